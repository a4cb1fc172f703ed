"""The collectives, under torch.distributed's own names: each line a strategy calls is the line of the lecture.

With p2p.py the only file that calls torch.distributed's operations, and so the one place for what they all need: dense
memory (gloo silently works on the wrong elements of a strided tensor), the names that differ between torch releases,
ranks counted in the group, and the choice of the algorithm, which is a rule and not a measured table:

- gloo: reduce_scatter, and all_gather of lists or from 1 MB, are our direct exchange; all else is the backend's.
  (gloo's reduce_scatter is an all-reduce inside: it sends twice the bytes, and adds in an order that depends on the
  position in the buffer. It gathers equal pieces only.)
- NCCL: the backend's.
- A mean of float16 or bfloat16 over gloo is our direct exchange, which adds in float32; gloo's sum would overflow.
- `ordered=True` (all_reduce, reduce_scatter) adds in rank order 0, 1, 2 … for every element, on any backend, so that no
  bit of a sum depends on how tensors are packed into buffers. That is the direct exchange, for a few numbers a star,
  which adds in the same order. Of two ranks any sum is ordered.

A synchronous call returns None; async_op=True returns a handle with `wait()`, which keeps the buffers alive. Wait for
every one: of an exchange of ours whose handle is dropped messages are lost, and a rank waits for ever. Any all-reduce
leaves the same bits on all ranks. Bytes that a rank sends, for n bytes on P ranks: all_reduce 2n(P-1)/P, reduce_scatter
and all_gather n(P-1)/P of the whole, all_to_all n(P-1)/P, broadcast n down a tree. Every operation is seen by whoever
watches (watch.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import direct, star
from collectives.algorithms.pieces import check_apart
from collectives.algorithms.reduction import check_mean
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
_SMALL = 1 << 9  # bytes of a norm or a loss, of which the messages are counted: 2(P-1) by a star, 2P(P-1) directly


@watched
def all_reduce(
    tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup, async_op: bool = False, ordered: bool = False
) -> Handle | None:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their elementwise `op`, in place,
    the same bits.

    The second half of an ordered one starts at the wait. So all ranks wait on it at the same place among their calls on
    this group, of any kind: a reduce_scatter that some start before the wait, and others after it, would mix with it.
    """
    check_mean(tensor, op)
    if _low_mean(tensor, op, group) or (ordered and dist.get_world_size(group) > 2):
        ours = star if tensor.nbytes <= _SMALL else direct
        return _in_place(tensor, lambda dense: ours.all_reduce(dense, op, group=group, async_op=True), async_op)
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
    check_mean(input, op)
    _check_equal(input, output, group)
    call = direct.reduce_scatter if _ours(group, ordered) else _backend_reduce_scatter
    return _into(output, input, lambda out, dense: call(out, dense, op, group=group, async_op=True), async_op)


@watched
def all_gather_single(
    output: Tensor, input: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> Handle | None:
    """Before: rank r holds piece r. After: every rank holds all pieces along dim 0 of `output`, of which `input` may be
    its own part.
    """
    _check_equal(output, input, group)
    ours = dist.get_backend(group) == "gloo" and output.nbytes >= _LARGE
    call = direct.all_gather if ours else _backend_all_gather
    return _into(output, input, lambda out, dense: call(out, dense, group=group, async_op=True), async_op)


@watched
def reduce_scatter(
    output: Tensor,
    inputs: Sequence[Tensor],
    op: Any = SUM,
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
    ordered: bool = False,
) -> Handle | None:
    """reduce_scatter_single of pieces of any sizes, also none: rank r holds the `op` of all ranks' `inputs[r]`."""
    check_mean(output, op)
    _check_pieces(inputs, output, group)
    call = direct.reduce_scatter if _ours(group, ordered) else dist.reduce_scatter
    given, dense = [piece.detach().contiguous() for piece in inputs], dense_like(output.detach())
    work = call(dense, given, op, group=group, async_op=True)
    return _returned(Handle([work], _copy_back([output], [dense]), keep=[dense, *given]), async_op)


@watched
def all_gather(
    outputs: Sequence[Tensor], input: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> Handle | None:
    """all_gather_single of pieces of any sizes, also none: every rank holds rank r's input in `outputs[r]`."""
    _check_pieces(outputs, input, group)
    call = direct.all_gather if dist.get_backend(group) == "gloo" else dist.all_gather
    given, dense = input.detach().contiguous(), [dense_like(piece.detach()) for piece in outputs]
    work = call(dense, given, group=group, async_op=True)
    return _returned(Handle([work], _copy_back(outputs, dense), keep=[*dense, given]), async_op)


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
    check_apart(output, input)
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
    check_mean(tensor, op)
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


def _backend_all_gather(output: Tensor, input: Tensor, **more: Any) -> dist.Work:
    return _ALL_GATHER(output.view(-1), input.view(-1), **more)


def _backend_reduce_scatter(output: Tensor, input: Tensor, op: Any, **more: Any) -> dist.Work:
    return _REDUCE_SCATTER(output.view(-1), input.view(-1), op, **more)


def _ours(group: dist.ProcessGroup, ordered: bool = False) -> bool:
    """Whether a reduce-scatter is the direct exchange."""
    return dist.get_backend(group) == "gloo" or (ordered and group.size() > 2)


def _check_equal(whole: Tensor, piece: Tensor, group: dist.ProcessGroup) -> None:
    if whole.numel() != group.size() * piece.numel():
        raise ValueError(
            f"the whole has {whole.numel()} elements, not {group.size()} times the piece's {piece.numel()}; "
            "reduce_scatter and all_gather take pieces of different sizes"
        )


def _check_pieces(pieces: Sequence[Tensor], mine: Tensor, group: dist.ProcessGroup) -> None:
    if len(pieces) != group.size() or pieces[group.rank()].numel() != mine.numel():
        raise ValueError(
            f"rank {group.rank()}: pieces of {[piece.numel() for piece in pieces]} elements are not one for each of"
            f" {group.size()} ranks with {mine.numel()} for this one"
        )


def _in_place(tensor: Tensor, call: Callable[[Tensor], Any], async_op: bool) -> Handle | None:
    dense = tensor.detach().contiguous()
    work, copy_back = call(dense), _copy_back([tensor], [dense])
    if hasattr(work, "advance") and copy_back is None:
        return _returned(work, async_op)  # as it is, so that its steps can be taken one by one
    return _returned(Handle([work], copy_back, keep=[dense]), async_op)


def _into(output: Tensor, input: Tensor, call: Callable[[Tensor, Tensor], Any], async_op: bool) -> Handle | None:
    dense, given = dense_like(output.detach()), input.detach().contiguous()
    work = call(dense, given)
    return _returned(Handle([work], _copy_back([output], [dense]), keep=[dense, given]), async_op)


def _copy_back(outputs: Sequence[Tensor], dense: Sequence[Tensor]) -> Callable[[], None] | None:
    """What is left to do for tensors that could not be written where they lie; None if nothing is."""
    pairs = [(tensor.detach(), there) for tensor, there in zip(outputs, dense, strict=True)]
    strided = [(tensor, there) for tensor, there in pairs if tensor.stride() != there.stride()]

    def copy() -> None:
        for tensor, there in strided:
            tensor.copy_(there)

    return copy if strided else None


def _returned(handle: Handle, async_op: bool) -> Handle | None:
    if async_op:
        return handle
    handle.wait()
    return None


def _low_mean(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> bool:
    return op == AVG and tensor.dtype in (torch.float16, torch.bfloat16) and dist.get_backend(group) == "gloo"
