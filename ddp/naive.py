"""Data parallelism, step one of three: every rank has the whole model and its own rows; after backward, one all-reduce
a parameter.

Every rank computes the gradient of its own rows and the all-reduce adds them up, so all ranks make the same update and
stay equal. Cost a step, for n bytes of gradients on P ranks: 2n(P-1)/P bytes sent a rank, one collective a parameter
(the fault that buckets mend), nothing of it beside backward (the fault that hooks mend). Memory: parameters, gradients
and optimizer state in full on every rank.

Lectures A, "DDP의 기본 동작", and B, "Naive DDP" (docs/notation.md), which says that PyTorch's DDP is exactly this;
that one has buckets and overlap (Li et al. 2020, "PyTorch Distributed"). Left out: buckets (bucketed.py) and overlap
(overlapped.py).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from collectives import comm
from collectives.replicas import Replica, replicate


class NaiveDDP(Replica):
    """The handle that `wrap` returns."""

    def finish(self) -> None:
        """Reduce every gradient, one after the other. A rank that did not use a parameter adds zeros to it; one that no
        rank used keeps grad None.
        """
        used = self.largest([int(param.grad is not None) for param in self.params])
        for param, used_anywhere in zip(self.params, used, strict=True):
            if not used_anywhere:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
            # IDEA: the gradient of the whole batch is the sum of the ranks' gradients.
            comm.all_reduce(param.grad, self.op, group=self.group, ordered=True)
        self.equalize_buffers()


def wrap(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    params: Sequence[nn.Parameter] | None = None,
    average: bool = True,
    device: torch.device | None = None,
) -> NaiveDDP:
    """Make `module` data parallel over `group`: equal replicas, as `replicate` makes them, and the handle of a step.

    average: divide by the number of ranks, as PyTorch's DDP does (False: the sum, when the loss is already scaled by
    the whole batch's count). Frozen parameters have no gradient to reduce; once unfrozen, on all ranks, they have.
    """
    return NaiveDDP(*replicate(module, group, params=params, device=device, average=average), group, average=average)
