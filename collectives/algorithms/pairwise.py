"""The pairwise exchange: P-1 steps, in each of which every rank gives one peer its piece and takes one from another.

In step s that is the rank s further on, and the rank s further back: no rank gets two messages at once, so a link or a
memory that many peers would share is never crowded. The bytes are those of the direct exchange, n(P-1)/P, and of what
arrives only one piece is there at a time. reduce-scatter adds in the order r, r-1, r-2 … PyTorch's counterpart: NCCL's
all-to-all is all pairs at once; MPI's pairwise one is this (Thakur, Rabenseifner and Gropp 2005, section 3.2).
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.algorithms.pieces import Whole, after, before, cut, gives_and_takes, keep, own
from collectives.algorithms.reduction import SUM, Reduction
from collectives.algorithms.steps import Steps, stepwise


@stepwise
def all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup,
) -> Steps:
    """Before: piece p of a rank's input is meant for rank p. After: piece p of its output came from rank p. Sizes are
    rows of dim 0.
    """
    gives, takes = gives_and_takes(output, input, output_split_sizes, input_split_sizes, group)
    keep(gives[group.rank()], takes[group.rank()])
    for step in range(1, group.size()):
        to, of = after(group, step), before(group, step)
        # IDEA: in every step the pairs are a permutation of the ranks: one message out, one in, for each.
        yield p2p.exchange([(gives[to], to)], [(takes[of], of)], group=group)


@stepwise
def reduce_scatter(output: Tensor, input: Whole, op: Any = SUM, *, group: dist.ProcessGroup) -> Steps:
    """Before: every rank holds an input of P pieces. After: rank r's `output` is the `op` of all pieces r."""
    pieces, reduction = cut(input, group.size()), Reduction.of(op, output, group)
    output = own(output, pieces, group)
    total, arrived = reduction.room(output).copy_(pieces[group.rank()]), output.new_empty(output.numel())
    for step in range(1, group.size()):
        to, of = after(group, step), before(group, step)
        yield p2p.exchange([(pieces[to], to)], [(arrived, of)], group=group)
        reduction.add(total, arrived, out=total)
    reduction.finish(total, output)
