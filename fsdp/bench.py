"""A training step with our fully_shard beside PyTorch's: time, bytes, peak memory, collectives.

    python -m fsdp.bench                        2 and 4 ranks
    python -m fsdp.bench --ranks 2 --repeat 5   five whole runs, and the median of their ratios

The same units and the same policy on both sides: each block of the GPT is a unit, and the root has embedding, last norm
and head. "resharded" is the default of both, under which all but the root free their weights after forward; "kept" is
reshard_after_forward=False; "hybrid" is the default on 2 ranks that shard times 2 that replicate. fsdp.simple has the
same units and keeps. nd_mesh's GPT with 3.1 and 9.9 million parameters, float32, 2 rows of 128 tokens a rank, fused
AdamW. Every competitor has a replica of its own. "No communication" is a rank that makes the whole update by itself.

A second case counts the memory of a whole life: a copy of the model, wrap, optimizer and two steps. Weights and moments
are in it, on all sides. `collectives` counts those of one step.
"""

import copy
import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed import fsdp as fsdp2

from collectives import comparison, counted, layout, rng
from collectives.runtime import Runtime
from collectives.turns import Call, Case
from fsdp import fully_shard, simple
from nd_mesh import data
from nd_mesh.config import ModelConfig
from nd_mesh.model import GPT

SIZES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "3M": ModelConfig(layers=4, width=256, heads=8, kv_heads=4, hidden=704),
        "10M": ModelConfig(layers=6, width=384, heads=6, kv_heads=3, hidden=1024),
    }
)
SMALL = ModelConfig(layers=2, width=16, heads=2, kv_heads=1, hidden=32)
ROWS, CONTEXT = 2, 128
ADAMW = MappingProxyType({"lr": 1e-4, "fused": True})


class Loss(nn.Module):
    """The GPT with its loss in forward, as PyTorch's wrapper wants it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gpt = GPT(config, 0)
        layout.declare(self.gpt, self.gpt.init_rule, self.gpt.decay_rule)
        for param in self.gpt.parameters():
            rng.fill(param, 0)

    def forward(self, batch: data.Batch) -> Tensor:
        return self.gpt.loss(self.gpt(batch.ids, batch.where), batch.labels)

    @property
    def units(self) -> list[nn.Module]:
        """From the inside out."""
        return [*self.gpt.blocks.values(), self]


class Trained(NamedTuple):
    """What a step needs: what it calls forward, what it does after backward, the optimizer, and what it does then."""

    forward: nn.Module
    finish: Call
    optimizer: torch.optim.Optimizer
    after_step: Call


Way = Callable[[Runtime, Loss], Trained]


def nothing() -> None:
    """What is left to do for those whose hooks do it."""


def grid(run: Runtime) -> DeviceMesh:
    """2 replicas times the ranks that shard."""
    ranks = torch.arange(run.size).view(2, -1)
    columns, rows = ([run.new_group(line.tolist()) for line in lines] for lines in (ranks.T, ranks))
    mine = [next(group for group in groups if group is not None) for groups in (columns, rows)]
    return DeviceMesh.from_group(mine, run.device.type, ranks, mesh_dim_names=("replicate", "shard"))


def ours(run: Runtime, model: Loss, *, hybrid: bool = False, reshard: bool | None = None) -> Trained:
    """fsdp/."""
    replicas, group = grid(run).get_all_groups() if hybrid else (None, run.world)
    for unit in model.units:
        handle = fully_shard(unit, group, replicate_group=replicas, reshard_after_forward=reshard)
    return Trained(model, handle.finish, torch.optim.AdamW(handle.parameters(), **ADAMW), handle.after_step)


def theirs(run: Runtime, model: Loss, *, hybrid: bool = False, reshard: bool | None = None) -> Trained:
    """FSDP2."""
    mesh = grid(run) if hybrid else DeviceMesh.from_group(run.world, run.device.type)
    for unit in model.units:
        fsdp2.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    return Trained(model, nothing, torch.optim.AdamW(model.parameters(), **ADAMW), nothing)


def in_forty_lines(run: Runtime, model: Loss) -> Trained:
    """fsdp/simple.py."""
    for unit in model.units:
        simple.fully_shard(unit, run.world)
    return Trained(model, nothing, torch.optim.AdamW(model.parameters(), **ADAMW), nothing)


def alone(run: Runtime, model: Loss) -> Trained:
    """No communication."""
    return Trained(model, nothing, torch.optim.AdamW(model.parameters(), **ADAMW), nothing)


FLOOR = {"no communication": alone}
WAYS: Mapping[str, Mapping[str, Way]] = MappingProxyType(
    {
        "resharded": {"fsdp": ours, "fully_shard": theirs, **FLOOR},
        "kept": {
            "fsdp": partial(ours, reshard=False),
            "fully_shard": partial(theirs, reshard=False),
            "fsdp.simple": in_forty_lines,
            **FLOOR,
        },
        "hybrid": {"fsdp": partial(ours, hybrid=True), "fully_shard": partial(theirs, hybrid=True), **FLOOR},
    }
)


def step(run: Runtime, policy: str, size: str, config: ModelConfig | None = None) -> Case:
    """One step, of replicas that were built before."""
    model, batch = Loss(config or SIZES[size]).to(run.device), rows(run)
    built = {name: partial(steps, way(run, copy.deepcopy(model)), batch, 1) for name, way in WAYS[policy].items()}
    return Case(f"{size}, {policy}: a training step", built)


def life(run: Runtime, policy: str, size: str, config: ModelConfig | None = None) -> Case:
    """A copy of the model, wrap, optimizer and two steps: all that a rank holds is counted."""
    model, batch = Loss(config or SIZES[size]).to(run.device), rows(run)

    def living(way: Way) -> Call:
        return lambda: steps(way(run, copy.deepcopy(model)), batch, 2)

    lives = {name: living(way) for name, way in WAYS[policy].items() if name not in FLOOR}
    return Case(f"{size}, {policy}: a life of two steps", lives, prepare=gc.collect)


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


def collectives(run: Runtime, way: Way, config: ModelConfig) -> Counter[str]:
    """The collectives of the third step."""
    trained, batch = way(run, Loss(config).to(run.device)), rows(run)
    steps(trained, batch, 2)
    return counted.collectives(partial(steps, trained, batch, 1))


def policies(run: Runtime) -> list[str]:
    """Hybrid takes 4 ranks, or any even number of more."""
    return [policy for policy in WAYS if policy != "hybrid" or (run.size > 2 and run.size % 2 == 0)]


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    return [case(run, policy, size) for size in SIZES for policy in policies(run) for case in (step, life)]


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(2, 4)))
