"""The direct exchange: every rank sends each peer the piece that is the peer's, all at once, and adds what it gets in
rank order.

reduce-scatter: one step, P-1 sends and receives posted in one batch, the sum at the wait. all-gather: the same step the
other way. all-reduce is one after the other; all-to-all is the exchange itself. A step needs no hand once it is
posted, so it runs beside computation; an all-reduce's second one is posted at the wait for the first. A rank sends
n(P-1)/P of n bytes in each, as a ring does, and needs n(P-1)/P of memory for the pieces that arrive (a ring: 2n/P).
What is to be added comes in chunks, all posted at once, and each is added when it is there.

Every element is the sum in the order of ranks 0, 1, 2 …, whatever buffer it lies in. PyTorch's counterpart:
reduce_scatter_tensor, all_gather_into_tensor, all_reduce; neither NCCL's nor gloo's promise an order. Left out: links
that many peers share, for which rings exist.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.algorithms.pieces import Whole, after, before, cut, gives_and_takes, in_chunks, keep, own
from collectives.algorithms.reduction import SUM, Reduction
from collectives.algorithms.steps import Steps, interleaved, stepwise


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
    mine = own(input, pieces, group)
    work = _exchange([mine] * group.size(), pieces, group)
    keep(mine, pieces[group.rank()])  # beside the messages
    yield work


@stepwise
def all_reduce(tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their `op`, in place."""
    pieces, reduction = cut(tensor, group.size()), Reduction.of(op, tensor, group)
    yield from interleaved([_all_reduce(chunk, reduction, group) for chunk in in_chunks(pieces)])


@stepwise
def all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup,
) -> Steps:
    """Before: piece p of a rank's input is meant for rank p. After: piece p of its output came from rank p. Sizes are
    rows of dim 0.
    """
    gives, takes = gives_and_takes(output, input, output_split_sizes, input_split_sizes, group)
    work = _exchange(gives, takes, group)
    keep(gives[group.rank()], takes[group.rank()])
    yield work


def _all_reduce(pieces: Sequence[Tensor], reduction: Reduction, group: dist.ProcessGroup) -> Steps:
    yield from _reduce_scatter(pieces[group.rank()], pieces, reduction, group)
    yield _exchange([pieces[group.rank()]] * group.size(), pieces, group)


def _reduce_scatter(output: Tensor, pieces: Sequence[Tensor], reduction: Reduction, group: dist.ProcessGroup) -> Steps:
    rank = group.rank()
    arrived = [torch.empty_like(output) for _ in range(len(pieces) - 1)]
    in_order = [*arrived[:rank], pieces[rank], *arrived[rank:]]
    yield _exchange(pieces, in_order, group)
    reduction.in_order(in_order, output, scratch=arrived[0] if arrived else output)


def _exchange(gives: Sequence[Tensor], takes: Sequence[Tensor], group: dist.ProcessGroup) -> p2p.Handle:
    """gives[p] to every peer p, takes[p] from it. The next rank comes first: if all began with rank 0, it would have
    all the traffic at once.
    """
    steps = range(1, group.size())
    # IDEA: all pieces fly at once, each straight to its owner: one step, and no rank needs a hand in between.
    sends = [(gives[peer], peer) for peer in (after(group, step) for step in steps)]
    receives = [(takes[peer], peer) for peer in (before(group, step) for step in steps)]
    return p2p.exchange(sends, receives, group=group)
