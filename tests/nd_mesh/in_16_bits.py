"""Runs in 16 bits beside the reference in float64: from the same masters, the error of loss, gradient and update."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from collectives.runtime import Runtime
from nd_mesh import data, train
from nd_mesh.config import Config, MeshConfig, ParallelConfig
from nd_mesh.model import GPT, IGNORE
from nd_mesh.train import Trainer
from tests import parity

STEPS = 3
U = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half the distance of two numbers near 1: one rounding's largest error


def masters(trainer: Trainer) -> list[parity.Piece]:
    """A rank's pieces of what the optimizer updates."""
    return [(p.held.name, p.held.boxes, parity.copied(p)) for p in trainer.handle.parameters()]


def steps_of(run: Runtime, config: Config, documents: list[np.ndarray], fault: str) -> parity.Run:
    """On each rank: its pieces of the masters before, and of each step the loss, the gradient, the masters after."""
    with FAULTS[fault]():
        trainer = parity.built(run, config, documents)
        return masters(trainer), [one_step(trainer, step) for step in range(STEPS)]


def one_step(trainer: Trainer, step: int) -> parity.Step:
    """Do a step, in its two halves; parameters are the masters."""
    loss, count, _ = trainer.gradients(step)
    params = trainer.handle.parameters()
    grads = [(param.held.name, param.held.boxes, parity.copied(param.grad)) for param in params]
    norm, lr = trainer.update(step, count)
    return parity.Step(loss, count, norm, grads, masters(trainer), lr, **parity.of_mixtures(trainer))


def every_second(cases: Sequence[dict[str, Any]], others: Iterable[str]) -> list[Any]:
    """Each case with each of the others, for pytest; every second pair is left to `make drill`."""
    return [
        pytest.param(case, other, id=f"{_name(case)}-{other}", marks=[pytest.mark.drill] * ((i + j) % 2))
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
    ]


def _name(case: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in case.items() if key not in ("expert_hidden", "shared_hidden"))


@dataclass(frozen=True)
class Errors:
    """The largest in any step. Of a tensor: of any of its numbers, over the largest that it has."""

    loss: float  # over the loss
    gradient: float  # of the worst tensor
    update: float  # likewise, of what the masters moved by
    whole: float  # of all numbers of the gradient together: the norm of the error over the norm
    chosen: bool  # whether all experts got as many tokens as in float64: another choice is no rounding

    def over(self, unit: float) -> "Errors":
        """The same in another unit."""
        return replace(self, **{name: getattr(self, name) / unit for name in ("loss", "gradient", "update", "whole")})


def against_float64(
    pool: Any, config: Config, ranks: int, documents: list[np.ndarray], *, fault: str = "none"
) -> Errors:
    """Of a run of SGD, on a mesh of so many ranks."""
    initial, done = parity.together(pool.run(ranks, steps_of, config, documents, fault))
    initial = {name: values.double() for name, values in initial.items()}
    one = replace(config, mesh=MeshConfig(), parallel=ParallelConfig(), train=replace(config.train, microbatches=1))
    expected = parity.reference(one, initial, documents, STEPS)
    errors, chosen, before, right_before = [], True, initial, initial
    for ours, right in zip(done, expected, strict=True):
        chosen = chosen and all(torch.equal(ours.tokens[layer], tokens) for layer, tokens in right.tokens.items())
        moved = _worst(_moved(ours.params, before), _moved(right.params, right_before))
        loss = abs(ours.loss - right.loss) / right.loss
        errors.append((loss, _worst(ours.grads, right.grads), moved, _together(ours.grads, right.grads)))
        before, right_before = ours.params, right.params
    return Errors(*map(max, zip(*errors, strict=True)), chosen)


def _moved(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: after[name].double() - before[name].double() for name in after}


def _worst(ours: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == right.keys()
    return max(float((ours[name].double() - right[name]).abs().max() / right[name].abs().max()) for name in right)


def _together(ours: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    errors = sum(float((ours[name].double() - right[name]).square().sum()) for name in right)
    return math.sqrt(errors / sum(float(grad.square().sum()) for grad in right.values()))


# -- faults, planted on every rank -------------------------------------------------------------------------------------


def _routers_not_scaled():
    true = data.Batch.of
    return mock.patch.object(data.Batch, "of", lambda batch, counts, scale: true(batch, counts, 1.0))


def _unscaled_twice():
    def twice(params, scale):
        true(params, scale)
        true(params, scale)

    true = train.unscale
    return mock.patch.object(train, "unscale", twice)


def _loss_in_16_bits():
    def loss(model, hidden, labels):
        logits = model.logits(hidden).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")

    return mock.patch.object(GPT, "loss", loss)


FAULTS = {
    "none": contextlib.nullcontext,
    "routers not scaled": _routers_not_scaled,
    "unscaled twice": _unscaled_twice,
    "loss in 16 bits": _loss_in_16_bits,
}
