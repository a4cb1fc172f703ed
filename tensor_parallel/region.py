"""A region: what lies between a column cut and the row cut that closes it. One input, one output, two collectives.

                     enter            columns       row            leave
    tensor parallel  x [T, D]        [T, F/tp]    [T, D] {+tp}    all_reduce      → [T, D]
    with sequences   gather [T/tp, D] → [T, D]    …               reduce_scatter  → [T/tp, D]

Backward: the duals, and at `enter` once for all columns that share x. Elements sent, of the n = B·T·D of x: 4n(P-1)/P
forward and backward, either way; 5n(P-1)/P if x, which the gradients of weights need whole, is kept as a piece and
gathered again (`save_gathered=False`).

Shoeybi et al. 2019, "Megatron-LM", §3; Korthikanti et al. 2022, §4.2; lecture B, "Tensor Parallelism", "Sequence
Parallelism". Megatron-LM's counterpart: LinearWithGradAccumulationAndAsyncCommunication. Left out: second derivatives.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from collectives import comm
from collectives.differentiable import all_reduce_identity, reduce_scatter_all_gather
from collectives.p2p import Handle


class Region:
    """Shared by the layers that lie in it: the column layers, which `enter` it with one input, and the row layer, which
    lets its output `leave`.

    sequence_parallel: outside of the region each rank has T/tp tokens, not copies of all. save_gathered: what the
    columns keep for backward is their whole input, not this rank's piece, which is then gathered again. Tokens are the
    last dim but one.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool = False, save_gathered: bool = False):
        if save_gathered and not sequence_parallel:
            raise ValueError("save_gathered=True is a mode of sequence_parallel=True: without it nothing is gathered")
        self.group, self.sequence_parallel, self.save_gathered = group, sequence_parallel, save_gathered
        self.columns: list[nn.Module] = []
        self._entrance: Entrance | None = None

    def enter(self, x: Tensor, column: nn.Module) -> "Entrance":
        """x: a copy [..., T, D] on every rank, or with sequence parallelism this rank's [..., T/tp, D]. The column
        layers that are called with the same tensor enter together.
        """
        if self._entrance is None or not self._entrance.admits(x, column):
            self._entrance = Entrance(self, x)
        entrance = self._entrance
        entrance.awaited.discard(column)
        if not entrance.awaited:
            self._entrance = None  # all have entered: what only they need goes
        return entrance

    def leave(self, y: Tensor) -> Tensor:
        """y [..., T, D] {+tp} → the sum, whole on every rank, or with sequence parallelism this rank's tokens of it.

        Raises ValueError on every rank where the tokens do not divide.
        """
        if not self.sequence_parallel:
            return all_reduce_identity(y, group=self.group)  # [..., T, D]
        ranks, tokens = self.group.size(), y.size(-2)
        if tokens % ranks:
            padded = -(-tokens // ranks) * ranks
            raise ValueError(
                f"sequence parallelism: tp={ranks} does not divide the {tokens} tokens of a row; "
                f"pad rows to {padded}, and mask what is added, or choose a tp that divides"
            )
        return reduce_scatter_all_gather(y, -2, group=self.group)  # [..., T/tp, D]


class Entrance:
    """One input of a region: gathered if it must be, and the half of backward that the columns share.

    Gradients of weights can wait, that of the input cannot: the layers below need it, after a collective. So a column
    layer's backward is two nodes of autograd's graph, and the engine, which of all nodes that are ready runs the one
    that was made last, runs them in this order, whatever the order in which the layers were called:

        _Regather × columns   start to gather x again, once                     made last
        the products          dx {+tp} = dy · W, summed over the columns
        _Depart               start to reduce dx
        _Weight × columns     wait for x; dW = dyᵀ · x, while dx travels
        _Arrive               wait for dx                                       made first

    No node has both a weight and a collective, so a backward in two halves (for the input, then for the weights) runs
    none of them twice.
    """

    def __init__(self, region: Region, x: Tensor):
        self.x, self.region, self.awaited = x, region, set(region.columns)
        self.version, self.with_grad = _version(x), torch.is_grad_enabled()
        self.weights: dict[nn.Parameter, Tensor] = {}
        self.whole = whole = _gathered(x.detach(), region) if region.sequence_parallel else x.detach()  # [..., T, D]
        if self.with_grad:
            self.flight = _Flight(region)
            self.again = region.sequence_parallel and not region.save_gathered and region.group.size() > 1
            arrived = _Arrive.apply(x, self.flight)
            weights = [column.weight for column in region.columns if column.weight.requires_grad]
            kept = None if self.again else whole
            shape = whole.shape[:-1]
            # IDEA: what is made first is run last: dW waits until dx is on its way.
            self.weights = {weight: _Weight.apply(weight, kept, shape, self.flight) for weight in weights}
            self.whole = _Depart.apply(arrived, whole, self.flight)

    def admits(self, x: Tensor, column: nn.Module) -> bool:
        """Whether a call is of the forward that this is for: each column enters once, with the same x."""
        unchanged = x is self.x and self.version is not None and x._version == self.version
        same = unchanged and torch.is_grad_enabled() == self.with_grad
        return same and column in self.awaited

    def project(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """x · Wᵀ + b for this rank's rows of W: [..., T, D] → [..., T, F/tp]."""
        if weight not in self.weights:  # without gradients, frozen, or unfrozen since
            return F.linear(self.whole, weight, bias)
        y, later = F.linear(self.whole, weight.detach(), bias), self.weights[weight]
        if self.again:
            later = _Regather.apply(later, self.x.detach(), self.flight)
        return _Join.apply(y, later)


class _Flight:
    """What is under way in the backward of one entrance."""

    def __init__(self, region: Region):
        self.region = region
        self.reduction: Handle | None = None
        self.gather: tuple[Tensor, Handle] | None = None
        self.readers = 0  # of the gathered input, still to come

    def start_gather(self, x: Tensor) -> None:
        """A weight's gradient is going to need x whole: the first starts the gather."""
        if self.gather is None:
            self.gather = _start_gather(x, self.region.group)
        self.readers += 1

    def gathered(self) -> Tensor:
        """x whole; the last one that needs it lets go of it."""
        whole, work = self.gather
        if work is not None:
            work.wait()
            whole = _in_order(whole)  # once for all
        self.readers -= 1
        self.gather = (whole, None) if self.readers else None
        return whole


class _Arrive(torch.autograd.Function):
    """forward: x. backward: waits for the dx that `_Depart` has sent off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return x.data  # no view, which could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        if ctx.flight.reduction is not None:
            ctx.flight.reduction.wait()
            ctx.flight.reduction = None
        return dx, None


class _Depart(torch.autograd.Function):
    """forward: the whole x. backward: starts the sum of dx over the ranks, into what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, flight: _Flight) -> Tensor:
        ctx.flight, ctx.shape = flight, x.shape
        return whole.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None, None]:  # [..., T, D] {+tp}
        region = ctx.flight.region
        if region.group.size() == 1:
            return dwhole, None, None
        if region.sequence_parallel:
            dx = dwhole.new_empty(ctx.shape)  # [..., T/tp, D]
            pieces = dwhole.unflatten(-2, (region.group.size(), dx.size(-2))).movedim(-3, 0)  # [tp, ..., T/tp, D]
            flat = pieces.flatten(0, -2).contiguous()
            work = comm.reduce_scatter_single(dx.flatten(0, -2), flat, group=region.group, async_op=True)
        else:
            dx = dwhole.clone(memory_format=torch.contiguous_format)  # [..., T, D]
            work = comm.all_reduce(dx, group=region.group, async_op=True)
        ctx.flight.reduction = work
        return dx, None, None


