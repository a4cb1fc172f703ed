"""How a whole is cut into a piece a rank: like torch.tensor_split, so the first ones may be one longer, and any length
has its pieces, also one shorter than the group, or 0.

What an algorithm sends is a piece, a span of pieces that are neighbours, or a chunk of each.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 22  # bytes
Whole = Tensor | Sequence[Tensor]  # contiguous; a sequence has one piece for each rank, of any sizes


def cut(whole: Whole, size: int) -> list[Tensor]:
    """The pieces of all ranks, flat: views."""
    # IDEA: every length is cut by one rule that all ranks know, so no sizes have to be sent.
    pieces = whole.view(-1).tensor_split(size) if isinstance(whole, Tensor) else whole
    if len(pieces) != size:
        raise ValueError(f"{len(pieces)} pieces for {size} ranks: give one for each")
    return [piece.view(-1) for piece in pieces]


def own(piece: Tensor, pieces: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """This rank's piece, flat; ValueError if it is not as long as the cut says."""
    expected = pieces[group.rank()].numel()
    if piece.numel() != expected:
        total = sum(other.numel() for other in pieces)
        raise ValueError(
            f"rank {group.rank()}: a piece of {piece.numel()} elements, where {total} cut over {group.size()} ranks"
            f" make {expected}"
        )
    return piece.view(-1)


def edges(whole: Tensor, size: int) -> list[int]:
    """Where the pieces begin, and where the last one ends: those of ranks a … b-1 lie at edges[a] : edges[b]."""
    return [0, *accumulate(piece.numel() for piece in cut(whole, size))]


def in_chunks(pieces: Sequence[Tensor]) -> list[list[Tensor]]:
    """The same whole, as several of at most CHUNK bytes a piece: number c has chunk c of every piece."""
    count = max(1, *(-(-piece.nbytes // CHUNK) for piece in pieces))
    return [list(chunk) for chunk in zip(*(piece.tensor_split(count) for piece in pieces), strict=True)]


def after(group: dist.ProcessGroup, steps: int = 1) -> int:
    """The rank that many further on, around the ring."""
    return (group.rank() + steps) % group.size()


def before(group: dist.ProcessGroup, steps: int = 1) -> int:
    """The rank that many further back, around the ring."""
    return (group.rank() - steps) % group.size()


def keep(mine: Tensor, place: Tensor) -> None:
    """What no message is needed for: this rank's own piece goes to its place, if it does not lie there already."""
    if mine.data_ptr() != place.data_ptr():
        place.copy_(mine)


def by_rows(tensor: Tensor, sizes: Sequence[int] | None, size: int) -> list[Tensor]:
    """The pieces for, or from, all ranks: so many rows of dim 0 each, equally many if no sizes are given; flat."""
    if tensor.dim() == 0:
        raise ValueError("a tensor without dims has no rows")
    rows = len(tensor)
    if sizes is None and rows % size:
        raise ValueError(f"{rows} rows do not divide by {size} ranks: give split sizes")
    sizes = [rows // size] * size if sizes is None else list(sizes)
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"split sizes {sizes} are not one for each of {size} ranks with a sum of {rows} rows")
    return [piece.view(-1) for piece in tensor.split(sizes)]


def gives_and_takes(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> tuple[list[Tensor], list[Tensor]]:
    """The pieces of an all_to_all: for all ranks, and from all ranks."""
    check_apart(output, input)
    gives, takes = by_rows(input, input_split_sizes, group.size()), by_rows(output, output_split_sizes, group.size())
    given, taken = gives[group.rank()].numel(), takes[group.rank()].numel()
    if given != taken:
        raise ValueError(f"rank {group.rank()} gives {given} elements to itself and takes {taken}: let them be as many")
    return gives, takes


def check_apart(output: Tensor, input: Tensor) -> None:
    """ValueError for an all_to_all in place."""
    if 0 != output.data_ptr() == input.data_ptr():
        raise ValueError("output and input are one: what arrives would overwrite what has not left; give two tensors")


def from_root(root: int, group: dist.ProcessGroup) -> int:
    """How far this rank is after the root, around the ring; ValueError for a root that is not in the group."""
    if not 0 <= root < group.size():
        raise ValueError(f"root {root} is not in a group of {group.size()} ranks, which count from 0 in it")
    return (group.rank() - root) % group.size()


def equal_pieces(whole: Tensor | None, piece: Tensor, root: int, group: dist.ProcessGroup) -> list[Tensor]:
    """On the root the pieces of its whole, all as long as this one; elsewhere nothing."""
    if from_root(root, group) != 0:
        return []
    if whole is None or whole.numel() != group.size() * piece.numel():
        what = "nothing" if whole is None else f"{whole.numel()} elements"
        raise ValueError(f"the root has {what}, not {group.size()} pieces of {piece.numel()} elements")
    return cut(whole, group.size())
