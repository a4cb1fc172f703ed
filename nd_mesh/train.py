"""The trainer: a step is read, computed, reduced, clipped, applied. It knows the mesh by its groups and the strategies
by their handle.

A run is a function of its config and its seed: weights, masks, rows and loss are the same on every mesh, so its curves
lie on each other. The run around the steps is in loop.py.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import Checkpoints, Keep, Saved, State, Storm, find, restore, training
from checkpoint.shard import Values
from collectives import comm
from collectives.agreement import Stopped, together
from collectives.norm import clip, grad_norm
from collectives.partials import sum_partials
from collectives.runtime import Runtime
from expert_parallel import Observation
from nd_mesh import data, manifest
from nd_mesh.config import Config, ConfigError, TrainConfig
from nd_mesh.context import Rows
from nd_mesh.experts import Observer, summary
from nd_mesh.mesh import Mesh
from nd_mesh.metrics import Record
from nd_mesh.model import GPT, IGNORE
from nd_mesh.parallelize import PARTIAL, parallelize
from nd_mesh.precision import Precision, Scaler, unscale
from nd_mesh.stages import Stages, microbatches

FIXED = (
    "data.context",
    "train.batch",
    "train.seed",
    "train.optimizer",
    "train.dtype",
)  # in a resume; and all of [model]


def learning_rate(train: TrainConfig, step: int) -> float:
    """The rate of step `step`, counted from 0: linear warm-up, then a cosine down to min_lr · lr."""
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    progress = (step - train.warmup) / max(1, train.steps - train.warmup)
    return train.lr * (train.min_lr + (1 - train.min_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """One rank's trainer. Building it is collective over the world, and so is every method but `microbatches`, `biases`
    and `check_same_run`.
    """

    def __init__(self, config: Config, train: data.Stream, validation: data.Stream, run: Runtime):
        self.config, self.train_stream, self.validation_stream, self.run = config, train, validation, run
        self.mesh = Mesh(config.mesh, run)
        self.rows = Rows(config.parallel, self.mesh)
        with torch.device("meta"):
            self.model = GPT(config.model, config.train.seed).to(Precision.of(config.train.dtype).masters)
        self.model, self.handle, self.recomputed = parallelize(self.model, config, self.mesh, run.device)
        self.optimizer = self._make_optimizer()
        self.observer = Observer(self.model, config, self.mesh) if config.model.experts else None
        self.observed: dict[int, Observation] = {}  # what the mixtures did in the newest step, by layer
        self.scaler = Scaler.of(config.train)
        self.tokens = 0  # valid ones consumed so far
        self.metrics: dict[str, float] = {}  # the newest of each

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """What the run is. Rank 0 writes it and compares it; it reads all of the data."""
        streams = self.train_stream, self.validation_stream
        return manifest.of(self.config, self.run, *streams) if self.run.rank == 0 else {}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        train, params = self.config.train, self.handle.parameters()
        groups = [
            {"params": [p for p in params if p.held.decay], "weight_decay": train.weight_decay},
            {"params": [p for p in params if not p.held.decay], "weight_decay": 0.0},
        ]
        if train.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=train.lr, momentum=train.momentum)
        return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)

    def step(self, step: int) -> Record:
        """Do step `step`, counted from 0."""
        began = time.perf_counter()
        scale = self.scaler.scale
        loss, count, busy = self.gradients(step)
        norm, lr = self.update(step, count)
        slowest, median = self._over_ranks(busy)
        times = {"seconds": time.perf_counter() - began, "slowest": slowest, "median": median}
        of_step = {"experts": summary(self.observed), "loss_scale": scale, "skipped": not math.isfinite(norm)}
        return Record(step + 1, loss, count, norm, lr, **times, **of_step)

    def gradients(self, step: int) -> tuple[float, int, float]:
        """Forward and backward of global batch `step`. Returns its loss, its valid tokens and this rank's seconds of
        work.

        After: the parameters' gradients are those of the whole batch's loss, reduced, before clipping.
        """
        began, scale = time.perf_counter(), self.scaler.scale
        self.optimizer.zero_grad()
        batches = self.microbatches(step)
        counts = data.counts(batches, first=self.mesh.rank("cp") == 0)
        counting, count = comm.all_reduce(counts, group=self.mesh.group("data"), async_op=True), counts[0]
        if self.observer is not None:
            counting.wait()  # a mixture's losses are means over the global batch, and are taken on its way
            batches = [batch.of(counts, scale) for batch in batches]

        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            counting.wait()
            # IDEA: loss = Σ token losses / Σ valid tokens, both over all ranks and microbatches, no mean of means.
            return self.model.loss(hidden, labels) * scale / count.clamp(min=1)

        total = torch.zeros((), dtype=torch.float64, device=self.run.device)
        for part in self._forward_and_backward(batches, loss):
            total += part
        counting.wait()
        busy = time.perf_counter() - began
        self.handle.finish()
        sum_partials(self.handle.parameters(), PARTIAL)
        unscale(self.handle.parameters(), scale)
        self._sum(total := total / scale)
        self.metrics["loss"] = total.item()
        self.observed = self.observer.observe() if self.observer is not None else {}
        return self.metrics["loss"], int(count), busy

    def _forward_and_backward(
        self, batches: list[data.Batch], loss: Callable[[Tensor, Tensor], Tensor]
    ) -> list[Tensor]:
        """The loss of each microbatch whose last stage is here: of all, unless there are several."""
        if isinstance(self.model, Stages):
            return self.model.pipe.step(microbatches(batches), loss)
        losses = []
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last else self.handle.no_sync():
                value = loss(self.model(batch.ids, where=batch.where), batch.labels)
                value.backward()
            losses.append(value.detach())
        return losses

    def _sum(self, total: Tensor) -> None:
        """Add up over the ranks whose tokens differ, and give it to all stages: one of them has it, the others zero."""
        for name in ("data", "pp") if isinstance(self.model, Stages) else ("data",):
            comm.all_reduce(total, group=self.mesh.group(name), ordered=True)

    def microbatches(self, step: int) -> list[data.Batch]:
        """This rank's microbatches of global batch `step`, on its device."""
        train = self.config.train
        deal = {"parts": self.mesh.size("batch"), "part": self.mesh.rank("batch"), "split": train.microbatches}
        batches = data.microbatches(self.train_stream, seed=train.seed, step=step, batch=train.batch, **deal)
        return [self.rows.cut(batch.to(self.run.device)) for batch in batches]

    def update(self, step: int, count: int) -> tuple[float, float]:
        """Clip, and move the parameters. Returns the norm before clipping and the rate. A batch without a valid token
        moves nothing, nor does one whose gradient is not finite somewhere: parameters, optimizer, biases and the count
        of tokens stay.

        Raises Stopped on every rank for such a gradient, where train.nonfinite says so and no smaller loss scale helps.
        """
        params, lr = self.handle.parameters(), learning_rate(self.config.train, step)
        norm = grad_norm(params, group=self.run.world)
        # The norm has the same bits on every rank, so what one rank met all of them act on alike.
        finite = bool(norm.isfinite())
        if not finite and self.scaler.lowest and self.config.train.nonfinite == "raise":
            raise Stopped(
                f"step {step + 1}: the gradient norm is {norm.item()}; try a smaller train.lr, or train.nonfinite=skip"
            )
        if count or not finite:
            self.scaler.update(finite)
        if count and finite:
            if self.config.train.clip:
                clip(params, norm, self.config.train.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.handle.after_step()
            if self.observer is not None:
                self.observer.follow(self.observed)
            self.tokens += count
        self.metrics |= {"grad_norm": norm.item(), "lr": lr}
        return norm.item(), lr

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss over the whole validation stream, nats a token; the same on every rank."""
        self.model.eval()
        stream, train, parts = self.validation_stream, self.config.train, self.mesh.size("batch")
        mine = data.deal(range(stream.samples), parts, self.mesh.rank("batch"))
        total = torch.zeros(2, dtype=torch.float64, device=self.run.device)  # loss, valid tokens
        rows = -(-train.batch // (parts * train.microbatches))  # as many at a time as in training
        rounds = -(-stream.samples // (rows * parts))  # equal on all ranks: forward may communicate
        samples = [torch.tensor(data.deal(mine, rounds, i), dtype=torch.int64) for i in range(rounds)]
        for first in range(0, rounds, train.microbatches):
            some = samples[first : first + train.microbatches]
            batches = [self.rows.cut(data.make_batch(stream, 0, each, each).to(self.run.device)) for each in some]
            for batch, loss in zip(batches, self._losses(batches), strict=False):  # of none, where the last stage isn't
                total += torch.stack([loss.double(), (batch.labels != IGNORE).sum()])
        self._sum(total)
        self.model.train()
        self.metrics["validation_loss"] = (total[0] / total[1].clamp(min=1)).item()
        return self.metrics["validation_loss"]

    def _losses(self, batches: list[data.Batch]) -> list[Tensor]:
        if isinstance(self.model, Stages):
            return self.model.pipe.evaluate(microbatches(batches), self.model.loss)
        return [self.model.loss(self.model(batch.ids, where=batch.where), batch.labels) for batch in batches]

    def checkpoints(self, folder: Path, log: Callable[[str], object] = lambda line: None) -> Checkpoints:
        """Those of this run, in a folder."""
        chosen, run = self.config.checkpoint, self.run
        return Checkpoints(
            folder,
            run.world,
            writer_group=run.new_group(range(run.size), label="checkpoint", backend="gloo"),
            keep=Keep(chosen.keep_last, chosen.keep_every),
            storm=Storm(chosen.writers, chosen.bandwidth * 10**6),
            about=self.about,
            log=log,
        )

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        """Make a checkpoint of the state after `step` steps, or begin to. Between two steps.

        Step k reads global batch k, so the step is the data cursor too. Of random state there is none: every draw is a
        function of seed, step and place.
        """
        samples = step * self.config.train.batch
        consumed = {"step": step, "data_cursor": step, "samples": samples, "tokens": self.tokens}
        tensors = training(self.handle.parameters(), self.optimizer) | self._biases()
        state = State(tensors, consumed | {"metrics": self.metrics, "scaler": self.scaler.state()})
        (checkpoints.save_async if self.config.checkpoint.asynchronous else checkpoints.save)(step, state)

    def resume(self, path: Path) -> Saved:
        """Take the state of a checkpoint, or of the newest in a run's folder, whatever mesh wrote it; returns which.

        Raises Stopped on every rank, and nothing is changed, for one that is damaged, or of another run.
        """
        found = find(path, group=self.run.world, fallback=self.config.checkpoint.fallback)
        together(lambda: self.check_same_run(found) if self.run.rank == 0 else None, group=self.run.world)
        restore(found, self.handle.parameters(), self.optimizer, self._biases())
        self.handle.after_load()
        self.tokens, self.metrics = found.shared["tokens"], found.shared["metrics"]
        self.scaler.load(found.shared.get("scaler", self.scaler.state()))  # older checkpoints have none
        return found

    def biases(self) -> dict[str, Tensor]:
        """Of the routers of this rank's layers, by name."""
        return self.observer.biases() if self.observer is not None else {}

    def _biases(self) -> Values:
        return {f"bias/{name}": [(bias.held.boxes[0], bias)] for name, bias in self.biases().items()}

    def load_weights(self, found: Saved) -> None:
        """Take the weights of a checkpoint, routers' biases among them, and nothing else. Collective.

        Raises Stopped on every rank, and nothing is changed, for one that is damaged, or has other weights.
        """
        found.read(training(self.handle.parameters(), self.optimizer) | self._biases(), all_names=False)
        self.handle.after_load()

    def check_same_run(self, found: Saved) -> None:
        """Raise ConfigError unless a checkpoint is of the same function of the same data."""
        before, now = found.manifest.about, self.about
        if lacks := {"config", "data"} - before.keys():
            raise ConfigError(f"the checkpoint {found.path} is not of a run: it does not tell its {', '.join(lacks)}")
        defaults = asdict(Config())  # what a setting was that is newer than the checkpoint
        tables = {name: {**defaults.get(name, {}), **settings} for name, settings in before["config"].items()}
        names = (*(f"model.{key}" for key in now["config"]["model"]), *FIXED)
        pairs = {
            name: [side[table][key] for side in (tables, now["config"])]
            for name in names
            for table, key in [name.split(".")]
        }
        pairs["the data's hash"] = [before["data"], now["data"]]
        different = [f"{name} was {old}, is {new}" for name, (old, new) in pairs.items() if old != new]
        if different:
            raise ConfigError(f"the checkpoint {found.path} is of another run: {'; '.join(different)}")

    def _over_ranks(self, seconds: float) -> tuple[float, float]:
        mine = torch.tensor([seconds], dtype=torch.float64, device=self.run.device)
        everyone = torch.empty(self.run.size, dtype=torch.float64, device=self.run.device)
        comm.all_gather_single(everyone, mine, group=self.run.world)
        return everyone.max().item(), everyone.median().item()
