"""Parity: training steps on a mesh, judged against the independent reference in float64.

Judged in this order: the initial weights (equal bits on every rank), then of every step the number of valid tokens, the
loss, the gradient before clipping, its norm, and the update. Never per element: a tensor's error is measured against
its largest entry.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives import layout
from collectives.runtime import Runtime
from nd_mesh.config import Config
from nd_mesh.data import Stream
from nd_mesh.train import Trainer
from tests.reference import loop

ULP = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Step:
    """One step of one rank, in the reference's terms."""

    loss: float
    count: int
    grad_norm: float
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    lr: float


def stream(documents: list[np.ndarray], context: int) -> Stream:
    """Documents as the trainer reads them."""
    return Stream(np.concatenate(documents), np.cumsum([0, *map(len, documents)])[:-1], context)


def train(
    run: Runtime, config: Config, documents: list[np.ndarray], steps: int
) -> tuple[dict[str, Tensor], list[Step]]:
    """On each rank: its initial weights and the steps it did. Equal boxes must have gradients of equal bits, in every
    step.
    """
    tokens = stream(documents, config.data.context)
    trainer = Trainer(config, tokens, tokens, run)
    params = {param.held.name: param for param in trainer.handle.parameters()}
    initial = {name: param.detach().clone() for name, param in params.items()}
    done = []
    for step in range(steps):
        loss, count, _ = trainer.gradients(step)
        layout.check_copies(((param.held, param.grad) for param in params.values()), run.world)
        grads = {name: param.grad.clone() for name, param in params.items()}
        norm, lr = trainer.update(step, count)
        done.append(
            Step(loss, count, norm, grads, {name: param.detach().clone() for name, param in params.items()}, lr)
        )
    return initial, done


def reference(config: Config, weights: dict[str, Tensor], documents: list[np.ndarray], steps: int) -> list[loop.Record]:
    """The same steps by the reference, from these weights."""
    model, train = config.model, config.train
    return loop.run(
        weights,
        documents,
        steps=steps,
        **{"T": config.data.context, "B": train.batch, "seed": train.seed, "total_steps": train.steps},
        **{"heads": model.heads, "kv_heads": model.kv_heads, "tied": model.tied, "dropout": model.dropout},
        **{"optimizer": train.optimizer, "lr": train.lr, "warmup": train.warmup, "min_lr_ratio": train.min_lr},
        **{"weight_decay": train.weight_decay, "betas": train.betas, "eps": train.eps, "momentum": train.momentum},
        clip=train.clip or None,
    )


def judge(initial: dict[str, Tensor], ours: list[Any], reference: list[Any]) -> dict[str, float]:
    """The largest error of each kind as a share of what is allowed; a miss is a share above 1. Both lists hold the same
    steps.
    """
    worst = dict.fromkeys(("loss", "norm", "gradient", "update"), 0.0)
    before = initial
    for step, expected in zip(ours, reference, strict=True):
        assert step.count == expected.count and step.lr == expected.lr, (
            step.count,
            expected.count,
            step.lr,
            expected.lr,
        )
        assert step.grads.keys() == expected.grads.keys()
        worst["loss"] = max(worst["loss"], abs(step.loss - expected.loss) / (1e-13 * max(expected.loss, 1)))
        worst["norm"] = max(
            worst["norm"], abs(step.grad_norm - expected.grad_norm) / (1e-13 * max(expected.grad_norm, 1e-300))
        )
        largest = max(float(grad.abs().max()) for grad in expected.grads.values())
        for name, grad in expected.grads.items():
            allowed = 1e-12 * float(grad.abs().max()) + 1e-14 * largest
            worst["gradient"] = max(worst["gradient"], _share(step.grads[name] - grad, allowed))
            moved = float((expected.params[name] - before[name]).abs().max())
            size = float(expected.params[name].abs().max())
            assert expected.count == 0 or moved > 1e-4 * size, (
                f"{name} moves by {moved} of {size}: too little to judge its update"
            )
            allowed = 1e-10 * moved + 4 * ULP * size if moved else 0.0
            worst["update"] = max(worst["update"], _share(step.params[name] - expected.params[name], allowed))
        before = expected.params
    return worst


def _share(error: Tensor, allowed: float) -> float:
    largest = float(error.abs().max())
    if largest == 0:
        return 0.0
    return largest / allowed if allowed else math.inf
