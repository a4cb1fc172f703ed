"""Random plans on real ranks, with sleeps and 4 MB activations: none hangs, and gradients are right."""

import pytest

from tests.pipeline.plans import random_plan
from tests.pipeline.wide import check_runs


def test_three_random_plans(pool):
    for ranks, seed in ((2, 1), (4, 2), (3, 3)):
        check_runs(pool, [random_plan(seed, ranks, virtual=2, microbatches=3)], 0.02, timeout=60)


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fifty_random_plans(pool, ranks):
    """Sleeps of up to 50 ms."""
    plans = [plan for plan in map(random_plan, range(50)) if plan.ranks == ranks]
    for plan in plans:
        check_runs(pool, [plan], 0.05, timeout=120)
