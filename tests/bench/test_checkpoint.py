"""Saving and loading beside torch.distributed.checkpoint, and that both bring back what was saved."""

import pytest
import torch

from checkpoint import bench
from tests.bench import ranks

ROUNDS = {"100 MB": 11, "400 MB": 7, "1 GB": 5}
LOADS = {"rows": ("rows", "rows"), "columns": ("columns", "rows"), "copies": ("copies", "copies")}
CASES = {
    **{f"save-{cut}": (bench.save, cut) for cut in ("rows", "copies")},
    **{case.__name__: (case, "rows") for case in (bench.stand_still, bench.durable)},
    **{f"load-{name}": (bench.load, *cuts) for name, cuts in LOADS.items()},
    "load-cold": (bench.load, "rows", "rows", True),
}


EVERYWHERE = [("100 MB", case) for case in CASES if case != "load-cold"]
EVERYWHERE += [("400 MB", case) for case in CASES if case != "save-copies"]
EVERYWHERE += [pytest.param("1 GB", case, marks=pytest.mark.drill) for case in CASES]


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize(("nbytes", "case"), EVERYWHERE)
@pytest.mark.parametrize("size", [2, 4])
def test_checkpoint(pool, benchmark, size, nbytes, case):
    build, *how = CASES[case]
    small = benchmark.disabled
    if small and nbytes != ("400 MB" if case == "load-cold" else "100 MB"):
        pytest.skip("when nothing is measured all sizes are one small state")
    ranks.record(benchmark, pool, size, build, "1 MB" if small else nbytes, *how, rounds=ROUNDS[nbytes])
    if not small:
        benchmark.extra_info["resident_bytes"] = pool.run(size, resident, build, nbytes, *how)[0]


def resident(run, build, *how):
    """How far one call raises the memory of a rank."""
    return bench.resident(run, build(run, *how))


@pytest.mark.parametrize(("cut", "saved_as"), [*LOADS.values(), ("rows", "copies"), ("copies", "columns")])
@pytest.mark.parametrize("size", [2, 4])
def test_both_bring_back_what_was_saved(pool, size, cut, saved_as):
    for filled in pool.run(size, brought_back, cut, saved_as):
        assert filled == {"checkpoint": [], "DCP": []}


def brought_back(run, cut, saved_as):
    """By competitor the names of the tensors that it did not fill with what was saved."""
    _, part, calls = bench.loads(run, "1 MB", cut, saved_as)
    expected, wrong = bench.Part.new(run, "1 MB", cut), {}
    for who in ("checkpoint", "DCP"):
        for tensor in part.tensors:
            tensor.zero_()
        calls[who]()
        wrong[who] = [n for n, (_, tensor) in expected.boxes.items() if not torch.equal(tensor, part.boxes[n][1])]
    return wrong


@pytest.mark.parametrize("cut", ["rows", "copies"])
def test_both_store_every_byte_once(pool, cut):
    payload, on_disk = pool.run(2, stored, cut)[0]
    assert payload <= on_disk["step-000001"] <= 1.3 * payload  # half a megabyte a rank, in 150 tensors
    assert payload <= on_disk["dcp"] <= 1.6 * payload


def stored(run, cut):
    """The bytes of the state, and of both checkpoints."""
    place, part, _ = bench.loads(run, "1 MB", cut, cut)
    return sum(4 * torch.Size(box.shape).numel() for box, _ in part.boxes.values()), place.nbytes()
