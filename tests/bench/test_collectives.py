"""The ground's benches: our collectives beside the backend's, numbers by counter beside torch's."""

import pytest

from collectives import bench
from tests.bench import ranks

pytestmark = pytest.mark.benchmark(timer=ranks.clock)
SMALL = 1 << 12  # for a run that measures nothing


@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 24])
@pytest.mark.parametrize(
    "case",
    [(case, name) for name in bench.COLLECTIVES for case in (bench.synchronous, bench.asynchronous)],
    ids=lambda case: f"{case[1]}-{case[0].__name__}",
)
@pytest.mark.parametrize("size", [2, 4])
def test_collective(pool, benchmark, size, case, nbytes):
    ranks.record(benchmark, pool, size, *case, SMALL if benchmark.disabled else nbytes)


@pytest.mark.parametrize("draw", bench.RANDOMNESS, ids=lambda draw: draw.__name__)
def test_randomness(pool, benchmark, draw):
    ranks.record(benchmark, pool, 1, on_one_thread, draw, SMALL if benchmark.disabled else bench.NUMBERS)


def on_one_thread(run, draw, count):
    """Every rank of the pool has one thread, and these need no other rank."""
    return draw(count)
