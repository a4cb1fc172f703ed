"""A model that is a chain of parts, each a plain module, and its stages. Three tensors go from part to part: two that
want gradients, and a mask.
"""

import torch
import torch.nn.functional as F
from torch import nn

from collectives import rng

WIDTH, TOKENS, VOCAB = 8, 3, 11


class Embed(nn.Module):
    """ids [b, T] → (x [b, T, D], carry [b, T, 1], even [b, T])."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids, *, rows, step):
        x = self.table(ids) + self.offset
        return x, x[..., :1], ids % 2 == 0


class Block(nn.Module):
    """A matrix that is used twice, a vector that only some tokens use, a parameter that is frozen and one that nobody
    uses.
    """

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.norm, self.twice = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.some = nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.rand(WIDTH) + 1, requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x, carry, even, *, rows, step):
        y = self.twice(torch.tanh(self.twice(self.norm(x)))) * self.frozen
        y = y + even[..., None] * self.some
        slots = rows[:, None] * TOKENS + torch.arange(TOKENS)  # [b, T], of the whole batch
        x = x + rng.dropout(torch.tanh(y), rng.key(7, "dropout", self.number, step), slots, 0.25)
        return x, carry + x.sum(-1, keepdim=True) / WIDTH, even


class Head(nn.Module):
    """(x, carry, even) → logits [b, T, V]."""

    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.RMSNorm(WIDTH), nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.ramp = nn.Parameter(torch.randn(VOCAB))

    def forward(self, x, carry, even, *, rows, step):
        return self.norm(x) @ self.weight.T + carry * self.ramp


class Stage(nn.Module):
    """Parts one after the other."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *args, **kwargs):
        for part in self.parts:
            args = part(*(args if isinstance(args, tuple) else (args,)), **kwargs)
        return args


def model(blocks, *, tied=False, seed=0):
    """The whole model: a stage of all parts."""
    torch.manual_seed(seed)
    whole = Stage([Embed(), *map(Block, range(blocks)), Head()]).double()
    if tied:
        whole.parts[-1].weight = whole.parts[0].table.weight
    return whole


def blocks_for(stages):
    """As many as make the stages uneven: three parts more than stages."""
    return stages + 1


def cut(stages):
    """The numbers of the parts of each stage: one each, and three more for the middle one and the last one."""
    sizes = [1] * stages
    for stage in (stages - 1, stages // 2, stages // 2):
        sizes[stage] += 1
    bounds = [sum(sizes[:stage]) for stage in range(stages + 1)]
    return [range(*bounds[stage : stage + 2]) for stage in range(stages)]


def loss(logits, target):
    """The sum of the token losses, over the number of valid tokens of the whole step."""
    labels, count = target
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100) / count
