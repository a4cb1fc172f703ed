"""The one gradient norm, from declarations only: square sums divided by the number of copies, summed over all ranks.

A parameter that c ranks hold is counted by each of them with weight 1/c, whatever the reason for the copies (data
parallelism, norms under tensor parallelism, a tied embedding at both ends of a pipeline), so no axis needs a case of
its own. Cost: one float64 all-reduce. PyTorch's counterpart: torch.nn.utils.clip_grad_norm_, whose factor is used here.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm


@torch.no_grad()
def grad_norm(params: Sequence[nn.Parameter], *, group: dist.ProcessGroup) -> Tensor:
    """The 2-norm of the whole model's gradient, a float64 scalar with the same bits on every rank of `group`, the
    world.

    Before: gradients are fully reduced and `layout.check` has counted the copies. A rank may hold no gradient at all;
    every rank calls it.
    """
    with_grad = [param for param in params if param.grad is not None]
    device = "cuda" if dist.get_backend(group) == "nccl" else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    grads = [param.grad for param in with_grad]
    norms = torch._foreach_norm(grads, 2, torch.float64) if grads else []  # in float64: float32 squares overflow
    for param, norm in zip(with_grad, norms, strict=True):
        total += norm.square() / param.held.copies
    comm.all_reduce(total, group=group, ordered=True)
    return total.sqrt()


@torch.no_grad()
def clip(params: Sequence[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients by min(1, limit / norm); 1e-6 is added to the norm as PyTorch does."""
    grads = [param.grad for param in params if param.grad is not None]
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    if grads:
        torch._foreach_mul_(grads, factor)
