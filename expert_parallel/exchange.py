"""An all-to-all of rows that is under way while something else is computed, in forward and in backward.

    forward    depart: start          something else          arrive: wait
    backward   depart: wait for dx    its backward            arrive: start to send dy back

Autograd runs, of what is ready, the node that was made last; so what is made between the two is computed between them
in backward too. Rows travel once in each direction, and neither node has weights, so a backward in two halves sends
nothing twice. Without the overlap: collectives/differentiable.py, all_to_all_rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives import comm
from collectives.p2p import Handle


class Exchange:
    """Of this rank's rows x, gives[0] go to rank 0, the next gives[1] to rank 1, …; takes[p] come from rank p.

    Collective over `group`, and so is its backward.
    """

    def __init__(self, x: Tensor, gives: Sequence[int], takes: Sequence[int], *, group: dist.ProcessGroup | None):
        self.gives, self.takes, self.group = list(gives), list(takes), group
        self.work: Handle | None = None
        self.rows = x
        if group is not None and group.size() > 1:
            if torch.is_grad_enabled() and not x.requires_grad:  # as on other ranks, whose backward would wait for ours
                x = x.detach().requires_grad_()
            self.rows = _Depart.apply(x, self)

    def wait(self) -> Tensor:
        """The rows that have come: takes[0] of them from rank 0, then takes[1] from rank 1, …"""
        rows, self.rows = self.rows, None
        return rows if self.group is None or self.group.size() == 1 else _Arrive.apply(rows, self)

    def start(self, x: Tensor, gives: list[int], takes: list[int]) -> None:
        """Send rows off."""
        x = x.contiguous()
        self.taken = x.new_zeros(sum(takes), *x.shape[1:])  # no NaN, which detect_anomaly would see on its way
        self.work = comm.all_to_all_single(self.taken, x, takes, gives, group=self.group, async_op=True)

    def finish(self) -> Tensor:
        """Those that come in return."""
        self.work.wait()
        taken, self.taken, self.work = self.taken, None, None
        return taken


class _Depart(torch.autograd.Function):
    """forward: x, which is on its way. backward: waits for the dx that `_Arrive` has sent for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(x, exchange.gives, exchange.takes)
        return x.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.finish()  # which is dx
        return dx, None


class _Arrive(torch.autograd.Function):
    """forward: the rows that have come. backward: starts to send their gradients back, into what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        # IDEA: what comes back arrives in the memory of a gradient that nobody reads before `_Depart` has waited.
        exchange.start(dy, exchange.takes, exchange.gives)
        return exchange.taken, None
