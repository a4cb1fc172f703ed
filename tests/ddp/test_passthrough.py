"""Each step of data parallelism over bare torch.distributed, in float64 against one process with the whole batch."""

import pytest
import torch
from torch import nn

from collectives import comm, p2p
from ddp import bucketed, naive, overlapped
from tests import passthrough
from tests.ddp.training import STEPS, sgd, worst
from tests.ddp.versions import snapshot

WRAPS = [naive.wrap, bucketed.wrap, overlapped.wrap]
SHARES = {1: [5], 2: [4, 1], 3: [2, 0, 3], 4: [1, 2, 0, 4]}  # rows of each rank


class Net(nn.Module):
    """A matrix used twice, a weight that lies transposed in memory, one that only the first row uses, one nobody."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.first = nn.Parameter(torch.randn(5))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x, rows):
        out = torch.tanh(self.twice(torch.tanh(self.twice(x)))) @ self.turned.t()  # [B, 5]
        return out + self.first * out if 0 in rows else out


def net(seed):
    torch.manual_seed(seed)
    return Net().double()


def steps(model, params, rows, count, *, finish=lambda: None, after_step=lambda: None):
    """Train on these of `count` rows: [(gradients, values)] by name, after each step. The loss is a mean over all."""
    optimizer, done = sgd(params), []
    numbers = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x, cotangent = (torch.randn(count, width, generator=numbers, dtype=torch.float64) for width in (6, 5))
        optimizer.zero_grad()
        for row in rows:
            ((model(x[row : row + 1], [row]) * cotangent[row]).sum() / count).backward()
        finish()
        grads, _ = snapshot(model)
        optimizer.step()
        after_step()
        done.append((grads, snapshot(model)[1]))
    return done


def train(run, wrap, shares):
    """This rank's steps, from weights of its own that wrap makes rank 0's."""
    model = net(run.rank)
    handle = wrap(model, run.world, average=False)
    rows = torch.arange(sum(shares)).split(shares)[run.rank].tolist()
    return steps(model, handle.parameters(), rows, sum(shares), finish=handle.finish, after_step=handle.after_step)


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__module__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_and_updates_are_those_of_one_process(pool, ranks, wrap):
    model, rows = net(0), sum(SHARES[ranks])
    expected = steps(model, model.parameters(), range(rows), rows)
    for done in pool.run(ranks, passthrough.run, train, wrap, SHARES[ranks]):
        assert worst(done, expected, net(0).state_dict()) <= 1


def without_a_reduction(run, wrap, shares):
    """Gradients stay what they were; what the ranks agree on is all right."""
    true = comm.all_reduce

    def half(tensor, op, **more):
        return p2p.Handle([]) if tensor.is_floating_point() else true(tensor, op, **more)

    comm.all_reduce = half  # until the stand-in leaves
    return train(run, wrap, shares)


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__module__)
def test_parity_sees_a_missing_reduction(pool, wrap):
    model, rows = net(0), sum(SHARES[2])
    expected = steps(model, model.parameters(), range(rows), rows)
    done = pool.run(2, passthrough.run, without_a_reduction, wrap, SHARES[2])[0]
    assert worst(done, expected, net(0).state_dict()) > 1e9
