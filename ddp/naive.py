"""Data parallelism, step one of three: every rank has the whole model and its own rows; after backward, one all-reduce
a parameter.

Every rank computes the gradient of its own rows and the all-reduce adds them up, so all ranks make the same update and
stay equal. Cost a step, for n bytes of gradients on P ranks: 2n(P-1)/P bytes sent a rank, one collective a parameter
(the fault that buckets mend), nothing of it beside backward (the fault that hooks mend). Memory: parameters, gradients
and optimizer state in full on every rank.

Lectures A, "DDP의 기본 동작", and B, "Naive DDP" (docs/notation.md), which says that PyTorch's DDP is exactly this;
that one has buckets and overlap (Li et al. 2020, "PyTorch Distributed"). Left out: buckets, overlap, and buffers that
change in training.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from collectives import comm, layout


class NaiveDDP:
    """The handle of a module whose gradients are summed over `group`. `wrap` makes it; the module itself stays as it
    is.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: dist.ProcessGroup, *, average: bool):
        self.params, self.group, self.average = list(params), group, average

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates: whole parameters, the same on every rank."""
        return self.params

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around a microbatch that is not the last. Nothing is reduced before `finish` here, so there is nothing to
        switch off.
        """
        yield

    def finish(self) -> None:
        """Once a step. Before: each `p.grad` is this rank's own, summed over its microbatches. After: it is the sum (or
        mean) over the group.

        A parameter that some ranks did not use counts as zero there; one that no rank used keeps grad None.
        """
        op = comm.AVG if self.average else comm.SUM
        for param, used in zip(self.params, self._used_anywhere(), strict=True):
            if not used:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            # IDEA: the gradient of the whole batch is the sum of the ranks' gradients.
            comm.all_reduce(param.grad, op, group=self.group, ordered=True)

    def after_step(self) -> None:
        """After the optimizer: nothing, every rank has updated everything."""

    def unshard(self, module: nn.Module) -> None:
        """Parameters are whole all the time."""

    def reshard(self, module: nn.Module) -> None:
        """Parameters stay whole."""

    def reduce(self, module: nn.Module) -> None:
        """Nothing is reduced before `finish`."""

    def _used_anywhere(self) -> list[bool]:
        """Agreement, one small all-reduce a step: for each parameter, whether any rank has a gradient."""
        device = self.params[0].device if self.params else None
        used = torch.tensor([param.grad is not None for param in self.params], dtype=torch.uint8, device=device)
        comm.all_reduce(used, comm.MAX, group=self.group)
        return used.bool().tolist()


def wrap(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    params: Sequence[nn.Parameter] | None = None,
    average: bool = True,
    device: torch.device | None = None,
) -> NaiveDDP:
    """Make `module` data parallel over `group`. Before: any values on each rank. After: those of the group's rank 0.

    params: those to treat, default all of the module's, with its buffers. Frozen ones have no gradient to reduce; once
    unfrozen, on all ranks, they have. average: divide by the number of ranks, as PyTorch's DDP does (False: the sum,
    when the loss is already scaled by the whole batch's count). Parameters on the meta device get memory on `device`
    and no values: whoever built them so initialises them afterwards, the same on every rank. Raises ValueError for
    buffers on the meta device.
    """
    buffers = dict(module.named_buffers()) if params is None else {}
    params = list(dict.fromkeys(module.parameters() if params is None else params))
    if empty := [name for name, buffer in buffers.items() if buffer.is_meta]:
        raise ValueError(f"buffers {empty} are on the meta device: give them values before wrap, nobody will later")
    for tensor in [*params, *buffers.values()]:
        if tensor.is_meta:
            layout.materialize(tensor, device or torch.device("cpu"))
        else:
            comm.broadcast(tensor, 0, group=group)
    return NaiveDDP(params, group, average=average)
