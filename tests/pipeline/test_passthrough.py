"""Each schedule over bare torch.distributed, in float64 against one process with the whole batch."""

import contextlib
from unittest import mock

import pytest

from pipeline import links
from tests import passthrough
from tests.pipeline.training import EVERY_SCHEDULE, Case, Recipe, possible, several, trained, worst

SGD, ADAMW = Recipe(tied=True), Recipe("adamw")
OFTEN = {2: [("1f1b", 1), ("zbv", 2)], 3: [("interleaved", 2)], 4: [("zb_h1", 1), ("dualpipe", 2)]}


@contextlib.contextmanager
def contiguous():
    """What p2p.py does for the strategy, and a bare send does not."""
    made = links.Outgoing.__init__

    def make(outgoing, tensors, *more):
        made(outgoing, [tensor.contiguous() for tensor in tensors], *more)

    with mock.patch.object(links.Outgoing, "__init__", make):
        yield


def bare(run, cases, recipes):
    with contiguous():
        return several(run, trained, cases, recipes)


def judge(pool, ranks, ways):
    cases = [Case(*way, ranks, m) for way in ways for m in (2, 5) if possible(Case(*way, ranks, m))]
    recipes = [(SGD, ADAMW)[i % 2] for i in range(len(cases))]
    results = pool.run(ranks, passthrough.run, bare, cases, recipes, timeout=100)
    for number, (case, recipe) in enumerate(zip(cases, recipes, strict=True)):
        assert worst([of_rank[number] for of_rank in results], case, recipe) <= 1, case


@pytest.mark.parametrize("ranks", OFTEN)
def test_training_is_that_of_one_process(pool, ranks):
    judge(pool, ranks, OFTEN[ranks])


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule(pool, ranks):
    judge(pool, ranks, EVERY_SCHEDULE)
