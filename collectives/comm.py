"""The collectives, under torch.distributed's own names: each line a strategy calls is the line of the lecture.

With p2p.py the only file that calls torch.distributed's operations, and so the one place for what they all need: dense
memory (gloo silently works on the wrong elements of a strided tensor), the names that differ between torch releases,
ranks counted in the group, and the choice of the algorithm, which is a rule and not a measured table:

- gloo: reduce_scatter, and all_gather from 1 MB, are our direct exchange; all else is the backend's. (gloo's
  reduce_scatter is an all-reduce inside: it sends twice the bytes, and adds in an order that depends on the position in
  the buffer.)
- NCCL: the backend's.
- A mean of float16 or bfloat16 over gloo is our direct exchange, which adds in float32; gloo's sum would overflow.
- `ordered=True` (all_reduce, reduce_scatter) adds in rank order 0, 1, 2 … for every element, on any backend, so that no
  bit depends on how tensors are packed into buffers. Of two ranks any sum is ordered.

A synchronous call returns None; async_op=True returns a handle with `wait()`, which keeps the buffers alive. Any
all-reduce leaves the same bits on all ranks. Bytes that a rank sends, for n bytes on P ranks: all_reduce 2n(P-1)/P,
reduce_scatter and all_gather n(P-1)/P of the whole, all_to_all n(P-1)/P, broadcast n down a tree. Every operation is
seen by whoever watches (watch.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import direct
from collectives.p2p import Handle, dense_like
from collectives.watch import watched

SUM, AVG, MIN, MAX, PRODUCT = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.PRODUCT,
)
_LARGE = 1 << 20  # bytes of a whole gathered tensor from which our all-gather is faster than gloo's


@watched
def all_reduce(
    tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup, async_op: bool = False, ordered: bool = False
) -> Handle | None:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their elementwise `op`, in place,
    the same bits.

    All ranks wait on the handles of ordered ones in the same order: their second half starts at the wait.
    """
    _check_mean(tensor, op)
    if _low_mean(tensor, op, group) or (ordered and dist.get_world_size(group) > 2):
        return _in_place(tensor, lambda dense: direct.all_reduce(dense, op, group=group), async_op)
    return _in_place(tensor, lambda dense: dist.all_reduce(dense, op, group=group, async_op=True), async_op)


@watched
def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: Any = SUM,
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
    ordered: bool = False,
) -> Handle | None:
    """Before: every rank holds an input of P equal pieces along dim 0. After: rank r holds the `op` of all pieces r, in
    `output`.
    """
    _check_mean(input, op)
    ours = dist.get_backend(group) == "gloo" or (ordered and dist.get_world_size(group) > 2)
    call = direct.reduce_scatter if ours else _backend_reduce_scatter
    return _into(output, input, lambda out, dense: call(out, dense, op, group=group), async_op)


