"""Units whose inputs need no gradient, such as token ids: the end of their backward shows at their weights only, and
these may come first in it, before those of the units inside.
"""

import pytest
import torch
from torch import nn

from fsdp import fully_shard
from tests.pool import RankHung
from tests.recorder import recording
from tests.shards import assembled, pieces

F64 = torch.float64


class Scale(nn.Module):
    """A vector through the units inside, then times its own weight."""

    def __init__(self, *inside):
        super().__init__()
        self.inside = nn.ModuleList(inside)
        self.weight = nn.Parameter(torch.ones(4, dtype=F64))

    def forward(self, x, own=True):
        for unit in self.inside:
            x = unit(x)
        return self.weight * x if own else x


def step(run, nested, owns):
    """The collectives of a step of two microbatches, in which rank r uses the root's weight if owns[r]; and what this
    rank holds.
    """
    units = [Scale(Scale()) if nested else Scale(), Scale()]
    for unit in units:
        for part in unit.inside:
            fully_shard(part, run.world)
        fully_shard(unit, run.world)
    handle = fully_shard(model := Scale(*units), run.world, average=False, prefetch=0, reshard_after_forward=True)
    with recording() as recorder:
        for _ in range(2):
            model(torch.full((4,), 10.0**run.rank, dtype=F64), owns[run.rank]).sum().backward()
        handle.finish()
    return recorder.told_by_name().replace("inside.", "").replace("Scale", "root"), pieces(handle)


FLAT = "gather root, gather 0, gather 1, gather root, gather 1, reduce 1, gather 0, reduce 0, reduce root"
NESTED = (
    "gather root, gather 0, gather 0.0, gather 1, gather root, gather 1, reduce 1, gather 0, gather 0.0, reduce 0.0, "
    "reduce 0, reduce root"
)


def judged(ranks, picture, of_root, of_others):
    texts, held = zip(*ranks, strict=True)
    assert set(texts) == {f"{picture}, {picture}"}
    grads, _ = assembled(held)
    for name, grad in grads.items():
        assert grad.tolist() == [of_root if name == "weight" else of_others] * 4


@pytest.mark.xfail(strict=True, reason="a root whose weights come first ends before the units inside have begun")
@pytest.mark.parametrize(("nested", "picture"), [(False, FLAT), (True, NESTED)])
def test_a_unit_ends_after_those_inside(pool, nested, picture):
    """Each is gathered twice and reduced once in a microbatch."""
    judged(pool.run(2, step, nested, (True, True)), picture, 22.0, 22.0)


@pytest.mark.xfail(strict=True, raises=RankHung, reason="ranks whose root has ended begin a second backward")
@pytest.mark.parametrize(("nested", "picture"), [(False, FLAT), (True, NESTED)])
def test_a_root_weight_that_some_ranks_skip(pool, nested, picture):
    judged(pool.run(2, step, nested, (True, False), timeout=3.0), picture, 2.0, 22.0)
