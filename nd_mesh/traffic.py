"""Traffic by axis: what a rank has sent in a step, by the ledger, beside the sum of the strategies' formulas.

Every byte is in exactly one line, of one operation on one group. A line has no formula where what is sent is a Python
object, which is pickled: in its first step FSDP compares the order in which units ran.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from collectives.call import spelled
from collectives.ledger import Ledger
from nd_mesh.terms import Term

EXACT = 1e-3  # bytes: sums of thirds of bytes are rounded


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
        return "" if abs(self.measured - self.formula) < EXACT else "differs"


def lines(ledger: Ledger, terms: Sequence[Term]) -> list[Line]:
    """The ledger's rows and the terms, put together; what is neither sent nor expected is left out."""
    found: dict[tuple[tuple[int, ...], str], Line] = {}
    for row in ledger.rows():
        line = found.setdefault((row.ranks, row.op), Line(row.op, row.ranks))
        line.calls += row.calls
        line.measured += row.algorithm
    for term in terms:
        key = term.group.ranks, term.op
        found.setdefault(key, Line(term.op, term.group.ranks)).terms.append(term)
    return [line for line in found.values() if line.measured or line.terms]
