"""A tied weight: the first stage looks tokens up in the matrix with which the last stage makes logits.

Each of the two ranks has a copy, and a gradient of its own use of it. Their sum is the gradient of both; so it is a
partial sum as others are: declared here, added up by collectives/partials.py after the sums over data, with the same
bits on both ranks, so the copies stay equal. Cost: an all_reduce of the matrix a step between two ranks. On one rank,
as in a V, both stages have the one parameter, and there is nothing to add.

Lecture A, "Embedding과 LM head memory가 큽니다"; Megatron-LM's counterpart: the embedding group. PyTorch's pipelining
leaves it to the caller.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from collectives import comm
from pipeline.plan import Plan

TIE = "tie"  # the label of the sum


def tie_group(plan: Plan, pipelines: Sequence[Sequence[int]], new_group: Callable) -> dist.ProcessGroup | None:
    """The ranks of this rank's pipeline with a first or a last stage, if it has one and they are two. Collective over
    the world: all ranks call it alike. pipelines, new_group: as of `connect`.
    """
    ends = {plan.rank_of[s] for s in range(plan.stages) if plan.before(s) is None or plan.after(s) is None}
    if len(ends) == 1:
        return None
    made = [new_group(sorted(ranks[end] for end in ends), TIE) for ranks in pipelines]
    return next((group for group in made if group is not None), None)


def tie(param: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Declare a copy of a tied weight. Before: any values, the same name in its declaration on both ranks. After: those
    of the group's rank 0, and `sum_partials(params, (TIE,))` adds up the gradients.
    """
    # IDEA: two uses of one weight on two ranks are two terms of one sum.
    param.held.sums[TIE] = group
    if not param.is_meta:
        comm.broadcast(param.detach(), 0, group=group)
