"""Fully sharded data parallelism in forty lines: an autograd function whose forward gathers what its backward scatters.

    forward   shard [n/P]  ── all_gather ──▶      weights [n]
    backward  dshard [n/P] ◀── reduce_scatter ──  dweights [n]

The two are each other's transpose: what gives every rank all pieces sends to every piece's owner the sum of what the
ranks have for it. So a unit's forward asks for its weights, and autograd does the rest. Cost, bytes a rank sends:
n(P-1)/P in forward and in backward each. Memory: the shards; and every unit's weights, gathered in forward, until its
backward has used them. That is what fully_shard mends (wrap.py), with prefetch, nested units, precision.

Zhao et al. 2023, "PyTorch FSDP"; lectures A, "FSDP", and B, "ZeRO-3 (FSDP)" (docs/notation.md).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm


class Gather(torch.autograd.Function):
    """forward: all_gather of the shards; backward: reduce_scatter, because each rank has a gradient of all of them."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        weights = shard.new_empty(group.size() * len(shard))  # [n]
        comm.all_gather_single(weights, shard, group=group)
        return weights

    @staticmethod
    def backward(ctx: Any, dweights: Tensor) -> tuple[Tensor, None]:
        dshard = dweights.new_empty(len(dweights) // ctx.group.size())  # [n/P]
        # IDEA: to gather the weights and to scatter their gradient are one operation and its transpose.
        comm.reduce_scatter_single(dshard, dweights, comm.AVG, group=ctx.group)
        return dshard, None


def fully_shard(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace all parameters of a unit, of one dtype, by one: `module.shard`, this rank's P-th of them in a row.

    Before: every rank has the same weights. After: a rank keeps n/P of n bytes, gathers them in each forward, and the
    gradient of its shard is the mean over the group. Apply it to each unit, then to a module around them, if that has
    parameters of its own; one that two units share would become two. Any optimizer that updates each element by itself
    works on `model.parameters()`.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False):
            if name != "shard":  # of a unit inside
                places.setdefault(param, []).append((owner, name))
    row = torch.cat([param.detach().flatten() for param in places])
    row = torch.cat([row, row.new_zeros(-len(row) % group.size())])  # padding
    module.shard = nn.Parameter(row.chunk(group.size())[group.rank()].clone())
    forward, sizes, shapes = module.forward, [param.numel() for param in places], [param.shape for param in places]
    own = [(i, owner, name) for i, of_one in enumerate(places.values()) for owner, name in of_one]
    for _, owner, name in own:
        delattr(owner, name)

    def gathered(*args: Any, **kwargs: Any) -> Any:
        weights = Gather.apply(module.shard, group)[: sum(sizes)].split(sizes)
        for i, owner, name in own:
            setattr(owner, name, weights[i].view(shapes[i]))
        output = forward(*args, **kwargs)
        for _, owner, name in own:
            delattr(owner, name)  # autograd keeps what backward needs
        return output

    module.forward = gathered
