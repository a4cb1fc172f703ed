"""How experts are cut over ranks, and what their gradients are sums of.

    data   0  1  2  3  4  5  6  7         dense gradients are summed over all of them
    ep     0  1  0  1  0  1  0  1         rank 0 of ep = 2 has the first half of the experts
    expert-data  {0, 2, 4, 6}, {1, 3, 5, 7}   gradients of experts are summed over those with the same half

An expert sees the tokens of all ranks of its ep group, since they were sent to it, so there nothing is left to add. In
both families a gradient is a *sum*. Who averages divides both by the number of ranks that have tokens: experts divided
by the ranks of expert-data alone would be ep times too large, which Adam would hide.

Fedus et al. 2021 (Switch), figure 9; Megatron-LM's counterpart: expert_data_parallel groups in core/parallel_state.py.
"""

import torch.distributed as dist

from collectives import layout
from expert_parallel.experts import Experts


def cut_experts(experts: Experts, group: dist.ProcessGroup, expert_data: dist.ProcessGroup | None = None) -> None:
    """Before: all experts on every rank of `group`, with the same values or on the meta device. After: rank r has the
    r-th of P equal parts, in place, and their declarations say so; "data" is the sum over expert_data.

    Raises ValueError on every rank where P does not divide the number of experts.
    """
    size, rank = group.size(), group.rank()
    _declare(experts)
    for param in experts.parameters():
        count = len(param)
        if count % size:
            fine = [ranks for ranks in range(1, count + 1) if count % ranks == 0]
            raise ValueError(f"{size} ranks do not divide {count} experts: share them over one of {fine} ranks")
        # IDEA: stacked, experts are cut as anything else is: a box of dim 0.
        layout.cut(param, 0, rank * (count // size), count // size)
        param.held.family = "expert"
        param.held.sums.pop("data", None)
        if expert_data is not None:
            param.held.sums["data"] = expert_data


def cut_hidden(experts: Experts, group: dist.ProcessGroup) -> None:
    """Cut each expert as tensor parallelism cuts a feed-forward network: before, every rank of `group` has the same
    experts; after, F/P of their hidden channels. The ranks of `group` send the same tokens to the same experts.

    The pair of collectives is around the experts alone, inside of router and combine: so every rank has the router's
    whole gradient. Raises ValueError on every rank where P does not divide F.
    """
    size, rank = group.size(), group.rank()
    _declare(experts)
    for param, dim in ((experts.gate, 1), (experts.up, 1), (experts.down, 2)):
        hidden = param.size(dim)
        if hidden % size:
            raise ValueError(f"{size} ranks do not divide the {hidden} hidden channels of an expert")
        layout.cut(param, dim, rank * (hidden // size), hidden // size)
    experts.hidden_group = group


def _declare(experts: Experts) -> None:
    for name, param in experts.named_parameters():
        if not hasattr(param, "held"):
            param.held = layout.Held(name, (layout.Box.whole(param.shape),), None, decay=True)
