"""A layer's feed-forward network, dense or a mixture of experts. E experts, the other letters as in model.py.

In the mixture every expert computes every token, and the weights say what counts.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch


@dataclass(frozen=True)
class Routing:
    """What one mixture's router said of the rows."""

    logits: torch.Tensor  # [B, T, E]
    shares: torch.Tensor  # [B, T, E] of each token they make 1
    chosen: torch.Tensor  # [B, T, E] True where a token of a document chose that expert
    kept: torch.Tensor  # [B, T, E] True where there was room as well


def dense(x, gate, up, down):
    """SwiGLU: x [B, T, D], gate and up [F, D], down [D, F]."""
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def silu(x):
    return x / (1 + torch.exp(-x))


def mixture(x, weights, bias, routed, settings):
    """x [B, T, D] -> y [B, T, D] and the Routing.

    weights by their names within the layer; bias [E] or None; routed [B, T] is True for tokens of documents. settings
    is a dict: choices (k), score ("softmax" or "sigmoid"), renormalise, scale and capacity (the factor c; 0: nobody is
    dropped).
    """
    choices, renormalise = settings["choices"], settings["renormalise"]
    logits = x @ weights["router.weight"].T  # [B, T, E]
    scores = logits.softmax(-1) if settings["score"] == "softmax" else torch.sigmoid(logits)

    best = the_best(scores.detach() if bias is None else scores.detach() + bias, choices)
    chosen = best & routed[:, :, None]
    kept = with_room(chosen, settings["capacity"], choices)

    factors = scores / (scores * best).sum(-1, keepdim=True) if renormalise else scores  # [B, T, E]
    factors = factors * settings["scale"] * kept
    y = torch.zeros_like(x)
    for e in range(logits.shape[-1]):
        gate, up, down = (weights[f"experts.{matrix}"][e] for matrix in ("gate", "up", "down"))
        y = y + factors[:, :, e, None] * dense(x, gate, up, down)
    if "shared.gate.weight" in weights:
        y = y + dense(x, *(weights[f"shared.{matrix}.weight"] for matrix in ("gate", "up", "down")))

    shares = scores / scores.sum(-1, keepdim=True)  # a softmax is divided by 1
    return y, Routing(logits, shares, chosen, kept)


def the_best(scores, choices):
    """[B, T, E] -> True where an expert is among the best of its token; of equal ones the first."""
    B, T, E = scores.shape
    best = torch.zeros(B, T, E, dtype=torch.bool)
    for b in range(B):
        for t in range(T):
            score = scores[b, t].tolist()
            best[b, t, sorted(range(E), key=lambda e: (-score[e], e))[:choices]] = True
    return best


def with_room(chosen, factor, choices):
    """Which of the chosen [B, T, E] are not dropped: of each row an expert takes the first that fit."""
    B, T, E = chosen.shape
    room = math.ceil(Fraction(str(factor)) * choices * T / E) if factor else T
    kept = torch.zeros_like(chosen)
    for b in range(B):
        for e in range(E):
            kept[b, chosen[b, :, e].nonzero().flatten()[:room], e] = True
    return kept


def balance_loss(routing, choices, labelled):
    """DeepSeek-V3's, of each row by itself; the mean over the rows that have a label, `labelled` [B]."""
    E = routing.shares.shape[-1]
    losses = []
    for row in labelled.nonzero().flatten():
        routed = routing.chosen[row].any(-1)  # [T]
        n = int(routed.sum())
        frequency = routing.chosen[row].sum(0).double() * E / (choices * n)  # [E]
        share = routing.shares[row][routed].sum(0) / n  # [E]
        losses.append((frequency * share).sum())
    return torch.stack(losses).mean() if losses else torch.tensor(0.0, dtype=torch.float64)


def z_loss(routing):
    """The mean over the tokens of documents of the square of the logarithm of what a softmax divides by."""
    routed = routing.chosen.any(-1)  # [B, T]
    return (routing.logits[routed].logsumexp(-1) ** 2).sum() / max(1, int(routed.sum()))


def moved(bias, load, rate):
    """The bias [E] after a step in which so many choices [E] fell on each expert."""
    total, E = int(load.sum()), len(load)
    steps = [(total > E * n) - (total < E * n) for n in load.tolist()]  # the sign of mean - load, in whole numbers
    return bias + rate * torch.tensor(steps, dtype=torch.float64)