class _Weight(torch.autograd.Function):
    """forward: a stand-in for the product, without memory. backward: dW = dyᵀ · x."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: Tensor | None, shape: torch.Size, flight: _Flight) -> Tensor:
        ctx.flight, ctx.dtype = flight, weight.dtype
        if kept is not None:
            ctx.save_for_backward(kept)
        return weight.new_zeros(()).expand(*shape, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        [whole] = ctx.saved_tensors or [ctx.flight.gathered()]
        dy = dy.reshape(-1, dy.size(-1))
        return (dy.t() @ whole.reshape(-1, whole.size(-1)).to(dy.dtype)).to(ctx.dtype), None, None, None


class _Regather(torch.autograd.Function):
    """forward: the stand-in. backward: starts to gather the input again; the gradient goes on."""

    @staticmethod
    def forward(ctx: Any, later: Tensor, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        ctx.save_for_backward(x)  # [..., T/tp, D]
        return later.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.flight.start_gather(*ctx.saved_tensors)
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


def _version(x: Tensor) -> int | None:
    """How often x was changed in place; None where nobody counts, as in inference mode."""
    return None if x.is_inference() else x._version


def _gathered(x: Tensor, region: Region) -> Tensor:
    """[..., T/tp, D] → [..., T, D]."""
    if region.group.size() == 1:
        return x
    whole, work = _start_gather(x, region.group)
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
