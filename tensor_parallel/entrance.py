"""How columns enter a region together, and the order of their backward.

Gradients of weights can wait, that of the input cannot: the layers below need it, after a collective. So a column
layer's backward is several nodes of autograd's graph. The engine, of all nodes that are ready, runs the one that was
made last, and so it runs these in this order, whatever the order in which the layers were called:

    _KeepInput × columns        bring x, or start to gather it again, once      made last
    the products                dx {+tp} = dy · W, summed over the columns
    _StartReduce                start to reduce dx
    _WeightGradient × columns   wait for x; dW = dyᵀ · x, while dx travels
    _WaitReduce                 wait for dx                                     made first

No node has both a weight and a collective: a backward in two halves, for the input and then for the weights, as
pipelines have it, runs none twice. Megatron-LM's counterpart: LinearWithGradAccumulationAndAsyncCommunication.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from collectives import comm
from collectives.p2p import Handle


class Entrance:
    """One input of a region: gathered if it must be, and the half of backward that the columns share.

    columns: the layers that may still come. forget: called when backward has passed, after which none comes.
    """

    def __init__(
        self,
        x: Tensor,
        columns: Sequence[nn.Module],
        group: dist.ProcessGroup,
        *,
        forget: Callable[[], object],
        sequence_parallel: bool,
        save_gathered: bool,
    ):
        if sequence_parallel:
            check_has_tokens(x)
        self.x, self.awaited = x, set(columns)
        self.version, self.needs_grad = _version(x), (torch.is_grad_enabled(), x.requires_grad)
        self.later: dict[nn.Module, Tensor] = {}
        self.whole = whole = _gathered(x.detach(), group) if sequence_parallel else x.detach()  # [..., T, D]
        if torch.is_grad_enabled():
            self.flight = _InFlight(group, sequence_parallel, forget, again=sequence_parallel and not save_gathered)
            self.kept = x.detach() if self.flight.again else whole
            arrived = _WaitReduce.apply(x, self.flight)
            trained, shape = [column for column in columns if column.weight.requires_grad], whole.shape[:-1]
            # IDEA: what is made first is run last: dW waits until dx is on its way.
            self.later = {column: _WeightGradient.apply(column.weight, shape, self.flight) for column in trained}
            self.whole = _StartReduce.apply(arrived, whole, self.flight)

    def admits(self, x: Tensor, column: nn.Module) -> bool:
        """Whether a call is of the forward that this is for: each column enters once, with the same x."""
        unchanged = x is self.x and self.version is not None and x._version == self.version
        same = unchanged and (torch.is_grad_enabled(), x.requires_grad) == self.needs_grad
        return same and column in self.awaited

    def project(self, column: nn.Module) -> Tensor:
        """x · Wᵀ + b for this rank's rows of W: [..., T, D] → [..., T, F/tp]."""
        if column not in self.later:  # without gradients, frozen, or unfrozen since
            return F.linear(self.whole, column.weight, column.bias)
        y = F.linear(self.whole, column.weight.detach(), column.bias)
        return _Join.apply(y, _KeepInput.apply(self.later[column], self.kept, self.flight))


class _InFlight:
    """What is under way in the backward of one entrance."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, forget: Callable[[], object], *, again: bool):
        self.group, self.sequence_parallel, self.forget = group, sequence_parallel, forget
        self.again = again and group.size() > 1  # whether x is gathered once more
        self.reduction: Handle | None = None
        self.input: tuple[Tensor, Handle | None] | None = None
        self.readers = 0  # of the whole input, still to come

    def start_input(self, kept: Tensor) -> None:
        """A weight's gradient is going to need x whole: the first to say so starts the gather, if there is one."""
        if self.input is None:
            self.input = _start_gather(kept, self.group) if self.again else (kept, None)
        self.readers += 1

    def wait_input(self) -> Tensor:
        """x whole, [..., T, D]; the last one that needs it lets go of it."""
        whole, work = self.input
        if work is not None:
            work.wait()
            whole = _in_order(whole)  # once for all
        self.readers -= 1
        self.input = (whole, None) if self.readers else None
        return whole


