"""A small model with every kind of parameter, trained by one plain process and by ranks that shard it, and how far
apart they are.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from collectives import layout, norm
from tests.shards import assembled, pieces, snapshot

ULP = torch.finfo(torch.float64).eps
STEPS, WIDTH, IDS = 3, 16, 37
SHARES = {1: [7], 2: [5, 2], 3: [4, 0, 3], 4: [1, 5, 0, 3]}  # the rows of a batch on each rank
DECAY = ("weight", "seven", "one", "bias")  # last parts of the names to which weight decay applies


class Block(nn.Module):
    """A matrix used twice, vectors of 1, 3 and 7, a scalar, one that is frozen, one of the first row, one of nobody."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(()) + 1)
        self.one, self.three, self.seven = (nn.Parameter(torch.randn(n)) for n in (1, 3, 7))
        self.frozen = nn.Parameter(torch.rand(5) + 1, requires_grad=False)
        self.first = nn.Parameter(torch.randn(2, 4))
        self.unused = nn.Parameter(torch.randn(11))

    def forward(self, x, rows):
        x = self.twice(torch.tanh(self.twice(self.norm(x))))  # [B, D]
        factors = torch.cat([self.three, self.seven, self.frozen, self.one])  # [D]
        if 0 in rows:
            x = x + (rows == 0)[:, None] * self.first.repeat(1, 4)[0] * self.first.sum()
        return torch.tanh(self.scale * x * factors)


class Head(nn.Module):
    """A weight that lies transposed in memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 5).t())

    def forward(self, x):
        return x @ self.weight.t()  # [B, 5]


class Blocks(nn.ModuleList):
    """One after the other."""

    def forward(self, x, rows):
        for block in self:
            x = block(x, rows)
        return x  # [B, D]


class Net(nn.Module):
    """An embedding, two blocks, a head; and two parameters that lie in no layer, one of them a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(IDS, WIDTH)
        self.blocks = Blocks(Block() for _ in range(2))
        self.offset = nn.Parameter(torch.randn(5))
        self.factor = nn.Parameter(torch.rand(()) + 1)
        self.head = Head()

    def forward(self, ids, rows):
        x = self.blocks(self.embed(ids), rows)  # [B, D]
        return self.factor * self.head(x) + self.offset  # [B, 5]


def net(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return Net().to(dtype)


def decays(name):
    return name.split(".")[-1] in DECAY


def data(rows, step, dtype=torch.float64):
    """Ids, numbers of the rows, and a fixed random cotangent, for a global batch."""
    numbers = torch.Generator().manual_seed(step)
    ids = torch.randint(IDS, (rows,), generator=numbers)
    return ids, torch.arange(rows), torch.randn(rows, 5, generator=numbers, dtype=torch.float64).to(dtype)


def probe():
    return torch.arange(IDS), torch.arange(IDS)


@dataclass(frozen=True)
class Recipe:
    """How to train. limit: of the gradient's norm. quiet: the handle's context for all microbatches but the last."""

    optimizer: str = "sgd"
    limit: float | None = None
    microbatches: int = 1
    quiet: str = "no_sync"
    average: bool = False
    keep_zeros: bool = False  # optimizer.zero_grad(set_to_none=False)
    dtype: torch.dtype = torch.float64
    steps: int = STEPS

    def made(self, decaying, others):
        """The optimizer, with groups for weight decay."""
        groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.3, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.05, eps=1e-4)  # at 1e-8 the noise of a gradient over eps is 1e-9


def plain(recipe, rows):
    """What one process does with whole batches: of each step (gradients, values, norm, outputs of the probe)."""
    model, done = net(0), []
    named = dict(model.named_parameters())
    optimizer = recipe.made(
        [p for name, p in named.items() if decays(name)], [p for name, p in named.items() if not decays(name)]
    )
    for step in range(recipe.steps):
        ids, numbers, cotangent = data(rows, step)
        optimizer.zero_grad(set_to_none=not recipe.keep_zeros)
        ((model(ids, numbers) * cotangent).sum() / rows).backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}
        total = nn.utils.clip_grad_norm_(model.parameters(), recipe.limit or math.inf)
        optimizer.step()
        with torch.no_grad():
            done.append((grads, snapshot(model), total, model(*probe())))
    return done


