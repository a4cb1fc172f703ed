"""A training step with our data parallels beside PyTorch's."""

import pytest

from ddp import bench
from tests.bench import ranks

pytestmark = pytest.mark.benchmark(timer=ranks.clock)


@pytest.mark.parametrize("case", [bench.step, bench.life, bench.slow_links], ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [2, 4])
def test_ddp(pool, benchmark, size, case):
    ranks.record(benchmark, pool, size, case, bench.SMALL if benchmark.disabled else bench.MODEL)
