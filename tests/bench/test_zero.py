"""A training step with our stages beside PyTorch's, and that all of them make the same step."""

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.bench import ranks
from zero import bench


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize("case", [bench.step, bench.life], ids=lambda case: case.__name__)
@pytest.mark.parametrize("stage", bench.WAYS)
@pytest.mark.parametrize("size", [2, 4])
def test_zero(pool, benchmark, size, stage, case):
    ranks.record(benchmark, pool, size, case, stage, bench.SMALL if benchmark.disabled else bench.MODEL)


@pytest.mark.parametrize("stage", bench.WAYS)
def test_all_that_communicate_make_the_same_step(pool, stage):
    start, *ends = pool.run(2, trained, stage)[0]
    assert len(ends) >= 3
    for weights in ends:  # of two ranks every sum is ordered, so float32 leaves no room
        torch.testing.assert_close(weights, ends[0], rtol=0, atol=1e-7)
        assert (weights - start).abs().max() > 1e-5


def trained(run, stage):
    """The weights of the model before, and after two steps of everyone with a group."""
    everyone = []
    ways = {name: way for name, way in bench.WAYS[stage].items() if name != "no communication"}
    for way in (None, *ways.values()):
        model, whole = bench.Loss(bench.SMALL), contextlib.nullcontext()
        if way is not None:
            made = way(run, model)
            bench.steps(made, bench.rows(run), 2)
            handle = getattr(made.after_step, "__self__", None)
            whole = handle.whole() if handle else whole
        with whole:
            full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
            everyone.append(torch.cat([p.detach().flatten() for p in full]))
    return everyone
