"""The naive all-reduce: everything to everyone, and each adds up all of it.

One step, n(P-1) bytes sent by each rank and as many received: the lectures' 2·D·(P−1) counts both. Memory for
everything that arrives, n(P-1). Divided into a reduce-scatter and an all-gather the same result costs 2n(P-1)/P, P/2
times less. It is right for a few numbers, where only the step counts.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.algorithms.pieces import after, before
from collectives.algorithms.reduction import SUM, Reduction
from collectives.algorithms.steps import Steps, stepwise


@stepwise
def all_reduce(tensor: Tensor, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their `op`, in place, added in rank
    order.
    """
    mine, rank, reduction = tensor.view(-1), group.rank(), Reduction.of(op, tensor, group)
    arrived = list(mine.new_empty(group.size() - 1, mine.numel()))
    in_order = [*arrived[:rank], mine, *arrived[rank:]]
    peers = range(1, group.size())
    # IDEA: no rank needs another's help: each does the whole sum, so all do the same work P times.
    yield p2p.exchange(
        [(mine, after(group, step)) for step in peers],
        [(in_order[peer], peer) for peer in (before(group, step) for step in peers)],
        group=group,
    )
    reduction.in_order(in_order, mine, scratch=arrived[0] if arrived else mine)