@watched
def all_gather_single(
    output: Tensor, input: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> Handle | None:
    """Before: rank r holds piece r. After: every rank holds all pieces along dim 0 of `output`, of which `input` may be
    its own part.
    """
    ours = dist.get_backend(group) == "gloo" and output.numel() * output.element_size() >= _LARGE
    call = direct.all_gather if ours else _backend_all_gather
    return _into(output, input, lambda out, dense: call(out, dense, group=group), async_op)


@watched
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Handle | None:
    """Before: piece p of a rank's input is meant for rank p. After: piece p of its output came from rank p. Sizes are
    rows of dim 0.
    """
    receive, give = (list(sizes) if sizes is not None else None for sizes in (output_split_sizes, input_split_sizes))
    return _into(
        output,
        input,
        lambda out, dense: dist.all_to_all_single(out, dense, receive, give, group=group, async_op=True),
        async_op,
    )


@watched
def broadcast(tensor: Tensor, group_src: int, *, group: dist.ProcessGroup, async_op: bool = False) -> Handle | None:
    """After: every rank holds what rank `group_src` of the group held, in place."""
    return _in_place(
        tensor, lambda dense: dist.broadcast(dense, group=group, async_op=True, group_src=group_src), async_op
    )


@watched
def reduce(
    tensor: Tensor, group_dst: int, op: Any = SUM, *, group: dist.ProcessGroup, async_op: bool = False
) -> Handle | None:
    """After: rank `group_dst` of the group holds the elementwise `op`, in place; the others' tensors are undefined."""
    _check_mean(tensor, op)
    if _low_mean(tensor, op, group):
        return all_reduce(tensor, op, group=group, async_op=async_op)
    return _in_place(
        tensor, lambda dense: dist.reduce(dense, op=op, group=group, async_op=True, group_dst=group_dst), async_op
    )


@watched
def gather(output: Tensor | None, input: Tensor, group_dst: int, *, group: dist.ProcessGroup) -> None:
    """After: rank `group_dst` of the group holds all pieces along dim 0 of `output`; the others pass None."""
    piece = input.detach().contiguous().view(-1)
    whole = dense_like(output.detach()) if output is not None else None
    pieces = list(whole.view(dist.get_world_size(group), -1)) if whole is not None else None
    dist.gather(piece, pieces, group=group, group_dst=group_dst)
    if output is not None and not output.is_contiguous():
        output.detach().copy_(whole)


@watched
def scatter(output: Tensor, input: Tensor | None, group_src: int, *, group: dist.ProcessGroup) -> None:
    """After: rank r holds piece r along dim 0 of what rank `group_src` of the group passed as `input`; the others pass
    None.
    """
    pieces = list(input.detach().contiguous().view(dist.get_world_size(group), -1)) if input is not None else None
    dense = dense_like(output.detach())
    dist.scatter(dense.view(-1), pieces, group=group, group_src=group_src)
    if not output.is_contiguous():
        output.detach().copy_(dense)


@watched
def barrier(*, group: dist.ProcessGroup) -> None:
    """Returns on no rank before all have called it."""
    dist.barrier(group=group)


@watched
def all_gather_object(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank. For agreement and build-time checks: slow, never on
    the hot path.
    """
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


# torch 2.13 renamed these two; 2.11 knows the older names only.
_ALL_GATHER: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _backend_all_gather(output: Tensor, input: Tensor, *, group: dist.ProcessGroup) -> dist.Work:
    return _ALL_GATHER(output.view(-1), input.view(-1), group=group, async_op=True)


def _backend_reduce_scatter(output: Tensor, input: Tensor, op: Any, *, group: dist.ProcessGroup) -> dist.Work:
    return _REDUCE_SCATTER(output.view(-1), input.view(-1), op=op, group=group, async_op=True)


def _in_place(tensor: Tensor, call: Callable[[Tensor], Any], async_op: bool) -> Handle | None:
    data = tensor.detach()
    dense = data.contiguous()
    work = call(dense)
    if dense is data and isinstance(work, Handle):
        return _returned(work, async_op)  # as it is, so that its parts can be advanced one by one
    copy_back = None if dense is data else lambda: data.copy_(dense)
    return _returned(Handle([work], copy_back, keep=[dense]), async_op)


def _into(output: Tensor, input: Tensor, call: Callable[[Tensor, Tensor], Any], async_op: bool) -> Handle | None:
    data, given = output.detach(), input.detach().contiguous()
    dense = dense_like(data)
    copy_back = None if dense is data else lambda: data.copy_(dense)
    return _returned(Handle([call(dense, given)], copy_back, keep=[dense, given]), async_op)


def _returned(handle: Handle, async_op: bool) -> Handle | None:
    if async_op:
        return handle
    handle.wait()
    return None


def _check_mean(tensor: Tensor, op: Any) -> None:
    if op == AVG and not tensor.is_floating_point():
        raise ValueError(f"a mean of {tensor.dtype} tensors is refused: sum them and divide as you mean it")


def _low_mean(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> bool:
    return op == AVG and tensor.dtype in (torch.float16, torch.bfloat16) and dist.get_backend(group) == "gloo"
