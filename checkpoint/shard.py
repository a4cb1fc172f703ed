"""One rank's file: its boxes as safetensors, hashed block by block while they are written.

A file of safetensors is a length, a header in JSON and the tensors' bytes one after the other, so it is written here
as a stream: the library wants a whole file at once, and what writes behind training must be slowed down within one.
Any reader of safetensors reads it; each tensor is one box, named TENSOR@OFFSET.

Cost: one pass over the bytes, no copy of what is contiguous and on the CPU.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch import Tensor

from checkpoint import manifest
from checkpoint.dtypes import dtype_name, raw
from checkpoint.files import Files
from checkpoint.pace import Pace
from collectives.layout import Box

BLOCK = 1 << 20  # bytes that one hash covers, and so the least that a reader who verifies has to read

Values = Mapping[str, Sequence[tuple[Box, Tensor]]]  # by global name: boxes, each with its values in the box's shape


@dataclass(frozen=True)
class Written:
    """What a rank reports of its file: for the manifest."""

    name: str
    file: manifest.File
    tensors: dict[str, manifest.Tensor]  # with the pieces in this file


def digest(data: bytes | memoryview) -> str:
    """The hash of a block: 128 bits of XXH3, at the speed of memory. Against damage, not against a forger."""
    return xxhash.xxh3_128_hexdigest(data)


def blocks(data: memoryview) -> Iterator[memoryview]:
    """The blocks of a piece's bytes, each with a hash of its own."""
    return (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))


def write(files: Files, path: Path, values: Values, pace: Pace) -> Written:
    """Write these boxes as the file `path`, not forced to the disk yet."""
    # The widest elements first: then each piece begins at a multiple of its element.
    pieces = [(name, box, tensor) for name, boxes in values.items() for box, tensor in boxes]
    pieces.sort(key=lambda piece: (-piece[2].dtype.itemsize, piece[0], piece[1].offset))
    header = _header(pieces)
    hashes: list[tuple[str, ...]] = []

    def stream() -> Iterator[bytes | memoryview]:
        yield header
        for _, _, tensor in pieces:
            told = []
            for block in blocks(raw(tensor.cpu().contiguous())):
                pace.wait(len(block))
                # IDEA: what is hashed is what was in memory, so a fault on the way to the disk and back is seen.
                told.append(digest(block))
                yield block
            hashes.append(tuple(told))

    files.write(path, stream())
    found: dict[str, manifest.Tensor] = {}
    at = len(header)
    for (name, box, tensor), told in zip(pieces, hashes, strict=True):
        piece = manifest.Piece(path.name, at, box.offset, box.local, told)
        before = found[name].pieces if name in found else ()
        found[name] = manifest.Tensor(dtype_name(tensor.dtype), box.shape, (*before, piece))
        at += tensor.nbytes
    return Written(path.name, manifest.File(at, digest(header)), found)


def _header(pieces: Sequence[tuple[str, Box, Tensor]]) -> bytes:
    entries, at = {}, 0
    for name, box, tensor in pieces:
        entries[f"{name}@{','.join(map(str, box.offset))}"] = {
            **{"dtype": dtype_name(tensor.dtype), "shape": box.local},
            "data_offsets": (at, at := at + tensor.nbytes),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
