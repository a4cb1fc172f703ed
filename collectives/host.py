"""Host memory of a rank, counted: what does not fit on the device lies here, in memory or in files, and is copied
there and back.

A pool hands out flat tensors and carries every copy, so that its counters hold both sides of the bargain: bytes that
the device no longer keeps, and bytes and seconds that moving them takes. `Pool` is memory, pinned where the device is a
GPU, for a copy from pageable memory waits for a second one inside the driver. `FilePool` is memory-mapped files: the
kernel keeps in memory what it can and the disk has the rest. Not counted: torch rounds a pinned block up to a power of
two, and a file to the blocks of its disk.

Ren et al. 2021, "ZeRO-Offload", and Rajbhandari et al. 2021, "ZeRO-Infinity", 6.3; lecture A, "CPU·NVMe Offload"
(docs/notation.md), whose "it fits" and "it is fast" are the two counters. PyTorch's counterpart: pinned tensors and
torch.from_file; DeepSpeed's: runtime/swap_tensor, with direct, asynchronous I/O past the kernel's cache, left out here.
"""

import itertools
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moves:
    """What was copied between host and device: bytes from the host and to it, and the seconds of both, in which copies
    that ran at the same time count twice.
    """

    read: int = 0
    written: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Moves") -> "Moves":
        return Moves(self.read + other.read, self.written + other.written, self.seconds + other.seconds)

    def __sub__(self, earlier: "Moves") -> "Moves":
        return Moves(self.read - earlier.read, self.written - earlier.written, self.seconds - earlier.seconds)


class Level:
    """The bytes of those tensors, of the ones it was shown, whose storage still lives: `now`, and the most so far."""

    def __init__(self) -> None:
        self.peak = 0
        self._living: dict[int, int] = {}  # bytes by number; no sum, which two threads could both be changing
        self._numbers = itertools.count()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @property
    def now(self) -> int:
        """Bytes that live now."""
        return sum(list(self._living.values()))

    def add(self, tensor: Tensor, freed: Callable[[], object] = lambda: None) -> Tensor:
        """Count the tensor until nothing refers to its storage any more, then call `freed`. Returns the tensor."""
        storage = tensor.untyped_storage()
        number = next(self._numbers)
        self._living[number] = storage.nbytes()
        self._storages.add(storage)
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, number, freed).atexit = False
        return tensor

    def _remove(self, number: int, freed: Callable[[], object]) -> None:
        del self._living[number]
        freed()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._storages


class Pool:
    """Host memory for what is computed with on `device`.

    `host` counts the tensors handed out, `staged` what of them is on the device, `moves` every copy since the pool was
    made: subtract an earlier value for a step's. Copies may be made from several threads at once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.host = Level()
        self.staged = Level()
        self.moves = Moves()
        self._counting = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat CPU tensor [numel] of this pool, uninitialised; its memory is freed with its last view."""
        return self.host.add(torch.empty(numel, dtype=dtype, pin_memory=self.device.type == "cuda"))

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of this pool, or a view of one."""
        return tensor in self.host

    def stage(self, source: Tensor) -> Tensor:
        """A copy on the device of a tensor in the pool, made before this returns."""
        into = self.staged.add(torch.empty(source.shape, dtype=source.dtype, device=self.device))
        self.read(into, source)
        return into

    def read(self, into: Tensor, source: Tensor) -> None:
        """Copy a tensor in the pool to one of its shape and dtype on the device. The copy runs on the calling thread's
        current stream and has ended when this returns.
        """
        self._copy(into, source)
        self._count(Moves(read=source.nbytes))

    def write(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor on the device to one of its shape and dtype in the pool; as `read`."""
        self._copy(target, source)
        self._count(Moves(written=source.nbytes))

    def check(self) -> None:
        """Nothing: memory that was handed out stays. FilePool looks after its files."""

    def close(self) -> None:
        """Nothing: memory goes with its tensors. FilePool removes its files."""

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"a copy changes neither shape nor dtype: {tuple(source.shape)} {source.dtype} to "
                f"{tuple(target.shape)} {target.dtype}; convert on the device"
            )
        began = time.perf_counter()
        target.copy_(source)
        self._count(Moves(seconds=time.perf_counter() - began))

    def _count(self, moves: Moves) -> None:
        with self._counting:
            self.moves += moves


class FilePool(Pool):
    """A pool whose tensors are memory-mapped files, one each, in a new folder inside `folder`.

    The files are scratch: they are removed with their tensors, the folder with the pool, with `close`, or when the
    interpreter ends. A process that is killed leaves them. Not for tmpfs, where files are memory.
    """

    def __init__(self, folder: str | Path, device: torch.device):
        super().__init__(device)
        self.folder = _new_folder(Path(folder))
        self._files: dict[Path, os.stat_result] = {}  # as they were made
        self._numbers = itertools.count()
        self._remove = weakref.finalize(self, _remove_folder, self.folder, os.getpid())

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel] in a file of its own; an empty one has none. Raises OSError, and leaves no file, when
        the disk has no room for all of it.
        """
        if numel == 0:
            return self.host.add(torch.empty(0, dtype=dtype))
        path = self.folder / str(next(self._numbers))
        self._files[path] = _allocate(path, numel * dtype.itemsize)
        try:
            tensor = torch.from_file(str(path), shared=True, size=numel, dtype=dtype)
        except RuntimeError:
            self._forget(path)
            raise
        return self.host.add(tensor, lambda: self._forget(path))

    def check(self) -> None:
        """Raises OSError if a file of a tensor is no longer there, is another one, or has another size: what would be
        read is lost, and reading past a file's end ends the process.
        """
        for path, made in list(self._files.items()):
            try:
                found = path.stat()
            except OSError as error:
                raise _explained(error, f"{path} has vanished ({error.strerror})", _LOST) from error
            if (found.st_dev, found.st_ino) != (made.st_dev, made.st_ino):
                raise OSError(f"{path} is not the file that was made here; {_LOST}")
            if found.st_size != made.st_size:
                raise OSError(f"{path} has {found.st_size:,} bytes, not the {made.st_size:,} it was made with; {_LOST}")

    def close(self) -> None:
        """Remove the folder and all files. Memory of tensors that still live stays readable until they are freed."""
        self._files.clear()
        self._remove()

    def _forget(self, path: Path) -> None:
        if self._files.pop(path, None):
            path.unlink(missing_ok=True)


_LOST = "what it held is lost: load a checkpoint, and keep others from clearing the folder"


def _explained(error: OSError, what: str, remedy: str) -> OSError:
    return OSError(error.errno, f"{what}; {remedy}")


def _new_folder(folder: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="host-", dir=folder))
    except OSError as error:
        remedy = "name a folder that exists and can be written"
        raise _explained(error, f"no scratch folder can be made in {folder} ({error.strerror})", remedy) from error


def _allocate(path: Path, nbytes: int) -> os.stat_result:
    """A new file with blocks for so many bytes, or no file.

    They are allocated now, since a store to a mapped page that finds no block left on a full disk ends the process by
    SIGBUS, which no `try` sees.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        remedy = "make room, or choose another folder"
        raise _explained(error, f"{path}: cannot allocate {nbytes:,} bytes ({error.strerror})", remedy) from error


def _remove_folder(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork, which has inherited the pool but not the files
        shutil.rmtree(folder, ignore_errors=True)
