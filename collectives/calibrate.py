"""How good the model of cost.py is on this machine: two numbers measured, then every algorithm beside its prediction.

    python -m collectives calibrate                             worlds of 2, 4 and 8 local ranks
    python -m collectives calibrate --ranks 2 --rounds 3        a short form
    python -m collectives calibrate --figure runs/bus.png       1 KiB to 64 MiB, and a picture: bus bandwidth over size

For each world all ranks shift messages of 1 KiB to 16 MiB around a ring at once, an exchange with both neighbours; the
line α + n / bandwidth is laid through the medians. With these two numbers cost.py predicts each collective, which then
runs, in turn with its competitors (turns.py). It reports and decides nothing: the rule of comm.py stands in code.
"""

import argparse
import functools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collectives import comparison, cost, p2p, runtime
from collectives.competitors import BACKEND, MODULES, NODE, able, competitors, predicted
from collectives.cost import Link, Topology
from collectives.demo import no_figure
from collectives.runtime import Runtime
from collectives.turns import Case, Row

SHIFTS = tuple(1 << i for i in range(10, 25, 2))  # bytes
MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)  # bytes of the whole message of a collective
SWEEP = tuple(1 << i for i in range(10, 27, 2))  # the same, for the picture
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
DRAWN = COLLECTIVES[:3]
SHIFT = "shift"

OFF = """measured / predicted
  above 1: additions, and what each message costs the processor, are in no α; a step of many messages pays α once
  below 1: the shift was fitted with all ranks sending; where few send at a time, they have the cores to themselves
  and on the whole: ranks that wait to be woken, other work on the machine; below 1 MiB claim nothing"""


@dataclass(frozen=True)
class Point:
    """One collective of n bytes by one competitor, in seconds."""

    collective: str
    who: str
    n: int
    measured: float
    predicted: float | None  # None for the backend's, whose algorithm is its own affair

    @property
    def ratio(self) -> float | None:
        """Measured / predicted."""
        return None if self.predicted is None else self.measured / self.predicted


@dataclass(frozen=True)
class World:
    """What was found on this many ranks."""

    size: int
    link: Link
    shifts: Mapping[int, float]  # bytes → seconds
    points: tuple[Point, ...]


# -- on the ranks ------------------------------------------------------------------------------------------------------


def cases(run: Runtime, sizes: Sequence[int]) -> list[Case]:
    """The shifts, then every collective by all who can do it."""
    return [_shift(run, n) for n in SHIFTS] + [_collective(run, name, n) for name in COLLECTIVES for n in sizes]


def _shift(run: Runtime, n: int) -> Case:
    leaving, arriving = torch.zeros(2, n // 4, device=run.device)
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    shift = lambda: p2p.exchange([(leaving, after)], [(arriving, before)], group=run.world).wait()  # noqa: E731
    return Case(_name(SHIFT, n), {SHIFT: shift}, repeat=_repeat(n))


def _collective(run: Runtime, collective: str, n: int) -> Case:
    return Case(_name(collective, n), competitors(collective, n, run), repeat=_repeat(n))


def _machine(link: Link) -> Topology:
    """Nodes for the hierarchical algorithm, whose two levels are the same link here."""
    return Topology(link, link, NODE)


def _name(collective: str, n: int) -> str:
    return f"{collective} of {n:,} bytes"


def _repeat(n: int) -> int:
    return 4 if n < 1 << 18 else 1


# -- what they found ---------------------------------------------------------------------------------------------------


def fit(seconds: Mapping[int, float]) -> Link:
    """The line α + n / bandwidth through seconds by bytes: least squares of the relative errors, so that short messages
    count as much as long ones. A latency below 0, which noise can make, is 0.

    Raises ValueError where the seconds do not grow with the bytes.
    """
    n, t = np.array(list(seconds)), np.array(list(seconds.values()))
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(t)))
    if per_byte <= 0:
        raise ValueError(f"longer messages took no longer ({seconds}): there is no bandwidth; measure more rounds")
    return Link(max(0.0, float(latency)), 1 / float(per_byte))


def world(size: int, rows: Sequence[Row], sizes: Sequence[int]) -> World:
    """The link of these ranks, and each measurement beside what it predicts."""
    seconds = {(row.case, row.who): row.seconds for row in rows}
    shifts = {n: seconds[_name(SHIFT, n), SHIFT] for n in SHIFTS}
    link = fit(shifts)
    points = [
        Point(collective, who, n, seconds[_name(collective, n), who], _seconds(collective, who, n, size, link))
        for collective in COLLECTIVES
        for n in sizes
        for who in able(collective, size, n)
    ]
    return World(size, link, shifts, tuple(points))


