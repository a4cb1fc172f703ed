"""How good the model of cost.py is on this machine: two numbers measured, then every algorithm beside its prediction.

    python -m collectives.calibrate                             worlds of 2, 4 and 8 local ranks
    python -m collectives.calibrate --ranks 2 --rounds 3        a short form
    python -m collectives.calibrate --figure runs/bus.png       and a picture: bus bandwidth over size

For each world all ranks shift messages of 1 KiB to 16 MiB around a ring at once, an exchange with both neighbours; the
line α + n / bandwidth is laid through the medians. With these two numbers cost.py predicts each collective, which then
runs, in turn with its competitors (turns.py). It reports and decides nothing: the rule of comm.py stands in code.
"""

import argparse
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives import comm, comparison, cost, p2p
from collectives.algorithms import direct, doubling, halving, naive, pairwise, ring, star, tree
from collectives.cost import Link, Topology
from collectives.runtime import Runtime
from collectives.turns import Case, Row

SHIFTS = tuple(1 << i for i in range(10, 25, 2))  # bytes
MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)  # bytes of the whole message of a collective
ALGORITHMS = (naive, star, tree, doubling, halving, ring, pairwise, direct)
BACKEND = "the backend's"
SHIFT = "shift"

OFF = """measured / predicted
  above 1: additions, and what each message costs the processor, are in no α; a step of many messages pays α once
  below 1: the shift was fitted with all ranks sending; where few send at a time, they have the cores to themselves
  and on the whole: ranks that wait to be woken, other work on the machine; below 1 MiB claim nothing"""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Buffers:
    """A message on this rank: the whole and another as long, and a piece of it. Zeros, so that sums stay small."""

    whole: Tensor
    other: Tensor
    piece: Tensor

    @classmethod
    def of(cls, n: int, run: Runtime) -> "Buffers":
        """Of n bytes, rounded down to whole float32 numbers for each rank."""
        numbers = n // 4 // run.size * run.size
        whole = torch.zeros(numbers, device=run.device)
        return cls(whole, torch.zeros_like(whole), torch.zeros(numbers // run.size, device=run.device))


# How each collective is called, whichever algorithm it is; and those that comm.py leaves to the backend at every size.
COLLECTIVES: MappingProxyType[str, Callable[[Call, Buffers, Any], Any]] = MappingProxyType(
    {
        "all_reduce": lambda call, b, group: call(b.whole, comm.SUM, group=group),
        "reduce_scatter": lambda call, b, group: call(b.piece, b.whole, comm.SUM, group=group),
        "all_gather": lambda call, b, group: call(b.whole, b.piece, group=group),
        "all_to_all": lambda call, b, group: call(b.other, b.whole, group=group),
        "broadcast": lambda call, b, group: call(b.whole, 0, group=group),
    }
)
BACKENDS: MappingProxyType[str, Call] = MappingProxyType(
    {"all_reduce": comm.all_reduce, "all_to_all": comm.all_to_all_single, "broadcast": comm.broadcast}
)


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


def cases(run: Runtime) -> list[Case]:
    """The shifts, then every collective by all who can do it."""
    return [_shift(run, n) for n in SHIFTS] + [_collective(run, name, n) for name in COLLECTIVES for n in MESSAGES]


def _shift(run: Runtime, n: int) -> Case:
    leaving, arriving = torch.zeros(2, n // 4, device=run.device)
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    shift = lambda: p2p.exchange([(leaving, after)], [(arriving, before)], group=run.world).wait()  # noqa: E731
    return Case(_name(SHIFT, n), {SHIFT: shift}, repeat=_repeat(n))


def _collective(run: Runtime, collective: str, n: int) -> Case:
    buffers, how = Buffers.of(n, run), COLLECTIVES[collective]
    calls = {who: functools.partial(how, call, buffers, run.world) for who, call in competitors(collective).items()}
    return Case(_name(collective, n), calls, repeat=_repeat(n))


def competitors(collective: str) -> dict[str, Call]:
    """All who can do it: our algorithms by name, then the backend."""
    ours = {module_name(module): getattr(module, collective, None) for module in ALGORITHMS}
    return {who: call for who, call in {**ours, BACKEND: BACKENDS.get(collective)}.items() if call}


def module_name(module: ModuleType) -> str:
    """The algorithm's, as cost.py has it."""
    return module.__name__.rpartition(".")[2]


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


def world(size: int, rows: Sequence[Row]) -> World:
    """The link of these ranks, and each measurement beside what it predicts."""
    seconds = {(row.case, row.who): row.seconds for row in rows}
    shifts = {n: seconds[_name(SHIFT, n), SHIFT] for n in SHIFTS}
    link = fit(shifts)
    machine = Topology(link, link, per_node=size)
    points = [
        _point(collective, who, n // 4 // size * size * 4, seconds[_name(collective, n), who], machine)
        for collective in COLLECTIVES
        for who in competitors(collective)
        for n in MESSAGES
    ]
    return World(size, link, shifts, tuple(points))


def _point(collective: str, who: str, n: int, measured: float, machine: Topology) -> Point:
    if who == BACKEND:
        return Point(collective, who, n, measured, None)
    choice = {"chunks": max(1, -(-n // ring.CHUNK))} if (collective, who) == ("broadcast", "ring") else {}
    return Point(collective, who, n, measured, cost.of(collective, who, n, machine.per_node, machine, **choice).seconds)


# -- for a reader ------------------------------------------------------------------------------------------------------


def report(found: World) -> str:
    """The fit and the table of one world, as text."""
    link = found.link
    off = [seconds / (link.latency + n / link.bandwidth) for n, seconds in found.shifts.items()]
    lines = [
        f"{found.size} ranks",
        f"the shift: α {1e6 * link.latency:,.0f} µs, {link.bandwidth / 1e9:.3f} GB/s of each rank in each direction;"
        f" measured / fitted {min(off):.2f} … {max(off):.2f}",
        f"{'ms: predicted → measured × ratio':28}" + "".join(f"{_bytes(n):>23}" for n in MESSAGES)[4:],
    ]
    lines += [
        f"{collective:15}{who:13}" + "".join(map(_cell, _points(found, collective, who)))
        for collective in COLLECTIVES
        for who in competitors(collective)
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

    shown = ("all_reduce", "reduce_scatter", "all_gather")
    shape = {"figsize": (4 * len(worlds) + 2, 3.5 * len(shown)), "layout": "constrained"}
    figure, panels = plt.subplots(len(shown), len(worlds), squeeze=False, sharex=True, sharey=True, **shape)
    for row, collective in zip(panels, shown, strict=True):
        for panel, found in zip(row, worlds, strict=True):
            _draw_panel(panel, found, collective)
        row[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.supxlabel("bytes of the whole message")
    figure.supylabel("bus bandwidth in bytes/s: measured (points), predicted (dashed), of the link (dotted)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_panel(panel: Any, found: World, collective: str) -> None:
    colors = {module_name(module): f"C{i}" for i, module in enumerate(ALGORITHMS)}
    for who in competitors(collective):
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
        prog="python -m collectives.calibrate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="worlds to measure (default 2 4 8)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default %(default)s)")
    parser.add_argument("--figure", type=Path, help="draw it into this file as well; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.rounds < 2 or min(options.ranks) < 2:
        parser.error("it takes at least 2 rounds and 2 ranks")
    if options.figure and not importlib.util.find_spec("matplotlib"):
        parser.error("--figure needs matplotlib, which is not installed: pip install matplotlib")
    worlds = []
    for size in options.ranks:
        rows = comparison.whole_run(cases, size, options.rounds)
        if rows is None:
            return 1
        worlds.append(world(size, rows))
        print(f"\n{report(worlds[-1])}", flush=True)
    print(f"\n{OFF}")
    if options.figure:
        draw(worlds, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
