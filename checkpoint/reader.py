"""Reading: the boxes that were saved, intersected with the boxes that are wanted, whatever mesh cut either.

A rank maps the files that hold anything of what it wants, hashes the blocks it needs and copies out of them. So it
reads what it needs, rounded up to whole blocks, and its share of the headers; and nothing is changed before all of it
was verified: the second look at a page costs no read while memory lasts. PyTorch's counterpart: the load planner of
torch.distributed.checkpoint; it verifies nothing.
"""

import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.dtypes import DTYPES
from checkpoint.files import naming
from checkpoint.manifest import Manifest, Piece
from checkpoint.plan import contains
from checkpoint.shard import BLOCK, Values, digest
from collectives.layout import Box


@dataclass
class Reader:
    """One complete checkpoint, as this rank reads it. Its methods return what is wrong, a line each."""

    path: Path
    manifest: Manifest
    _maps: dict[str, memoryview] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)  # byte of each file that is no header
    _verified: set[tuple[str, int]] = field(default_factory=set)  # (file, first byte) of headers and blocks
    _met: dict[tuple[str, Box], list[tuple[Piece, Box, Box]]] = field(default_factory=dict)  # what `_meeting` found

    def __post_init__(self) -> None:
        for tensor in self.manifest.tensors.values():
            for piece in tensor.pieces:
                self._first[piece.file] = min(piece.at, self._first.get(piece.file, piece.at))

    def misfits(self, targets: Values) -> list[str]:
        """Where what is wanted is not what was saved: names, shapes, dtypes."""
        wrong = []
        for name, boxes in targets.items():
            saved = self.manifest.tensors.get(name)
            if saved is None:
                wrong.append(f"{name} is not in it")
                continue
            shapes = {box.shape for box, _ in boxes} - {saved.shape}
            wrong += [f"{name} has shape {list(saved.shape)}, here {list(shape)}" for shape in sorted(shapes)]
            dtypes = {tensor.dtype for _, tensor in boxes} - {DTYPES[saved.dtype]}
            wrong += [f"{name} is {DTYPES[saved.dtype]}, here {dtype}" for dtype in sorted(dtypes, key=str)]
            wrong += [f"{name}: {fault}" for box, tensor in boxes for fault in _unfit(box, tensor)]
        return wrong

    def verify(self, targets: Values) -> list[str]:
        """Hash the blocks that hold any of these boxes, and the headers of their files."""
        wrong: dict[str, None] = {}
        for name, boxes in targets.items():
            for box, _ in boxes:
                for piece, source, both in self._meeting(name, box):
                    first, last = _span(both, source)
                    size = DTYPES[self.manifest.tensors[name].dtype].itemsize
                    wrong |= dict.fromkeys(self._damage(piece, first * size, last * size, source.numel * size))
        return list(wrong)

    def verify_share(self, part: int, parts: int) -> list[str]:
        """Hash one of `parts` equal shares of the whole checkpoint: headers and blocks, dealt out in turn."""
        wrong = dict.fromkeys(self.verify_headers(part, parts))
        pieces = [(piece, tensor) for tensor in self.manifest.tensors.values() for piece in tensor.pieces]
        for i, (piece, tensor) in enumerate(pieces):
            nbytes = math.prod(piece.local) * DTYPES[tensor.dtype].itemsize
            for at in range((part - i) % parts * BLOCK, nbytes, parts * BLOCK):
                wrong |= dict.fromkeys(self._damage(piece, at, min(at + BLOCK, nbytes), nbytes))
        return list(wrong)

    def verify_headers(self, part: int, parts: int) -> list[str]:
        """Hash the headers of one of `parts` equal shares of the files: also where nobody wants what is inside."""
        files = sorted(self.manifest.files)[part::parts]
        return [damage for file in files for damage in self._damaged_header(file)]

    def fill(self, targets: Values) -> None:
        """Copy what was saved into the tensors of these boxes."""
        for name, boxes in targets.items():
            dtype = DTYPES[self.manifest.tensors[name].dtype]
            for box, tensor in boxes:
                for piece, source, both in self._meeting(name, box):
                    data = self._map(piece.file)[piece.at : piece.at + source.numel * dtype.itemsize]
                    saved = torch.frombuffer(data, dtype=dtype).view(source.local)
                    # IDEA: an intersection of two boxes is all that moves, whatever cut either.
                    tensor[both.slices(box)].copy_(saved[both.slices(source)])

    def _meeting(self, name: str, box: Box) -> list[tuple[Piece, Box, Box]]:
        """The pieces of a tensor that hold any of a box: each with its own box and what both have."""
        if (name, box) not in self._met:
            saved = self.manifest.tensors[name]
            meetings = ((*pair, box.intersect(pair[1])) for pair in zip(saved.pieces, saved.boxes(), strict=True))
            self._met[name, box] = [meeting for meeting in meetings if meeting[2]]
        return self._met[name, box]

    def _damage(self, piece: Piece, first: int, last: int, size: int) -> Iterator[str]:
        """What is wrong with the blocks of bytes first … last-1 of a piece of so many bytes."""
        yield from self._damaged_header(piece.file)
        data = self._map(piece.file)[piece.at : piece.at + size]
        for number in range(first // BLOCK, -(-last // BLOCK)):
            at = number * BLOCK
            if self._once(piece.file, piece.at + at) and digest(data[at : at + BLOCK]) != piece.hashes[number]:
                stop = piece.at + min(at + BLOCK, size)
                yield f"{self.path / piece.file} is damaged between bytes {piece.at + at:,} and {stop:,}"

    def _damaged_header(self, file: str) -> Iterator[str]:
        header = self._map(file)[: self._first.get(file)]
        if self._once(file, 0) and digest(header) != self.manifest.files[file].header:
            yield f"{self.path / file} is damaged in its header"

    def _once(self, file: str, at: int) -> bool:
        new = (file, at) not in self._verified
        self._verified.add((file, at))
        return new

    def _map(self, file: str) -> memoryview:
        """The bytes of a file. Raises OSError where it cannot be read, ValueError where its size is wrong."""
        if file not in self._maps:
            expected = self.manifest.files[file].bytes
            with naming(self.path / file), (self.path / file).open("rb") as opened:
                if (size := os.fstat(opened.fileno()).st_size) != expected:
                    raise ValueError(f"{self.path / file} has {size:,} bytes, {expected:,} were written: it is damaged")
                # A private copy, because torch knows no memory that cannot be written.
                self._maps[file] = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
        return self._maps[file]


def _unfit(box: Box, tensor: Tensor) -> Iterator[str]:
    """Why a tensor cannot be filled with the values of a box."""
    if tuple(tensor.shape) != box.local:
        yield f"the box {list(box.local)} comes with a tensor of shape {list(tensor.shape)}"
    if not contains(Box.whole(box.shape), box):
        yield f"{list(box.local)} at {list(box.offset)} is no part of {list(box.shape)}"
    if (
        tensor.is_meta
        or tensor.layout != torch.strided
        or any(length > 1 and not stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ):
        yield "its tensor has no memory of its own: give a dense one, neither on the meta device nor expanded"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        yield "an inference tensor cannot be changed: make it outside of torch.inference_mode"


def _span(part: Box, within: Box) -> tuple[int, int]:
    """The range of elements of a stored box in which a part of it lies."""
    first = last = 0
    for chosen, length in zip(part.slices(within), within.local, strict=True):
        first, last = first * length + chosen.start, last * length + chosen.stop - 1
    return first, last + 1
