"""Files that outlive a crash: written under another name, forced to the disk, and only then renamed to their own.

A rename is the one atomic act of a file system: before it nothing is there, after it everything is. It holds across a
loss of power only if the file's bytes, and the folder that has its name, were forced to the disk as well (fsync).
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """What fails inside is an OSError that names this path, whichever library raised it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all: after a failure the earlier one of that name is still there."""
    partial = path.with_name(f"{path.name}.tmp")
    with naming(path):
        partial.write_text(text)
        sync(partial)
        partial.replace(path)
    sync(path.parent)


def free_name(path: Path) -> Path:
    """The first of NAME.1, NAME.2, … that does not exist."""
    candidates = (path.with_name(f"{path.name}.{number}") for number in range(1, 10**6))
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))
