"""A training step, cut over all ranks, beside PyTorch's DTensor styles: time, bytes, peak memory, collectives.

    python -m tensor_parallel.bench                        2 and 4 ranks
    python -m tensor_parallel.bench --ranks 2 --repeat 5   five whole runs, and the median of their ratios

nd_mesh's GPT with 3.5 million parameters, float32, 4 rows of 256 tokens, the same on all ranks; forward, backward and a
step of SGD, with the vocabulary cut. Beside ours stand torch.distributed.tensor.parallel's plans: "plain", each column
with an input of its own, whose gradient is reduced once a matrix; "shared input", reduced once for all that share it;
"sequence parallel", with one gather for them. "No communication" is a rank's part of the work, nothing sent.

The loss alone, forward and backward, of 1,024 tokens and a vocabulary of 32,768.
"""

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from collectives import comparison, counted, layout, rng
from collectives.partials import sum_partials
from collectives.runtime import Runtime
from collectives.turns import Call, Case
from nd_mesh import data
from nd_mesh.config import ModelConfig
from nd_mesh.model import GPT
from nd_mesh.parallelize import plan
from tensor_parallel import parallelize, vocab_parallel_cross_entropy

MODEL = ModelConfig(layers=4, width=256, heads=8, kv_heads=8, hidden=768)
SMALL = ModelConfig(layers=1, width=16, heads=4, kv_heads=4, hidden=32)
ROWS, CONTEXT = 4, 256
TOKENS, VOCABULARY = 1024, 32_768
LR = 1e-2


class Trained(NamedTuple):
    """What a step needs: the model, its loss, what adds up the gradients that are partial, and the optimizer."""

    model: GPT
    loss: Callable[[Tensor, Tensor], Tensor]
    finish: Call
    optimizer: torch.optim.Optimizer
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


Way = Callable[[Runtime, GPT], Trained]


def nothing() -> None:
    """What is left to do for those that have no partial gradients."""


def built(config: ModelConfig) -> GPT:
    """The model, the same on every rank."""
    model = GPT(config, 0)
    layout.declare(model, model.init_rule, model.decay_rule)
    for param in model.parameters():
        rng.fill(param, 0)
    return model


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Everyone's optimizer."""
    return torch.optim.SGD(params, lr=LR)


def ours(run: Runtime, model: GPT, **settings: bool) -> Trained:
    """tensor_parallel/."""
    parallelize(model, plan(model, None), run.world, **settings)

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(hidden)  # [B, T, V/tp]
        return vocab_parallel_cross_entropy(logits, labels, model.config.vocab, group=run.world).sum()

    params = list(model.parameters())
    return Trained(model, loss, partial(sum_partials, params, ("tp",)), sgd(params))


def theirs(run: Runtime, model: GPT, *plans: Mapping[str, object]) -> Trained:
    """DTensor's styles, one plan after the other."""
    mesh = DeviceMesh.from_group(run.world, run.device.type)
    for styles in plans:
        parallelize_module(model, mesh, dict(styles))

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")

    return Trained(model, loss, nothing, sgd(model.parameters()), loss_parallel)


def alone(run: Runtime, model: GPT) -> Trained:
    """No communication: the work of a rank with its cut of the model, in a group of its own."""
    trained = ours(run, model)
    own = [run.new_group([rank]) for rank in range(run.size)][run.rank]
    for part in model.modules():
        if hasattr(part, "region"):
            part.region.group = own

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(hidden)
        mine = logits.size(-1)
        return vocab_parallel_cross_entropy(logits, labels % mine, mine, group=own).sum()

    return trained._replace(loss=loss)


