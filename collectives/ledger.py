"""The ledger: how many bytes this rank sends, by operation and group, in two columns.

`algorithm` is the formula's: what a ring, and so NCCL, needs; a mean over the ranks where they differ. `wire` is what
the backend in use sends from *this* rank. An operation that this project carries out itself is the sum of its
exchanges; of gloo's own, found by measuring and read in its sources:

    all_reduce           ring: 2n(P-1)/P
    all_gather           ring: n(P-1)/P of the whole (below 1 MB, above it is ours)
    all_to_all           each piece to its owner: n less its own piece
    broadcast            binomial tree: rank v (from the root) sends n to v + 2^i where v < 2^i and v + 2^i < P
    reduce               ring reduce-scatter, then each piece to the root: n(P-1)/P from the root, n from the others
    gather, scatter      the pieces, from or to the root
    all_gather_object    two rings: the sizes, then every value made as long as the longest

Headers are left out: up to 4 KB a call, less than 1 % of a large message. Of other backends nothing is known here, so
there the second column is the first.
"""

import pickle
from dataclasses import dataclass

import torch.distributed as dist

from collectives.call import Call, spelled
from collectives.watch import Watcher


@dataclass
class Row:
    """What one operation on one group came to. Bytes sent by this rank."""

    op: str
    ranks: tuple[int, ...]  # of the group, counted in the world
    calls: int = 0
    algorithm: float = 0.0
    wire: float = 0.0


class Ledger(Watcher):
    """Counts a call when it has ended, so one in flight is not in it yet."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}

    def ends(self, call: Call) -> None:
        """Add the call to its row; a part of another is in that one's."""
        if call.outer is None:
            row = self._rows.setdefault((call.name, call.op), Row(call.op, call.ranks))
            row.calls += 1
            row.algorithm += algorithm_bytes(call)
            row.wire += wire_bytes(call)

    def rows(self) -> list[Row]:
        """One row for each operation and group, in the order of their first ends."""
        return list(self._rows.values())

    def table(self) -> str:
        """The rows as text, for a person."""
        head = f"{'op':22} {'ranks':12} {'calls':>8} {'algorithm':>16} {'wire':>16}   bytes sent by this rank"
        lines = [
            f"{row.op:22} {spelled(row.ranks):12} {row.calls:8,} {row.algorithm:16,.0f} {row.wire:16,.0f}"
            for row in self.rows()
        ]
        return "\n".join([head, *lines])


def algorithm_bytes(call: Call) -> float:
    """What the formula says for n = call.nbytes on P ranks."""
    n, size = call.nbytes, call.size
    match call.op:
        case "all_reduce":
            sent = 2 * n * (size - 1) / size
        case "reduce_scatter_single" | "reduce_scatter" | "all_gather_single" | "all_gather" | "broadcast" | "reduce":
            sent = n * (size - 1) / size
        case "all_to_all_single":
            sent = n - (n * call.gives[call.rank] / sum(call.gives) if n else 0)
        case "gather":
            sent = n if call.rank != call.root else 0
        case "scatter":
            sent = n * (size - 1) if call.rank == call.root else 0
        case "all_gather_object":
            sent = (size - 1) * (8 + max(len(pickle.dumps(value)) for value in call.result))
        case "send" | "recv" | "exchange" | "barrier":
            sent = n
    return sent


def wire_bytes(call: Call) -> float:
    """What this rank writes to its sockets, headers aside. Complete when the call has ended."""
    if call.parts:
        return sum(map(wire_bytes, call.parts))
    n, size = call.nbytes, call.size
    match call.op if dist.get_backend(call.group) == "gloo" else "":
        case "broadcast":
            distance = (call.rank - call.root) % size
            steps = [2**i for i in range(size.bit_length())]
            return n * sum(distance < step and distance + step < size for step in steps)
        case "reduce":
            return n * (size - 1) / size if call.rank == call.root else n if size > 1 else 0
        case _:
            return algorithm_bytes(call)
