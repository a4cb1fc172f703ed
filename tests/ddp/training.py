"""A small model with every kind of parameter, trained by one plain process and by the ranks, and how far apart they
are.
"""

import contextlib
import functools
import math

import torch
from torch import nn

from tests.ddp.versions import snapshot

ULP = torch.finfo(torch.float64).eps
STEPS, WIDTH, IDS = 3, 6, 7
SHARES = {1: [7], 2: [5, 2], 3: [4, 0, 3], 4: [1, 5, 0, 3]}  # the rows of a batch on each rank


class Net(nn.Module):
    """An embedding, a matrix used twice, a weight that lies transposed in memory, a scalar, and one nobody uses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(IDS, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH, 5).t())
        self.scale = nn.Parameter(torch.rand(()) + 1)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, ids):
        x = self.embed(ids)  # [B, D]
        x = self.twice(torch.tanh(self.twice(self.norm(x))))
        return torch.tanh(self.scale * x) @ self.turned.t()  # [B, 5]


def net(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return Net().to(dtype)


def data(rows, step, dtype=torch.float64):
    """Ids and a fixed random cotangent for the rows of a global batch."""
    numbers = torch.Generator().manual_seed(step)
    ids = torch.randint(IDS, (rows,), generator=numbers)
    return ids, torch.randn(rows, 5, generator=numbers, dtype=dtype)


def sgd(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def plain(rows, seed=0):
    """What one process does with whole batches: [(gradients before the update, values after it)] of each step."""
    model = net(seed)
    optimizer, done = sgd(model.parameters()), []
    for step in range(STEPS):
        ids, cotangent = data(rows, step)
        optimizer.zero_grad()
        ((model(ids) * cotangent).sum() / rows).backward()
        grads, _ = snapshot(model)
        optimizer.step()
        done.append((grads, snapshot(model)[1]))
    return done


def train(run, wrap, average, microbatches, *, change=contextlib.nullcontext, dtype=torch.float64):
    """The same steps on rows dealt out in SHARES: (values after wrap, [(gradients, values)]) of this rank.

    A rank's loss is its part of the batch's mean, times the ranks if they average. change: what the steps run under.
    """
    model, shares = net(run.rank, dtype), SHARES[run.size]
    scale = (run.size if average else 1) / sum(shares)
    with change():
        handle = wrap(model, run.world, average=average)
        initial = snapshot(model)[1]
        optimizer, done = sgd(handle.parameters()), []
        for step in range(STEPS):
            mine = [part.split(shares)[run.rank] for part in data(sum(shares), step, dtype)]
            optimizer.zero_grad()
            parts = list(zip(*(part.tensor_split(microbatches) for part in mine), strict=True))
            for number, (ids, cotangent) in enumerate(parts, start=1):
                with contextlib.nullcontext() if number == microbatches else handle.no_sync():
                    if len(ids):
                        ((model(ids) * cotangent).sum() * scale).backward()
            handle.finish()
            grads, _ = snapshot(model)
            optimizer.step()
            handle.after_step()
            done.append((grads, snapshot(model)[1]))
    return initial, done


def worst(ours, expected, initial):
    """The largest error of a gradient and of an update, as a share of what is allowed."""
    share, before = 0.0, initial
    for (grads, values), (expected_grads, expected_values) in zip(ours, expected, strict=True):
        largest = max(float(grad.abs().max()) for grad in expected_grads.values() if grad is not None)
        for name, grad in expected_grads.items():
            if grad is None:
                assert grads[name] is None and torch.equal(values[name], initial[name])
                continue
            mine = torch.zeros_like(grad) if grads[name] is None else grads[name]
            share = max(share, furthest(mine, grad) / (1e-12 * float(grad.abs().max()) + 1e-14 * largest))
            moved, size = (float(x.abs().max()) for x in (expected_values[name] - before[name], expected_values[name]))
            assert moved > 1e-4 * size, f"{name} moves too little to judge its update"
            share = max(share, furthest(values[name], expected_values[name]) / (1e-10 * moved + 4 * ULP * size))
        before = expected_values
    return share


def furthest(ours, expected):
    """The largest difference; infinite where one is not a number, since max(0.0, nan) is 0.0."""
    return float((ours - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())


def judged(pool, ranks, wrap, average, *, microbatches=1, change=contextlib.nullcontext):
    """(worst error of any rank, what each rank did); all must have started from rank 0's weights."""
    results = pool.run(ranks, functools.partial(train, change=change), wrap, average, microbatches)
    start, expected = snapshot(net(0))[1], plain(sum(SHARES[ranks]))
    for initial, _ in results:
        assert all(torch.equal(initial[name], value) for name, value in start.items())
    return max(worst(done, expected, start) for _, done in results), [done for _, done in results]


def same_bits(replicas):
    """Whether all replicas had the same values after each step."""
    return all(
        torch.equal(mine[name], first[name])
        for replica in replicas
        for (_, mine), (_, first) in zip(replica, replicas[0], strict=True)
        for name in first
    )
