"""The folder of a run's checkpoints: which of them is complete, and in which order names come and go.

    FOLDER/step-000020/             complete: it has its name
        rank-0.safetensors …        what each rank wrote
        manifest.json               what is in them, with a hash of everything
        COMMIT                      the manifest's hash
    FOLDER/step-000040.tmp/         a save that did not end
    FOLDER/step-000020.old/         what a second save of a step replaces, while it does
    FOLDER/step-000010.gone/        being deleted
    FOLDER/LOCK                     whose folder it is

Everything under a name is forced to the disk before the name is given, and a name is taken away, on the disk too,
before what is under it is deleted. So after a crash at any moment each folder called step-N is complete, and the newest
that was ever complete is there. One rank, the coordinator, does all of this. Mohan et al. 2021, "CheckFreq" (FAST), and
lecture A, "Atomic Commit" (docs/notation.md).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint import manifest
from checkpoint.files import Files, naming
from checkpoint.manifest import Manifest

COMMIT = "COMMIT"
_NAME = re.compile(r"step-(\d+)(\.old)?")
_LEFT = re.compile(r"step-\d+\.(tmp|gone)")


@dataclass(frozen=True)
class Keep:
    """Which complete checkpoints stay when a newer one is there: the `last` ones, and each `every` steps. 0: all."""

    last: int = 0
    every: int = 0

    def __post_init__(self) -> None:
        if self.last < 0 or self.every < 0:
            raise ValueError(f"keep last={self.last}, every={self.every}: give numbers from 1 on, or 0")

    def removes(self, steps: Sequence[int]) -> list[int]:
        """Those of these steps that may go."""
        if not self.last:
            return []
        older = sorted(set(steps))[: -self.last]
        return [step for step in older if not self.every or step % self.every]


def name(step: int) -> str:
    """`step-000020` for 20."""
    return f"step-{step:06d}"


def candidates(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in a folder, the newest first. What was moved aside counts only where nothing
    took its name.
    """
    with naming(folder):
        folders = [path for path in folder.iterdir() if path.is_dir()]
    found = [(int(match[1]), path) for path in folders if (match := _NAME.fullmatch(path.name))]
    by_step: dict[int, Path] = {}
    for step, path in sorted(found, key=lambda entry: (-entry[0], entry[1].suffix)):
        by_step.setdefault(step, path)
    return list(by_step.items())


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, be it a damaged one, and no folder of them. Raises ValueError if neither."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: name a checkpoint, or a folder of checkpoints")
    if _LEFT.fullmatch(path.name):
        raise ValueError(f"{path} is a save that did not end, or is being deleted: name another checkpoint")
    return _NAME.fullmatch(path.name) is not None or (path / COMMIT).exists()


def complete(path: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint and its text, if it is as it was committed and every file has its size.

    Raises ValueError naming the file that is not.
    """
    text = _read(path / manifest.NAME)
    if _read(path / COMMIT) != manifest.commitment(text):
        raise ValueError(f"{path / manifest.NAME} is not the one that {path / COMMIT} was written for: one is damaged")
    try:
        told = manifest.parse(text)
    except ValueError as error:
        raise ValueError(f"{path / manifest.NAME} cannot be read: {error}") from error
    if (match := _NAME.fullmatch(path.name)) and int(match[1]) != told.step:
        raise ValueError(f"{path} is the checkpoint of step {told.step}: give it its name back")
    for file, entry in told.files.items():
        try:
            size = (path / file).stat().st_size
        except OSError as error:
            raise ValueError(f"{path / file}: {error.strerror}") from error
        if size != entry.bytes:
            raise ValueError(f"{path / file} has {size:,} bytes, {entry.bytes:,} were written: it is damaged")
    return told, text


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


# -- the coordinator's acts, in their order ----------------------------------------------------------------------------


def recover(files: Files, folder: Path) -> None:
    """After a crash: what was moved aside and not replaced has its name again, and what was left over is deleted."""
    for step, path in candidates(folder):
        if path.name != name(step) and path.suffix == ".old":
            files.rename(path, path.with_suffix(""))
    files.sync(folder)  # a job that was killed may have given a name that is not on the disk: now it is
    for path in sorted(folder.iterdir()):
        if _LEFT.fullmatch(path.name) or (path.suffix == ".old" and _NAME.fullmatch(path.name)):
            _delete(files, path)


def begin(files: Files, folder: Path, step: int) -> Path:
    """A new, empty folder for the save of a step: its path."""
    partial = folder / f"{name(step)}.tmp"
    if partial.exists():
        files.remove(partial)
    files.make_folder(partial)
    return partial


def publish(files: Files, partial: Path, final: Path, told: Manifest) -> None:
    """Give a folder in which all ranks' files are on the disk its manifest, its COMMIT and its name.

    What has that name already steps aside and is deleted when this is done.
    """
    text = told.text()
    for path, content in ((partial / manifest.NAME, text), (partial / COMMIT, manifest.commitment(text))):
        files.write(path, [content.encode()])
        files.sync(path)
    files.sync(partial)
    aside = final.with_name(f"{final.name}.old")
    if final.exists():
        if aside.exists():
            _delete(files, aside)
        files.rename(final, aside)
        files.sync(final.parent)
    # IDEA: the rename is the checkpoint; all before it is preparation, all after it is tidying up.
    files.rename(partial, final)
    files.sync(final.parent)
    if aside.exists():
        _delete(files, aside)


def retire(files: Files, folder: Path, keep: Keep, newest: int) -> None:
    """Delete the checkpoints that need not be kept; that of the step `newest` is on the disk.

    Those of later steps are left alone: the run went back behind them, so they say nothing of what may go.
    """
    by_step = dict(candidates(folder))
    for step in keep.removes([step for step in by_step if step <= newest]):
        _delete(files, by_step[step])


def _delete(files: Files, path: Path) -> None:
    """Take a checkpoint's name away, on the disk too, and then what is under it."""
    gone = path.with_name(f"{path.name.split('.')[0]}.gone")
    if path != gone:
        if gone.exists():
            files.remove(gone)
        files.rename(path, gone)
        files.sync(path.parent)
    files.remove(gone)
