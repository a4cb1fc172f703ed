"""A model whose sizes divide nothing, a step of it under a stage, and rows padded by hand: for what the stages cost."""

import contextlib

import torch
from torch import nn

from zero import stage0, stage1, stage2, stage3

STAGES = (stage0, stage1, stage2, stage3)


class Block(nn.Module):
    """A layer with three parameters."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """The next token from one token. Every parameter lies in a layer."""

    def __init__(self, vocab, width, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def backward(handle, model, ids, microbatches):
    """The gradients of a step, reduced."""
    for number in range(1, microbatches + 1):
        with contextlib.nullcontext() if number == microbatches else handle.no_sync():
            model(ids).float().square().sum().backward()
    handle.finish()


def adamw(handle):
    return handle.optimizer(torch.optim.AdamW(handle.parameters(), lr=1e-3))


def padded(sizes, ranks, itemsize):
    """Elements of a row: each parameter begins at a multiple of 64 bytes, and the ranks' ranges are equal."""
    align, end = 64 // itemsize, 0
    for size in sizes:
        end = -(-end // align) * align + size
    return -(-end // ranks) * ranks
