"""The pieces in a checkpoint's files, each a box of a tensor, and how any other box is put together from them."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import torch
from safetensors import safe_open
from torch import Tensor

from collectives.layout import Box
from nd_mesh import durable
from nd_mesh.saved import Checkpoint


def key(name: str, kind: str, offset: Sequence[int]) -> str:
    """The name under which a file has the piece of a tensor that begins at this offset."""
    return f"{name}/{kind}/{','.join(map(str, offset))}"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


class Pieces(contextlib.ExitStack):
    """The open files of a checkpoint, closed at the end of a `with`. Raises OSError naming one that cannot be read."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__()
        self.index = checkpoint.state["tensors"]
        self.files = {}
        for name in checkpoint.state["files"]:
            with durable.naming(checkpoint.path / name):
                self.files[name] = self.enter_context(safe_open(checkpoint.path / name, "pt"))
        self.keys = {name: set(file.keys()) for name, file in self.files.items()}

    def differences(self) -> list[str]:
        """Pieces that the index names and no file has, and the other way round."""
        listed: dict[str, set[str]] = defaultdict(set)
        for name, kinds in self.index.items():
            for kind, entry in kinds.items():
                for piece in entry["pieces"]:
                    listed[piece["file"]].add(key(name, kind, piece["offset"]))
        wrong = []
        for file in sorted({*listed, *self.keys}):
            there = self.keys.get(file, set())
            wrong += [f"{file} lacks {piece}" for piece in sorted(listed[file] - there)]
            wrong += [f"{file} has {piece}, which state.json lacks" for piece in sorted(there - listed[file])]
        return wrong

    def fill(self, part: Tensor, box: Box, name: str, kind: str) -> list[str]:
        """Copy into `part`, the values of `box`, what the pieces have of it. Returns what is wrong with them."""
        wrong, found = [], []
        for piece in self.index[name][kind]["pieces"]:
            source = Box(box.shape, tuple(piece["offset"]), tuple(piece["local"]))
            # IDEA: the saved boxes that intersect ours hold all we need, whatever mesh cut either of them.
            if both := box.intersect(source):
                found.append(both)
                wrong += self._copy(part[both.slices(box)], both, source, piece["file"], key(name, kind, source.offset))
        twice = any(one.intersect(other) for one, other in combinations(found, 2))
        if twice or sum(both.numel for both in found) != box.numel:
            wrong.append(
                f"{name} ({kind}): the pieces do not hold {list(box.local)} at {list(box.offset)} exactly once"
            )
        return wrong

    def _copy(self, into: Tensor, both: Box, source: Box, file: str, piece: str) -> list[str]:
        """Read the box `both` out of the piece whose box is `source`."""
        if piece not in self.keys.get(file, ()):
            return []  # `differences` tells it
        stored = self.files[file].get_slice(piece)
        if tuple(stored.get_shape()) != source.local:
            return [f"{piece} has shape {stored.get_shape()}, state.json says {list(source.local)}"]
        values = stored[both.slices(source)]
        if values.dtype != into.dtype:
            return [f"{piece} is {dtype_name(values.dtype)}, state.json says {dtype_name(into.dtype)}"]
        into.copy_(values)
        return []
