"""Dispatch and combine: each token travels to the ranks that have its experts, and what they make of it travels back.

    permute    rows in the order of the experts that are to have them, a copy of a token for each
    exchange   all_to_all: counts first, then rows                    elements sent: tokens · k · D · share that leaves
    experts    this rank's, each with the rows of all ranks
    exchange   the way back                                           the same
    combine    the k outputs of a token, weighted, are added up

Backward goes the same ways, so a step sends four times that. A choice that is NOBODY, a dropped one or of what is no
token, is not sent, and adds nothing. Weights stay at home. Nothing is padded: shapes follow the router (dropless).

Lepikhin et al. 2020 (GShard), §3.2; Gale et al. 2022 (MegaBlocks), on dropless; Megatron-LM's counterpart:
core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives import comm
from expert_parallel.exchange import Exchange


class Dispatch:
    """Tokens x [N, D] on their way to experts [N, k], of `count` in all, an equal share on each rank of the group, in
    order.

    Made, they travel; `arrive` has what came here, `combine` sends it back. Each is collective. On one rank nothing is
    sent.
    """

    def __init__(self, x: Tensor, experts: Tensor, count: int, group: dist.ProcessGroup | None):
        self.group, self.shape = group, experts.shape
        ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        everyones = self._counts(experts, count, ranks)  # [P][E]
        mine, here = count // ranks, slice(rank * (count // ranks), (rank + 1) * (count // ranks))
        self.gives = [sum(everyones[rank][p * mine : (p + 1) * mine]) for p in range(ranks)]
        self.blocks = [counts[here] for counts in everyones]  # [P][E/P] rows that come from each rank for each expert
        self.takes = [sum(counts) for counts in self.blocks]
        self.counts = [sum(counts) for counts in zip(*self.blocks, strict=True)]  # [E/P]
        nobody = experts.numel() - sum(self.gives)
        # IDEA: sorted by expert, choices are sorted by rank too, and equal ones stay in the order of their tokens.
        self.order = experts.flatten().argsort(stable=True)[nobody:]
        self.there = Exchange(_Copies.apply(x, self.order, self.shape), self.gives, self.takes, group=group)

    def _counts(self, experts: Tensor, count: int, ranks: int) -> list[list[int]]:
        numbers = experts.flatten() + 1  # 0 for NOBODY
        # Not bincount, for which a GPU must tell the largest number first.
        counts = numbers.new_zeros(count + 1).scatter_add_(0, numbers, torch.ones_like(numbers))[1:]  # [E]
        if ranks == 1:
            return [counts.tolist()]
        everyones = counts.new_empty(ranks, count)
        comm.all_gather_single(everyones.flatten(), counts, group=self.group)
        return everyones.tolist()

    def arrive(self) -> Tensor:
        """The rows that this rank's experts are to have: counts[0] for its first, then counts[1] …"""
        return self._by_expert(self.there.wait())

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """outputs of the experts, in the order of `arrive`, and weights [N, k] -> [N, D]."""
        back = Exchange(self._by_rank(outputs), self.takes, self.gives, group=self.group).wait()
        choices = back.new_zeros(weights.numel(), back.size(1)).index_copy_(0, self.order, back)
        outputs = choices.view(*self.shape, back.size(1))  # [N, k, D], zeros for what was not sent
        return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1)

    def _by_expert(self, rows: Tensor) -> Tensor:
        return _reordered(rows, self.blocks)

    def _by_rank(self, rows: Tensor) -> Tensor:
        return _reordered(rows, [list(column) for column in zip(*self.blocks, strict=True)])


def _reordered(rows: Tensor, blocks: list[list[int]]) -> Tensor:
    """Blocks of rows, the second index running faster -> the first running faster."""
    if len(blocks) == 1 or len(blocks[0]) == 1:
        return rows
    parts = rows.split(list(itertools.chain(*blocks)))
    return torch.cat([part for i in range(len(blocks[0])) for part in parts[i :: len(blocks[0])]])


class _Copies(torch.autograd.Function):
    """forward: of tokens [N, D] a copy for each choice, in this order of the choices N·k. backward: a token's gradients
    are added up, first choice first, so that equal bits come out whatever the order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = shape
        return x.index_select(0, order // shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcopies: Tensor) -> tuple[Tensor, None, None]:
        [order] = ctx.saved_tensors
        choices = dcopies.new_zeros(ctx.shape.numel(), dcopies.size(1)).index_copy_(0, order, dcopies)
        return choices.view(*ctx.shape, dcopies.size(1)).sum(1), None, None
