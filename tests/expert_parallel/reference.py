"""A mixture of experts as its definition says it, in one process: loops over rows, slots and choices, and autograd. It
shares no code with what is tested, and knows of no ranks.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import torch

MATRICES = ("router.weight", "experts.gate", "experts.up", "experts.down")


@dataclass(frozen=True)
class Layer:
    """What a layer is. capacity: the factor, None for dropless. bias: what is added to the scores to choose, one number
    an expert, or None. over: what the balance loss has its statistics of: "sequence", or "batch", all tokens.
    """

    width: int = 6
    hidden: int = 5
    experts: int = 12
    choices: int = 2
    score: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    bias: tuple | None = None
    capacity: float | None = None
    balance: float = 0.7
    z: float = 0.3
    over: str = "sequence"
    shared: int = 0  # hidden size of the expert of every token; 0: there is none


@dataclass
class Result:
    """What a layer makes of a global batch."""

    y: torch.Tensor  # [B, T, D]
    balance: torch.Tensor  # () the mean over rows, or of the batch; without its coefficient
    z: torch.Tensor
    chosen: set = field(default_factory=set)  # (row, slot, expert)
    dropped: set = field(default_factory=set)
    entropy: float = 0.0  # a routed token

    @property
    def tokens(self):
        """Of each expert number how often it was chosen."""
        return Counter(expert for *_, expert in self.chosen)


def weights(layer, seed=0):
    """Random values by name; of the shared expert as well, if there is one."""
    D, F, E, S = layer.width, layer.hidden, layer.experts, layer.shared
    shapes = {"router.weight": (E, D), "experts.gate": (E, F, D), "experts.up": (E, F, D), "experts.down": (E, D, F)}
    if S:
        shapes |= {"shared.gate.weight": (S, D), "shared.up.weight": (S, D), "shared.down.weight": (D, S)}
    numbers = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=numbers, dtype=torch.float64) * (1.0 if name == "router.weight" else 0.5)
        for name, shape in shapes.items()
    }


def ranking(scores, layer):
    """The experts of one token's scores, a list of numbers: the best first, of equal ones the lowest number."""
    bias = layer.bias or (0.0,) * layer.experts
    return sorted(range(layer.experts), key=lambda e: (-(scores[e] + bias[e]), e))[: layer.choices]


def ffn(x, gate, up, down):
    """down(silu(gate x) · up x) of one token."""
    h = gate @ x
    return down @ (h / (1 + torch.exp(-h)) * (up @ x))


def scores_of(logits, layer):
    """(what experts are chosen and weighted by, the same as parts of one)"""
    if layer.score == "softmax":
        parts = logits.exp() / logits.exp().sum(-1, keepdim=True)
        return parts, parts
    s = 1 / (1 + torch.exp(-logits))
    return s, s / s.sum(-1, keepdim=True)


def apply(layer, named, x, routed):
    """A Result of x [B, T, D] with weights by name; routed [B][T]: whether a slot holds a token of a document."""
    E, k = layer.experts, layer.choices
    router, gate, up, down = (named[name] for name in MATRICES)
    logits = x @ router.T
    scores, parts = scores_of(logits, layer)
    zero = x.new_zeros(())
    result, outputs, losses = Result(x, zero, zero), [], []
    for b, row in enumerate(routed):
        queue, room = Counter(), math.inf
        if layer.capacity is not None:
            room = math.ceil(Fraction(str(layer.capacity)) * k * len(row) / E)
        for t, is_token in enumerate(row):
            y = x.new_zeros(layer.width)
            best = ranking(scores[b, t].tolist(), layer) if is_token else []
            among = sum(scores[b, t, e] for e in best) if layer.renormalise else 1.0
            for e in best:
                result.chosen.add((b, t, e))
                queue[e] += 1
                if queue[e] > room:
                    result.dropped.add((b, t, e))
                else:
                    y = y + layer.scale * scores[b, t, e] / among * ffn(x[b, t], gate[e], up[e], down[e])
            if layer.shared:
                y = y + ffn(x[b, t], *(named[f"shared.{name}.weight"] for name in ("gate", "up", "down")))
            outputs.append(y)
        if any(row):
            losses.append(balance(layer, [parts[b, t] for t, is_token in enumerate(row) if is_token], queue))
    there = [(b, t) for b, row in enumerate(routed) for t, is_token in enumerate(row) if is_token]
    result.y = torch.stack(outputs).view_as(x) if outputs else x * 0
    if there:
        everyone = [parts[b, t] for b, t in there]
        result.balance = (
            sum(losses) / len(losses) if layer.over == "sequence" else balance(layer, everyone, result.tokens)
        )
        result.z = sum(torch.log(logits[b, t].exp().sum()) ** 2 for b, t in there) / len(there)
        result.entropy = sum(-(p * p.log()).sum().item() for p in everyone) / len(there)
    return result


def balance(layer, parts, counts):
    """Σᵢ fᵢ·Pᵢ of tokens, given by their scores as parts of one, and of how often each expert was chosen."""
    n = len(parts)
    f = [layer.experts * counts[i] / (layer.choices * n) for i in range(layer.experts)]
    return sum(f[i] * sum(p[i] for p in parts) / n for i in range(layer.experts))


def loss(layer, result):
    """What the layer adds to the loss."""
    return layer.balance * result.balance + layer.z * result.z
