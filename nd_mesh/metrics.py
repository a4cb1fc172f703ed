"""What a run shows and leaves behind: a line a person likes to watch, metrics.jsonl in full precision, curves as PNG, a
bigram baseline.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from checkpoint.files import naming
from collectives import agreement
from nd_mesh import folder, picture
from nd_mesh.data import Stream


@dataclass(frozen=True)
class Record:
    """What one step did: the same numbers on every rank, but for `seconds`."""

    step: int  # counted from 1
    loss: float  # nats a token, over the valid tokens of the global batch
    tokens: int  # valid ones
    grad_norm: float  # before clipping
    lr: float
    seconds: float  # of the whole step, by this rank's clock
    slowest: float  # seconds of forward and backward on the rank that took longest, before it waits for the others
    median: float  # the same, of the median rank
    experts: dict[str, Any] | None = None  # of mixtures: losses without coefficients, entropy, overflow, loads
    loss_scale: float = 1.0  # with which gradients were made
    skipped: bool = False  # a gradient was not finite, and the step was left out


COLUMNS = "step, loss, gradient norm, rate, throughput, forward and backward of the slowest/the median rank, time left"


class Report:
    """Rank 0's view of a run, on the terminal and in the folder `out`. On other ranks it shows and writes nothing.

    first: the steps that were done before it began. A write that fails is noted in `failure`, not raised: the trainer
    stops all ranks together.
    """

    def __init__(self, out: Path, steps: int, *, shown: bool, first: int = 0):
        self.out, self.steps, self.shown, self.first = out.absolute(), steps, shown, first
        self.failure = ""
        self.console = Console(highlight=False, soft_wrap=True, quiet=not shown)
        self.progress = Progress(
            BarColumn(8), TextColumn("{task.description}"), console=self.console, auto_refresh=False, disable=not shown
        )
        self.task = self.progress.add_task("", total=steps)
        self.seconds = 0.0

    def open(self, manifest: dict[str, Any], *, going_on: bool) -> None:
        """On rank 0, which has the folder: write what the run is; go on after step `first`, or begin.

        Raises OSError.
        """
        if going_on:
            folder.go_on(self.out, self.first)
        folder.write(self.out / "manifest.json", json.dumps(manifest, indent=1))

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def step(self, record: Record) -> None:
        """Move the progress line on, and write the record. About twenty lines of a run stay on the terminal."""
        self._write({name: value for name, value in asdict(record).items() if value is not None})
        self.seconds += record.seconds
        left = self.seconds / (record.step - self.first) * (self.steps - record.step)
        line = (
            f"{record.step:>{len(str(self.steps))}}/{self.steps}  loss {record.loss:.4f}  |g| {record.grad_norm:.2f}  "
            f"lr {record.lr:.1e}  {record.tokens / record.seconds / 1000:.1f}k tok/s  "
            f"{record.slowest:.2f}/{record.median:.2f} s  {_clock(left)}"
            + (f"  busiest expert ×{record.experts['imbalance']:.2f}" if record.experts else "")
        )
        if self.console.is_terminal:
            self.progress.start()
            self.progress.update(self.task, completed=record.step, description=line, refresh=True)
        if record.skipped:
            scaled = f" at a loss scale of {record.loss_scale:.0f}" if record.loss_scale > 1 else ""
            self.say(f"step {record.step} was left out: the gradient norm is {record.grad_norm}{scaled}")
        if record.step == self.first + 1 or record.step % max(1, self.steps // 20) == 0:
            self.say(line)
        if record.step == self.steps:
            self.progress.stop()

    def evaluation(self, step: int, loss: float) -> None:
        """A validation loss after `step` steps, in nats a token."""
        self._write({"step": step, "validation_loss": loss})
        self.say(f"validation loss {loss:.4f} nats a token after {step} steps")

    def sample(self, text: str) -> None:
        """Text that the model made, shown and kept as sample.txt."""
        self.say(f"a sample:\n{text}")
        if self.shown:
            with self._noting(self.out / "sample.txt") as path:
                path.write_text(text)

    def close(self) -> None:
        """Draw the curve where matplotlib is installed."""
        if not self.shown:
            return
        try:
            plot([self.out], self.out / "loss.png")
        except Exception as failure:  # a curve that cannot be drawn, for want of matplotlib or otherwise, ends no run
            self.say(f"no loss.png: {failure}")

    def _write(self, record: dict) -> None:
        if self.shown:
            with self._noting(self.out / "metrics.jsonl") as path, path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    @contextlib.contextmanager
    def _noting(self, path: Path) -> Iterator[Path]:
        try:
            with naming(path):
                yield path
        except OSError as error:
            self.failure = self.failure or agreement.words(error)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def read(run: Path) -> list[dict]:
    """The records of a run's metrics.jsonl. Raises ValueError for a line that is no record; the last may be unfinished,
    as a run leaves it that is killed.
    """
    path = run / "metrics.jsonl"
    *lines, _ = path.read_text().split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}, line {number} is not a record of a run: {line[:40]!r}") from None
    return records


def plot(runs: Sequence[Path], to: Path) -> None:
    """The loss curves of runs on top of each other, as PNG; where there are two or more, below them their distance from
    the first, at the steps that both have. Raises ValueError without matplotlib.
    """
    plt = picture.pyplot()
    rows = 1 if len(runs) == 1 else 2
    figure, axes = plt.subplots(rows, 1, figsize=(8, 4 * rows), sharex=True, squeeze=False)
    curves = [losses(run) for run in runs]
    for i, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        axes[0, 0].plot(
            curve[:, 0], curve[:, 1], label=run.name, linewidth=3 if i == 0 else 1, alpha=0.5 if i == 0 else 1
        )
        if i:
            steps, apart = distance(curve, curves[0])
            axes[1, 0].semilogy(steps, apart + 1e-12, label=f"|{run.name} − {runs[0].name}|")
            axes[1, 0].set_ylabel("difference, nats")
            axes[1, 0].legend()
    axes[0, 0].set_ylabel("training loss, nats a token")
    axes[0, 0].legend()
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(to, dpi=120)
    plt.close(figure)


def losses(run: Path) -> np.ndarray:
    """[steps, 2] of a run: the step and its training loss."""
    return np.array([(record["step"], record["loss"]) for record in read(run) if "loss" in record]).reshape(-1, 2)


def distances(runs: Sequence[Path]) -> list[str]:
    """A line for each run but the first: how far its loss is from the first one's at most, in nats."""
    told = []
    for run in runs[1:]:
        steps, apart = distance(losses(run), losses(runs[0]))
        ends = [last for last in (20, 100) if any(steps <= last) and any(steps > last)] + [*steps[-1:]]
        worst = ", ".join(f"{apart[steps <= last].max():.1e} up to step {last:.0f}" for last in ends)
        told.append(f"{run.name} from {runs[0].name}: {worst or 'no step that both have'}")
    return told


def distance(curve: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of two curves [n, 2] the steps that both have, and how far apart they are there."""
    steps, here, there = np.intersect1d(curve[:, 0], other[:, 0], return_indices=True)
    return steps, np.abs(curve[here, 1] - other[there, 1])


def bigram_loss(train: Stream, validation: Stream, vocab: int) -> float:
    """The validation loss, nats a token, of the model that knows only the token before: counts of the training stream
    plus one.
    """
    counts = np.ones((vocab, vocab))
    np.add.at(counts, _pairs(train), 1)
    log_chance = np.log(counts / counts.sum(1, keepdims=True))
    return float(-log_chance[_pairs(validation)].mean())


def _pairs(stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """Each token and the next, within documents."""
    inside = np.ones(len(stream.tokens) - 1, dtype=bool)
    inside[stream.starts[1:] - 1] = False
    return stream.tokens[:-1][inside], stream.tokens[1:][inside]
