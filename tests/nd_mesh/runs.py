"""Small runs for the tests of the trainer: their configuration, their data, and all that they hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from collectives.agreement import Stopped
from collectives.runtime import Runtime
from nd_mesh import loop, metrics
from nd_mesh.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, TrainConfig, WatchConfig
from nd_mesh.train import Trainer
from tests import parity

MODEL = ModelConfig(vocab=37, layers=1, width=8, heads=2, kv_heads=1, hidden=12, dropout=0.1)
TRAIN = TrainConfig(steps=10, batch=5, microbatches=2, lr=0.01, warmup=3, sample=3, prompt="\x01", evaluate_every=3)
TIMES = ("seconds", "slowest", "median")
SYNCHRONOUS = CheckpointConfig()


def config(dp: int, checkpoint: CheckpointConfig = SYNCHRONOUS, **train) -> Config:
    """Without a journal, which wants more room than the small disks of these tests have."""
    tables = {"checkpoint": checkpoint, "watch": WatchConfig(journal=False)}
    return Config(MeshConfig(dp=dp), MODEL, DataConfig(context=8), replace(TRAIN, **train), **tables)


def stream() -> parity.Stream:
    """Fourteen samples: ten steps of five are several epochs."""
    numbers = np.random.default_rng(1)
    return parity.stream([numbers.integers(0, 37, n).astype(np.uint8) for n in (50, 3, 40, 1, 17)], 8)


def trainer(run: Runtime, cfg: Config) -> Trainer:
    return Trainer(cfg, stream(), stream(), run)


def everything(built: Trainer) -> dict[str, torch.Tensor]:
    """A copy of all parameters and of the whole optimizer state, scalars too."""
    found = {}
    for param in built.handle.parameters():
        found[param.held.name] = param.detach().clone()
        for kind, value in built.optimizer.state.get(param, {}).items():
            found[f"{param.held.name} {kind}"] = value.clone()
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = one.keys() == other.keys()
    return same and all(one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one)


def save(built: Trainer, folder: Path, step: int) -> None:
    """One checkpoint."""
    with built.checkpoints(folder) as checkpoints:
        built.save(checkpoints, step)


def run_until(run: Runtime, cfg: Config, last: int | None) -> str:
    """The whole command's work; cut off on every rank before step `last`, as by a kill, if one is given."""
    real = Trainer.step

    def step(self: Trainer, number: int):
        if number == last:
            raise KeyboardInterrupt
        return real(self, number)

    Trainer.step = step
    try:
        loop.train(cfg, stream(), stream(), run)
    except (KeyboardInterrupt, Stopped) as end:
        return str(end)
    finally:
        Trainer.step = real
    return "done"


def records(out: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in metrics.read(out)]


def values(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(checkpoint.glob("*.safetensors")) for k, v in load_file(file).items()}
