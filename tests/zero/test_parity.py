"""Every stage against one plain process with the whole batch, in float64: gradients before clipping, norms, updates,
outputs; and the faults that must show.
"""

import functools
from unittest import mock

import pytest
import torch

from collectives import comm
from collectives.p2p import Handle
from tests.training import SHARES, Recipe, plain, train, worst
from tests.zero.versions import SMALL, drilled, each_stage, each_version
from zero.bucket import Bucket

RECIPES = {
    "one microbatch": Recipe(),
    "averaged": Recipe(average=True),
    "accumulated": Recipe(microbatches=3),
    "accumulated, averaged and clipped": Recipe(microbatches=3, average=True, limit=5.0),
    "clipped, zeros kept": Recipe(limit=5.0, keep_zeros=True),
    "AdamW, zeros kept": Recipe(optimizer="adamw", average=True, keep_zeros=True),
    "AdamW, accumulated and clipped": Recipe(optimizer="adamw", microbatches=3, limit=5.0),
}
OFTEN = [
    *((ranks, "accumulated, averaged and clipped") for ranks in (1, 2, 4)),
    *((2, "one microbatch"), (4, "AdamW, zeros kept")),
]  # on three ranks every version trains below
SELDOM = [(ranks, recipe) for ranks in (1, 2, 3, 4) for recipe in RECIPES if (ranks, recipe) not in OFTEN]
expected = functools.cache(plain)


@pytest.mark.parametrize(("ranks", "recipe"), [*OFTEN, *(drilled(*case) for case in SELDOM)])
@each_stage
def test_training_is_that_of_one_process(pool, wrap, ranks, recipe):
    """Ranks without rows, microbatches without rows, parameters used by one rank, by none, frozen ones."""
    chosen = RECIPES[recipe]
    assert worst(pool.run(ranks, train, wrap, chosen), expected(chosen, sum(SHARES[ranks]))) <= 1


@pytest.mark.parametrize("ranks", [drilled(2), 3])
@each_version
def test_buckets_thresholds_and_overlap_change_nothing(pool, wrap, ranks):
    recipe = RECIPES["AdamW, accumulated and clipped"]
    assert worst(pool.run(ranks, train, wrap, recipe), expected(recipe, sum(SHARES[ranks]))) <= 1


# -- faults that parity must notice ------------------------------------------------------------------------------------


def last_rank_left_out():
    """Sums over the other ranks only; what the ranks agree on is right all the same."""
    scatter, reduce = comm.reduce_scatter_single, comm.all_reduce

    def zeroed(x, group):
        return torch.zeros_like(x) if group.rank() == group.size() - 1 else x

    def scattered(output, input, *args, group, **more):
        return scatter(output, zeroed(input, group), *args, group=group, **more)

    def reduced(x, *args, group, **more):
        if x.is_floating_point() and x.numel() > 1:  # and is no norm
            x.copy_(zeroed(x, group))
        return reduce(x, *args, group=group, **more)

    return mock.patch.multiple(comm, reduce_scatter_single=scattered, all_reduce=reduced)


def no_reduction():
    """Every rank keeps its own part of its own gradient."""
    reduce = comm.all_reduce

    def scattered(output, input, *args, group, **more):
        output.copy_(input[group.rank() * len(output) :][: len(output)])
        return Handle([])

    def reduced(x, *args, **more):
        return Handle([]) if more.get("async_op") else reduce(x, *args, **more)

    return mock.patch.multiple(comm, reduce_scatter_single=scattered, all_reduce=reduced)


def no_gather():
    """Every rank sees its own updates only; what is gathered is what was there."""

    def gathered(output, input, *, group, **more):
        whole = output.view(group.size(), -1)
        whole[group.rank()] = input
        return Handle([])

    return mock.patch.object(comm, "all_gather_single", gathered)


def mean_for_sum():
    return mock.patch.object(comm, "SUM", comm.AVG)


def sum_for_mean():
    return mock.patch.object(comm, "AVG", comm.SUM)


def sums_of_the_last_microbatch_only():
    def add(bucket, reduced):
        bucket.sum = reduced

    return mock.patch.object(Bucket, "add", add)


def gradients_of_the_last_microbatch_only():
    true = Bucket.collect

    def collect(bucket, param):
        bucket.arrived.discard(param)
        true(bucket, param)

    return mock.patch.object(Bucket, "collect", collect)


FAULTS = {
    "a rank is left out": (last_rank_left_out, Recipe(steps=1), "0123"),
    "no reduction": (no_reduction, Recipe(steps=1), "0123"),
    "no gather": (no_gather, Recipe(steps=1), "123"),
    "a mean for a sum": (mean_for_sum, Recipe(steps=1), "0123"),
    "a sum for a mean": (sum_for_mean, Recipe(average=True, steps=1), "0123"),
    "sums of the last microbatch": (sums_of_the_last_microbatch_only, Recipe(microbatches=3, steps=1), "23"),
    "gradients of the last microbatch": (gradients_of_the_last_microbatch_only, Recipe(microbatches=3, steps=1), "01"),
}


@pytest.mark.parametrize(
    ("fault", "stage"), [(fault, f"stage {stage}") for fault, (_, _, stages) in FAULTS.items() for stage in stages]
)
@pytest.mark.parametrize("ranks", [2, drilled(3)])
def test_parity_sees_a_fault(pool, ranks, stage, fault):
    change, recipe, _ = FAULTS[fault]
    results = pool.run(ranks, functools.partial(train, change=change), SMALL[stage], recipe)
    with pytest.raises(AssertionError):
        assert worst(results, expected(recipe, sum(SHARES[ranks]))) <= 1