COLUMNS = ("q", "k", "v", "ffn.gate", "ffn.up")
ROW = {"blocks.*.o": RowwiseParallel(), "blocks.*.ffn.down": RowwiseParallel()}
SHARED = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False)
GATHERED = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)
PLAIN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    **{f"blocks.*.{name}": ColwiseParallel() for name in COLUMNS},
    **ROW,
    "head": ColwiseParallel(use_local_output=False),
}
NORMS = ("blocks.*.attend_norm", "blocks.*.ffn_norm")
SCATTERED = {
    **PLAIN,
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ROW},
    **{name: SequenceParallel() for name in (*NORMS, "norm")},
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
OTHERS: Mapping[str, Way] = MappingProxyType(
    {
        "DTensor, plain": lambda run, model: theirs(run, model, PLAIN),
        "DTensor, shared input": lambda run, model: theirs(run, model, PLAIN, dict.fromkeys(NORMS, SHARED)),
        "DTensor, sequence parallel": lambda run, model: theirs(run, model, SCATTERED, dict.fromkeys(NORMS, GATHERED)),
    }
)
SEQUENCE = {name: way for name, way in OTHERS.items() if "sequence" in name}
WAYS: Mapping[str, Mapping[str, Way]] = MappingProxyType(
    {
        "tensor parallel": {"tensor_parallel": ours, **OTHERS, "no communication": alone},
        "sequence parallel": {
            "tensor_parallel, save_gathered=False": partial(ours, sequence_parallel=True),
            **SEQUENCE,
        },
        "sequence parallel, inputs kept whole": {
            "tensor_parallel, save_gathered=True": partial(ours, sequence_parallel=True, save_gathered=True),
            **SEQUENCE,
        },
    }
)


def step(run: Runtime, cut: str, config: ModelConfig = MODEL) -> Case:
    """One step, of models that were cut before."""
    model, batch = built(config).to(run.device), rows(run)
    made = {name: partial(steps, way(run, copy.deepcopy(model)), batch, 1) for name, way in WAYS[cut].items()}
    return Case(f"{cut}: a training step", made)


def steps(trained: Trained, batch: data.Batch, count: int) -> None:
    """So many training steps with these rows."""
    for _ in range(count):
        trained.optimizer.zero_grad()
        with trained.around():
            loss = trained.loss(trained.model(batch.ids, batch.where), batch.labels)
            (loss / batch.labels.numel()).backward()
        trained.finish()
        trained.optimizer.step()


def rows(run: Runtime) -> data.Batch:
    """All ranks' rows, the same in every step."""
    tokens = np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint8)
    stream = data.Stream(tokens, np.array([0]), CONTEXT)
    deal = {"batch": ROWS, "parts": 1, "part": 0, "split": 1}
    return next(iter(data.microbatches(stream, seed=0, step=0, **deal))).to(run.device)


def entropy(run: Runtime, vocab: int = VOCABULARY) -> Case:
    """The loss of logits that are cut, and its gradient."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(vocab, (TOKENS,), generator=generator).to(run.device)
    whole = torch.randn(TOKENS, vocab, generator=generator).to(run.device)
    cut = whole.chunk(run.size, 1)[run.rank].clone().requires_grad_()  # [B·T, V/tp]
    mesh = DeviceMesh.from_group(run.world, run.device.type)
    dtensor = DTensor.from_local(cut.detach(), mesh, [Shard(1)]).requires_grad_()

    def clear() -> None:
        cut.grad = dtensor.grad = None

    def ours() -> None:
        vocab_parallel_cross_entropy(cut, labels, vocab, group=run.world).sum().backward()

    def theirs() -> None:
        with loss_parallel():
            F.cross_entropy(dtensor, labels, reduction="sum").backward()

    calls = {"vocab_parallel_cross_entropy": ours, "loss_parallel": theirs}
    return Case(f"the loss of {TOKENS} tokens, V = {vocab}", calls, prepare=clear)


def collectives(run: Runtime, way: Way, config: ModelConfig) -> Counter[str]:
    """The collectives of the third step."""
    trained, batch = way(run, built(config).to(run.device)), rows(run)
    steps(trained, batch, 2)
    return counted.collectives(partial(steps, trained, batch, 1))


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    return [*(step(run, cut) for cut in WAYS), entropy(run)]


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(2, 4)))
