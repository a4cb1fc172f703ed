"""Everything through one rank, the root: straight to it and straight from it.

broadcast, scatter, gather, reduce: one step. all-reduce is a reduce and a broadcast, two steps: D bytes from every
other rank, D(P-1) from the root, whose link all wait for. A parameter server (Li et al. 2014) is a star. PyTorch's
counterpart: none since its collectives are rings and trees. Left out: several roots, each for a part of the message;
with P of them it is the direct exchange.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.algorithms.pieces import after, before, equal_pieces, from_root, keep
from collectives.algorithms.reduction import SUM, Reduction
from collectives.algorithms.steps import Steps, stepwise


@stepwise
def broadcast(tensor: Tensor, group_src: int, *, group: dist.ProcessGroup) -> Steps:
    """After: every rank holds what rank `group_src` of the group held, in place."""
    yield _from_root([tensor.view(-1)] * group.size(), tensor.view(-1), group_src, group)


@stepwise
def scatter(output: Tensor, input: Tensor | None, group_src: int, *, group: dist.ProcessGroup) -> Steps:
    """After: rank r holds piece r of what rank `group_src` passed as `input`, P equal ones; the others pass None."""
    pieces = equal_pieces(input, output, group_src, group)
    if pieces:
        keep(pieces[group_src], output.view(-1))
    yield _from_root(pieces, output.view(-1), group_src, group)


@stepwise
def gather(output: Tensor | None, input: Tensor, group_dst: int, *, group: dist.ProcessGroup) -> Steps:
    """After: rank `group_dst` holds all ranks' pieces, of equal length, in `output`; the others pass None."""
    pieces = equal_pieces(output, input, group_dst, group)
    if pieces:
        keep(input.view(-1), pieces[group_dst])
    yield _to_root(input.view(-1), pieces, group_dst, group)


@stepwise
def reduce(tensor: Tensor, group_dst: int, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """After: rank `group_dst` holds the `op` of all ranks' tensors, in place, added in rank order; the others' are as
    they were.
    """
    yield from _reduce(tensor, group_dst, op, group)


@stepwise
def all_reduce(tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their `op`, in place."""
    yield from _reduce(tensor, 0, op, group)
    # IDEA: the root's link carries P-1 times the message, in and out, while all other links stand idle.
    yield _from_root([tensor.view(-1)] * group.size(), tensor.view(-1), 0, group)


@stepwise
def barrier(*, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> Steps:
    """Returns on no rank before all have called it: a byte from each to rank 0, and one back. `device`: the bytes'."""
    token = torch.zeros(group.size(), dtype=torch.uint8, device=device)
    yield _to_root(token[:1], token.split(1), 0, group)
    yield _from_root(token.split(1), token[:1], 0, group)


def _reduce(tensor: Tensor, root: int, op: Any, group: dist.ProcessGroup) -> Steps:
    mine, reduction = tensor.view(-1), Reduction.of(op, tensor, group)
    if from_root(root, group) != 0:
        yield _to_root(mine, [], root, group)
        return
    arrived = list(mine.new_empty(group.size() - 1, mine.numel()))
    in_order = [*arrived[:root], mine, *arrived[root:]]
    yield _to_root(mine, in_order, root, group)
    reduction.in_order(in_order, mine, scratch=arrived[0] if arrived else mine)


def _from_root(pieces: Sequence[Tensor], piece: Tensor, root: int, group: dist.ProcessGroup) -> p2p.Handle:
    if from_root(root, group) != 0:
        return p2p.exchange([], [(piece, root)], group=group)
    peers = [after(group, step) for step in range(1, group.size())]
    return p2p.exchange([(pieces[peer], peer) for peer in peers], [], group=group)


def _to_root(piece: Tensor, pieces: Sequence[Tensor], root: int, group: dist.ProcessGroup) -> p2p.Handle:
    if from_root(root, group) != 0:
        return p2p.exchange([(piece, root)], [], group=group)
    peers = [before(group, step) for step in range(1, group.size())]
    return p2p.exchange([], [(pieces[peer], peer) for peer in peers], group=group)
