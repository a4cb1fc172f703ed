"""What a run shows and leaves behind: a line a person likes to watch, metrics.jsonl in full precision, curves as PNG, a
bigram baseline.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nd_mesh.config import ConfigError
from nd_mesh.data import Stream


@dataclass(frozen=True)
class Record:
    """What one step did: the same numbers on every rank."""

    step: int  # counted from 1
    loss: float  # nats a token, over the valid tokens of the global batch
    tokens: int  # valid ones
    grad_norm: float  # before clipping
    lr: float
    seconds: float  # of the whole step
    slowest: float  # seconds of forward and backward on the rank that took longest, before it waits for the others
    median: float  # the same, of the median rank


COLUMNS = "step, loss, gradient norm, rate, throughput, forward and backward of the slowest/the median rank, time left"


class Report:
    """Rank 0's view of a run, on the terminal and in the folder `out`. On other ranks it shows and writes nothing."""

    def __init__(self, out: Path, steps: int, *, shown: bool):
        from rich.console import Console  # noqa: PLC0415, an extra for the one who watches
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

        self.out, self.steps, self.shown = out.absolute(), steps, shown
        self.console = Console(highlight=False, soft_wrap=True, quiet=not shown)
        self.progress = Progress(
            BarColumn(8), TextColumn("{task.description}"), console=self.console, auto_refresh=False, disable=not shown
        )
        self.task = self.progress.add_task("", total=steps)
        self.seconds = 0.0
        if shown:
            _keep_earlier(self.out)
            self.out.mkdir(parents=True, exist_ok=True)
            self.file = (self.out / "metrics.jsonl").open("w")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def step(self, record: Record) -> None:
        """Move the progress line on, and write the record. About twenty lines of a run stay on the terminal."""
        self._write(asdict(record))
        self.seconds += record.seconds
        left = self.seconds / record.step * (self.steps - record.step)
        line = (
            f"{record.step:>{len(str(self.steps))}}/{self.steps}  loss {record.loss:.4f}  |g| {record.grad_norm:.2f}  "
            f"lr {record.lr:.1e}  {record.tokens / record.seconds / 1000:.1f}k tok/s  "
            f"{record.slowest:.2f}/{record.median:.2f} s  {_clock(left)}"
        )
        if self.console.is_terminal:
            self.progress.start()
            self.progress.update(self.task, completed=record.step, description=line, refresh=True)
        if record.step == 1 or record.step % max(1, self.steps // 20) == 0:
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
            (self.out / "sample.txt").write_text(text)

    def close(self) -> None:
        """Finish the files, and draw the curve where matplotlib is installed."""
        if not self.shown:
            return
        self.file.close()
        try:
            plot([self.out], self.out / "loss.png")
        except Exception as failure:  # a curve that cannot be drawn, for want of matplotlib or otherwise, ends no run
            self.say(f"no loss.png: {failure}")

    def _write(self, record: dict) -> None:
        if self.shown:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()


def check_folder(out: Path) -> None:
    """Raise ConfigError unless a run may write into `out`: it is new, empty, or an earlier run's, which is kept."""
    out = out.absolute()
    if "\0" in str(out):
        raise ConfigError(f"train.out={str(out)!r} is not a path")
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"train.out={out} exists and is not a folder: name a folder")
    earlier = (out / "metrics.jsonl").exists()
    if out.is_dir() and any(out.iterdir()) and not earlier:
        raise ConfigError(f"train.out={out} is a folder of something else: name a new one")
    written = out if out.exists() and not earlier else next(folder for folder in out.parents if folder.exists())
    if not written.is_dir() or not os.access(written, os.W_OK | os.X_OK):
        raise ConfigError(f"train.out={out} cannot be written: {written} is not a folder that we may change")


def _keep_earlier(out: Path) -> None:
    """Move an earlier run's folder aside, to out.1, out.2, …"""
    if (out / "metrics.jsonl").exists():
        number = next(n for n in range(1, 10**6) if not os.path.lexists(out.with_name(f"{out.name}.{n}")))
        out.rename(out.with_name(f"{out.name}.{number}"))


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def read(run: Path) -> list[dict]:
    """The records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def plot(runs: Sequence[Path], to: Path) -> None:
    """The loss curves of runs on top of each other, as PNG; where there are two or more, below them their distance from
    the first.
    """
    import matplotlib  # noqa: PLC0415, an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    rows = 1 if len(runs) == 1 else 2
    figure, axes = plt.subplots(rows, 1, figsize=(8, 4 * rows), sharex=True, squeeze=False)
    curves = [np.array([(r["step"], r["loss"]) for r in read(run) if "loss" in r]).reshape(-1, 2) for run in runs]
    for i, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        axes[0, 0].plot(
            curve[:, 0], curve[:, 1], label=run.name, linewidth=3 if i == 0 else 1, alpha=0.5 if i == 0 else 1
        )
        if i:
            both = min(len(curve), len(curves[0]))
            axes[1, 0].semilogy(
                curve[:both, 0],
                np.abs(curve[:both, 1] - curves[0][:both, 1]) + 1e-12,
                label=f"|{run.name} − {runs[0].name}|",
            )
            axes[1, 0].set_ylabel("difference, nats")
            axes[1, 0].legend()
    axes[0, 0].set_ylabel("training loss, nats a token")
    axes[0, 0].legend()
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(to, dpi=120)
    plt.close(figure)


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
