"""The two-level all-reduce: inside a node the links are fast, between nodes they are slow, so send little there.

    reduce_scatter inside     every rank of a node has the node's sum of one piece      n(L-1)/L bytes, fast links
    all_reduce between        the ranks with the same place in all nodes add theirs     2(n/L)(N-1)/N bytes, slow links
    all_gather inside         every rank has the sum of all                             n(L-1)/L bytes, fast links

with L ranks in each of N nodes, P = L·N. In all 2n(P-1)/P bytes, as in one ring over all ranks, but of those only the
middle line's cross nodes, from each of the L ranks over a link of its own. A flat ring waits in every one of its
2(P-1) steps for its slowest link; here 2(N-1) steps do. Each level is a ring, and adds in a ring's order. PyTorch's
counterpart: NCCL over NVLink and network, HSDP's reduction. Sources: Goyal et al. 2017, section 4; Mikami et al. 2018.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import ring
from collectives.algorithms.pieces import cut
from collectives.algorithms.reduction import SUM
from collectives.algorithms.steps import Steps, stepwise


@stepwise
def all_reduce(tensor: Tensor, op: Any = SUM, *, inside: dist.ProcessGroup, between: dist.ProcessGroup) -> Steps:
    """Before: every rank holds a tensor of the same shape. After: every rank holds their `op`, in place.

    inside: the ranks of this rank's node; between: those with the same place in all nodes, as two axes of a mesh; other
    groups are not noticed, and give other sums. A 16-bit result is rounded at each level. A step of the handle is a
    level.
    """
    piece = cut(tensor, inside.size())[inside.rank()]
    # IDEA: three collectives in a row, the middle one with 1/L of the message: all that ever crosses nodes.
    yield ring.reduce_scatter(piece, tensor, op, group=inside, async_op=True)
    yield ring.all_reduce(piece, op, group=between, async_op=True)
    yield ring.all_gather(tensor, piece, group=inside, async_op=True)
