"""The router: a linear layer that gives each token a score for every expert; the best few get the token.

    softmax   p = softmax(W·x), the k largest; their weights are p, or p over their sum          Switch, Mixtral
    sigmoid   s = sigmoid(W·x), the k largest of s + bias; weights s over their sum, times scale    DeepSeek-V3

In float32, or float64 if the tokens are: a score that is rounded otherwise chooses otherwise, and another choice is no
small error. Of equal scores the expert with the lowest number wins, on every rank and whenever it is computed again.

Shazeer et al. 2017; Fedus et al. 2021 (Switch), §2.4 (float32); Jiang et al. 2024 (Mixtral), §2.1; DeepSeek-AI 2024
(V3), §2.1.2, equations 12 to 16. Left out: noise, groups of experts of which few are chosen.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """What the router says of tokens [...]."""

    experts: Tensor  # [..., k] int64, the best first; no token has an expert twice
    weights: Tensor  # [..., k] of their outputs
    shares: Tensor  # [..., E] the scores as parts of 1: what the balance is of
    logits: Tensor  # [..., E]


class Router(nn.Module):
    """x [..., D] -> Routing to `choices` of `experts`.

    renormalise: a token's weights make 1. scale: their factor. biased: choose by score + bias, a buffer [E] that no
    gradient moves (balance.py does); weights and shares are without it.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        choices: int,
        *,
        score: Score = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        biased: bool = False,
    ):
        super().__init__()
        if not 1 <= choices <= experts:
            raise ValueError(f"choices={choices} of experts={experts}: choose at least 1, and at most all")
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={score!r} is unknown: use softmax or sigmoid")
        self.choices, self.score, self.renormalise, self.scale = choices, score, renormalise, scale
        self.weight = nn.Parameter(torch.empty(experts, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.register_buffer("bias", torch.zeros(experts) if biased else None)

    def forward(self, x: Tensor) -> Routing:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))  # [..., E]
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        shares = scores if self.score == "softmax" else _parts(scores)
        ranked = scores.detach() if self.bias is None else scores.detach() + self.bias
        # IDEA: a stable sort, since topk does not say which of equal scores it takes.
        experts = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : self.choices]
        weights = scores.gather(-1, experts)
        if self.renormalise:
            weights = _parts(weights)
        return Routing(experts, weights * self.scale, shares, logits)


def _parts(scores: Tensor) -> Tensor:
    """As parts of their sum."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0; less has an infinite inverse
