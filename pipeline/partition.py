"""Where to cut: the layers of a model dealt out to stages, so that the slowest stage is as fast as can be.

A step of M microbatches takes about M - 1 times the slowest stage and once all of them, so only the slowest counts.
Layers are not alike: an embedding takes memory and no time, a head as much time as several blocks. So they are measured
at the run's shapes, and the best cut is found by dynamic programming over (stages, layers): S·L² steps.

Harlap et al. 2018, "PipeDream", 3.1; lecture A, "Stage Balance". Left out: the time of messages, ranks of unlike speed.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from collectives.saved import saving


@dataclass(frozen=True)
class Cost:
    """What a layer takes of its rank, for one microbatch."""

    forward: float  # seconds
    backward: float  # seconds
    weights: int = 0  # bytes of its parameters, once
    activations: int = 0  # bytes that forward saves for backward, a microbatch


def measure(layers: Sequence[Callable[[Any], Any]], inputs: Any, repeats: int = 5) -> list[Cost]:
    """Run layers one after the other, each on what the one before returned, and measure each: medians of `repeats`.

    inputs: of the first, of the run's shapes. Embedding, head and loss are layers as others are. Gradients that the
    parameters have are kept as they are.
    """
    costs = []
    for layer in layers:
        params = list(layer.parameters()) if isinstance(layer, nn.Module) else []
        runs = [_once(layer, inputs, params) for _ in range(repeats + 1)][1:]  # the first one warms up
        forward, backward, activations, _ = map(list, zip(*runs, strict=True))
        weights = sum(param.nbytes for param in params)
        costs.append(Cost(statistics.median(forward), statistics.median(backward), weights, activations[0]))
        inputs = runs[-1][3]
    return costs


def _once(layer: Callable[[Any], Any], inputs: Any, params: Sequence[nn.Parameter]) -> tuple[float, float, int, Any]:
    inputs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), inputs)
    with saving() as saved:
        started = _now()
        output = layer(inputs)
        forward = _now() - started
    kept = saved.nbytes(without=params)
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = [x for x in (*tree_leaves(inputs), *params) if isinstance(x, Tensor) and x.requires_grad]
    started = _now()
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(x) for x in outputs], allow_unused=True)
    return forward, _now() - started, kept, tree_map_only(Tensor, Tensor.detach, output)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def even(layers: int, stages: int) -> list[range]:
    """The usual cut: as many layers on each stage, the first ones take one more."""
    bounds = [stage * (layers // stages) + min(stage, layers % stages) for stage in range(stages + 1)]
    return [range(*bounds[i : i + 2]) for i in range(stages)]


def partition(
    costs: Sequence[Cost], stages: int, *, memory: float = math.inf, live: Sequence[float] = ()
) -> list[range]:
    """The layers of each stage, one at least, so that the slowest stage's time (forward and backward) is the smallest.

    memory: bytes that a stage may have, of weights and of the activations of `live[s]` microbatches (default 1): what
    the simulator gives as peak. Raises ValueError if no cut fits.
    """
    if not 0 < stages <= len(costs):
        raise ValueError(f"{len(costs)} layers do not make {stages} stages: use 1 to {len(costs)} stages")
    live = live or [1] * stages
    times, weights, activations = (
        [0, *itertools.accumulate(numbers)]
        for numbers in zip(*((c.forward + c.backward, c.weights, c.activations) for c in costs), strict=True)
    )

    def time_of(stage: int, layers: range) -> float:
        ends = layers.start, layers.stop
        time_taken, own, kept = (sums[ends[1]] - sums[ends[0]] for sums in (times, weights, activations))
        return time_taken if own + live[stage] * kept <= memory else math.inf

    # best[end]: the slowest of the stages so far, which have the first `end` layers, and the cut that makes it so
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for stage in range(stages):
        found: dict[int, tuple[float, list[range]]] = {}
        for end in range(stage + 1, len(costs) + 1):
            # IDEA: the best cut of some layers is the best cut of fewer, and one more stage: try all places for it.
            tried = [
                (max(slowest, time_of(stage, range(start, end))), [*cut, range(start, end)])
                for start, (slowest, cut) in best.items()
                if start < end
            ]
            found[end] = min(tried, key=lambda each: each[0])
        best = found
    slowest, cut = best[len(costs)]
    if math.isinf(slowest):
        raise ValueError(f"no cut of {len(costs)} layers into {stages} stages fits {memory:.0f} bytes: use more stages")
    return cut
