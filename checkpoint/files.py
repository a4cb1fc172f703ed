"""The file operations of a checkpoint, all of them: one small interface, so that whoever wants to can log every one,
fail any, or stop after any. And what makes a file outlive a crash.

A rename is the one atomic act of a file system: before it nothing is there, after it everything is. It holds across a
loss of power only if the bytes of the files, and the folders that have their names, were forced to the disk before
(fsync). Pillai et al. 2014, "All File Systems Are Not Created Equal" (OSDI), on what goes wrong without.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

Bytes = bytes | memoryview
BEHIND = 4 << 20  # bytes of a file that are sent to the disk at a time while what follows is still being made


# IDEA: nothing else changes a disk but the lock, so a log of these operations holds every state a crash can leave.
class Files:
    """Six operations, and two made of them. Each raises an OSError that names the path; only what went through `sync`
    is on the disk for sure.
    """

    def make_folder(self, path: Path) -> None:
        """A new, empty folder; its parent is there."""
        with naming(path):
            path.mkdir()

    def write(self, path: Path, chunks: Iterable[Bytes]) -> None:
        """A new file of these bytes, or the file of that name with these bytes in place of its own."""
        with naming(path), path.open("wb", buffering=0) as file:
            at = sent = 0
            for chunk in chunks:
                left = memoryview(chunk)
                while left:  # a write may take less than it is given
                    left = left[file.write(left) :]
                at += len(chunk)
                if at - sent >= BEHIND:
                    _send(file.fileno(), sent, at - sent)
                    sent = at

    def sync(self, path: Path) -> None:
        """Force a file's bytes, or the names in a folder, to the disk."""
        with naming(path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file or folder another name in the same file system, at once; a file of that name is replaced."""
        with naming(path):
            path.replace(to)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        with naming(path):
            path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        with naming(path):
            path.rmdir()

    def remove(self, path: Path) -> None:
        """Remove a folder and all that is in it, file by file; or a file, or a link and not what it leads to."""
        if path.is_symlink() or not path.is_dir():
            self.unlink(path)
            return
        with naming(path):
            inside = sorted(path.iterdir())
        for entry in inside:
            self.remove(entry)
        self.remove_folder(path)

    def make_folders(self, path: Path) -> None:
        """A folder and what it lies in, on the disk when this returns; no failure where it is there already."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        with contextlib.suppress(FileExistsError):  # another rank's folder on the way
            self.make_folder(path)
        self.sync(path.parent)


def _send(descriptor: int, at: int, nbytes: int) -> None:
    """Have the system start to write these bytes of a file to the disk, so that a `sync` at the end waits for little.

    The call asks to drop them from the cache; what is not on the disk yet cannot be dropped and is written instead.
    """
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(descriptor, at, nbytes, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """What fails inside is an OSError that names this path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
