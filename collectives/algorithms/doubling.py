"""Recursive doubling: in every step each rank exchanges all it knows with a partner twice as far away.

    step 1   0 ⇄ 1   2 ⇄ 3   4 ⇄ 5   6 ⇄ 7
    step 2   0 ⇄ 2   1 ⇄ 3   4 ⇄ 6   5 ⇄ 7
    step 3   0 ⇄ 4   1 ⇄ 5   2 ⇄ 6   3 ⇄ 7

all-gather: what is known doubles, n(P-1)/P bytes in log₂ P steps, as few bytes as a ring and far fewer steps, but over
long ways. all-reduce: the whole message in every step, n·log₂ P bytes; the one for short messages (long ones:
halving.py). A group that is no power of two is folded: seats 0 … r-1 are taken by the two ranks 2s and 2s+1, the others
by one; a guest, 2s+1, gives its part to its host before, and is told the result after, one step each.

barrier is a dissemination (Hensgen, Finkel and Manber 1988): ⌈log₂ P⌉ steps for any P. Source of the rest: Thakur,
Rabenseifner and Gropp 2005, sections 3.1 and 3.5. PyTorch's counterpart: NCCL's PAT and tree for short messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.algorithms.pieces import after, before, cut, edges, keep, own
from collectives.algorithms.reduction import SUM, Reduction
from collectives.algorithms.steps import Steps, idle, stepwise


@dataclass(frozen=True)
class Seats:
    """The group folded into a power of two, and this rank in it."""

    rank: int
    size: int

    @property
    def count(self) -> int:
        """Seats, the largest power of two that is not larger than the group."""
        return 1 << (self.size.bit_length() - 1)

    def start(self, seat: int) -> int:
        """The first rank of a seat, who plays; of seats a … b-1 the ranks are start(a) … start(b)-1."""
        return min(2 * seat, seat + self.size - self.count)

    @property
    def steps(self) -> int:
        """Of a doubling, or a halving."""
        return self.count.bit_length() - 1

    @property
    def folds(self) -> int:
        """Steps before, and after: 0 of a power of two, else 1."""
        return int(self.count < self.size)

    @property
    def seat(self) -> int:
        """Where this rank sits."""
        return max(self.rank // 2, self.rank - (self.size - self.count))

    @property
    def host(self) -> int | None:
        """Who plays for this rank; None if it plays itself."""
        return None if self.rank == self.start(self.seat) else self.rank - 1

    @property
    def guest(self) -> int | None:
        """For whom this rank plays besides itself."""
        return self.rank + 1 if self.start(self.seat + 1) == self.start(self.seat) + 2 else None

    def partners(self) -> Iterator[tuple[int, int]]:
        """(distance in seats, rank) of the partner in each step, the nearest first."""
        distance = 1
        while distance < self.count:
            yield distance, self.start(self.seat ^ distance)
            distance *= 2


@stepwise
def all_gather(output: Tensor, input: Tensor, *, group: dist.ProcessGroup) -> Steps:
    """Before: rank r holds piece r, which may be its part of `output`. After: every rank's `output` is all pieces."""
    pieces, seats = cut(output, group.size()), Seats(group.rank(), group.size())
    mine = own(input, pieces, group)
    keep(mine, pieces[seats.rank])
    if seats.host is not None:
        yield p2p.exchange([(mine, seats.host)], [], group=group)
        yield from idle(seats.steps)
        yield p2p.exchange([], [(piece, seats.host) for piece in _but(seats.rank, output, seats)], group=group)
        return
    if seats.guest is not None:
        yield p2p.exchange([], [(pieces[seats.guest], seats.guest)], group=group)
    else:
        yield from idle(seats.folds)
    yield from double(output.view(-1), seats, group)
    if seats.guest is not None:
        yield p2p.exchange([(piece, seats.guest) for piece in _but(seats.guest, output, seats)], [], group=group)


def double(whole: Tensor, seats: Seats, group: dist.ProcessGroup) -> Steps:
    """Before: whoever plays holds the pieces of its seat, in their places. After: all pieces."""
    ends = edges(whole, seats.size)
    for distance, partner in seats.partners():
        # IDEA: 1, 2, 4 … pieces that are neighbours are known; the partner knows as many, right beside them.
        mine = seats.seat // distance * distance
        known, new = (
            whole[ends[seats.start(seat)] : ends[seats.start(seat + distance)]] for seat in (mine, mine ^ distance)
        )
        yield p2p.exchange([(known, partner)], [(new, partner)], group=group)


def _but(rank: int, whole: Tensor, seats: Seats) -> list[Tensor]:
    """The whole without one rank's piece."""
    ends = edges(whole, seats.size)
    return [whole.view(-1)[: ends[rank]], whole.view(-1)[ends[rank + 1] :]]


@stepwise
def all_reduce(tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their `op`, in place."""
    reduction, seats = Reduction.of(op, tensor, group), Seats(group.rank(), group.size())
    total = reduction.partial(tensor)
    if seats.host is not None:
        yield p2p.exchange([(total, seats.host)], [], group=group)
        yield from idle(seats.steps)
        yield p2p.exchange([], [(tensor, seats.host)], group=group)
        return
    total = yield from take_in(total, seats, reduction, group)
    for distance, partner in seats.partners():
        arrived = reduction.room(total)
        yield p2p.exchange([(total, partner)], [(arrived, partner)], group=group)
        # The same order on both sides, so that both have the same bits: which of 0 and -0 is the minimum hangs on it.
        total = reduction.add(*((arrived, total) if seats.seat & distance else (total, arrived)), out=arrived)
    reduction.finish(total, tensor)
    if seats.guest is not None:
        yield p2p.exchange([(tensor, seats.guest)], [], group=group)


def take_in(total: Tensor, seats: Seats, reduction: Reduction, group: dist.ProcessGroup) -> Steps:
    """Add what the guest brings, if there is one. Returns the sum."""
    if seats.guest is None:
        yield from idle(seats.folds)
        return total
    arrived = reduction.room(total)
    yield p2p.exchange([], [(arrived, seats.guest)], group=group)
    return reduction.add(total, arrived, out=arrived)


@stepwise
def barrier(*, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> Steps:
    """Returns on no rank before all have called it. `device`: that of the bytes that are sent."""
    sent, received = torch.zeros(2, dtype=torch.uint8, device=device).split(1)
    distance = 1
    while distance < group.size():
        sends, receives = [(sent, after(group, distance))], [(received, before(group, distance))]
        yield p2p.exchange(sends, receives, group=group)
        distance *= 2
