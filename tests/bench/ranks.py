"""Benches on the pool's ranks, handed to pytest-benchmark: its clock is the ranks' own.

pytest-benchmark would time a call in the test's process, where nothing is computed, and with it the pool's pipes. So
the ranks measure (collectives/turns.py), ours and the others in turn, and each round of ours is then played back: the
clock goes on by what that round took on its slowest rank. A file of benches says

    pytestmark = pytest.mark.benchmark(timer=ranks.clock)
"""

from collections.abc import Callable
from typing import Any

from collectives import comm, turns
from collectives.runtime import Runtime
from collectives.turns import Case, Row
from tests.pool import Pool

ROUNDS = 21


class Clock:
    """Stands still, but for `advance`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


clock = Clock()


def record(benchmark: Any, pool: Pool, size: int, build: Callable[..., Case], *args: Any, rounds: int = ROUNDS) -> None:
    """Measure the case that `build(runtime, *args)` makes on each of this many ranks. Ours goes to `benchmark`, round
    by round, the others into its extra_info.

    With --benchmark-disable every competitor is called once, no more: pass small sizes then.
    """
    if benchmark.disabled:
        benchmark.pedantic(pool.run, (size, called_once, build, args))
        return
    ours, *others = pool.run(size, measured, build, args, rounds, timeout=120)[0]
    seconds = iter(ours.rounds)
    benchmark.pedantic(lambda: clock.advance(next(seconds)), rounds=rounds)
    benchmark.extra_info.update(ranks=size, case=ours.case, who=ours.who, **costs(ours))
    benchmark.extra_info["beside"] = {
        other.who: {"median_seconds": other.seconds, "ours_over_its": list(other.ratio), **costs(other)}
        for other in others
    }


def called_once(run: Runtime, build: Callable[..., Case], args: tuple) -> None:
    """A rank's job when nothing is measured."""
    case = build(run, *args)
    for call in case.calls.values():
        case.prepare()
        call()
        case.finish()
    comm.barrier(group=run.world)  # with the case goes what rank 0 made for all, as a folder


def measured(run: Runtime, build: Callable[..., Case], args: tuple, rounds: int) -> list[Row]:
    """A rank's job."""
    return turns.measure(run, [build(run, *args)], rounds)


def costs(row: Row) -> dict[str, Any]:
    """What stands beside the seconds, in the JSON's names."""
    return {"cpu_seconds": row.cpu, "sent_bytes": row.sent, "peak_bytes": row.peak}
