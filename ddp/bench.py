"""A training step with our three data parallels beside PyTorch's: time, bytes, peak memory.

    python -m ddp.bench                        2 and 4 ranks
    python -m ddp.bench --ranks 2 --repeat 5   five whole runs, and the median of their ratios

The model is nd_mesh's GPT with 4.6 million parameters, float32; a step is zero_grad, forward, backward, reduction,
fused AdamW, on 2 rows of 128 tokens a rank. Every competitor has replicas of its own. "No communication" is what the
ranks would need if they did not have to agree: the floor. The second case counts the memory of a whole life, wrap and
two steps with SGD, of which the weights are not counted and everything else is. Cores that compute and send at once
gain nothing from overlap, so the third case slows the links (collectives/slow.py) until traffic takes about as long as
backward, with buckets of 2 MiB.
"""

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives import comparison, layout, rng
from collectives.runtime import Runtime
from collectives.slow import Slow
from collectives.turns import Call, Case
from collectives.watch import watching
from ddp import bucketed, naive, overlapped
from nd_mesh import data
from nd_mesh.config import ModelConfig
from nd_mesh.model import GPT

MODEL = ModelConfig(layers=6, width=256, heads=8, kv_heads=4, hidden=704)
SMALL = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, hidden=32)
ROWS, CONTEXT = 2, 128
Finish = Callable[[], object]


class Loss(nn.Module):
    """The GPT with its loss in forward, as DistributedDataParallel wants it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gpt = GPT(config, 0)
        layout.declare(self.gpt, self.gpt.init_rule, self.gpt.decay_rule)
        for param in self.gpt.parameters():
            rng.fill(param, 0)

    def forward(self, batch: data.Batch) -> Tensor:
        return self.gpt.loss(self.gpt(batch.ids, batch.where), batch.labels)


def ours(wrap: Callable, run: Runtime, model: nn.Module, **settings: int) -> tuple[nn.Module, Finish]:
    """What a step calls forward, and what it does after backward."""
    return model, wrap(model, run.world, **settings).finish


def theirs(run: Runtime, model: nn.Module, **settings: bool) -> tuple[nn.Module, Finish]:
    """The same for PyTorch's, which is done when backward is."""
    return DistributedDataParallel(model, **settings), lambda: None


WAYS = {
    "overlapped": lambda run, model: ours(overlapped.wrap, run, model),
    "torch DDP": theirs,
    "torch DDP, gradient_as_bucket_view": lambda run, model: theirs(run, model, gradient_as_bucket_view=True),
    "bucketed": lambda run, model: ours(bucketed.wrap, run, model),
    "naive": lambda run, model: ours(naive.wrap, run, model),
    "no communication": lambda run, model: (model, lambda: None),
}


def step(run: Runtime, config: ModelConfig = MODEL) -> Case:
    """One step, of replicas that were built before."""

    def built(way: Callable) -> Call:
        model, finish = way(run, Loss(config).to(run.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return _steps(model, finish, optimizer, _batch(run), 1)

    return Case("a training step", {name: built(way) for name, way in WAYS.items()})


def life(run: Runtime, config: ModelConfig = MODEL) -> Case:
    """Wrap and two steps: the peak holds gradients, buckets, activations, but no weights and no moments."""
    model, batch = Loss(config).to(run.device), _batch(run)

    def living(way: Callable) -> Call:
        def call() -> None:
            wrapped, finish = way(run, model)
            _steps(wrapped, finish, torch.optim.SGD(wrapped.parameters(), lr=1e-4), batch, 2)()

        return call

    return Case("wrap and two steps", {name: living(way) for name, way in WAYS.items()}, prepare=model.zero_grad)


def slow_links(run: Runtime, config: ModelConfig = MODEL) -> Case:
    """One step where a byte takes 5 ns and a message 1 ms."""

    def built(wrap: Callable) -> Call:
        model, finish = ours(wrap, run, Loss(config).to(run.device), cap=2 << 20)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step, slow = _steps(model, finish, optimizer, _batch(run), 1), Slow(latency=1e-3, seconds_per_byte=5e-9)

        def call() -> None:
            with watching(slow):
                step()

        return call

    return Case(
        "a training step on slow links", {"overlapped": built(overlapped.wrap), "bucketed": built(bucketed.wrap)}
    )


def _steps(model: nn.Module, finish: Finish, optimizer: torch.optim.Optimizer, batch: data.Batch, count: int) -> Call:
    def call() -> None:
        for _ in range(count):
            optimizer.zero_grad()
            (model(batch) / batch.labels.numel()).backward()
            finish()
            optimizer.step()

    return call


def _batch(run: Runtime) -> data.Batch:
    tokens = np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint8)
    stream = data.Stream(tokens, np.array([0]), CONTEXT)
    deal = {"batch": ROWS * run.size, "parts": run.size, "part": run.rank, "split": 1}
    return next(iter(data.microbatches(stream, seed=0, step=0, **deal))).to(run.device)


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    return [step(run), life(run), slow_links(run)]


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(2, 4)))
