"""The binomial tree: what one rank knows, two know after a step, then four, then eight.

A broadcast takes ⌈log₂ P⌉ steps, the root sends n bytes in each; a reduce is the same tree, from the leaves to the
root. scatter and gather send the pieces of a whole subtree in one message: n(P-1)/P bytes from, or to, the root in as
many steps. all-reduce and barrier go up and down the tree. Few steps: for messages so short that latency is all; long
ones cost log₂ P times what they must.

Counted from the root, rank v hangs below v less its lowest set bit, so that a subtree is ranks v … v + 2^i - 1:

    0 ── 4 ── 6 ── 7        from 0:  step 1 to 4,  step 2 to 2,  step 3 to 1
    │    └─── 5             from 4:                step 2 to 6,  step 3 to 5
    ├─── 2 ── 3             from 2 to 3, from 6 to 7: step 3
    └─── 1

PyTorch's counterpart: gloo's broadcast; NCCL's double binary tree (Sanders, Speck and Träff 2009) sends less from each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.algorithms.pieces import equal_pieces, from_root
from collectives.algorithms.reduction import SUM, Reduction
from collectives.algorithms.steps import Steps, idle, stepwise


@dataclass(frozen=True)
class Place:
    """This rank's place in the tree that hangs from a root."""

    v: int  # this rank, counted from the root
    root: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, root: int) -> "Place":
        """In a group, of the tree that hangs from rank `root` of it."""
        return cls(from_root(root, group), root, group.size())

    @property
    def lowest(self) -> int:
        """The lowest set bit of v; of the root, the first power of two that is not smaller than the group."""
        return self.v & -self.v or 1 << (self.size - 1).bit_length()

    @property
    def span(self) -> int:
        """Ranks in its subtree, which are v … v + span - 1."""
        return min(self.lowest, self.size - self.v)

    def rank(self, v: int) -> int:
        """The rank in the group of the one that is v from the root."""
        return (v + self.root) % self.size

    @property
    def parent(self) -> int | None:
        """The rank above, None for the root."""
        return self.rank(self.v - self.lowest) if self.v else None

    @property
    def above(self) -> int:
        """Steps of a broadcast before the one in which this rank, not the root, is told."""
        return (self.size - 1).bit_length() - self.lowest.bit_length()

    def children(self) -> Iterator[tuple[list[int], slice]]:
        """For each further step of a broadcast, the rank below, if it exists, and where its subtree lies in this one's:
        the largest first.
        """
        bit = self.lowest // 2
        while bit:
            below = [self.rank(self.v + bit)] if self.v + bit < self.size else []
            yield below, slice(bit, min(2 * bit, self.span))
            bit //= 2


@stepwise
def broadcast(tensor: Tensor, group_src: int, *, group: dist.ProcessGroup) -> Steps:
    """After: every rank holds what rank `group_src` of the group held, in place."""
    yield from _broadcast(tensor.view(-1), group_src, group)


@stepwise
def reduce(tensor: Tensor, group_dst: int, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """After: rank `group_dst` holds the `op` of all ranks' tensors, in place; the others' are as they were."""
    yield from _reduce(tensor.view(-1), group_dst, Reduction.of(op, tensor, group), group)


@stepwise
def all_reduce(tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their `op`, in place."""
    yield from _reduce(tensor.view(-1), 0, Reduction.of(op, tensor, group), group)
    yield from _broadcast(tensor.view(-1), 0, group)


@stepwise
def barrier(*, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> Steps:
    """Returns on no rank before all have called it: a byte up the tree and one down. `device`: that of the byte."""
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    yield from _reduce(token, 0, Reduction.of(SUM, token, group), group)
    yield from _broadcast(token, 0, group)


@stepwise
def scatter(output: Tensor, input: Tensor | None, group_src: int, *, group: dist.ProcessGroup) -> Steps:
    """After: rank r holds piece r of what rank `group_src` passed as `input`, P equal ones; the others pass None."""
    place, mine = Place.of(group, group_src), output.view(-1)
    pieces = equal_pieces(input, output, group_src, group)
    held = mine.new_empty(place.span, mine.numel())  # of the subtree, in its order
    if place.parent is None:
        torch.stack([pieces[place.rank(v)] for v in range(place.size)], out=held)
    else:
        yield from idle(place.above)
        yield p2p.exchange([], [(held, place.parent)], group=group)
    for below, subtree in place.children():
        yield p2p.exchange([(held[subtree], child) for child in below], [], group=group)
    mine.copy_(held[0])


@stepwise
def gather(output: Tensor | None, input: Tensor, group_dst: int, *, group: dist.ProcessGroup) -> Steps:
    """After: rank `group_dst` holds all ranks' pieces, of equal length, in `output`; the others pass None."""
    place, mine = Place.of(group, group_dst), input.view(-1)
    pieces = equal_pieces(output, input, group_dst, group)
    held = mine.new_empty(place.span, mine.numel())
    held[0].copy_(mine)
    for below, subtree in reversed(list(place.children())):
        yield p2p.exchange([], [(held[subtree], child) for child in below], group=group)
    if place.parent is not None:
        yield p2p.exchange([(held, place.parent)], [], group=group)
    for v, piece in enumerate(held[: len(pieces)]):
        pieces[place.rank(v)].copy_(piece)


def _broadcast(tensor: Tensor, root: int, group: dist.ProcessGroup) -> Steps:
    place = Place.of(group, root)
    if place.parent is not None:
        yield from idle(place.above)
        yield p2p.exchange([], [(tensor, place.parent)], group=group)
    for below, _ in place.children():
        # IDEA: whoever knows tells another: in every step twice as many know.
        yield p2p.exchange([(tensor, child) for child in below], [], group=group)


def _reduce(tensor: Tensor, root: int, reduction: Reduction, group: dist.ProcessGroup) -> Steps:
    place, total = Place.of(group, root), reduction.partial(tensor)
    for below, _ in reversed(list(place.children())):
        arrived = [(reduction.room(tensor), child) for child in below]
        yield p2p.exchange([], arrived, group=group)
        for part, _ in arrived:
            total = reduction.add(total, part, out=part)
    if place.parent is None:
        reduction.finish(total, tensor)
    else:
        yield p2p.exchange([(total, place.parent)], [], group=group)
        yield from idle(place.above)
