"""Parameters on the meta device, and ranks that begin with other weights."""

import pytest
import torch
from torch import nn

from collectives import layout, rng
from fsdp import fully_shard
from tests.fsdp.models import F64
from tests.fsdp.test_norm import groups
from tests.shards import assembled, pieces, snapshot
from tests.zero.test_memory import from_here, living
from tests.zero.versions import drilled


class Rotary(nn.Module):
    """Weights, a scalar, and a table that is in no state dict (T49)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 37), nn.Linear(37, 16)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.arange(5.0).cos(), persistent=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


def rule(name):
    return layout.Constant(1.5) if name == "scale" else layout.Normal(0.3)


def on_meta():
    """Parameters on meta, buffers real, as a builder that is careful leaves them."""
    with torch.device("meta"):
        model = Rotary().double()
    model.table = torch.arange(5.0).cos()
    layout.declare(model, rule, lambda name: True)
    return model


def filled(run, shape, meta):
    """The weights after construction by box, and what was allocated for them."""
    group, replicas = groups(run, shape)
    junk = [torch.full((64, 64), torch.nan, dtype=F64) for _ in range(20)]  # what is not written to reads as this
    del junk
    if meta:
        model = on_meta()
    else:
        torch.manual_seed(run.rank)
        model = Rotary().double()
        layout.declare(model, rule, lambda name: True)

    from_here()
    for unit in (model.first, model):
        handle = fully_shard(unit, group, replicate_group=replicas, average=False, device=run.device)
    nbytes = sum(living().values())
    zeros = all(shard.eq(0).all() for shard in handle.parameters())
    for shard in handle.parameters():
        rng.fill(shard, seed=3)
    handle.after_load()
    with handle.whole():
        values = snapshot(model)
    model(torch.ones(2, 16, dtype=F64)).sum().backward()
    handle.finish()
    return values, pieces(handle), nbytes, zeros, sum(pack.slots.length for pack in handle.packs), model.table


@pytest.mark.parametrize("meta", [True, drilled(False)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2)])
def test_each_rank_fills_its_shards(pool, shape, meta):
    """The same bits on every mesh. From meta a rank allocates its slot and nothing more but a few scalars."""
    expected = Rotary().double()
    layout.declare(expected, rule, lambda name: True)
    for param in expected.parameters():
        rng.fill(param, seed=3)
    for values, _, nbytes, zeros, slot, table in pool.run(shape[0] * shape[1], filled, shape, meta):
        assert all(torch.equal(values[name], param) for name, param in expected.named_parameters())
        assert torch.equal(table, torch.arange(5.0).cos())
        if meta:
            print(f"{shape}: {nbytes} bytes for a slot of {8 * slot}")
            assert zeros and 8 * slot <= nbytes <= 8 * slot + 256


def seeded(run, shape):
    """T48. Each rank builds with its own seed, and buffers of its own."""
    torch.manual_seed(run.rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    model[1].running_mean += run.rank
    group, replicas = groups(run, shape)
    for unit in (model[0], model):
        handle = fully_shard(unit, group, replicate_group=replicas)
    with handle.whole():
        return {name: value.clone() for name, value in model.state_dict().items()}, pieces(handle)


@pytest.mark.parametrize("shape", [(1, 2), (1, 4), (2, 2), (2, 1)])
def test_ranks_begin_as_rank_0(pool, shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    states, held = zip(*pool.run(shape[0] * shape[1], seeded, shape), strict=True)
    _, values = assembled(held)
    for name, value in model.state_dict().items():
        assert all(torch.equal(state[name], value) for state in states), name
        assert name not in values or torch.equal(values[name], value)
