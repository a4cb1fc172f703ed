"""Stages that sleep: so long in F, so long in I, so long in W, and in a B for the sum of the two."""

import contextlib
import time

import torch
from torch import nn

from collectives import comm
from collectives.timeline import Timeline
from collectives.watch import watching
from pipeline import Microbatch, Pipeline, connect
from pipeline.picture import bubble, gathered, measured, step_time


class Dozes(torch.autograd.Function):
    """x as it is; its gradient comes after a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        time.sleep(ctx.seconds)
        return dout, None


class Layer(nn.Module):
    """[1] → [1]. What comes first has a weight, so that a first stage can be split behind it."""

    def __init__(self, forward, input, weight):
        super().__init__()
        self.seconds, self.wide_awake = (forward, input, weight), False
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)

    def forward(self, x):
        forward, input, weight = (0.0, 0.0, 0.0) if self.wide_awake else self.seconds
        time.sleep(forward)
        x = self.first(x)
        return Dozes.apply(x, input) * Dozes.apply(self.second.weight, weight)[0]


def total(output, target):
    return output.sum()


def dozing(run, plan, layers):
    """(step time, bubble), the same on every rank. layers: of each stage their seconds."""
    stages = {s: nn.Sequential(*(Layer(*seconds) for seconds in layers[s])) for s in plan.stages_of(run.rank)}
    links = connect(plan, [range(run.size)], run.new_group)
    pipe = Pipeline(plan, stages, links, run.world, loss=total, timeline=(timeline := Timeline()))
    microbatches = [Microbatch((torch.ones(1),)) for _ in range(plan.microbatches)]
    for wide_awake in (True, False):  # a first step that costs nothing
        for layer in (layer for stage in stages.values() for layer in stage):
            layer.wide_awake = wide_awake
        comm.barrier(group=run.world)
        with contextlib.nullcontext() if wide_awake else watching(timeline):
            pipe.step(microbatches)
    spans = measured(gathered(timeline, run.world))
    return step_time(spans), bubble(spans)
