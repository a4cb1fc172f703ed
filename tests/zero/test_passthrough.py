"""Each stage over bare torch.distributed, in float64 against one process with the whole batch."""

import functools

import pytest

from collectives import comm, p2p
from tests import passthrough
from tests.training import SHARES, Recipe, plain, train, worst
from tests.zero.versions import SMALL, drilled, each_stage

RECIPES = [Recipe(microbatches=2, limit=5.0), Recipe(optimizer="adamw", average=True)]
ONE_STEP = Recipe(steps=1)  # shows a fault
expected = functools.cache(plain)


@pytest.mark.parametrize("ranks", [drilled(1), drilled(2), 3, drilled(4)])
@each_stage
def test_training_is_that_of_one_process(pool, wrap, ranks):
    for recipe in RECIPES:
        results = pool.run(ranks, passthrough.run, train, wrap, recipe)
        assert worst(results, expected(recipe, sum(SHARES[ranks]))) <= 1


def without_a_reduction(run, wrap, recipe):
    """Gradients stay what they were; what the ranks agree on is all right."""

    def nothing(*args, **more):
        return p2p.Handle([])

    def only_agreements(tensor, *args, **more):
        return true(tensor, *args, **more) if tensor.dim() == 0 or not tensor.is_floating_point() else nothing()

    true = comm.all_reduce
    comm.all_reduce, comm.reduce_scatter_single = only_agreements, nothing  # until the stand-ins leave
    return train(run, wrap, recipe)


@pytest.mark.parametrize("stage", SMALL)
def test_parity_sees_a_missing_reduction(pool, stage):
    results = pool.run(2, passthrough.run, without_a_reduction, SMALL[stage], ONE_STEP)
    with pytest.raises(AssertionError):
        assert worst(results, expected(ONE_STEP, sum(SHARES[2]))) <= 1
