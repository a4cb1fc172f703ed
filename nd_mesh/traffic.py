"""Traffic by axis: what a rank has sent in a step, by the ledger, beside the sum of the strategies' formulas.

Every byte is in exactly one line, of one operation on one group. A line is marked where the two are not the same, where
the router decides what is sent, and where there is no formula: in the first step FSDP's ranks compare the order in
which their units ran, as a Python object, which is pickled. Not counted: what a run does around its steps.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from collectives import comm
from collectives.call import spelled
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from nd_mesh.config import Config
from nd_mesh.formulas import expected
from nd_mesh.mesh import AXES, EXPERT_GROUPS, Grid
from nd_mesh.terms import Term

DIFFERS = "DIFFERS"
EXACT = 1e-3  # bytes: of sums of thirds, which a float rounds
WIDTH = 70  # of the columns of the table
TOGETHER = "\u00a0"  # in place of a space where no line may end
HEAD = "traffic of the first step: bytes that rank {} of {} sends, measured, and by the strategies' formulas"


@dataclass
class Line:
    """One operation on one group. Bytes sent by this rank."""

    op: str
    ranks: tuple[int, ...]
    calls: int = 0
    measured: float = 0.0
    terms: list[Term] = field(default_factory=list)

    @property
    def formula(self) -> float:
        """The sum of the terms."""
        return float(sum(term.nbytes for term in self.terms))

    @property
    def mark(self) -> str:
        """What is to be said of it; nothing, where the two agree."""
        if not self.terms:
            return "no formula"
        if any(term.even for term in self.terms):
            return "depends on routing"
        return "" if abs(self.measured - self.formula) < EXACT else DIFFERS


def lines(ledger: Ledger, config: Config, rank: int) -> list[Line]:
    """The ledger's rows of a first step and the formulas' terms put together, of groups of more than one rank."""
    found: dict[tuple[tuple[int, ...], str], Line] = {}
    for row in ledger.rows():
        line = found.setdefault((row.ranks, row.op), Line(row.op, row.ranks))
        line.calls += row.calls
        line.measured += row.algorithm
    for term in expected(config, rank):
        key = term.group, term.op
        found.setdefault(key, Line(term.op, term.group)).terms.append(term)
    return [line for line in found.values() if line.measured or line.terms]


def by_axis(config: Config, rank: int) -> dict[str, float]:
    """By the formulas alone what a rank sends in its first step, by axis; no rank is needed for it."""
    grid, sent = Grid(config.mesh), defaultdict(float)
    for term in expected(config, rank):
        sent[axis_of(grid, term.group)] += float(term.nbytes)
    return dict(sent)


def axis_of(grid: Grid, ranks: tuple[int, ...]) -> str:
    """The axes along which these ranks differ: tp, or dp · cp; world, if it has several. Where they are some of an axis
    only, a group of the expert view has its own name, ep or expert data, and others, as two neighbours of a pipeline or
    ranks with the same keys, have the axis's.
    """
    axes = _axes(grid, ranks)
    if len(ranks) == grid.size() and len(axes) > 1:
        return "world"
    if len(ranks) < math.prod(getattr(grid.sizes, axis) for axis in axes):
        for name in EXPERT_GROUPS if grid.sizes.ep > 1 else ():
            if ranks in grid.groups(name):
                return name.replace("_", " ")
    return " · ".join(axes)


def _axes(grid: Grid, ranks: Sequence[int]) -> list[str]:
    places = [grid.coordinates(rank) for rank in ranks]
    return [axis for axis in AXES if len({place[axis] for place in places}) > 1]


def told(ledger: Ledger, config: Config, run: Runtime) -> str:
    """This rank's table, and what the others found in theirs. Collective over the world."""
    found = lines(ledger, config, run.rank)
    differs = comm.all_gather_object(any(line.mark == DIFFERS for line in found), group=run.world)
    wrong = [str(rank) for rank, differ in enumerate(differs) if differ]
    return "\n".join([table(found, config, run.rank), *([f"it differs on ranks {', '.join(wrong)}"] if wrong else [])])


# -- for a person ------------------------------------------------------------------------------------------------------


def table(found: Sequence[Line], config: Config, rank: int) -> str:
    """The lines as text: by axis, and of each the operations."""
    grid, axes = Grid(config.mesh), defaultdict(list)
    for line in sorted(found, key=lambda line: _order(grid, line)):
        axes[axis_of(grid, line.ranks)].append(line)
    told = [HEAD.format(rank, grid.size()), _row("axis", "ranks", "calls", "measured", "formula").rstrip()]
    for axis, several in axes.items():
        told += [_sum(axis, several), *(_sum(f"  {line.op}", [line], spelled(line.ranks)) for line in several)]
    return "\n".join([*told, _sum("all", found)])


def _order(grid: Grid, line: Line) -> tuple:
    """The outermost axis first, the world last; of an axis larger groups first, and what is sent most."""
    axes = _axes(grid, line.ranks)
    return len(axes), [AXES.index(axis) for axis in axes], -len(line.ranks), line.ranks, -line.measured


def _sum(name: str, several: Sequence[Line], ranks: str = "") -> str:
    calls, measured, formula = (
        sum(getattr(each, what) for each in several) for what in ("calls", "measured", "formula")
    )
    known = any(line.terms for line in several)
    row = _row(name, ranks, f"{calls:,}", f"{measured:,.0f}", f"{formula:,.0f}" if known else "-")
    told = [part for line in several for part in _explained(line)] if ranks else []
    return f"\n{'':{WIDTH}}".join([row + told[0], *told[1:]] if told else [row.rstrip()])


def _explained(line: Line) -> list[str]:
    """What is to be said, and the terms, largest first, those with one name as one: in lines that are not too long."""
    terms: dict[str, float] = defaultdict(float)
    for term in line.terms:
        terms[term.what] += float(term.nbytes)
    told = sorted(terms.items(), key=lambda item: -item[1])
    words = [f"{what} {nbytes:,.0f}" if len(told) > 1 else what for what, nbytes in told]
    text = ": ".join(filter(None, [line.mark, f"{TOGETHER}+ ".join(word.replace(" ", TOGETHER) for word in words)]))
    return [part.replace(TOGETHER, " ") for part in textwrap.wrap(text, 120 - WIDTH, break_on_hyphens=False)]


def _row(name: str, ranks: str, *numbers: str) -> str:
    calls, measured, formula = numbers
    return f"{name:<24}{ranks:<10}{calls:>6}{measured:>14}{formula:>14}  "
