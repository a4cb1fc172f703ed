"""Saving and loading beside torch.distributed.checkpoint: time, the time training stands still, and bytes.

    python -m checkpoint.bench                        2 and 4 ranks
    python -m checkpoint.bench --ranks 2 --repeat 5   five whole runs, and the median of their ratios

The state is that of a transformer under Adam: 50 float32 tensors and two moments of each, cut by rows, by columns, or
whole on every rank ("copies"); as boxes for ours, as DTensors of the same memory for theirs. Both force every file to
the disk; ours also forces folders, and hashes every byte written or read, where theirs verifies nothing. A new
checkpoint goes into an empty folder, which is deleted outside the clock.

"write" is what a save cannot beat: each rank writes its bytes to a file, in one go, and forces it. "read" is what a
load cannot beat: each rank reads as many bytes of such a file into its tensors. Loads find the files in the kernel's
cache; before a cold one the kernel is asked to drop them, and what the disk itself keeps is not in our hands.
"""

import ctypes
import math
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from checkpoint import Checkpoints, State, find
from checkpoint.dtypes import raw
from collectives import comm, comparison
from collectives.layout import Box
from collectives.runtime import Runtime
from collectives.turns import Call, Case, nothing

SIZES: Mapping[str, int] = MappingProxyType({"1 MB": 32, "100 MB": 320, "400 MB": 640, "1 GB": 1008})  # the width
LAYERS = 6
CUTS: Mapping[str, int | None] = MappingProxyType({"rows": 0, "columns": -1, "copies": None})  # the dim that is cut


def shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The global tensors of a transformer of this width, by name."""
    matrices = {"query": (1, 1), "key": (1, 1), "value": (1, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
    yield "embedding", (10 * width, width)
    for layer in range(LAYERS):
        for name, (rows, columns) in matrices.items():
            yield f"{layer}.{name}", (rows * width, columns * width)
        for name in ("norm1", "norm2"):
            yield f"{layer}.{name}", (width,)
    yield "norm", (width,)


@dataclass
class Part:
    """A rank's part of the state: by global name a box and its values."""

    boxes: dict[str, tuple[Box, Tensor]]
    cut: int | None  # the dim

    @classmethod
    def new(cls, run: Runtime, size: str, cut: str) -> "Part":
        """Each element is its index in the global tensor."""
        dim, boxes = CUTS[cut], {}
        for kind in ("parameter", "exp_avg", "exp_avg_sq"):
            for name, shape in shapes(SIZES[size]):
                box = Box.whole(shape)
                if dim is not None:
                    rows = shape[dim] // run.size
                    box = box.cut(dim % len(shape), run.rank * rows, rows)
                whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
                boxes[f"{kind}/{name}"] = box, whole[box.slices(Box.whole(shape))].clone()
        return cls(boxes, dim)

    @property
    def tensors(self) -> list[Tensor]:
        """The values alone."""
        return [tensor for _, tensor in self.boxes.values()]

    def state(self) -> State:
        """What ours saves and fills."""
        return State({name: [entry] for name, entry in self.boxes.items()})

    def state_dict(self, mesh: DeviceMesh) -> dict[str, DTensor]:
        """What theirs saves and fills."""

        def placed(box: Box) -> list[Placement]:
            return [Replicate() if self.cut is None else Shard(self.cut % len(box.shape))]

        return {
            name: DTensor.from_local(tensor, mesh, placed(box), run_check=False)
            for name, (box, tensor) in self.boxes.items()
        }


