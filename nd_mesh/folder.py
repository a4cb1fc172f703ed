"""The folder of a run: who may write into it, and how nothing that an earlier run wrote is lost."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from nd_mesh import durable, saved
from nd_mesh.config import ConfigError


def check(out: Path) -> None:
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


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Meanwhile this process alone writes into the run's folder `out`, wherever it is moved. Raises ConfigError if
    another does. The lock is the system's, so a job that was killed holds none; where there are no locks, nobody does.
    """
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"train.out={out} belongs to a run that has not ended (its manifest.json says which): wait for it, or name "
            "another folder"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def begin(out: Path) -> None:
    """Make the folder of a new run. An earlier run's is moved aside, to out.1, out.2, …, if that run has ended."""
    with durable.naming(out):
        if (out / "metrics.jsonl").exists():
            with held(out):
                out.rename(durable.free_name(out))
        out.mkdir(parents=True, exist_ok=True)


def go_on(out: Path, step: int) -> None:
    """Make the folder that of a run which goes on after `step`: what it had from later steps is kept in tail.1, …

    Records, checkpoints, and the manifest of the earlier start; a record that was cut off half way counts as later.
    """
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    kept = next((i for i, line in enumerate(lines) if not _is_until(line, step)), len(lines))
    later = [path for saved_step, path in saved.candidates(out) if saved_step > step]
    manifest = out / "manifest.json"
    tail = durable.free_name(out / "tail")
    with durable.naming(tail):
        tail.mkdir()
        (tail / "metrics.jsonl").write_bytes(b"".join(lines[kept:]))
        for path in [*later, *([manifest] if manifest.exists() else [])]:
            path.rename(tail / path.name)
    durable.sync(tail / "metrics.jsonl")
    durable.sync(tail)
    durable.write(out / "metrics.jsonl", b"".join(lines[:kept]).decode())


def _is_until(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False
