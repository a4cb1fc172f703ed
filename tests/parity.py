"""Parity: training steps on a mesh, judged against the independent reference in float64.

Judged in this order: the initial weights (equal bits on every rank), then of every step the number of valid tokens, the
loss, the gradient before clipping, its norm, and the update. Never per element: a tensor's error is measured against
its largest entry.
"""

import itertools
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives import layout
from collectives.runtime import Runtime
from nd_mesh.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from nd_mesh.data import Stream
from nd_mesh.train import Trainer
from tests.pool import Pool
from tests.reference import loop

ULP = torch.finfo(torch.float64).eps
STEPS = 3
VOCAB, CONTEXT = 37, 16
MODEL = ModelConfig(vocab=VOCAB, layers=2, width=16, heads=4, kv_heads=2, hidden=20, rope_base=50.0)
SGD = TrainConfig(
    **{"steps": 6, "batch": 7, "dtype": "float64", "seed": 3, "clip": 0.5},  # no setting has its default
    **{"optimizer": "sgd", "lr": 0.5, "warmup": 1, "min_lr": 0.3, "momentum": 0.8, "weight_decay": 0.02},
)
ADAMW = replace(
    SGD, optimizer="adamw", lr=0.05, betas=(0.8, 0.9), eps=1e-4
)  # at the usual 1e-8 the noise of a gradient over eps is 1e-9


def config(
    dp: int = 1, *, dropout: float = 0.0, tied: bool = False, train: TrainConfig = SGD, **settings: Any
) -> Config:
    """A small run in float64, clipped in every step; `settings` change its [train]."""
    model = replace(MODEL, dropout=dropout, tied=tied)
    return Config(MeshConfig(dp=dp), model, DataConfig(context=CONTEXT), replace(train, **settings))


def cases() -> dict[str, Config]:
    """Every mesh and option that the reference is compared with, by name."""
    found = {}
    for dp, microbatches, dropout, tied in itertools.product((1, 2, 3, 4), (1, 3), (0.0, 0.1), (False, True)):
        name = f"dp {dp}, {microbatches} microbatches, dropout {dropout}, {'tied' if tied else 'untied'}, sgd"
        found[name] = config(dp, dropout=dropout, tied=tied, microbatches=microbatches)
    for dp in (1, 2, 3, 4):
        found[f"dp {dp}, 3 microbatches, dropout 0.1, untied, adamw"] = config(
            dp, dropout=0.1, train=ADAMW, microbatches=3
        )
    found["dp 4, 2 rows, 2 microbatches, sgd"] = config(4, dropout=0.1, batch=2, microbatches=2)
    return found


def documents() -> list[np.ndarray]:
    """Packed documents of uneven lengths; forty of a single token fill two samples without one label."""
    lengths = [5, 40, 3, 1, 22, *[1] * 40, 19, 16, 17, 33, 2, 60, 7]
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, VOCAB, length).astype(np.uint8) for length in lengths]


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
    run: Runtime, config: Config, documents: list[np.ndarray], steps: int, equal_bits: bool = True
) -> tuple[dict[str, Tensor], list[Step]]:
    """On each rank: its initial weights and the steps it did. Equal boxes must have gradients of equal bits, in every
    step, unless `equal_bits` is not asked for.
    """
    tokens = stream(documents, config.data.context)
    trainer = Trainer(config, tokens, tokens, run)
    params = {param.held.name: param for param in trainer.handle.parameters()}
    initial = {name: param.detach().cpu().clone() for name, param in params.items()}
    done = []
    for step in range(steps):
        loss, count, _ = trainer.gradients(step)
        if equal_bits:
            layout.check_copies(((param.held, param.grad) for param in params.values()), run.world)
        grads = {name: param.grad.cpu().clone() for name, param in params.items()}
        norm, lr = trainer.update(step, count)
        done.append(
            Step(loss, count, norm, grads, {name: param.detach().cpu().clone() for name, param in params.items()}, lr)
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
        **{"clip": train.clip or None, "rope_base": model.rope_base},
    )


def judged(pool: Pool, cfg: Config, texts: list[np.ndarray]) -> dict[str, float]:
    """Train on the mesh of `cfg` and by the reference, and judge every rank; the worst share of each kind."""
    ranks = pool.run(cfg.mesh.dp, train, cfg, texts, STEPS)
    initial = ranks[0][0]
    expected = reference(cfg, initial, texts, STEPS)
    for weights, _ in ranks:
        assert all(torch.equal(weights[name], initial[name]) for name in initial), (
            "initial weights differ between ranks"
        )
    shares = [judge(initial, done, expected) for _, done in ranks]
    return {kind: max(share[kind] for share in shares) for kind in shares[0]}


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


def main() -> int:
    """`make parity`: all cases, a line each; 1 if one misses."""
    pool, missed = Pool(), 0
    print(f"{'share of the error that is allowed':<60}{'loss':>9}{'norm':>9}{'gradient':>10}{'update':>9}")
    for name, cfg in cases().items():
        worst = judged(pool, cfg, documents())
        missed += max(worst.values()) > 1
        print(f"{name:<60}{worst['loss']:>9.4f}{worst['norm']:>9.4f}{worst['gradient']:>10.4f}{worst['update']:>9.4f}")
    pool.close()
    print(f"{len(cases()) - missed} passed, {missed} failed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