class Place:
    """A folder that all ranks share, deleted with the object of rank 0."""

    def __init__(self, run: Runtime):
        self.run = run
        made = tempfile.mkdtemp(prefix="bench-") if run.rank == 0 else ""
        self.path = Path(comm.all_gather_object(made, group=run.world)[0])
        if run.rank == 0:
            weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def clear(self, part: Part) -> None:
        """Delete what is in it, but for the lock; have the system find memory for as many bytes of files. Collective.

        A virtual machine gives free memory back to its host within seconds: who writes first after a while would pay
        for getting it again, which was seen to double the time of a save.
        """
        comm.barrier(group=self.run.world)
        warm = self.path / f"warm-{self.run.rank}"
        write(warm, part)
        warm.unlink()
        if self.run.rank == 0:
            for folder in self.path.glob("*/"):
                shutil.rmtree(folder)
        comm.barrier(group=self.run.world)

    def forget(self) -> None:
        """Ask the kernel to drop from its cache what is in it. Collective."""
        comm.barrier(group=self.run.world)
        for path in self.path.rglob("*.*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        comm.barrier(group=self.run.world)

    def nbytes(self) -> dict[str, int]:
        """Bytes of the files in each folder. Collective."""
        found = {
            folder.name: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            for folder in self.path.glob("*/")
        }
        comm.barrier(group=self.run.world)  # rank 0 may delete them as soon as it has counted
        return found


def save(run: Runtime, size: str, cut: str) -> Case:
    """A checkpoint that is durable when the call returns."""
    place, part, mesh = Place(run), Part.new(run, size, cut), DeviceMesh.from_group(run.world, "cpu")
    checkpoints, state, state_dict = Checkpoints(place.path, run.world), part.state(), part.state_dict(mesh)
    calls = {
        "checkpoint": lambda: checkpoints.save(1, state),
        "DCP": lambda: dcp.save(state_dict, storage_writer=writer(place), process_group=run.world),
        "write": lambda: write(place.path / f"raw-{run.rank}", part),
    }
    return Case(f"{size} of {cut}: save", calls, prepare=lambda: place.clear(part))


def stand_still(run: Runtime, size: str, cut: str) -> Case:
    """The call after which the state may change again."""
    ours, theirs, wait, clear = behind(run, size, cut)
    return Case(f"{size} of {cut}: async_save, the call", {"checkpoint": ours, "DCP": theirs}, clear, wait)


def durable(run: Runtime, size: str, cut: str) -> Case:
    """The same, and the wait for what goes on behind, while this thread has nothing else to do."""
    ours, theirs, wait, clear = behind(run, size, cut)

    def whole(call: Call) -> Call:
        return lambda: (call(), wait())

    return Case(f"{size} of {cut}: async_save, durable", {"checkpoint": whole(ours), "DCP": whole(theirs)}, clear)


def behind(run: Runtime, size: str, cut: str) -> tuple[Call, Call, Call, Call]:
    """The asynchronous saves of both, the wait for either, and what makes their folder empty. Both stage into memory
    that they have from an earlier save.
    """
    place, part, mesh = Place(run), Part.new(run, size, cut), DeviceMesh.from_group(run.world, "cpu")
    group = run.new_group(range(run.size), str(place.path), "gloo")  # of this case alone
    checkpoints, state, state_dict = (
        Checkpoints(place.path, run.world, writer_group=group),
        part.state(),
        part.state_dict(mesh),
    )
    stager, begun = DefaultStager(StagingOptions(False, False, False, False)), []

    def theirs() -> None:
        staging = {"async_stager": stager, "process_group": group}
        begun.append(dcp.async_save(state_dict, storage_writer=writer(place), **staging))

    def wait() -> None:
        checkpoints.wait()
        while begun:
            begun.pop().result()

    return lambda: checkpoints.save_async(1, state), theirs, wait, lambda: place.clear(part)


def load(run: Runtime, size: str, cut: str, saved_as: str, cold: bool = False) -> Case:
    """A checkpoint into tensors that are there, cut as the saved ones or otherwise."""
    place, _, calls = loads(run, size, cut, saved_as)
    name = (
        f"{size} of {saved_as}: load" + (f" as {cut}" if cut != saved_as else "") + (" from the disk" if cold else "")
    )
    return Case(name, calls, place.forget if cold else nothing)


def loads(run: Runtime, size: str, cut: str, saved_as: str) -> tuple[Place, Part, dict[str, Call]]:
    """Where both checkpoints lie, the tensors that are filled, and who fills them."""
    place, mesh, source = Place(run), DeviceMesh.from_group(run.world, "cpu"), Part.new(run, size, saved_as)
    with Checkpoints(place.path, run.world) as checkpoints:
        checkpoints.save(1, source.state())
    dcp.save(source.state_dict(mesh), storage_writer=writer(place), process_group=run.world)
    part, file = Part.new(run, size, cut), place.path / f"raw-{run.rank}"
    write(file, part)
    comm.barrier(group=run.world)  # rank 0 may delete the folder as soon as it has this
    targets, state_dict, reader = part.state().tensors, part.state_dict(mesh), dcp.FileSystemReader(place.path / "dcp")
    calls = {
        "checkpoint": lambda: find(place.path, group=run.world).read(targets),
        "DCP": lambda: dcp.load(state_dict, storage_reader=reader, process_group=run.world),
        "read": lambda: read(file, part),
    }
    return place, part, calls


def writer(place: Place) -> dcp.FileSystemWriter:
    """Theirs, which forces its files."""
    return dcp.FileSystemWriter(place.path / "dcp", sync_files=True)


def write(path: Path, part: Part) -> None:
    """A rank's bytes and no more, on the disk."""
    with path.open("wb", buffering=0) as file:
        for tensor in part.tensors:
            file.write(raw(tensor))
        os.fsync(file.fileno())


def read(path: Path, part: Part) -> None:
    """As many bytes into a rank's tensors."""
    with path.open("rb", buffering=0) as file:
        for tensor in part.tensors:
            file.readinto(raw(tensor))


def resident(run: Runtime, case: Case) -> dict[str, int]:
    """By competitor, how far the resident memory of the process rises in one call and what it leaves to others, on the
    rank with most: torch's and Python's memory on every thread, and the pages of files that are mapped.
    """
    rises = {}
    for who, call in case.calls.items():
        case.prepare()
        ctypes.CDLL(None).malloc_trim(0)  # what is free and was kept would hide what is taken
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
        before = _kilobytes("VmHWM")
        call()
        case.finish()
        rises[who] = 1024 * (_kilobytes("VmHWM") - before)
    everyone = comm.all_gather_object(rises, group=run.world)
    return {who: max(rank[who] for rank in everyone) for who in rises}


def _kilobytes(entry: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(entry))
    return int(line.split()[1])


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    return [case for size in ("100 MB", "400 MB") for case in _cases(run, size)]


def _cases(run: Runtime, size: str) -> Iterator[Case]:
    for cut in ("rows", "copies"):
        yield save(run, size, cut)
    yield stand_still(run, size, "rows")
    yield durable(run, size, "rows")
    for cut, saved_as in (("rows", "rows"), ("columns", "rows"), ("copies", "copies")):
        yield load(run, size, cut, saved_as)
    yield load(run, size, "rows", "rows", cold=True)


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(2, 4)))
