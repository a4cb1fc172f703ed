"""Speed of the ground: numbers by counter beside torch's generators, the direct exchange beside gloo's own collectives.

    python -m collectives.bench                  all of it
    python -m collectives.bench --ranks 2        the exchange on 2 ranks only

All cases of a table take turns, in an order that rotates from round to round, with a barrier before each; of a round
the slowest rank counts. Shown are medians over the rounds, and of the ratio ours / theirs of each round the median and
the quartiles. Bytes are what rank 0 wrote to its sockets in one call. Randomness runs on one thread. Watchers are timed
around an operation that does nothing.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from collectives import comm, demo, rng, runtime
from collectives.algorithms import direct
from collectives.journal import Journal
from collectives.layout import Box, Held, Normal
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.watch import watched, watching

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}  # of the whole message
NUMBERS = 1 << 20
PIECE = 1 << 14  # numbers at a time, as rng.fill draws them

# torch 2.13 renamed these two.
_ALL_GATHER: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Case:
    """The same work done by us and by the built-in, and how often a turn repeats it."""

    name: str
    beside: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    calls: int = 1


@dataclass(frozen=True)
class Row:
    """What came out, per call: seconds and bytes sent of each, and the quartiles of ours / theirs."""

    case: str
    beside: str
    ours: float
    theirs: float
    ratio: tuple[float, float, float]
    sent: tuple[int, int]


def randomness(run: Runtime, rounds: int) -> list[Row]:
    """2^20 numbers of each kind, on one thread."""
    torch.set_num_threads(1)
    index = torch.arange(NUMBERS)
    pieces = index.split(PIECE)
    width = 1024
    rows = torch.arange(NUMBERS // width)
    x = torch.randn(len(rows), width)
    param = nn.Parameter(torch.empty_like(x))
    param.held = Held("weight", (Box.whole(x.shape),), Normal(0.02), decay=True)

    def in_pieces(draw: Callable[[int, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: [draw(1, piece) for piece in pieces]

    def torch_rand(dtype: torch.dtype) -> Callable[[], object]:
        return lambda: torch.rand(NUMBERS, dtype=dtype)

    def torch_randn(dtype: torch.dtype) -> Callable[[], object]:
        return lambda: torch.randn(NUMBERS, dtype=dtype)

    cases = [
        Case("uniform", "rand, float64", in_pieces(rng.uniform), torch_rand(torch.float64)),
        Case("uniform", "rand, float32", in_pieces(rng.uniform), torch_rand(torch.float32)),
        Case("uniform, all at once", "rand, float64", lambda: rng.uniform(1, index), torch_rand(torch.float64)),
        Case("normal", "randn, float64", in_pieces(rng.normal), torch_randn(torch.float64)),
        Case("normal", "randn, float32", in_pieces(rng.normal), torch_randn(torch.float32)),
        Case("fill a float32 weight", "nn.init.normal_", lambda: rng.fill(param, 1), lambda: nn.init.normal_(param)),
        Case("keep", "rand >= p", lambda: rng.keep(1, rows, width, 0.1), lambda: torch.rand(len(rows), width) >= 0.1),
        Case("dropout", "F.dropout", lambda: rng.dropout(x, 1, rows, 0.1), lambda: functional.dropout(x, 0.1)),
        Case("permutation", "randperm", lambda: rng.permutation(1, index, NUMBERS), lambda: torch.randperm(NUMBERS)),
    ]
    return measure(run, cases, rounds)


def exchanges(run: Runtime, rounds: int) -> list[Row]:
    """The direct exchange beside the collectives of the backend, float32, by size of the whole message."""
    group, cases = run.world, []
    for size, length in SIZES.items():
        whole, piece = torch.zeros(length // 4), torch.zeros(length // 4 // run.size)
        calls = max(1, (1 << 20) // length)
        pairs = {
            "all_reduce": (
                lambda x=whole: direct.all_reduce(x, dist.ReduceOp.SUM, group=group).wait(),
                lambda x=whole: dist.all_reduce(x, group=group),
            ),
            "reduce_scatter": (
                lambda x=whole, out=piece: direct.reduce_scatter(out, x, dist.ReduceOp.SUM, group=group).wait(),
                lambda x=whole, out=piece: _REDUCE_SCATTER(out, x, group=group),
            ),
            "all_gather": (
                lambda out=whole, x=piece: direct.all_gather(out, x, group=group).wait(),
                lambda out=whole, x=piece: _ALL_GATHER(out, x, group=group),
            ),
        }
        cases += [Case(f"{name} of {size}", "gloo's", *pair, calls) for name, pair in pairs.items()]
    return measure(run, cases, rounds)


def watchers(run: Runtime, rounds: int) -> dict[str, float]:
    """Microseconds of the processor for a call that does nothing, bare and watched: medians over the rounds."""

    def all_reduce(tensor: Tensor, *, group: dist.ProcessGroup) -> None:
        """What is watched."""

    x, seen, seconds = torch.zeros(1), watched(all_reduce), {}
    with tempfile.TemporaryDirectory() as folder:
        cases = {"nobody watching": (), "a ledger": (Ledger(),), "a journal": (Journal(Path(folder), run.rank),)}
        for _ in range(rounds):
            for name, who in {"not watched": None, **cases}.items():
                call = all_reduce if who is None else seen
                with watching(*who) if who else contextlib.nullcontext():
                    begin = time.thread_time()
                    for _ in range(1000):
                        call(x, group=run.world)
                    seconds.setdefault(name, []).append(time.thread_time() - begin)
    return {name: statistics.median(taken) * 1e3 for name, taken in seconds.items()}


def measure(run: Runtime, cases: Sequence[Case], rounds: int) -> list[Row]:
    """Every case `rounds` times, ours and theirs in turn; the same rows on every rank. Collective."""
    turns = [(case, call) for case in cases for call in (case.ours, case.theirs)]
    sent = [_bytes_of(run, call) for _, call in turns]  # warms up as well
    seconds = torch.zeros(len(turns), rounds, dtype=torch.float64)
    for k in range(rounds):
        for i in range(len(turns)):
            turn = (i + k) % len(turns)
            case, call = turns[turn]
            comm.barrier(group=run.world)
            begin = time.perf_counter()
            for _ in range(case.calls):
                call()
            seconds[turn, k] = (time.perf_counter() - begin) / case.calls
    comm.all_reduce(seconds, comm.MAX, group=run.world)
    rows = []
    for i, case in enumerate(cases):
        ours, theirs = seconds[2 * i].tolist(), seconds[2 * i + 1].tolist()
        low, middle, high = statistics.quantiles(map(float.__truediv__, ours, theirs), n=4)
        medians = statistics.median(ours), statistics.median(theirs)
        rows.append(Row(case.name, case.beside, *medians, (low, middle, high), (sent[2 * i], sent[2 * i + 1])))
    return rows


def _bytes_of(run: Runtime, call: Callable[[], object]) -> int:
    call()
    comm.barrier(group=run.world)
    before = demo.bytes_written()
    call()
    return demo.bytes_since(before) or 0


def main() -> int:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4], help="1 is randomness (default 1 2 4)")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()

    def rank_main() -> None:
        with runtime.start(timeout=60) as run:
            table = randomness(run, options.rounds) if run.size == 1 else exchanges(run, options.rounds)
            if run.rank == 0:
                print(f"\n{_heading(run.size)}\n" + "\n".join(_line(row, run.size) for row in table), flush=True)
            if run.size == 1:
                print(
                    "\na call",
                    *(f"{name:20}{us:6.2f} µs" for name, us in watchers(run, options.rounds).items()),
                    sep="\n",
                )

    return max(runtime.launch(rank_main, ranks) for ranks in options.ranks)


def _heading(ranks: int) -> str:
    what, unit = ("one thread", "M numbers/s") if ranks == 1 else (f"{ranks} ranks", "ms")
    sent = "" if ranks == 1 else f"{'bytes sent':>14}{'theirs':>12}"
    return f"{what:26}{'beside':17}{'ours':>8}{'theirs':>8} {unit:13}ours / theirs in time{sent}"


def _line(row: Row, ranks: int) -> str:
    speeds = [NUMBERS / s / 1e6 if ranks == 1 else 1e3 * s for s in (row.ours, row.theirs)]
    sent = "" if ranks == 1 else "  {:12,}{:12,}".format(*row.sent)
    ratio = "{1:5.2f} ({0:5.2f} … {2:5.2f})".format(*row.ratio)
    return f"{row.case:26}{row.beside:17}{speeds[0]:8.2f}{speeds[1]:8.2f} {'':13}{ratio}{sent}"


if __name__ == "__main__":
    sys.exit(main())
