"""The direct exchange: every rank sends each peer the piece that is the peer's, all at once, and adds what it gets in
rank order.

reduce-scatter: one round of P-1 sends and receives, posted in one batch, the sum at the wait. all-gather: the same
round the other way. all-reduce is one after the other. No step waits for a hand, as a ring's do, so the whole round
runs beside computation. A rank sends n(P-1)/P of n bytes in each, as a ring does, and needs n(P-1)/P of memory for the
pieces that arrive (a ring: n/P).

Every element is the sum in the order of ranks 0, 1, 2 …, whatever buffer it lies in; float16 and bfloat16 are added in
float32 and rounded once. PyTorch's counterpart: reduce_scatter_tensor, all_gather_into_tensor, all_reduce; neither
NCCL's nor gloo's promise an order. Left out: splitting a message, and links that many peers share, for which rings
exist.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.p2p import Handle, exchange

_COMBINE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


def reduce_scatter(output: Tensor, input: Tensor, op: Any, *, group: dist.ProcessGroup) -> Handle:
    """Start it: rank r's `output` becomes the `op` of all ranks' pieces r, P equal ones along dim 0 of `input`."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if input.numel() != size * output.numel():
        raise ValueError(
            f"reduce_scatter: the input has {input.numel()} elements, not {size} times the output's {output.numel()}"
        )
    pieces = input.view(-1).tensor_split(size)
    return _reduce_pieces(output.view(-1), pieces, op, rank=rank, group=group)


def all_gather(output: Tensor, input: Tensor, *, group: dist.ProcessGroup) -> Handle:
    """Start it: every rank's `output` becomes all ranks' `input`, in rank order along dim 0."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if output.numel() != size * input.numel():
        raise ValueError(
            f"all_gather: the output has {output.numel()} elements, not {size} times the input's {input.numel()}"
        )
    pieces = output.view(-1).tensor_split(size)
    if pieces[rank].data_ptr() != input.data_ptr():
        pieces[rank].copy_(input.view(-1))
    return _gather_pieces(pieces, rank=rank, group=group)


def all_reduce(tensor: Tensor, op: Any, *, group: dist.ProcessGroup) -> Handle:
    """Start its first half, the reduce-scatter of nearly equal pieces; `wait` adds, then gathers: every rank holds the
    `op`, in place.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    pieces = tensor.view(-1).tensor_split(size)
    scattered = _reduce_pieces(pieces[rank], pieces, op, rank=rank, group=group)
    return Handle([scattered], lambda: _gather_pieces(pieces, rank=rank, group=group))


def _reduce_pieces(output: Tensor, pieces: Sequence[Tensor], op: Any, *, rank: int, group: dist.ProcessGroup) -> Handle:
    arrived = list(torch.empty(len(pieces) - 1, output.numel(), dtype=output.dtype, device=output.device))
    in_order = [*arrived[:rank], pieces[rank], *arrived[rank:]]
    works = exchange(
        [(pieces[peer], peer) for peer in _after(rank, len(pieces))],
        [(in_order[peer], peer) for peer in _before(rank, len(pieces))],
        group=group,
    )
    return Handle([works], lambda: _combine(output, in_order, op, scratch=arrived[0] if arrived else output))


def _gather_pieces(pieces: Sequence[Tensor], *, rank: int, group: dist.ProcessGroup) -> Handle:
    return exchange(
        [(pieces[rank], peer) for peer in _after(rank, len(pieces))],
        [(pieces[peer], peer) for peer in _before(rank, len(pieces))],
        group=group,
    )


def _after(rank: int, size: int) -> list[int]:
    """All other ranks, the next one first: if all began with rank 0, it would have all the traffic at once."""
    return [(rank + step) % size for step in range(1, size)]


def _before(rank: int, size: int) -> list[int]:
    """All other ranks in the order in which they send to this one."""
    return [(rank - step) % size for step in range(1, size)]


def _combine(output: Tensor, parts: Sequence[Tensor], op: Any, *, scratch: Tensor) -> None:
    """output = parts[0] op parts[1] op …; `output` may be one of the parts, so nothing is written into it before the
    last step. `scratch` is the first or second part, free to be overwritten when the first step has read it.
    """
    combine = _COMBINE[op]
    low = output.dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if low else parts[0]
    for i, part in enumerate(parts[1:], start=1):
        # IDEA: every element is summed in rank order, wherever it lies, so packing and bucket size change no bit.
        last = i == len(parts) - 1
        total = combine(total, part, out=total if low else output if last else scratch)
    if op == dist.ReduceOp.AVG:
        total = torch.div(total, len(parts), out=total if low else output)
    if total.data_ptr() != output.data_ptr():
        output.copy_(total)
