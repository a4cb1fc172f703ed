"""A training step with our fully_shard beside PyTorch's, and that both make the same step with the same collectives."""

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp import bench
from tests.bench import ranks

PLACES = [(2, "resharded"), (2, "kept"), (4, "resharded"), (4, "kept"), (4, "hybrid")]


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize("case", [bench.step, bench.life], ids=lambda case: case.__name__)
@pytest.mark.parametrize("parameters", bench.SIZES)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}-{place[1]}")
def test_fsdp(pool, benchmark, place, parameters, case):
    size, policy = place
    small = benchmark.disabled
    if small and parameters != "3M":
        pytest.skip("when nothing is measured both sizes are one small model")
    ranks.record(benchmark, pool, size, case, policy, parameters, bench.SMALL if small else bench.SIZES[parameters])
    if not small:
        benchmark.extra_info["collectives"] = pool.run(size, counted, policy)[0]


@pytest.mark.parametrize(("size", "policy"), PLACES)
def test_both_start_the_same_collectives(pool, size, policy):
    for sides in pool.run(size, counted, policy):
        ours, theirs = sides["fsdp"], sides["fully_shard"]
        assert ours.pop("agreement") == (2 if policy == "hybrid" else 1)
        units, replicas = bench.SMALL.layers + 1, [bench.SMALL.layers + 1] if policy == "hybrid" else []
        gathers = units if policy == "kept" else 2 * units - 1
        assert list(ours.values()) == list(theirs.values()) == [gathers, units, *replicas]


def counted(run, policy):
    """The collectives of a step of each, by name."""
    names = [name for name in bench.WAYS[policy] if name != "no communication"]
    return {name: dict(bench.collectives(run, bench.WAYS[policy][name], bench.SMALL)) for name in names}


@pytest.mark.parametrize(("size", "policy"), [(2, "resharded"), (2, "kept"), (4, "hybrid")])
def test_all_that_communicate_make_the_same_step(pool, size, policy):
    start, *ends = pool.run(size, trained, policy)[0]
    assert len(ends) >= 2
    for weights in ends:
        torch.testing.assert_close(weights, ends[0], rtol=0, atol=1e-7)
        assert (weights - start).abs().max() > 1e-5


def trained(run, policy):
    """The weights of the model before, and after two steps of everyone with a group whose parameters have names."""
    everyone = []
    ways = {name: way for name, way in bench.WAYS[policy].items() if name.startswith(("fsdp", "fully"))}
    ways.pop("fsdp.simple", None)  # its parameters are rows
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
