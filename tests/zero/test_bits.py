"""Every element is added in rank order, so that stages, buckets, thresholds and overlap change no bit."""

import functools

import pytest
import torch
from torch import nn

from tests.shards import assembled, pieces
from tests.sleepy import sleepy_steps
from tests.training import Recipe, same_bits, train
from tests.zero.versions import SMALL, STAGES, VERSIONS, drilled, each_version
from zero import stage1, stage2, stage3

F32, F64 = torch.float32, torch.float64
REDUCING_ALWAYS = [name for name in VERSIONS if name.startswith(("stage 2", "stage 3"))]


@pytest.mark.parametrize(("optimizer", "dtype"), [drilled("sgd", F64), ("adamw", F32)])
@pytest.mark.parametrize("ranks", [drilled(1), drilled(2), 3, drilled(4)])
def test_one_microbatch_without_clipping_gives_the_same_bits_in_all_stages(pool, ranks, optimizer, dtype):
    recipe = Recipe(optimizer=optimizer, dtype=dtype, average=True, steps=2)
    expected = pool.run(ranks, train, STAGES["stage 0"], recipe)
    for name, wrap in VERSIONS.items():
        assert same_bits(pool.run(ranks, train, wrap, recipe), expected) == [], name


@pytest.mark.parametrize("dtype", [F64, drilled(F32)])
@pytest.mark.parametrize("ranks", [drilled(2), 3, drilled(4)])
def test_three_microbatches_give_the_same_bits_where_each_is_reduced(pool, ranks, dtype):
    """Stages 2 and 3 add up sums of all ranks; stages 0 and 1 reduce what a rank has added up, to which another order
    of additions belongs: they agree among each other.
    """
    recipe = Recipe(microbatches=3, dtype=dtype, steps=2)
    for names in (REDUCING_ALWAYS, [name for name in VERSIONS if name not in REDUCING_ALWAYS]):
        first, *others = [pool.run(ranks, train, VERSIONS[name], recipe) for name in names]
        for name, other in zip(names[1:], others, strict=True):
            assert same_bits(other, first) == [], name


def test_another_order_of_additions_shows(pool):
    """What the tests above compare is not so coarse that everything is equal."""
    recipe = Recipe(microbatches=3, steps=1)
    first, second = (pool.run(3, train, SMALL[name], recipe) for name in ("stage 1", "stage 2"))
    assert len(same_bits(first, second)) > 10


def reduce_random(run, wrap, average, trains):
    """(this rank's own gradient, what it holds) of a float32 vector, which trains or is still frozen at wrap."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1000), requires_grad=trains)])
    handle = wrap(model, run.world, average=average)
    model[0].requires_grad_(True)
    own = torch.randn(1000, generator=torch.Generator().manual_seed(run.rank))
    model[0].grad = own.clone()
    handle.finish()
    return own, pieces(handle)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [3, drilled(4)])
@each_version
def test_every_element_is_added_in_rank_order(pool, wrap, ranks, average, trains):
    owns, held = zip(*pool.run(ranks, reduce_random, wrap, average, trains), strict=True)
    total = torch.zeros(1000)
    for own in owns:
        total += own
    [grad] = assembled(held)[0].values()
    assert torch.equal(grad, total / ranks if average else total)


# -- overlap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(3, 2), drilled(2, 1), drilled(2, 3), drilled(3, 1), drilled(3, 3)]
)
def test_overlap_changes_no_bit_however_ranks_dawdle(pool, ranks, microbatches):
    """Weights of megabytes, in buckets of one and of several layers."""
    versions = [
        functools.partial(stage.wrap, overlap=overlap, cap=cap)
        for stage, cap in ((stage2, 1), (stage2, 64 << 20), (stage3, 1))
        for overlap in (False, True)
    ]
    if microbatches == 1:
        versions.append(stage1.wrap)
    (first, whole), *others = [
        (assembled(held), wholes)
        for held, wholes in (zip(*pool.run(ranks, sleepy_steps, wrap, microbatches), strict=True) for wrap in versions)
    ]
    for (grads, values), wholes in others:
        for mine, theirs in ((grads, first[0]), (values, first[1]), *((rank, whole[0]) for rank in wholes)):
            assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
