"""One parameter, cut along one dimension into a piece for each rank, as even as can be: the first ones are one longer.

    weight [5, 3], dim 0, 3 ranks     rank 0: rows 0 1     rank 1: rows 2 3     rank 2: row 4

In a packed buffer [P, S] each rank has a row, its *slot*, in which its pieces of all parameters lie one after the
other, at the same place in every slot: as far apart as rank 0's, the longest. What a shorter piece leaves is padding,
at most one row of the parameter a rank. To copy a parameter out of the slots takes two copies whatever P is: one for
the longer pieces, one for the others.

Pure arithmetic and views. PyTorch's counterpart: Shard(dim) and FSDPParam._init_sharded_param, whose pieces are
torch.chunk's: all of ceil(n/P), the last ones shorter or empty.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """The pieces of a tensor of this shape along `dim`. A scalar is cut as a row of one: it is rank 0's, shape [1]."""

    shape: torch.Size
    dim: int
    size: int  # P

    @property
    def rows(self) -> int:
        """The length of the dimension that is cut."""
        return self.shape[self.dim] if self.shape else 1

    def range(self, rank: int) -> range:
        """The indices along `dim` that a rank holds."""
        length, longer = divmod(self.rows, self.size)
        start = rank * length + min(rank, longer)
        return range(start, start + length + (rank < longer))

    def local(self, rank: int) -> torch.Size:
        """The shape of a rank's piece."""
        shape = self.shape or torch.Size([1])
        return torch.Size([*shape[: self.dim], len(self.range(rank)), *shape[self.dim + 1 :]])

    @cached_property
    def longest(self) -> int:
        """Elements of the longest piece, rank 0's: what a parameter takes of a slot."""
        return self.local(0).numel()

    @property
    def padding(self) -> int:
        """Elements of all slots together that belong to no rank's piece."""
        return self.size * self.longest - self.shape.numel()

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Views of a whole tensor, [ranks, *piece] for ranks with equal pieces: at most two, none empty."""
        whole = whole if self.shape else whole.view(1)
        parts = []
        for first, ranks, rows in self._kinds():
            part = whole.narrow(self.dim, self.range(first).start, ranks * rows)
            parts.append(part.unflatten(self.dim, (ranks, rows)).movedim(self.dim, 0))
        return parts

    def places(self, slots: Tensor) -> list[Tensor]:
        """Views of the slots [P, longest], for each of the parts the place of the same shape."""
        places = []
        for first, ranks, _ in self._kinds():
            piece = self.local(first)
            places.append(slots[first : first + ranks, : piece.numel()].unflatten(1, piece))
        return places

    def _kinds(self) -> Iterator[tuple[int, int, int]]:
        """(the first rank, how many, the length of their pieces): the longer pieces, then the others."""
        length, longer = divmod(self.rows, self.size)
        # IDEA: ranks whose pieces are equally long are one strided copy, however many they are.
        for first, ranks, rows in ((0, longer, length + 1), (longer, self.size - longer, length)):
            if ranks * rows and self.shape.numel():
                yield first, ranks, rows
