"""Offload: shards and their gradients lie in a pool; the same bits as without, and every byte that moves is counted."""

import pytest
import torch
from torch import nn

from collectives.host import FilePool, Moves, Pool
from fsdp import MixedPrecision
from tests.fsdp.models import F64, sharded
from tests.fsdp.test_norm import groups
from tests.shards import assembled, pieces
from tests.zero.versions import drilled

SETTINGS = {
    "default": {},
    "reshard": {"reshard_after_forward": True, "prefetch": 2},
    "keep": {"reshard_after_forward": False, "prefetch": 0},
    "mixed": {"mixed_precision": MixedPrecision(param=torch.bfloat16)},
}


class Net(nn.Module):
    """Sizes that do not divide, a scalar, one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.scale, self.frozen = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.scale + self.frozen


def pool_of(kind, folder):
    device = torch.device("cpu")
    return {"memory": Pool, "files": lambda device: FilePool(folder, device)}[kind](device) if kind else None


def trained(run, kind, folder, settings, shape):
    """Of three steps of two microbatches what this rank holds; of each the bytes moved; and bytes in the pool."""
    torch.manual_seed(run.rank)
    model, steps, moves = Net().double(), [], []
    host = pool_of(kind, folder)
    group, replicas = groups(run, shape)
    settings = {**settings, "group": group, "replicate_group": replicas, "offload": host}
    handle = sharded(run, model, [model.first, model.second], **settings)
    optimizer = torch.optim.AdamW(handle.parameters(), lr=0.01)
    at_rest = host.host.now if host else 0
    for step in range(3):
        before = host.moves if host else Moves()
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + 2 * run.rank + micro), dtype=F64)
            model(x).double().square().sum().backward()
        handle.finish()
        held = pieces(handle)
        assert not host or all(host.holds(p) and (p.grad is None or host.holds(p.grad)) for p in handle.parameters())
        optimizer.step()
        handle.after_step()
        steps.append((held, pieces(handle)))
        moves.append((host.moves if host else Moves()) - before)
    slots = [(unit.name, sum(pack.slots.length for pack in unit.packs)) for unit in handle.units]
    trains = sum(pack.slots.trained() for pack in handle.packs)
    optimizer.zero_grad()
    left = host.host.now if host else 0
    with handle.whole():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    return steps, [(m.read, m.written) for m in moves], (at_rest, left), slots, trains, state


def same(ours, theirs):
    """All ranks' pieces, put together after each backward and each update, have the same bits."""
    for mine, others in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        for held, true in zip(zip(*mine, strict=True), zip(*others, strict=True), strict=True):
            (grads, values), (true_grads, true_values) = assembled(held), assembled(true)
            assert all(torch.equal(values[name], value) for name, value in true_values.items())
            for name, grad in true_grads.items():
                assert (grads[name] is None) == (grad is None) and (grad is None or torch.equal(grads[name], grad)), (
                    name
                )


@pytest.mark.parametrize("settings", ["default", "reshard", "keep", "mixed"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("memory", (1, 2)), *(drilled(*case) for case in (("files", (1, 3)), ("memory", (2, 2)), ("memory", (1, 1))))],
)
def test_the_same_bits_and_every_byte(pool, tmp_path, kind, shape, settings):
    """At rest the shards. A step reads a unit's slot for each of its gathers and writes the gradients' slots once."""
    ranks = shape[0] * shape[1]
    ours = pool.run(ranks, trained, kind, str(tmp_path), SETTINGS[settings], shape)
    theirs = pool.run(ranks, trained, None, "", SETTINGS[settings], shape)
    same([steps for steps, *_ in ours], [steps for steps, *_ in theirs])
    for (_, moves, (at_rest, left), slots, trains, state), (*_, true_state) in zip(ours, theirs, strict=True):
        assert all(torch.equal(state[name], value) for name, value in true_state.items())
        slot = sum(n for _, n in slots)
        root, blocks = slots[0][1], slot - slots[0][1]
        default = 2 * root + 4 * blocks
        gathers = {"default": default, "reshard": 4 * slot, "keep": 2 * slot, "mixed": default}
        assert at_rest == left == 8 * slot
        assert moves == [(8 * gathers[settings], 8 * trains)] * 3
