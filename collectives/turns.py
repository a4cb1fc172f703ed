"""Time ours beside others on the ranks themselves: every competitor in turn, in an order that rotates.

Two processes on one machine disturb each other, and a machine is fast in one minute and slow in the next. So all
competitors run in one process group and take turns, one call each a round; a barrier stands before every turn, the
slowest rank counts, and ours is compared with another in the *same* round: the ratio's median and quartiles over the
rounds say more than two medians. The first of a round is the second of the next, so none is always the cold one.

Beside the seconds stand what does not depend on the machine: bytes written to sockets, peak memory; and the processor
time of all ranks together, which shows waiting. Standard library's counterpart: timeit; PyTorch's:
torch.utils.benchmark. docs/benchmarks.md tells how to read the result.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collectives import allocated, comm, demo
from collectives.runtime import Runtime

Call = Callable[[], object]


def nothing() -> None:
    """What a case does before or after its turns that needs nothing done."""


@dataclass(frozen=True)
class Case:
    """The same work done by several: each one's name and its call, ours first."""

    name: str
    calls: Mapping[str, Call]
    prepare: Call = nothing  # before every turn, outside the clock
    finish: Call = nothing  # after every turn, outside the clock: what the call left to others
    repeat: int = 1  # calls in a turn: many, where one is too short for the clock
    peaks: Mapping[str, Callable[[], int]] = field(default_factory=dict)  # in place of that of a call


@dataclass(frozen=True)
class Row:
    """What one competitor needs for one call, the same on every rank."""

    case: str
    who: str
    rounds: tuple[float, ...]  # seconds of each round, of the slowest rank
    cpu: float  # seconds of processor time of all ranks together, the median
    sent: int | None  # bytes written to sockets by the rank that wrote most; None where the system does not count them
    peak: int  # bytes allocated above the level before the call, of the rank with most
    ratio: tuple[float, float, float] | None  # ours / this one's seconds: quartiles over the rounds; None for ours

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


def measure(run: Runtime, cases: Sequence[Case], rounds: int) -> list[Row]:
    """All competitors of all cases in turn, `rounds` times; a row for each. Collective over the world.

    Raises ValueError for less than two rounds, which have no quartiles.
    """
    if rounds < 2:
        raise ValueError(f"{rounds} rounds have no quartiles; take at least 2")
    turns = [(case, call) for case in cases for call in case.calls.values()]
    costs = [  # warms up as well
        (_bytes_sent(run, case, call), case.peaks[who]() if who in case.peaks else _peak(run, case, call))
        for case in cases
        for who, call in case.calls.items()
    ]
    seconds = torch.zeros(2, len(turns), rounds, dtype=torch.float64)
    for k in range(rounds):
        for i in range(len(turns)):
            turn = (i + k) % len(turns)
            seconds[:, turn, k] = _timed(run, *turns[turn])
    everyone = comm.all_gather_object((seconds, costs), group=run.world)
    wall, cpu = torch.stack([times for times, _ in everyone]).unbind(1)  # [P, turns, rounds] each
    totals = [
        [_most(kind) for kind in zip(*ranks, strict=True)] for ranks in zip(*(c for _, c in everyone), strict=True)
    ]
    return _rows(cases, wall.amax(0).tolist(), cpu.sum(0).median(-1).values.tolist(), totals)


def _timed(run: Runtime, case: Case, call: Call) -> Tensor:
    case.prepare()
    _settle(run)
    comm.barrier(group=run.world)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(case.repeat):
        call()
    _settle(run)
    spent = [time.perf_counter() - wall, time.process_time() - cpu]
    case.finish()
    return torch.tensor(spent, dtype=torch.float64) / case.repeat


def _bytes_sent(run: Runtime, case: Case, call: Call) -> int | None:
    case.prepare()
    call()  # the first one makes connections
    case.finish()
    case.prepare()
    comm.barrier(group=run.world)
    before = demo.bytes_written()
    call()
    sent = demo.bytes_since(before)
    case.finish()
    return sent


def _peak(run: Runtime, case: Case, call: Call) -> int:
    def prepare() -> None:
        case.finish()
        case.prepare()

    peak = allocated.peak_bytes(call, run.device, prepare=prepare)
    case.finish()
    return peak


def _settle(run: Runtime) -> None:
    """A GPU works on after its calls have returned."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


def _most(values: Sequence[int | None]) -> int | None:
    return None if None in values else max(values)


def _rows(cases: Sequence[Case], wall: list, cpu: list, costs: list) -> list[Row]:
    rows, turn = [], 0
    for case in cases:
        ours = wall[turn]
        for who in case.calls:
            mine = wall[turn]
            ratios = statistics.quantiles(map(float.__truediv__, ours, mine), n=4)
            ratio = tuple(ratios) if mine is not ours else None
            rows.append(Row(case.name, who, tuple(mine), cpu[turn], *costs[turn], ratio))
            turn += 1
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a line each, under a heading."""
    lines = [f"{'':42}{'ms':>9}{'cpu ms':>9}   {'ours / its time':22}{'bytes sent':>14}{'peak bytes':>14}"]
    case = None
    for row in rows:
        lines += [row.case] if row.case != case else []
        case = row.case
        ratio = "{1:.2f} ({0:.2f} … {2:.2f})".format(*row.ratio) if row.ratio else ""
        sent = "?" if row.sent is None else f"{row.sent:,}"
        lines.append(f"  {row.who:40}{1e3 * row.seconds:9.3f}{1e3 * row.cpu:9.3f}   {ratio:22}{sent:>14}{row.peak:14,}")
    return "\n".join(lines)
