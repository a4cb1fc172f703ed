"""The folder of a checkpoint: written so that a complete one is never in doubt, and found again.

    OUT/step-000020/             complete: it has its name
        rank-0.safetensors …     what each rank wrote
        state.json               step, data cursor, config, the index of every tensor, the files with their sizes
    OUT/step-000040.tmp/         a save that did not end; the next save of that step clears it
    OUT/step-000020.old/         what a second save of the same step replaces, while it does

Every file is forced to the disk before the folder gets its name, so neither a full disk nor a kill at any moment takes
anything from the checkpoints that are there. Rank 0 alone decides which of them is complete: two ranks that look at a
slow file system may see two things.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.runtime import Runtime
from nd_mesh import durable
from nd_mesh.agreement import Stopped, attempt
from nd_mesh.config import ConfigError

_NAME = re.compile(r"step-(\d+)(\.old)?")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, and what its state.json says."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The steps that were done."""
        return self.state["step"]


def commit(final: Path, write: Callable[[Path], Any], state: Callable[[list[Any]], dict], run: Runtime) -> None:
    """Make the checkpoint `final`, a path that all ranks share, in three acts of all ranks together.

    `write(folder)` writes this rank's files, forced to the disk, and returns what `state` is to know of them;
    `state(returned by rank)` makes, on rank 0, the content of state.json; its "files" are their names with the bytes of
    each. Raises Stopped on every rank when anything fails on any; then what was there before is there still.
    """
    partial = final.with_name(f"{final.name}.tmp")
    first = run.rank == 0
    try:
        attempt(lambda: _clear(partial) if first else None, run)
        written = attempt(lambda: write(partial), run)
        attempt(lambda: _publish(partial, final, state(written)) if first else None, run)
    except Stopped:
        if first:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk, the space is wanted
        raise


def _clear(partial: Path) -> None:
    with durable.naming(partial):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)


def _publish(partial: Path, final: Path, state: dict[str, Any]) -> None:
    """Write state.json and give the folder its name. What has that name already steps aside and is deleted last."""
    durable.write(partial / "state.json", json.dumps(state))
    aside = final.with_name(f"{final.name}.old")
    with durable.naming(final):
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        # IDEA: the rename is the checkpoint; all before it is preparation, all after it is tidying up.
        partial.rename(final)
    durable.sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def choose(path: Path) -> Checkpoint:
    """The checkpoint `path`, or the latest complete one of the run's folder `path`. Raises ConfigError in one line."""
    if not path.is_dir():
        raise ConfigError(f"train.resume={path} is not a folder: name a checkpoint, or the folder of a run")
    if path.name.endswith(".tmp"):
        raise ConfigError(f"train.resume={path} is a save that did not end: name another checkpoint")
    if _NAME.fullmatch(path.name) or (path / "state.json").exists():
        return _complete(path)
    problems = []
    for _, folder in candidates(path):
        try:
            return _complete(folder)
        except ConfigError as incomplete:
            problems.append(str(incomplete))
    raise ConfigError(f"train.resume={path} has no complete checkpoint{''.join(f'; {text}' for text in problems)}")


def candidates(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints in a run's folder, latest first; of one step, first the one with its name."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found, key=lambda entry: (-entry[0], len(entry[1].name)))


def _complete(folder: Path) -> Checkpoint:
    try:
        state = json.loads((folder / "state.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in state["files"]}
    except OSError as error:
        raise ConfigError(f"the checkpoint {folder} is not complete: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the checkpoint {folder} is not complete: state.json cannot be read: {error}") from error
    if wrong := [name for name, size in sizes.items() if size != state["files"][name]]:
        raise ConfigError(f"the checkpoint {folder} is not complete: {', '.join(wrong)}: not the size it was written")
    return Checkpoint(folder, state)
