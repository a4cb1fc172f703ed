"""The ring: every rank sends to the next one and receives from the one before, a piece at a time.

reduce-scatter: P-1 steps; a piece goes once around, and each rank adds its own part to it. all-gather: P-1 steps; the
finished pieces go around. all-reduce is one after the other: 2n(P-1)/P bytes a rank, which no algorithm can beat
(Patarasuk and Yuan 2009), in 2(P-1) steps, and no link carries anything but these. Memory: two pieces. A piece r is
added in the order r+1, r+2, … r: where an element lies in the buffer decides its order, and so its last bit.

Long messages go in chunks, each in a ring of its own: while one is being added, the others are on their way. broadcast
and reduce run along the ring cut open at the root: P-2 steps until the last rank has its first chunk, then a step a
chunk. PyTorch's counterpart: NCCL's and gloo's all-reduce. Lecture B, *All-reduce = Reduce-scatter + All-gather*.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.algorithms.pieces import Whole, after, before, cut, from_root, in_chunks, keep, own
from collectives.algorithms.reduction import SUM, Reduction
from collectives.algorithms.steps import Steps, idle, interleaved, stepwise


@stepwise
def reduce_scatter(output: Tensor, input: Whole, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds an input of P pieces. After: rank r's `output` is the `op` of all pieces r."""
    pieces, reduction = cut(input, group.size()), Reduction.of(op, output, group)
    chunks = in_chunks([own(output, pieces, group), *pieces])
    yield from interleaved([_reduce_scatter(chunk[0], chunk[1:], reduction, group) for chunk in chunks])


@stepwise
def all_gather(output: Whole, input: Tensor, *, group: dist.ProcessGroup) -> Steps:
    """Before: rank r holds piece r, which may be its part of `output`. After: every rank's `output` is all pieces."""
    pieces = cut(output, group.size())
    keep(own(input, pieces, group), pieces[group.rank()])
    yield from interleaved([_all_gather(chunk, group) for chunk in in_chunks(pieces)])


@stepwise
def all_reduce(tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their `op`, in place."""
    pieces, reduction = cut(tensor, group.size()), Reduction.of(op, tensor, group)
    yield from interleaved([_all_reduce(chunk, reduction, group) for chunk in in_chunks(pieces)])


def _all_reduce(pieces: Sequence[Tensor], reduction: Reduction, group: dist.ProcessGroup) -> Steps:
    yield from _reduce_scatter(pieces[group.rank()], pieces, reduction, group)
    yield from _all_gather(pieces, group)


def _reduce_scatter(output: Tensor, pieces: Sequence[Tensor], reduction: Reduction, group: dist.ProcessGroup) -> Steps:
    total = reduction.partial(pieces[before(group)])
    for step in range(1, group.size()):
        mine = pieces[before(group, step + 1)]
        arrived = reduction.room(mine)
        # IDEA: the sum so far goes on to the next rank, which adds its own part: all links are busy in every step.
        yield _shift([total], [arrived], group)
        total = reduction.add(arrived, mine, out=arrived)
    reduction.finish(total, output)


def _all_gather(pieces: Sequence[Tensor], group: dist.ProcessGroup) -> Steps:
    for step in range(1, group.size()):
        known, new = pieces[before(group, step - 1)], pieces[before(group, step)]
        yield _shift([known], [new], group)


@stepwise
def broadcast(tensor: Tensor, group_src: int, *, group: dist.ProcessGroup) -> Steps:
    """After: every rank holds what rank `group_src` of the group held, in place."""
    chunks = [chunk for [chunk] in in_chunks([tensor.view(-1)])]
    distance = from_root(group_src, group)
    first, last = distance == 0, distance == group.size() - 1
    lag = 0 if first else 1  # a chunk goes on in the step after that in which it came
    yield from idle(distance - 1)
    for k in range(len(chunks) + lag):
        arriving = [] if first else chunks[k : k + 1]
        leaving = [] if last else chunks[k - lag : k - lag + 1]
        yield _shift(leaving, arriving, group)


@stepwise
def reduce(tensor: Tensor, group_dst: int, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """After: rank `group_dst` holds the `op` of all ranks' tensors, in place; the others' are as they were. Added from
    the rank after it around to itself.
    """
    reduction = Reduction.of(op, tensor, group)
    chunks = [chunk for [chunk] in in_chunks([tensor.view(-1)])]
    distance = (from_root(group_dst, group) - 1) % group.size()
    first, last = distance == 0, distance == group.size() - 1
    totals = [reduction.partial(chunk) if first else reduction.room(chunk) for chunk in chunks]
    lag = 0 if first else 1
    yield from idle(distance - 1)
    for k in range(len(chunks) + lag):
        arriving = [] if first else totals[k : k + 1]
        leaving = [] if last else totals[k - lag : k - lag + 1]
        yield _shift(leaving, arriving, group)
        for total in arriving:
            reduction.add(total, chunks[k], out=total)
    if last:
        for total, chunk in zip(totals, chunks, strict=True):
            reduction.finish(total, chunk)


def _shift(leaving: Sequence[Tensor], arriving: Sequence[Tensor], group: dist.ProcessGroup) -> p2p.Handle:
    """These to the next rank, those from the one before."""
    sends = [(tensor, after(group)) for tensor in leaving]
    return p2p.exchange(sends, [(tensor, before(group)) for tensor in arriving], group=group)
