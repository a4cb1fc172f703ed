"""What every folder's demo shares: start local ranks, collect claims, print the table, end with 1 if one does not hold.

A claim is a formula of the lecture beside what was measured on every rank. Parity, bytes and memory are judged; time is
shown, never judged, because the machine is shared. Under torchrun a demo uses the ranks it finds, alone it starts 4
itself.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from collectives import comm, runtime
from collectives.runtime import Runtime


@dataclass
class Claim:
    """One row of the table. `measured` is this rank's; `allowed` is how far it may be from `expected`."""

    name: str
    formula: str
    expected: float
    measured: float | None  # None: this machine cannot measure it
    allowed: float
    part: str  # of the demo: a heading in the table

    def holds(self) -> bool:
        """Whether the measurement is as near as it must be; an unmeasured claim is not judged."""
        return self.measured is None or abs(self.measured - self.expected) <= self.allowed


@dataclass
class Demo:
    """The claims and times of a demo, on one rank."""

    run: Runtime
    figure: Path | None = None  # the file of --figure, for rank 0 to draw
    part: str = ""  # whatever is recorded belongs to this part of the demo
    claims: list[Claim] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def claim(self, name: str, formula: str, expected: float, measured: float | None, *, allowed: float = 0.0) -> None:
        """Record that `measured` on this rank must equal `expected`, to within `allowed`, and by which formula."""
        self.claims.append(Claim(name, formula, expected, measured, allowed, self.part))

    def parity(self, name: str, error: float, allowed: float) -> None:
        """Record the largest relative error against one process; at most `allowed`."""
        self.claim(name, f"≤ {allowed:g}", 0.0, error, allowed=allowed)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Show how long a block takes."""
        began = time.perf_counter()
        yield
        self.seconds[f"{self.part}: {name}" if self.part else name] = time.perf_counter() - began

    def traffic(self, name: str, formula: str, expected: float, measured: float | None, *, calls: int) -> None:
        """Record bytes written to sockets: within 1 % of the formula plus 4 KB a call, for headers."""
        self.claim(name, formula, expected, measured, allowed=0.01 * expected + 4096 * calls)

    def finish(self) -> bool:
        """Print the table on rank 0; whether every claim holds on every rank. Collective."""
        everyone = comm.all_gather_object(self.claims, group=self.run.world)
        rows = list(zip(*everyone, strict=True))  # one a claim, one entry a rank
        if self.run.rank == 0:
            _print_table(rows, self.seconds)
        return all(claim.holds() for row in rows for claim in row)


def bytes_written() -> int | None:
    """Bytes that this process has written so far, to sockets and files alike; None where the system does not count
    them.
    """
    io = Path("/proc/self/io")
    if not io.exists():
        return None
    return next(int(line.split()[1]) for line in io.read_text().splitlines() if line.startswith("wchar"))


def bytes_since(before: int | None) -> int | None:
    """Bytes written since `bytes_written` returned `before`."""
    now = bytes_written()
    return None if now is None or before is None else now - before


def no_figure(path: Path) -> str:
    """Why nothing could be drawn into this file, "" if it can: asked before time is spent on what it shows."""
    if not importlib.util.find_spec("matplotlib"):
        return "--figure needs matplotlib, which is not installed: pip install matplotlib"
    if path.suffix not in (".png", ".svg", ".pdf"):
        return f"--figure {path}: its name must end in .png, .svg or .pdf"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as why:
        return f"--figure {path} cannot be written: {why}"
    return ""


def main(
    work: Callable[[Runtime, Demo], None],
    *,
    ranks: int = 4,
    figure: str = "",
    before: Callable[[int, float], int] = lambda ranks, timeout: 0,
) -> int:
    """Run a demo on the ranks of torchrun, or on local ranks started here; the exit status. Call it before anything
    else is computed. figure: what it draws if asked to, "" for a demo without a picture. before: given the number of
    local ranks and their time-out, runs whole jobs whose ends `work` looks at; a status that is not 0 ends the demo.
    Not called under torchrun.
    """
    parser = argparse.ArgumentParser(
        description=sys.modules[work.__module__].__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, default=ranks, help="local ranks to start when torchrun did not (default %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds until a rank that waits for another gives up"
    )
    if figure:
        parser.add_argument("--figure", type=Path, help=f"draw {figure} into this .png, .svg or .pdf; needs matplotlib")
    parser.set_defaults(figure=None)
    options = parser.parse_args()
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks} must be at least 1")
    if why := options.figure and no_figure(options.figure):
        parser.error(why)

    def rank_main() -> int:
        with runtime.start(timeout=options.timeout) as run:
            demo = Demo(run, options.figure)
            work(run, demo)
            fine = demo.finish()
        return 0 if fine else 1

    if runtime.launched():
        return rank_main()
    return before(options.ranks, options.timeout) or runtime.launch(rank_main, options.ranks)


def _print_table(rows: list[tuple[Claim, ...]], seconds: dict[str, float]) -> None:
    from rich import box  # noqa: PLC0415, only rank 0 prints
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table("claim", "formula", "expected", "all ranks", "", box=box.SIMPLE, pad_edge=False)
    part = ""
    for row in rows:
        if row[0].part != part:
            part = row[0].part
            table.add_row(f"[bold]{part}[/]")
        values = sorted(claim.measured for claim in row if claim.measured is not None)
        span = "not on this system" if not values else _number(values[0])
        if values and values[-1] != values[0]:
            span += f" … {_number(values[-1])}"
        mark = "holds" if all(claim.holds() for claim in row) else "DOES NOT HOLD"
        table.add_row(row[0].name, row[0].formula, _number(row[0].expected), span, mark)
    console = Console(highlight=False)
    console.print(table)
    if seconds:
        console.print("times on rank 0, shown and not judged:")
    for name, value in seconds.items():
        console.print(f"{value * 1000:10.1f} ms  {name}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"
