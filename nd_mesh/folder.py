"""The folder of a run: who may write into it, and how nothing that an earlier run wrote is lost."""

import json
import os
from pathlib import Path

from checkpoint import lock
from checkpoint.files import Files, naming
from checkpoint.folder import candidates
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


def begin(out: Path) -> None:
    """Make the folder of a new run. An earlier run's is moved aside, to out.1, out.2, …, if that run has ended."""
    if (out / "metrics.jsonl").exists():
        with lock.held(out):
            Files().rename(out, free_name(out))
    with naming(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.jsonl").touch()  # the mark of a run's folder, so it is there first


def go_on(out: Path, step: int) -> None:
    """Make the folder that of a run which goes on after `step`: what it had from later steps is kept in tail.1, …

    Records, checkpoints, and the manifest of the earlier start; a record that was cut off half way counts as later.
    """
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    kept = next((i for i, line in enumerate(lines) if not _is_until(line, step)), len(lines))
    later = [path for saved_step, path in candidates(out) if saved_step > step]
    manifest = out / "manifest.json"
    files, tail = Files(), free_name(out / "tail")
    files.make_folder(tail)
    files.write(tail / "metrics.jsonl", lines[kept:])
    files.sync(tail / "metrics.jsonl")
    for path in [*later, *([manifest] if manifest.exists() else [])]:
        files.rename(path, tail / path.name)
    files.sync(tail)
    write(out / "metrics.jsonl", b"".join(lines[:kept]).decode())


def _is_until(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all: after a failure the earlier one of that name is still there."""
    files, partial = Files(), path.with_name(f"{path.name}.tmp")
    with naming(path):
        files.write(partial, [text.encode()])
        files.sync(partial)
        files.rename(partial, path)
    files.sync(path.parent)


def free_name(path: Path) -> Path:
    """The first of NAME.1, NAME.2, … that does not exist."""
    candidates = (path.with_name(f"{path.name}.{number}") for number in range(1, 10**6))
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))
