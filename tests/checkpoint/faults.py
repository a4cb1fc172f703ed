"""The protocol with one fault, each of which a crash must bring to light."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from checkpoint import Checkpoints, folder, manifest, shard
from checkpoint.files import Files
from checkpoint.folder import COMMIT, Keep
from checkpoint.manifest import Manifest

FORGOTTEN = {  # fault → what is not forced, and after which operation
    "a rank's file is not forced": r"\.tmp/rank-\d\.safetensors after",
    "the manifest is not forced": r"\.tmp/manifest\.json after",
    "COMMIT is not forced": r"\.tmp/COMMIT after",
    "the partial folder is not forced": r"\.tmp after",
    "the new name is not forced": r"^run after run/step-\d+$",
    "the taking of a name is not forced": r"^run after run/step-\d+\.gone$",
    "the run's new folder is not forced": r"^\. after run$",
}


def forces_late(checkpoints: Checkpoints, partial: Path, job, group, pace):
    """In place of `_write_file`: the ranks' files are on the disk some time, not before the checkpoint has its name."""
    return shard.write(checkpoints.files, partial / f"rank-{group.rank()}.safetensors", job.values, pace), job.own


def names_before_commit(files: Files, partial: Path, final: Path, told: Manifest) -> None:
    """In place of `publish`."""
    text = told.text()
    files.write(partial / manifest.NAME, [text.encode()])
    files.sync(partial / manifest.NAME)
    files.sync(partial)
    files.rename(partial, final)
    files.sync(final.parent)
    files.write(final / COMMIT, [manifest.commitment(text).encode()])
    files.sync(final / COMMIT)
    files.sync(final)


def deletes_before_rename(files: Files, partial: Path, final: Path, told: Manifest) -> None:
    """In place of `publish`."""
    if final.exists():
        folder._delete(files, final)
    PUBLISH(files, partial, final, told)


def retires_before_commit(files: Files, partial: Path, final: Path, told: Manifest) -> None:
    """In place of `publish`, where the last one is kept."""
    for step, path in folder.candidates(final.parent):
        if step in Keep(last=1).removes([step, told.step]):
            folder._delete(files, path)
    PUBLISH(files, partial, final, told)


def deletes_in_place(files: Files, path: Path) -> None:
    """In place of `_delete`."""
    files.remove(path)


def forgets_what_was_moved_aside(files: Files, path: Path) -> None:
    """In place of `recover`."""
    for left in sorted(path.glob("step-*.*")):
        files.remove(left)


PUBLISH = folder.publish
REPLACED: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "the ranks' files are forced after the rest": lambda: mock.patch.object(Checkpoints, "_write_file", forces_late),
    "the name before COMMIT": lambda: mock.patch.object(folder, "publish", names_before_commit),
    "the old one is deleted before the new one has its name": lambda: mock.patch.object(
        folder, "publish", deletes_before_rename
    ),
    "retention before the commit": lambda: mock.patch.object(folder, "publish", retires_before_commit),
    "deletion in place": lambda: mock.patch.object(folder, "_delete", deletes_in_place),
    "what was moved aside is deleted": lambda: mock.patch.object(folder, "recover", forgets_what_was_moved_aside),
}


@contextlib.contextmanager
def planted(fault: str) -> Iterator[str]:
    """Meanwhile the protocol has this fault; yields the pattern of what is not forced."""
    with REPLACED.get(fault, contextlib.nullcontext)():
        yield FORGOTTEN.get(fault, "")
