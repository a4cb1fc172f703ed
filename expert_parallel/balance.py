"""What keeps experts evenly loaded: a loss on the router's scores, or a bias that follows the load.

    sequence  Σᵢ fᵢ·Pᵢ of each row, the mean over rows       DeepSeek-V3, equations 17 to 20
    batch     Σᵢ fᵢ·Pᵢ of all tokens of one call             Switch, equation 4
    z         (log Σᵢ exp logitᵢ)² of a token, the mean      ST-MoE, equation 5
    bias      bᵢ += rate · sign(mean load - loadᵢ)           Wang et al. 2024; DeepSeek-V3, §2.1.2

fᵢ is E times the share of choices that fell on expert i, as dispatch makes them (V3's equation 18 leaves the bias
out), Pᵢ the mean of its shares of the scores; where both are even the sum is 1. A product of means is no sum over
parts. In a row that is cut over ranks fᵢ is that of the whole row: counts, which have no gradient. Pᵢ is linear, so
each rank's part of it gives a part of the loss. A *batch* that is cut into microbatches has another loss, so what its
statistics are of belongs to its definition.

The loss enters by an identity function on the layer's output, whose backward gives it its gradient. So it passes
pipelines, the halves of a backward and recomputation, and nobody adds it to a loss that may be on another rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives import comm


def sequence_balance(shares: Tensor, routed: Tensor, counts: Tensor, choices: int) -> Tensor:
    """The loss [B] of each row, of rows that are cut this rank's part of it.

    shares [B, T/P, E] and routed [B, T/P] are of this rank's tokens, counts [B, E] those of the choices of the whole
    row. A row without a routed token has 0.
    """
    counts = counts.to(shares.dtype)
    tokens = (counts.sum(1, keepdim=True) / choices).clamp(min=1)  # [B, 1] of the whole row
    f = counts * (counts.size(1) / (choices * tokens))  # [B, E]
    p = (shares * routed.unsqueeze(-1)).sum(1) / tokens  # [B, E] {+sequence}
    return (f * p).sum(1)


def batch_balance(
    shares: Tensor, routed: Tensor, counts: Tensor, choices: int, *, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """This rank's part of the loss of all tokens that the ranks of `group` have in this call, and how many they are.

    counts [E] are those of this rank's choices.
    """
    counts = counts.clone()
    if group is not None and group.size() > 1:
        comm.all_reduce(counts, group=group)
    counts = counts.to(shares.dtype)
    tokens = counts.sum() / choices
    f = counts * (len(counts) / (choices * tokens.clamp(min=1)))  # [E]
    p = (shares * routed.unsqueeze(-1)).sum((0, 1)) / tokens.clamp(min=1)  # [E] {+group}
    return (f * p).sum(), tokens


def z_loss(logits: Tensor, routed: Tensor) -> Tensor:
    """The sum over this rank's routed tokens; logits [B, T/P, E]."""
    return (logits.logsumexp(-1).square() * routed).sum()


def with_loss(y: Tensor, loss: Tensor) -> Tensor:
    """y; whoever runs backward through it runs it through `loss`, a scalar, as well."""
    return _WithLoss.apply(y, loss)


class _WithLoss(torch.autograd.Function):
    """forward: y. backward: dy, and 1 for the loss, as if it had been added to the loss that backward began with."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return y.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        # IDEA: a loss that starts in the middle of a model needs no way out of it.
        return dy, ctx.like


@torch.no_grad()
def follow_load(bias: Tensor, tokens: Tensor, rate: float) -> None:
    """Once a step: move the router's bias [E], in place, against the load: the choices [E] of the whole global batch,
    the same on every rank, and so the biases stay equal. Half precision would round small steps away: ValueError.
    """
    if torch.finfo(bias.dtype).bits < 32:
        raise ValueError(f"the bias is {bias.dtype}, which rounds steps of {rate} away: keep it in float32")
    below = torch.sign(tokens.sum() - len(tokens) * tokens)  # of integers, exactly
    bias += rate * below.to(bias.dtype)
