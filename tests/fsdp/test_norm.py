"""The one gradient norm over shards, replicas and several groups is that of one process, and so is clipping."""

import pytest
import torch
from torch import nn

from collectives import layout, norm
from fsdp import fully_shard
from tests.fsdp.models import check_grads
from tests.fsdp.test_state import batch, two_layers
from tests.shards import assembled, pieces
from tests.zero.versions import drilled


class Odd(nn.Module):
    """A scalar, a vector of 1, one that is frozen, one of nobody, beside layers."""

    def __init__(self):
        super().__init__()
        self.layers = two_layers()
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.frozen, self.unused = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layers(x) * self.scale + self.one * self.frozen


def groups(run, shape):
    """(group, replicas) of this rank in a grid of [replicas, shards] ranks."""
    grid = torch.arange(run.size).view(shape).tolist()
    mine = [g for g in [run.new_group(ranks) for ranks in grid] if g is not None]
    others = [g for g in [run.new_group(list(ranks)) for ranks in zip(*grid, strict=True)] if g is not None]
    return mine[0], (others[0] if shape[0] > 1 else None)


def clipped(run, shape, limit):
    torch.manual_seed(run.rank)
    model = Odd().double()
    group, replicas = groups(run, shape)
    layout.declare(model, lambda name: layout.Constant(0.0), lambda name: True)
    for param in model.parameters():  # tp's are summed by somebody else
        param.held.sums = {"fsdp": group, "dp": replicas or group, "tp": run.new_group([run.rank])}
    for unit in (model.layers[0], model):
        handle = fully_shard(unit, group, replicate_group=replicas, average=False)
    model(batch(run.rank)).square().sum().backward()
    handle.finish()
    params = handle.parameters()
    assert all("tp" in p.held.sums and all(g.size() == 1 for g in p.held.sums.values()) for p in params)
    derived = [(param.held.copies, param.held.copy) for param in params]
    total = norm.grad_norm(params, group=run.world)
    layout.check(params, run.world)
    checked = norm.grad_norm(params, group=run.world)
    norm.clip(params, total, limit)
    return pieces(handle), total, checked, derived, [len(param.held.boxes) for param in params]


@pytest.mark.parametrize("limit", [0.1, 1e6])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), drilled((2, 1)), drilled((4, 1)), drilled((2, 3)), (1, 4)])
def test_norm_and_clipping(pool, shape, limit):
    """With the copies that fully_shard declares, and with those that `layout.check` counts."""
    ranks = shape[0] * shape[1]
    torch.manual_seed(0)
    model = Odd().double()
    for rank in range(ranks):
        model(batch(rank)).square().sum().backward()
    true = nn.utils.clip_grad_norm_(model.parameters(), limit)
    held, totals, checked, copies, boxes = zip(*pool.run(ranks, clipped, shape, limit), strict=True)
    assert all(torch.equal(total, totals[0]) for total in (*totals, *checked))
    assert abs(totals[0] - true) <= 1e-13 * true
    assert [set(mine) for mine in copies] == [{(shape[0], rank // shape[1])} for rank in range(ranks)]
    assert all(count in (0, 1) for mine in boxes for count in mine)
    check_grads(assembled(held)[0], {name: param.grad for name, param in model.named_parameters()})
