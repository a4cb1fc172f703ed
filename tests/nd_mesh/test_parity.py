"""A run does not depend on the mesh: data parallel training against one independent process, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nd_mesh.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from tests import parity

MODEL = ModelConfig(vocab=37, layers=2, width=16, heads=4, kv_heads=2, hidden=20)
TRAIN = TrainConfig(steps=6, batch=7, optimizer="sgd", lr=0.5, warmup=2, clip=0.5, eps=1e-4, dtype="float64", seed=3)


def config(dp: int, *, model: dict | None = None, **train) -> Config:
    return Config(MeshConfig(dp=dp), replace(MODEL, **(model or {})), DataConfig(context=16), replace(TRAIN, **train))


def documents() -> list[np.ndarray]:
    """Packed documents of uneven lengths; forty of a single token fill two samples without one label."""
    lengths = [5, 40, 3, 1, 22, *[1] * 40, 19, 16, 17, 33, 2, 60, 7]
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, 37, length).astype(np.uint8) for length in lengths]


def judged(pool, cfg: Config, steps: int = 4) -> None:
    ranks = pool.run(cfg.mesh.dp, parity.train, cfg, documents(), steps)
    initial = ranks[0][0]
    expected = parity.reference(cfg, initial, documents(), steps)
    for weights, done in ranks:
        assert all(torch.equal(weights[name], initial[name]) for name in initial)
        worst = parity.judge(initial, done, expected)
        assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_sgd(pool, dp, microbatches, dropout, tied):
    judged(pool, config(dp, model={"dropout": dropout, "tied": tied}, microbatches=microbatches))


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_adamw(pool, dp):
    judged(pool, config(dp, model={"dropout": 0.1}, microbatches=3, optimizer="adamw", lr=0.05))


def test_rank_without_rows(pool):
    judged(pool, config(4, model={"dropout": 0.1}, batch=2, microbatches=2))


def test_rows_without_labels_exist():
    """The documents above do what they are for: a sample without a label, and unequal counts."""
    stream = parity.stream(documents(), 16)
    _, labels, _, _ = stream.rows(np.arange(stream.samples))
    counts = (labels >= 0).sum(1)
    assert counts.min() == 0 and len(counts.unique()) > 4
