"""Every collective by all who can do it, as a table: formula, bytes sent, steps, time, bus bandwidth.

Bytes are those of the sockets, steps are counted by a logical clock (critical_path.py); of our algorithms both are held
against cost.py, rank by rank. Of the backend's own only the outside is seen. Times are of the slowest rank, shown and
never judged.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from collectives import comm, cost, cost_table, demo
from collectives.competitors import COLLECTIVES, NODE, Call, competitors, predicted
from collectives.cost import LINKS, Cost, Topology
from collectives.critical_path import CriticalPath, Event, steps
from collectives.runtime import Runtime
from collectives.watch import watching

TIMES = 5  # calls, of which the median counts
HEADERS = 4096  # bytes an exchange, at the most


@dataclass(frozen=True)
class Measured:
    """One call on one rank."""

    sent: int | None  # bytes to the sockets; None where the system does not count them
    events: Sequence[Event]
    seconds: tuple[float, ...]

    @property
    def exchanges(self) -> int:
        """How many were posted; each is two events."""
        return sum(posted is not None for _, posted in self.events)


@dataclass(frozen=True)
class Row:
    """A collective of n bytes by one competitor, the same on every rank."""

    collective: str
    who: str
    n: int
    expected: Cost | None  # None for the backend
    ranks: Sequence[Measured]

    @property
    def steps(self) -> int:
        """Messages that stood one after another."""
        return steps([rank.events for rank in self.ranks])

    @property
    def seconds(self) -> float:
        """Of the slowest rank, in the median of the calls."""
        return statistics.median(max(times) for times in zip(*(rank.seconds for rank in self.ranks), strict=True))

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that the busiest link must have carried, however it was done."""
        return cost.bus_bandwidth(self.collective, self.n, len(self.ranks), self.seconds)

    def sends_as_predicted(self) -> bool:
        """Whether every rank sent what the formula says, within 1 % and the headers."""
        return all(
            rank.sent is None or abs(rank.sent - sent) <= 0.01 * sent + HEADERS * rank.exchanges
            for rank, sent in zip(self.ranks, self.expected.sent_by, strict=True)
        )


def line_up(run: Runtime, n: int) -> list[Row]:
    """A row for each, of a message of n bytes, float32 numbers that the ranks divide. Collective over the world."""
    machine = Topology(LINKS["NVLink 4 (H100)"], LINKS["InfiniBand NDR"], NODE)  # its times are not asked for
    rows = []
    for collective in COLLECTIVES:
        size = 1 if collective == "barrier" else n
        for who, call in competitors(collective, n, run).items():
            ranks = comm.all_gather_object(_measure(run, call), group=run.world)
            expected = predicted(collective, who, size, run.size, machine)
            rows.append(Row(collective, who, size, expected, ranks))
    return rows


def as_predicted(row: Row) -> bool:
    """Whether one of our algorithms did what its formulas say."""
    return row.sends_as_predicted() and row.steps == row.expected.steps


def _measure(run: Runtime, call: Call) -> Measured:
    call()  # the first one makes connections
    comm.barrier(group=run.world)
    before = demo.bytes_written()
    with watching(path := CriticalPath()):
        call()
    sent = demo.bytes_since(before)
    return Measured(sent, path.events, tuple(_timed(run, call) for _ in range(TIMES)))


def _timed(run: Runtime, call: Call) -> float:
    comm.barrier(group=run.world)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def table(rows: Sequence[Row]) -> str:
    """The rows as text, under a heading."""
    lines = [f"{'':28}{'sent by the busiest rank':>26}{'measured':>14}{'steps':>23}{'ms':>9}{'bus MB/s':>10}"]
    before = None
    for row in rows:
        lines.append(f"{row.collective if row.collective != before else '':15}{row.who:13}{_line(row)}")
        before = row.collective
    return "\n".join([*lines, *cost_table.remarks(len(rows[0].ranks))])


def _line(row: Row) -> str:
    sent = [rank.sent for rank in row.ranks]
    measured = "?" if None in sent else f"{max(sent):,}"
    bus = "" if row.collective == "barrier" else f"{row.bus_bandwidth / 1e6:,.0f}"
    if row.expected is None:
        return f"{'':26}{measured:>14}{'':23}{1e3 * row.seconds:9.2f}{bus:>10}"
    formula = cost.ALGORITHMS[row.collective, row.who]
    return (
        f"{formula.sent:>12}{row.expected.sent:14,.0f}{measured:>14}{formula.steps:>15} = {row.steps:<5}"
        f"{1e3 * row.seconds:9.2f}{bus:>10}{'' if as_predicted(row) else '  DOES NOT HOLD'}"
    )