def _seconds(collective: str, who: str, n: int, ranks: int, link: Link) -> float | None:
    found = predicted(collective, who, n, ranks, _machine(link))
    return found and found.seconds


# -- for a reader ------------------------------------------------------------------------------------------------------


def report(found: World) -> str:
    """The fit and the table of one world, as text."""
    link = found.link
    off = [seconds / (link.latency + n / link.bandwidth) for n, seconds in found.shifts.items()]
    lines = [
        f"{found.size} ranks on {os.cpu_count()} cores",
        f"the shift: α {1e6 * link.latency:,.0f} µs, {link.bandwidth / 1e9:.3f} GB/s of each rank in each direction;"
        f" measured / fitted {min(off):.2f} … {max(off):.2f}",
        f"{'ms: predicted → measured × ratio':28}" + "".join(f"{_bytes(n):>23}" for n in MESSAGES)[4:],
    ]
    lines += [
        f"{collective:15}{who:13}"
        + "".join(_cell(point) for point in _points(found, collective, who) if point.n in MESSAGES)
        for collective in COLLECTIVES
        for who in able(collective, found.size)
    ]
    worst = max((point for point in found.points if point.ratio), key=lambda point: abs(math.log(point.ratio)))
    told = f"farthest from the model: {worst.collective} by {worst.who} of {worst.n:,} bytes, × {worst.ratio:.2f}"
    return "\n".join([*lines, told])


def _points(found: World, collective: str, who: str) -> list[Point]:
    """By size."""
    return [point for point in found.points if (point.collective, point.who) == (collective, who)]


def _cell(point: Point) -> str:
    if point.ratio is None:
        return f"{1e3 * point.measured:17.2f}".ljust(23)
    return f"{1e3 * point.predicted:8.2f} → {1e3 * point.measured:6.2f} ×{point.ratio:4.1f}"


def _bytes(n: int) -> str:
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


def draw(worlds: Sequence[World], path: Path) -> None:
    """Bus bandwidth over size: a row of panels for each of three collectives, a column for each world."""
    import matplotlib  # noqa: PLC0415, an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    shape = {"figsize": (4 * len(worlds) + 2, 3.5 * len(DRAWN)), "layout": "constrained"}
    figure, panels = plt.subplots(len(DRAWN), len(worlds), squeeze=False, sharex=True, sharey=True, **shape)
    for row, collective in zip(panels, DRAWN, strict=True):
        for panel, found in zip(row, worlds, strict=True):
            _draw_panel(panel, found, collective)
        row[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.supxlabel("bytes of the whole message")
    figure.supylabel("bus bandwidth in bytes/s: measured (points), predicted (dashed), of the link (dotted)")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_panel(panel: Any, found: World, collective: str) -> None:
    colors = {who: f"C{i}" for i, who in enumerate(MODULES)}
    for who in able(collective, found.size):
        points = _points(found, collective, who)
        n, color = [point.n for point in points], colors.get(who, "black")
        panel.loglog(n, [_bus(found, p, p.measured) for p in points], "o-", ms=3, lw=1.2, label=who, color=color)
        if who != BACKEND:
            panel.loglog(n, [_bus(found, p, p.predicted) for p in points], "--", lw=0.8, color=color)
    panel.axhline(found.link.bandwidth, color="black", ls=":", lw=1)
    panel.set_title(f"{collective}, {found.size} ranks", fontsize=9)


def _bus(found: World, point: Point, seconds: float) -> float:
    return cost.bus_bandwidth(point.collective, point.n, found.size, seconds)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m collectives calibrate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="worlds to measure (default 2 4 8)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default %(default)s)")
    parser.add_argument("--figure", type=Path, help="draw it into this .png, .svg or .pdf as well; needs matplotlib")
    options = parser.parse_args(arguments)
    if runtime.launched():
        parser.error("it starts its own ranks: run it with python, not with torchrun")
    if options.rounds < 2 or min(options.ranks) < 2:
        parser.error("it takes at least 2 rounds and 2 ranks")
    if why := options.figure and no_figure(options.figure):
        parser.error(why)
    worlds, sizes = [], SWEEP if options.figure else MESSAGES
    for size in options.ranks:
        rows = comparison.whole_run(functools.partial(cases, sizes=sizes), size, options.rounds)
        if rows is None:
            return 1
        worlds.append(world(size, rows, sizes))
        print(f"\n{report(worlds[-1])}", flush=True)
    print(f"\n{OFF}")
    if options.figure:
        draw(worlds, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
