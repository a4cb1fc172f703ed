"""Recursive halving: in every step each rank gives a partner half of what is left, and adds what it gets to the other.

reduce-scatter: from the farthest partner to the nearest, n/2, n/4, n/8 … bytes: n(P-1)/P in log₂ P steps. all-reduce
(Rabenseifner 2004) is that, then the doubling of doubling.py: 2n(P-1)/P bytes, as a ring, in 2·log₂ P steps. It is the
mirror image of doubling: the same partners, in reverse order, and where that one learns this one gives away. A group
that is no power of two is folded in the same way, which costs a guest's whole message once more.

Memory: up to 3n/4, a host's up to 5n/3; of 16-bit numbers twice that, and a float32 copy. The ranks are added as the
leaves of a binary tree, the same for every element. Source: Thakur, Rabenseifner and Gropp 2005, sections 3.4 and 3.5.
PyTorch's counterpart: gloo's own library has it, as "halving doubling" (gloo/allreduce_halving_doubling.h).
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.algorithms.doubling import Seats, double, take_in
from collectives.algorithms.pieces import cut, edges, own
from collectives.algorithms.reduction import SUM, Reduction
from collectives.algorithms.steps import Steps, idle, stepwise


@stepwise
def reduce_scatter(output: Tensor, input: Tensor, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds an input of P pieces. After: rank r's `output` is the `op` of all pieces r."""
    reduction, seats = Reduction.of(op, input, group), Seats(group.rank(), group.size())
    mine, total = own(output, cut(input, group.size()), group), reduction.partial(input.view(-1))
    if seats.host is not None:
        yield p2p.exchange([(total, seats.host)], [], group=group)
        yield from idle(seats.steps)
        yield p2p.exchange([], [(mine, seats.host)], group=group)
        return
    total = yield from _halve(total, seats, reduction, group)
    reduction.finish(total[: mine.numel()], mine)
    if seats.guest is not None:
        theirs = mine.new_empty(total.numel() - mine.numel())
        reduction.finish(total[mine.numel() :], theirs)
        yield p2p.exchange([(theirs, seats.guest)], [], group=group)


@stepwise
def all_reduce(tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their `op`, in place."""
    reduction, seats = Reduction.of(op, tensor, group), Seats(group.rank(), group.size())
    whole, ends = tensor.view(-1), edges(tensor, group.size())
    total = reduction.partial(whole)
    if seats.host is not None:
        yield p2p.exchange([(total, seats.host)], [], group=group)
        yield from idle(2 * seats.steps)
        yield p2p.exchange([], [(whole, seats.host)], group=group)
        return
    total = yield from _halve(total, seats, reduction, group)
    reduction.finish(total, whole[ends[seats.start(seats.seat)] : ends[seats.start(seats.seat + 1)]])
    yield from double(whole, seats, group)
    if seats.guest is not None:
        yield p2p.exchange([(whole, seats.guest)], [], group=group)


def _halve(total: Tensor, seats: Seats, reduction: Reduction, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a whole. Returns, to whoever plays, the `op` of all: the pieces of its seat."""
    ends, first = edges(total, seats.size), 0  # the first seat of those that `total` is about
    total = yield from take_in(total, seats, reduction, group)
    for distance, partner in reversed(list(seats.partners())):
        middle = ends[seats.start(first + distance)] - ends[seats.start(first)]
        upper = bool(seats.seat & distance)
        first += upper * distance
        # IDEA: the half that goes is nobody's business here any more; so the next step sends half as much.
        gone, kept = (total[:middle], total[middle:]) if upper else (total[middle:], total[:middle])
        arrived = reduction.room(kept)
        yield p2p.exchange([(gone, partner)], [(arrived, partner)], group=group)
        total = reduction.add(*((arrived, kept) if upper else (kept, arrived)), out=arrived)
    return total
