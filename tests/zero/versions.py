"""The stages that tests run, and layers whose gradients are easily told."""

import functools

import pytest
import torch
from torch import nn

from zero import stage0, stage1, stage2, stage3

STAGES = {"stage 0": stage0.wrap, "stage 1": stage1.wrap, "stage 2": stage2.wrap, "stage 3": stage3.wrap}
SMALL = {name: functools.partial(wrap, cap=600) for name, wrap in STAGES.items()}  # several buckets
VERSIONS = {
    **{f"{name}, 600 bytes": wrap for name, wrap in SMALL.items()},
    "stage 1": stage1.wrap,
    "stage 2, 1 byte, waiting": functools.partial(stage2.wrap, cap=1, overlap=False),
    "stage 3, threshold, waiting": functools.partial(stage3.wrap, threshold=20, cap=600, overlap=False),
    "stage 3, no layers": functools.partial(stage3.wrap, layers=()),
}
each_stage = pytest.mark.parametrize("wrap", list(SMALL.values()), ids=list(SMALL))
each_version = pytest.mark.parametrize("wrap", list(VERSIONS.values()), ids=list(VERSIONS))
drilled = functools.partial(pytest.param, marks=pytest.mark.drill)  # values for which a test is a drill


def vectors(text, dtype=torch.float64):
    """A layer for each number, with a parameter of this many ones."""
    return Vectors(Vector(int(n), dtype) for n in text.split())


class Vectors(nn.ModuleList):
    """The sum of what some layers make of x, by default all."""

    def forward(self, x, which=None):
        return sum(self[i](x) for i in (range(len(self)) if which is None else which))


class Vector(nn.Module):
    """A layer that adds up all of x times its weight."""

    def __init__(self, n, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()
