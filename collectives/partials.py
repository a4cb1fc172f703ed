"""Gradients that are still partial after the data-parallel sum are added up over the groups of their declaration.

A parameter that several ranks hold may have seen a part of the work on each: of the tokens (a norm under sequence
parallelism), of the heads (keys and values that two ranks share). Its declaration names the group over which its
gradient is a sum (`held.sums`), and this is where the sum is made: after those over data, so on shards where there are
any, in one flat buffer a group. Cost: one all_reduce a group, of the few parameters that have one.

Megatron-LM's counterpart: finalize_model_grads, with a list of the parameters that are to be summed. Left out: overlap
with backward; the buffers are small.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from collectives import comm


@torch.no_grad()
def sum_partials(params: Iterable[nn.Parameter], labels: Sequence[str]) -> None:
    """Before: each gradient is this rank's term of the sums over `held.sums[label]`. After: the sum, in place, over one
    group after the other in the order of `labels`; the same bits on all ranks of a group.

    Every rank calls it with the same labels. A gradient that some ranks of a group do not have counts as zero there;
    one that none of them has stays None.
    """
    if isinstance(labels, str):
        raise ValueError(f"labels={labels!r} is a word, whose letters are no labels: give ({labels!r},)")
    params = list(params)
    for label in labels:
        buckets: dict[tuple, list[nn.Parameter]] = defaultdict(list)
        for param in params:
            if label in param.held.sums:
                buckets[param.held.sums[label], param.dtype, param.device].append(param)
        for (group, *_), members in buckets.items():
            if group.size() > 1:
                _sum(sorted(members, key=lambda param: param.held.name), group)  # each rank may list them its way


def _sum(params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    used = torch.tensor([param.grad is not None for param in params], device=params[0].device)
    # In the parameter's dtype, which all ranks know: what a gradient's is, only those that have one do.
    flat = torch.cat([part.reshape(-1).to(params[0].dtype) for part in (*grads, used)])
    # IDEA: what a declaration calls a partial sum is summed, whatever made it one.
    comm.all_reduce(flat, group=group, ordered=True)
    *sums, used = flat.split([*(grad.numel() for grad in grads), len(params)])
    for param, grad, total, anywhere in zip(params, grads, sums, used, strict=True):
        if param.grad is not None or anywhere:  # to look at a number is to wait for the GPU
            param.grad = grad.copy_(total.view_as(grad))
