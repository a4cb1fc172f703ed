"""Every element is added in rank order, so that prefetch, resharding and the cut into units change no bit."""

import functools

import pytest
import torch

from fsdp import fully_shard
from tests.fsdp.versions import MODES, Mode, drilled, trained
from tests.shards import assembled
from tests.sleepy import sleepy_steps
from tests.training import Recipe, same_bits

F32, F64 = torch.float32, torch.float64
RECIPES = [
    (4, Recipe(microbatches=2, limit=5.0, dtype=F32)),  # three ranks have rows: of two any order is the same
    drilled(3, Recipe(microbatches=3, limit=5.0, dtype=F32)),
    drilled(4, Recipe(microbatches=3, quiet="sync", average=True)),
    drilled(3, Recipe(microbatches=3, quiet="sync", optimizer="adamw", dtype=F32, average=True)),
    drilled(2, Recipe(optimizer="adamw", average=True)),
]


@pytest.mark.parametrize(("ranks", "recipe"), RECIPES)
def test_prefetch_resharding_and_sharding_change_no_bit(pool, ranks, recipe):
    first = pool.run(ranks, trained, Mode(True, prefetch=0), recipe)
    for mode in (Mode(True, prefetch=3), Mode(False, prefetch=1), Mode(shards=1)):
        assert same_bits(pool.run(ranks, trained, mode, recipe), first) == [], mode


@pytest.mark.drill
@pytest.mark.parametrize(("ranks", "recipe"), RECIPES[:1])
def test_the_cut_into_units_changes_no_bit(pool, ranks, recipe):
    first = pool.run(ranks, trained, Mode(units="root"), recipe)
    for units in ("blocks", "nested", "two blocks", "layer used twice"):
        assert same_bits(pool.run(ranks, trained, Mode(units=units), recipe), first) == [], units


def test_another_order_of_additions_shows(pool):
    """What the tests above compare is not so coarse that everything is equal."""
    recipes = Recipe(microbatches=3), Recipe(microbatches=3, quiet="sync")
    first, second = (pool.run(3, trained, MODES["full"], recipe) for recipe in recipes)
    assert len(same_bits(first, second)) > 10


# -- overlap -----------------------------------------------------------------------------------------------------------


def wrapped(model, group, *, reshard, prefetch):
    """Each child a unit."""
    for layer in model:
        fully_shard(layer, group, reshard_after_forward=reshard)
    return fully_shard(model, group, reshard_after_forward=reshard, prefetch=prefetch)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), drilled(3, 1), drilled(2, 3), drilled(3, 3)])
def test_overlap_changes_no_bit_however_ranks_dawdle(pool, ranks, microbatches):
    """Weights of megabytes, which arrive while a unit computes, and leave while the one before does."""
    settings = [(True, 1), (True, 0), (True, 3), (False, 1)]
    wraps = [functools.partial(wrapped, reshard=reshard, prefetch=prefetch) for reshard, prefetch in settings]
    (first, whole), *others = [
        (assembled(held), wholes)
        for held, wholes in (zip(*pool.run(ranks, sleepy_steps, wrap, microbatches), strict=True) for wrap in wraps)
    ]
    for (grads, values), wholes in others:
        for mine, theirs in ((grads, first[0]), (values, first[1]), *((rank, whole[0]) for rank in wholes)):
            assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
