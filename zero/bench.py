"""A training step with our stages beside PyTorch's: time, bytes, peak memory.

    python -m zero.bench                        2 and 4 ranks
    python -m zero.bench --ranks 2 --repeat 5   five whole runs, and the median of their ratios

Stage 1 beside DistributedDataParallel with ZeroRedundancyOptimizer, stages 2 and 3 beside fully_shard, whose units are
the blocks; so are stage 3's layers. Stage 2's buckets hold two blocks: fewer messages, and still no more memory than
fully_shard takes. Model, rows and optimizer are those of ddp.bench: nd_mesh's GPT with 4.6 million parameters, float32,
2 rows of 128 tokens a rank, fused AdamW. Every competitor has a replica of its own. "No communication" is a rank that
makes the whole update by itself.

For each stage a second case counts the memory of a whole life: a copy of the model, wrap, optimizer and two steps.
Weights and moments are in it, on all sides.
"""

import copy
import gc
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from collectives import comparison, layout, rng
from collectives.runtime import Runtime
from collectives.turns import Call, Case
from nd_mesh import data
from nd_mesh.config import ModelConfig
from nd_mesh.model import GPT
from zero import stage0, stage1, stage2, stage3

MODEL = ModelConfig(layers=6, width=256, heads=8, kv_heads=4, hidden=704)
SMALL = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, hidden=32)
ROWS, CONTEXT = 2, 128
TWO_BLOCKS = 6 << 20  # bytes: room for two blocks of MODEL, and not for three
ADAMW = MappingProxyType({"lr": 1e-4, "fused": True})


class Loss(nn.Module):
    """The GPT with its loss in forward, as PyTorch's wrappers want it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gpt = GPT(config, 0)
        layout.declare(self.gpt, self.gpt.init_rule, self.gpt.decay_rule)
        for param in self.gpt.parameters():
            rng.fill(param, 0)

    def forward(self, batch: data.Batch) -> Tensor:
        return self.gpt.loss(self.gpt(batch.ids, batch.where), batch.labels)


class Trained(NamedTuple):
    """What a step needs: what it calls forward, what it does after backward, the optimizer, and what it does then."""

    forward: nn.Module
    finish: Call
    optimizer: torch.optim.Optimizer
    after_step: Call


Way = Callable[[Runtime, Loss], Trained]


def nothing() -> None:
    """What is left to do for those whose hooks do it."""


def ours(stage: ModuleType, run: Runtime, model: Loss, **settings: object) -> Trained:
    """A stage."""
    handle = stage.wrap(model, run.world, **settings)
    return Trained(model, handle.finish, torch.optim.AdamW(handle.parameters(), **ADAMW), handle.after_step)


def in_layers(run: Runtime, model: Loss) -> Trained:
    """Stage 3, in fully_shard's units: the blocks. Embedding, norm and head stay whole."""
    return ours(stage3, run, model, layers=list(model.gpt.blocks.values()))


def redundancy(run: Runtime, model: Loss, *, views: bool) -> Trained:
    """DDP and ZeroRedundancyOptimizer. views: of both their buffers, instead of copies in and out of them."""
    replica = DistributedDataParallel(model, gradient_as_bucket_view=views)
    more = {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": views}
    return Trained(replica, nothing, ZeroRedundancyOptimizer(replica.parameters(), **more, **ADAMW), nothing)


def sharded(run: Runtime, model: Loss, *, reshard: bool) -> Trained:
    """FSDP2: each block a unit, and the root with what is left."""
    settings = {"mesh": DeviceMesh.from_group(run.world, run.device.type), "reshard_after_forward": reshard}
    for block in model.gpt.blocks.values():
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return Trained(model, nothing, torch.optim.AdamW(model.parameters(), **ADAMW), nothing)


def alone(run: Runtime, model: Loss) -> Trained:
    """No communication."""
    return Trained(model, nothing, torch.optim.AdamW(model.parameters(), **ADAMW), nothing)


FLOOR = {"stage 0": partial(ours, stage0), "no communication": alone}
WAYS: Mapping[str, Mapping[str, Way]] = MappingProxyType(
    {
        "stage 1": {
            "stage 1": partial(ours, stage1),
            "ZeroRedundancyOptimizer + DDP": partial(redundancy, views=False),
            "ZeroRedundancyOptimizer + DDP, views": partial(redundancy, views=True),
            **FLOOR,
        },
        "stage 2": {
            "stage 2": partial(ours, stage2, cap=TWO_BLOCKS),
            "fully_shard(reshard_after_forward=False)": partial(sharded, reshard=False),
            **FLOOR,
        },
        "stage 3": {"stage 3": in_layers, "fully_shard": partial(sharded, reshard=True), **FLOOR},
    }
)


def step(run: Runtime, stage: str, config: ModelConfig = MODEL) -> Case:
    """One step, of replicas that were built before."""
    model, batch = Loss(config).to(run.device), rows(run)
    built = {name: partial(steps, way(run, copy.deepcopy(model)), batch, 1) for name, way in WAYS[stage].items()}
    return Case(f"{stage}: a training step", built)


def life(run: Runtime, stage: str, config: ModelConfig = MODEL) -> Case:
    """A copy of the model, wrap, optimizer and two steps: all that a rank holds is counted."""
    model, batch = Loss(config).to(run.device), rows(run)

    def living(way: Way) -> Call:
        return lambda: steps(way(run, copy.deepcopy(model)), batch, 2)

    lives = {name: living(way) for name, way in WAYS[stage].items() if name not in FLOOR}
    return Case(f"{stage}: a life of two steps", lives, prepare=gc.collect)


def steps(trained: Trained, batch: data.Batch, count: int) -> None:
    """So many training steps with these rows."""
    for _ in range(count):
        trained.optimizer.zero_grad()
        (trained.forward(batch) / batch.labels.numel()).backward()
        trained.finish()
        trained.optimizer.step()
        trained.after_step()


def rows(run: Runtime) -> data.Batch:
    """A rank's rows of one batch, the same in every step."""
    tokens = np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint8)
    stream = data.Stream(tokens, np.array([0]), CONTEXT)
    deal = {"batch": ROWS * run.size, "parts": run.size, "part": run.rank, "split": 1}
    return next(iter(data.microbatches(stream, seed=0, step=0, **deal))).to(run.device)


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    return [case(run, stage) for case in (step, life) for stage in WAYS]


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(2, 4)))
