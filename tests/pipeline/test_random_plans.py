"""A thousand random plans through the checker, held against an argument of its own: can_run of plans.py."""

import time

import pytest

from pipeline import check
from tests.pipeline.plans import can_run, disturbed, random_plan


@pytest.fixture(scope="module")
def plans():
    return [random_plan(seed) for seed in range(1000)]


def accepted(plan) -> bool:
    try:
        check(plan)
    except ValueError as refused:
        assert " hangs: rank" in str(refused)
        return False
    return True


def test_plans_that_run_pass_in_milliseconds(plans):
    start = time.process_time()
    for plan in plans:
        check(plan)
    assert time.process_time() - start < 30  # 1 to 3 ms each measured, on a machine that is not busy
    assert all(map(can_run, plans))


def test_plans_of_every_size(plans):
    assert {plan.ranks for plan in plans} == {1, 2, 3, 4}
    assert {plan.microbatches for plan in plans} == set(range(1, 10))
    assert {len(plan.stages_of(0)) for plan in plans} >= {1, 2, 3, 4}
    kinds = ["".join(action.kind for actions in plan.actions for action in actions) for plan in plans]
    assert any("B" in each and "W" in each for each in kinds) and len(set(kinds)) > 950


def test_disturbed_plans_are_refused_if_and_only_if_they_cannot_run(plans):
    verdicts = []
    for seed, plan in enumerate(plans[:400]):
        changed = disturbed(plan, seed)
        verdicts.append(accepted(changed))
        assert verdicts[-1] == can_run(changed), changed.name
    assert 100 < sum(verdicts) < 300
