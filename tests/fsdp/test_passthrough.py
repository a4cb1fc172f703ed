"""Each mode over bare torch.distributed, in float64 against one process with the whole batch."""

import functools

import pytest

from collectives import comm, p2p
from tests import passthrough
from tests.fsdp.versions import HYBRID, MODES, drilled, trained
from tests.training import SHARES, Recipe, plain, worst

ALL_MODES = MODES | HYBRID
RECIPES = [Recipe(microbatches=2, limit=5.0), Recipe(optimizer="adamw", average=True)]
OFTEN = [(2, "full"), (3, "nested"), (4, "hybrid")]
SELDOM = [
    (ranks, mode)
    for mode in ALL_MODES
    for ranks in ((4,) if mode in HYBRID else (1, 2, 3, 4))
    if (ranks, mode) not in OFTEN
]
expected = functools.cache(plain)


@pytest.mark.parametrize(("ranks", "mode"), [*OFTEN, *(drilled(*case) for case in SELDOM)])
def test_training_is_that_of_one_process(pool, ranks, mode):
    for recipe in RECIPES:
        results = pool.run(ranks, passthrough.run, trained, ALL_MODES[mode], recipe)
        assert worst(results, expected(recipe, sum(SHARES[ranks]))) <= 1


def without_a_reduction(run, mode, recipe):
    """Gradients stay what they were; what the ranks agree on is all right."""

    def own(output, input, *args, group, **more):
        output.copy_(input[group.rank() * len(output) :][: len(output)])
        return p2p.Handle([])

    def only_agreements(tensor, *args, **more):
        return p2p.Handle([]) if more.get("async_op") else true(tensor, *args, **more)

    true = comm.all_reduce
    comm.all_reduce, comm.reduce_scatter_single = only_agreements, own  # until the stand-ins leave
    return trained(run, mode, recipe)


@pytest.mark.parametrize("mode", ["full", "no shard"])
def test_parity_sees_a_missing_reduction(pool, mode):
    results = pool.run(2, passthrough.run, without_a_reduction, ALL_MODES[mode], Recipe())
    with pytest.raises(AssertionError):
        assert worst(results, expected(Recipe(), sum(SHARES[2]))) <= 1
