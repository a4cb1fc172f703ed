"""Bytes alive, by the allocator's count: shards at rest, few units in a step, and of gradients one unit under way."""

import itertools

import pytest
import torch
from torch import nn

from collectives import allocated
from fsdp import fully_shard
from tests.zero.test_memory import from_here, living
from tests.zero.versions import drilled

WIDTH, BLOCKS = 512, 6  # a unit of 1 MB, from which gathers need no memory inside of gloo
UNIT = 4 * WIDTH * WIDTH  # bytes
SMALL = 0.1  # of a unit: activations, scalars


class Net(nn.Module):
    """A weight of its own around blocks of one matrix each, or of a matrix and `within` such blocks."""

    def __init__(self, blocks, within=0, out=WIDTH):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Net(within) if within else nn.Linear(WIDTH, out, bias=False) for _ in range(blocks))

    def forward(self, x):
        x = self.own(x)
        for block in self.blocks:
            x = x + block(x).sum(-1, keepdim=True)
        return x


def units(module):
    """All that are to be units, inner ones first."""
    for child in getattr(module, "blocks", ()):
        yield from units(child)
    yield module


def wrapped(run, model, hybrid, **settings):
    group, replicas = run.world, None
    if hybrid:
        group = next(g for g in [run.new_group(ranks) for ranks in ([0, 1], [2, 3])] if g is not None)
        replicas = next(g for g in [run.new_group(ranks) for ranks in ([0, 2], [1, 3])] if g is not None)
    for unit in units(model):
        handle = fully_shard(unit, group, replicate_group=replicas, **settings)
    return handle


def rises(run, phase, within, hybrid, settings):
    """Units: what lives at rest; and the most beyond that in a forward, in a backward."""
    from_here()
    model = Net(2 if within else BLOCKS, within)
    if phase != "trained":
        model.requires_grad_(False)
    handle = wrapped(run, model, hybrid, **settings)
    x = torch.randn(1, WIDTH, requires_grad=phase != "forward")

    def zero():
        handle.after_step()
        x.grad = None
        for shard in handle.parameters():
            shard.grad = None

    def step():
        if phase == "forward":
            with torch.no_grad():
                model(x)
        else:
            model(x).sum().backward()
        handle.finish()

    step()
    zero()
    rest = sum(living().values()) - x.nbytes
    return rest / UNIT, allocated.peak_bytes(step, run.device, prepare=zero) / UNIT


def near(found, expected):
    return expected <= found <= expected + SMALL


SHORT = [("frozen", True, 0), ("frozen", True, 1), ("forward", None, 2), ("frozen", None, 3), ("frozen", False, 1)]
ALL = itertools.product(("forward", "frozen"), (None, True, False), range(4))


@pytest.mark.parametrize(
    ("phase", "reshard", "prefetch"), [*SHORT, *(drilled(*case) for case in ALL if case not in SHORT)]
)
def test_weights_alive(pool, phase, reshard, prefetch):
    """The root's weights, and prefetch + 1 units; with prefetch 0 two while one is copied out of its slots. Exactly.

    Without resharding all of them, and the slots of one.
    """
    few = 1 + max(2, prefetch + 1)
    expected = 1 + BLOCKS + 1 if reshard is False else few
    settings = {"reshard_after_forward": reshard, "prefetch": prefetch}
    for rest, most in pool.run(2, rises, phase, 0, False, settings):
        print(f"{phase}, reshard {reshard}, prefetch {prefetch}: {most:.3f} units alive, {expected} expected")
        assert near(rest, (1 + BLOCKS) / 2) and near(most, expected)


@pytest.mark.parametrize(
    ("phase", "prefetch"), [("frozen", 1), ("forward", 2), drilled("frozen", 0), drilled("frozen", 3)]
)
def test_nested_units_alive(pool, phase, prefetch):
    """Beside prefetch + 1 units what the two units around them hold."""
    for rest, most in pool.run(2, rises, phase, 3, False, {"reshard_after_forward": True, "prefetch": prefetch}):
        print(f"nested, {phase}, prefetch {prefetch}: {most:.3f} units alive")
        assert near(rest, (1 + 2 * 4) / 2) and near(most, 2 + max(2, prefetch + 1))


@pytest.mark.drill
@pytest.mark.parametrize("prefetch", [0, 1])
def test_units_alive_in_hybrid(pool, prefetch):
    for rest, most in pool.run(4, rises, "frozen", 0, True, {"reshard_after_forward": True, "prefetch": prefetch}):
        assert near(rest, (1 + BLOCKS) / 2) and near(most, 1 + max(2, prefetch + 1))


@pytest.mark.parametrize(("prefetch", "hybrid"), [drilled(0, False), (1, False), drilled(3, False), (1, True)])
def test_gradients_alive(pool, prefetch, hybrid):
    """Beside shards, those of gradients, and weights: a unit under way, what arrives for it, and the next one's, which
    autograd has made, a matrix here.
    """
    settings = {"reshard_after_forward": True, "prefetch": prefetch}
    sums = (BLOCKS - 1 - prefetch) / 2  # at the last block that still has `prefetch` blocks ahead
    expected = 1 + (prefetch + 1) + 2 + 1 / 2 + sums
    for rest, most in pool.run(4 if hybrid else 2, rises, "trained", 0, hybrid, settings):
        print(f"trained, prefetch {prefetch}, hybrid {hybrid}: {most:.3f} units alive, {expected} expected")
        assert near(rest, (1 + BLOCKS) / 2) and near(most, expected)


def padded(run):
    model = Net(2, out=3)
    handle = wrapped(run, model, False)
    return handle.padding(), sum(shard.numel() for shard in handle.parameters())


def test_padding_is_told(pool):
    """Matrices of 3 rows on 2 ranks: one row of padding each."""
    whole, slots = WIDTH * WIDTH + 2 * 3 * WIDTH, WIDTH * WIDTH // 2 + 2 * 2 * WIDTH
    told = f"{whole:,} parameters in 3 units, {slots:,} a rank, {2 * WIDTH} of padding"
    assert pool.run(2, padded) == [(told, slots), (told, slots - 2 * WIDTH)]