class _WaitReduce(torch.autograd.Function):
    """forward: x. backward: waits for the dx that `_StartReduce` has sent off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _InFlight) -> Tensor:
        ctx.flight = flight
        return x.data  # no view, which could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        if ctx.flight.reduction is not None:
            ctx.flight.reduction.wait()
            ctx.flight.reduction = None
        ctx.flight.forget()  # a column that has run again alone in this backward has left its input behind
        return dx, None


class _StartReduce(torch.autograd.Function):
    """forward: the whole x. backward: starts the sum of dx over the ranks, into what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, flight: _InFlight) -> Tensor:
        ctx.flight, ctx.shape = flight, x.shape
        return whole.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None, None]:  # [..., T, D] {+tp}
        group = ctx.flight.group
        if group.size() == 1:
            return dwhole, None, None
        if ctx.flight.sequence_parallel:
            dx = dwhole.new_zeros(ctx.shape)  # [..., T/tp, D]; no NaN, which detect_anomaly would see on its way
            pieces = dwhole.unflatten(-2, (group.size(), dx.size(-2))).movedim(-3, 0)  # [tp, ..., T/tp, D]
            flat = pieces.flatten(0, -2).contiguous()
            work = comm.reduce_scatter_single(dx.flatten(0, -2), flat, group=group, async_op=True)
        else:
            dx = dwhole.clone(memory_format=torch.contiguous_format)  # [..., T, D]
            work = comm.all_reduce(dx, group=group, async_op=True)
        ctx.flight.reduction = work
        return dx, None, None


class _WeightGradient(torch.autograd.Function):
    """forward: a stand-in for the product, without memory. backward: dW = dyᵀ · x."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: torch.Size, flight: _InFlight) -> Tensor:
        ctx.flight, ctx.dtype = flight, weight.dtype
        return weight.new_zeros(()).expand(*shape, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        whole = ctx.flight.wait_input()
        dy = dy.reshape(-1, dy.size(-1))
        return (dy.t() @ whole.reshape(-1, whole.size(-1)).to(dy.dtype)).to(ctx.dtype), None, None


class _KeepInput(torch.autograd.Function):
    """forward: the stand-in; keeps x, whole or a piece. backward: brings it, or starts to gather it; dy goes on."""

    @staticmethod
    def forward(ctx: Any, later: Tensor, kept: Tensor, flight: _InFlight) -> Tensor:
        ctx.flight = flight
        ctx.save_for_backward(kept)  # [..., T, D] or [..., T/tp, D]
        return later.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.flight.start_input(*ctx.saved_tensors)
        return dy, None, None


class _Join(torch.autograd.Function):
    """forward: y, the stand-in is zero. backward: dy to both, so that each half of backward finds its own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, later: Tensor) -> Tensor:
        return y.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, dy


def check_has_tokens(x: Tensor) -> None:
    """Raise ValueError on every rank, before anything is sent, for a tensor that is not [..., T, D]."""
    if x.dim() < 2:
        raise ValueError(f"sequence parallelism: x of shape {list(x.shape)} has no tokens: give it as [..., T, D]")


def _version(x: Tensor) -> int | None:
    """How often x was changed in place; None where nobody counts, as in inference mode."""
    return None if x.is_inference() else x._version


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., T/tp, D] → [..., T, D]."""
    if group.size() == 1:
        return x
    whole, work = _start_gather(x, group)
    work.wait()
    return _in_order(whole)


def _start_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Handle]:
    """The pieces of all ranks, one after the other: [tp, ..., T/tp, D]."""
    whole = x.new_empty(group.size(), *x.shape)
    work = comm.all_gather_single(whole.flatten(0, 1), x.contiguous(), group=group, async_op=True)
    return whole, work


def _in_order(whole: Tensor) -> Tensor:
    """[tp, ..., T/tp, D] → [..., T, D]; a view where there is one row."""
    pieces, *rows, tokens, width = whole.shape
    return whole.movedim(0, -3).reshape(*rows, pieces * tokens, width)
