"""Stages whose activations are 4 MB and which dawdle, each as long as it likes: whoever waits for the wrong message, or
frees what is being sent, shows.
"""

import random
import time

import torch
from torch import nn

from pipeline import Microbatch, Pipeline, connect
from tests.training import furthest

SHAPE = 8, 65536  # 4 MB in float64


class Wide(nn.Module):
    """[8, N] → [8, N]; a weight of 8."""

    def __init__(self, stage, sleep):
        super().__init__()
        self.weight, self.sleep = nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64) + 0.01 * stage), sleep

    def forward(self, x):
        self.sleep()
        y = torch.tanh(x * self.weight[:, None])
        if y.requires_grad:
            y.register_hook(lambda grad: self.sleep())
        return y


def dot(output, target):
    """Each row by a number of its own and of the microbatch."""
    return (output.sum(1) * torch.arange(1, 9)).sum() * (target + 1)


def inputs(m):
    numbers = torch.Generator().manual_seed(m)
    return torch.randn(SHAPE, generator=numbers, dtype=torch.float64)


def runs(run, plans, longest):
    """Of each plan (losses, {stage: gradient}) after two steps. longest: seconds of a sleep."""
    draw, found = random.Random(run.rank), []
    for plan in plans:
        stages = {s: Wide(s, lambda: time.sleep(draw.random() * longest)) for s in plan.stages_of(run.rank)}
        links = connect(plan, [range(plan.ranks)], run.new_group)
        pipe = Pipeline(plan, stages, links, run.world, loss=dot)
        for _ in range(2):
            losses = pipe.step([Microbatch((inputs(m),), {}, m) for m in range(plan.microbatches)])
        found.append((losses, {s: stage.weight.grad for s, stage in stages.items()}))
    return found


def check_runs(pool, plans, longest, timeout):
    """Plans of as many ranks end in time, with the right losses and gradients."""
    ranks = plans[0].ranks
    results = pool.run(ranks, runs, plans, longest, timeout=timeout)
    for plan, of_ranks in zip(plans, zip(*results, strict=True), strict=True):
        stages = [Wide(s, lambda: None) for s in range(plan.stages)]
        expected = [dot(nn.Sequential(*stages)(inputs(m)), m) for m in range(plan.microbatches)]
        sum(expected).backward()
        losses = [loss for losses, _ in of_ranks for loss in losses]
        grads = {s: grad for _, grads in of_ranks for s, grad in grads.items()}
        assert grads.keys() == set(range(plan.stages)), plan.name
        assert furthest(torch.stack(losses), torch.stack(expected)) <= 1e-12 * max(map(abs, losses)), plan.name
        for s, stage in enumerate(stages):
            true = 2 * stage.weight.grad  # of two steps
            assert furthest(grads[s], true) <= 1e-12 * float(true.abs().max()), (plan.name, s)
