"""Who writes what: every element of every tensor once, as many bytes on each rank as can be.

Each rank says which boxes it holds. A box that several ranks hold is a copy, wherever it comes from (data parallelism,
a norm under tensor parallelism, a tied embedding): its rows are dealt out so that the ranks end level. A pure function
of what all ranks hold, so every rank computes the same deal and none is told. PyTorch's counterpart: the planner's
deduplication in torch.distributed.checkpoint, which gives a copied tensor to one rank, whole.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from collectives.layout import Box

SMALL = 64 << 10  # bytes: what is smaller is written whole, for each piece costs an entry in the manifest


@dataclass(frozen=True)
class Holding:
    """What a rank holds of one global tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


Description = Mapping[str, Holding]  # by the tensor's global name
Share = dict[str, list[Box]]


def deal(held: Sequence[Description]) -> list[Share]:
    """For each rank the boxes it writes, each inside a box it holds. Raises ValueError, naming each tensor, where ranks
    disagree on a tensor or where their boxes together are not exactly the whole of it.
    """
    _check(held)
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank, description in enumerate(held):
        for name, tensor in description.items():
            for box in tensor.boxes:
                if box.numel or not math.prod(tensor.shape):  # a tensor without elements is written as well
                    holders[name, box].append(rank)
    dtypes = {name: tensor.dtype for description in held for name, tensor in description.items()}

    def nbytes(name: str, box: Box) -> int:
        return box.numel * dtypes[name].itemsize

    loads = [0] * len(held)
    shares: list[Share] = [defaultdict(list) for _ in held]
    # IDEA: first what only one rank can write, last what most can, the largest first: these level out the others.
    order = sorted(holders.items(), key=lambda entry: (len(entry[1]), -nbytes(*entry[0]), *_place(*entry[0])))
    for (name, box), ranks in order:
        for rank, part in _level(box, nbytes(name, box), ranks, loads):
            shares[rank][name].append(part)
            loads[rank] += nbytes(name, part)
    return [dict(share) for share in shares]


def _place(name: str, box: Box) -> tuple[str, tuple[int, ...]]:
    return name, box.offset


def _level(box: Box, nbytes: int, ranks: Sequence[int], loads: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Parts of a box for some of these ranks, with which their loads are as even as whole rows allow."""
    ranks = sorted(ranks, key=lambda rank: (loads[rank], rank))
    dim = next((dim for dim, length in enumerate(box.local) if length > 1), None)
    if len(ranks) == 1 or dim is None or nbytes <= SMALL:
        yield ranks[0], box
        return
    # As many of the least loaded as the box lifts to one level, which is that of none of the others.
    count = len(ranks)
    while loads[ranks[count - 1]] >= (nbytes + sum(loads[rank] for rank in ranks[:count])) / count and count > 1:
        count -= 1
    level = (nbytes + sum(loads[rank] for rank in ranks[:count])) / count
    rows, start, due = box.local[dim], 0, 0.0
    for rank in ranks[:count]:
        due += level - loads[rank]
        stop = rows if rank == ranks[count - 1] else round(due / nbytes * rows)
        if stop > start:
            yield rank, box.cut(dim, start, stop - start)
        start = stop


def _check(held: Sequence[Description]) -> None:
    wrong = []
    for name in dict.fromkeys(name for description in held for name in description):
        everyone = [(rank, description[name]) for rank, description in enumerate(held) if name in description]
        kinds = {(tensor.dtype, tensor.shape): rank for rank, tensor in reversed(everyone)}
        if len(kinds) > 1:
            told = "; ".join(f"rank {rank} has {dtype} {list(shape)}" for (dtype, shape), rank in kinds.items())
            wrong.append(f"{name}: {told}")
        else:
            wrong += coverage(name, everyone[0][1].shape, {box for _, tensor in everyone for box in tensor.boxes})
    if wrong:
        raise ValueError(f"the ranks do not hold whole tensors: {'; '.join(wrong)}")


def coverage(name: str, shape: tuple[int, ...], boxes: Sequence[Box] | set[Box]) -> list[str]:
    """What is wrong if these boxes are not exactly the tensor: gaps, overlaps, boxes that stick out."""
    inside = [box for box in boxes if box.numel]
    if outside := [box for box in inside if box.shape != shape or not _within(box)]:
        return [f"{name}: {_told(outside[0])} is no part of {list(shape)}"]
    # Along the dim of most cuts a box has few neighbours, and only those can overlap.
    dim = max(range(len(shape)), key=lambda dim: len({box.offset[dim] for box in inside}), default=None)
    inside.sort(key=lambda box: box.offset[dim:])
    for i, box in enumerate(inside):
        for other in inside[i + 1 :]:
            if dim is not None and other.offset[dim] >= box.offset[dim] + box.local[dim]:
                break  # and so does every later one
            if box.intersect(other):
                return [f"{name}: {_told(box)} and {_told(other)} overlap"]
    if (found := sum(box.numel for box in inside)) != math.prod(shape):
        return [f"{name}: {found} of its {math.prod(shape)} elements are there"]
    return []


def _within(box: Box) -> bool:
    return all(0 <= a <= a + n <= size for a, n, size in zip(box.offset, box.local, box.shape, strict=True))


def contains(box: Box, part: Box) -> bool:
    """Whether a part, be it one without elements, lies in a box."""
    slices = part.slices(box)
    return all(chosen.start >= 0 and chosen.stop <= n for chosen, n in zip(slices, box.local, strict=True))


def _told(box: Box) -> str:
    return f"{list(box.local)} at {list(box.offset)}"
