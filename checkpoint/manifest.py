"""manifest.json: everything about a checkpoint but the tensors' bytes, and where each of these lies.

    {"format": 1, "step": 20, "world": 4,
     "files":   {"rank-0.safetensors": {"bytes": 5160, "header": hash of all before the first tensor}, …},
     "tensors": {"exp_avg/head.weight": {"dtype": "F32", "shape": [256, 64], "pieces": [
                    {"file": …, "at": first byte, "offset": [64, 0], "local": [64, 64], "hashes": [one a block]}]}, …},
     "shared":  small state that all ranks have alike, "own": [that of rank 0, …],
     "about":   what the run says of itself: mesh, rank map, config, commit, data, versions}

Any language reads it. COMMIT holds its SHA-256 in the form of `sha256sum`, so that `sha256sum --check COMMIT` says
whether it is the one that was committed; from there a chain of hashes reaches every byte of the checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.layout import Box

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class File:
    """A file of tensors."""

    bytes: int
    header: str  # hash of its header, the length before it included


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, stored row-major in one file."""

    file: str
    at: int  # its first byte
    offset: tuple[int, ...]
    local: tuple[int, ...]
    hashes: tuple[str, ...]  # of each block of its bytes, the last one shorter


@dataclass(frozen=True)
class Tensor:
    """A global tensor."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def boxes(self) -> list[Box]:
        """The boxes of the pieces, in their order."""
        return [Box(self.shape, piece.offset, piece.local) for piece in self.pieces]


@dataclass(frozen=True)
class Manifest:
    """What the file says. `shared` and `own` are encoded (plain.py)."""

    step: int
    world: int
    files: dict[str, File]
    tensors: dict[str, Tensor]
    shared: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]  # by rank
    about: Mapping[str, Any]
    format: int = FORMAT

    def text(self) -> str:
        """The content of manifest.json."""
        return json.dumps(vars(self), default=vars, separators=(",", ":"))  # asdict would copy all of it first


def parse(text: str) -> Manifest:
    """The manifest of a file's content. Raises ValueError for what is none, or of a format we do not know."""
    try:
        told = json.loads(text)
        if told["format"] != FORMAT:
            raise ValueError(f"its format is {told['format']}, this code reads {FORMAT}: use a version that wrote it")
        return Manifest(
            **{
                **told,
                "files": {name: File(**file) for name, file in told["files"].items()},
                "tensors": {name: _tensor(**tensor) for name, tensor in told["tensors"].items()},
            }
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not as expected: {type(error).__name__}: {error}") from error


def _tensor(dtype: str, shape: list[int], pieces: list[dict]) -> Tensor:
    return Tensor(dtype, tuple(shape), tuple(_piece(**piece) for piece in pieces))


def _piece(file: str, at: int, offset: list[int], local: list[int], hashes: list[str]) -> Piece:
    return Piece(file, at, tuple(offset), tuple(local), tuple(hashes))


def commitment(text: str) -> str:
    """The content of COMMIT for a manifest of this content."""
    # IDEA: one hash of the text that holds all others.
    return f"{hashlib.sha256(text.encode()).hexdigest()}  {NAME}\n"