def train(run, wrap, recipe, change=contextlib.nullcontext):
    """The same steps on rows dealt out in SHARES: (pieces after wrap, of each step (pieces with gradients before
    clipping, pieces after the update, norm, outputs), all weights after the last).

    A rank's loss is its part of the batch's mean, times the ranks if they average. change: what the steps run under.
    """
    model, shares = net(run.rank, recipe.dtype), SHARES[run.size]
    layout.declare(model, lambda name: layout.Constant(0.0), decays)
    scale, done = (run.size if recipe.average else 1) / sum(shares), []
    with change():
        handle = wrap(model, run.world, average=recipe.average)
        initial, shards = pieces(handle), handle.parameters()
        optimizer = recipe.made([p for p in shards if p.held.decay], [p for p in shards if not p.held.decay])
        for step in range(recipe.steps):
            mine = [part.split(shares)[run.rank] for part in data(sum(shares), step, recipe.dtype)]
            optimizer.zero_grad(set_to_none=not recipe.keep_zeros)
            parts = list(zip(*(part.tensor_split(recipe.microbatches) for part in mine), strict=True))
            for number, (ids, rows, cotangent) in enumerate(parts, start=1):
                with (
                    contextlib.nullcontext()
                    if number == recipe.microbatches
                    else getattr(handle, recipe.quiet, contextlib.nullcontext)()
                ):
                    ((model(ids, rows) * cotangent).sum() * scale).backward()
            handle.finish()
            before, total = pieces(handle), norm.grad_norm(shards, group=run.world)
            norm.clip(shards, total, recipe.limit or math.inf)
            optimizer.step()
            handle.after_step()
            with torch.no_grad():
                done.append((before, pieces(handle), total, model(*probe())))
        with handle.whole():
            return initial, done, snapshot(model)


def worst(ranks, expected):
    """The largest error of a gradient, of an update, of a norm and of an output, as a share of what is allowed; and
    what must hold without tolerance, asserted.
    """
    initial, steps, last = zip(*ranks, strict=True)
    _, before = assembled(initial)
    assert all(torch.equal(before[name], value) for name, value in snapshot(net(0)).items())
    share = 0.0
    for on_ranks, (true_grads, true_values, true_norm, true_out) in zip(
        zip(*steps, strict=True), expected, strict=True
    ):
        with_grads, updated, norms, outs = zip(*on_ranks, strict=True)
        (grads, _), (_, values) = assembled(with_grads), assembled(updated)
        share = max(share, gradient_error(grads, true_grads), update_error(values, true_values, before))
        assert all(
            torch.equal(norm, norms[0]) and torch.equal(out, outs[0]) for norm, out in zip(norms, outs, strict=True)
        )
        share = max(share, furthest(norms[0], true_norm) / (1e-12 * float(true_norm)))
        share = max(share, furthest(outs[0], true_out) / (1e-10 * float(true_out.abs().max())))
        before = true_values
    for whole in last:
        assert whole.keys() == values.keys() and all(torch.equal(whole[name], values[name]) for name in values)
    return share


def gradient_error(grads, expected):
    """The largest of a gradient, as a share of what is allowed. Where there should be none, there is none."""
    assert {name for name, grad in grads.items() if grad is None} == {n for n, g in expected.items() if g is None}
    there = {name: grad for name, grad in expected.items() if grad is not None}
    largest = max(float(grad.abs().max()) for grad in there.values())
    return max(
        furthest(grads[name], grad) / (1e-12 * float(grad.abs().max()) + 1e-14 * largest)
        for name, grad in there.items()
    )


def update_error(values, expected, before):
    """The largest of an update, as a share of what is allowed. What should not move has not moved by a bit."""
    share = 0.0
    for name, value in expected.items():
        moved, size = float((value - before[name]).abs().max()), float(value.abs().max())
        if name.endswith(("unused", "frozen")):
            assert moved == 0 and torch.equal(values[name], value)
            continue
        assert moved > 1e-4 * size, f"{name} moves too little to judge its update"
        share = max(share, furthest(values[name], value) / (1e-10 * moved + 4 * ULP * size))
    return share


def furthest(ours, expected):
    """The largest difference; infinite where one is not a number, since max(0.0, nan) is 0.0."""
    return float((ours - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())


def same_bits(ours, theirs):
    """The names of the tensors, by step and kind, that are not the same on two lists of ranks."""
    different = []
    for step, (mine, others) in enumerate(zip(together(ours), together(theirs), strict=True)):
        for kind, first, second in zip(("gradient", "value"), mine, others, strict=True):
            pairs = {name: (tensor, second[name]) for name, tensor in first.items()}
            different += [
                (step, kind, name)
                for name, (a, b) in pairs.items()
                if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))
            ]
    return different


def together(ranks):
    """Of each step the whole gradients before clipping, and the whole values after the update."""
    steps = zip(*(steps for _, steps, _ in ranks), strict=True)
    for on_ranks in steps:
        before, after, *_ = zip(*on_ranks, strict=True)
        yield assembled(before)[0], assembled(after)[1]
