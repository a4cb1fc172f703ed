"""Speed of the ground: numbers by counter beside torch's generators, our collectives beside the backend's.

    python -m collectives.bench                  all of it
    python -m collectives.bench --ranks 2        the collectives on 2 ranks only
    python -m collectives.bench --repeat 5       five whole runs, and the median of their ratios

On one rank the numbers, 2^20 of each kind on one thread, and the watchers around an operation that does nothing; on
more the collectives, 1 KiB to 64 MiB of float32, by all who can do them (competitors.py).
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from collectives import comparison, rng
from collectives.competitors import BACKEND, competitors
from collectives.journal import Journal
from collectives.layout import Box, Held, Normal
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.turns import Call, Case
from collectives.watch import Watcher, watched, watching

SIZES = tuple(1 << i for i in (10, 14, 18, 20, 22, 24, 26))  # bytes of the whole message
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
NUMBERS = 1 << 20
PIECE = 1 << 14  # numbers at a time, as rng.fill draws them
WIDTH = 1 << 10  # of a row, for what is drawn by row


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    if run.size > 1:
        return [
            case(run, collective, n)
            for collective in COLLECTIVES
            for n in SIZES
            for case in (synchronous, asynchronous)
        ]
    torch.set_num_threads(1)
    return [*(draw(NUMBERS) for draw in RANDOMNESS), watchers(run)]


# -- a collective, n bytes in all --------------------------------------------------------------------------------------


def synchronous(run: Runtime, collective: str, n: int) -> Case:
    """By all who can do it, the direct exchange first: comm.py's choice where it is not the backend's."""
    calls = competitors(collective, n, run)
    return _case(f"{collective} of {n:,} bytes", n, {"direct": calls.pop("direct"), **calls})


def asynchronous(run: Runtime, collective: str, n: int) -> Case:
    """Started and then waited for, with nothing in between."""
    calls = competitors(collective, n, run)

    def started(call: Call) -> Call:
        return lambda: call(async_op=True).wait()

    return _case(f"{collective} of {n:,} bytes, async", n, {who: started(calls[who]) for who in ("direct", BACKEND)})


def _case(name: str, n: int, calls: dict[str, Call]) -> Case:
    return Case(name, calls, repeat=max(1, min(16, (1 << 20) // n)))


# -- randomness, n numbers on one thread -------------------------------------------------------------------------------


def uniform(n: int) -> Case:
    """Between 0 and 1: in pieces that stay in the cache, as they are drawn here, and all at once."""
    index = torch.arange(n)
    return Case(
        "uniform",
        {
            "rng.uniform, float64": _in_pieces(rng.uniform, n),
            "the same, all at once": lambda: rng.uniform(1, index),
            "torch.rand, float64": lambda: torch.rand(n, dtype=torch.float64),
            "torch.rand, float32": lambda: torch.rand(n),
        },
    )


def normal(n: int) -> Case:
    """Of mean 0 and variance 1."""
    return Case(
        "normal",
        {
            "rng.normal, float64": _in_pieces(rng.normal, n),
            "torch.randn, float64": lambda: torch.randn(n, dtype=torch.float64),
            "torch.randn, float32": lambda: torch.randn(n),
        },
    )


def weight(n: int) -> Case:
    """A float32 weight initialised in place."""
    param = nn.Parameter(torch.empty(n // WIDTH, WIDTH))
    param.held = Held("weight", (Box.whole(param.shape),), Normal(0.02), decay=True)
    return Case("weight", {"rng.fill": lambda: rng.fill(param, 1), "nn.init.normal_": lambda: nn.init.normal_(param)})


def mask(n: int) -> Case:
    """Dropout's mask."""
    rows = torch.arange(n // WIDTH)
    ours, theirs = lambda: rng.keep(1, rows, WIDTH, 0.1), lambda: torch.rand(len(rows), WIDTH) >= 0.1
    return Case("mask", {"rng.keep": ours, "torch.rand >= p": theirs})


def dropout(n: int) -> Case:
    """The mask, applied."""
    rows, x = torch.arange(n // WIDTH), torch.ones(n // WIDTH, WIDTH)
    ours, theirs = lambda: rng.dropout(x, 1, rows, 0.1), lambda: functional.dropout(x, 0.1)
    return Case("dropout", {"rng.dropout": ours, "F.dropout": theirs})


def permutation(n: int) -> Case:
    """The order of n samples."""
    index = torch.arange(n)
    ours, theirs = lambda: rng.permutation(1, index, n), lambda: torch.randperm(n)
    return Case("permutation", {"rng.permutation": ours, "torch.randperm": theirs})


RANDOMNESS = (uniform, normal, weight, mask, dropout, permutation)


# -- the watchers ------------------------------------------------------------------------------------------------------


def watchers(run: Runtime) -> Case:
    """What it costs to watch a call: the time is that of 1000 of them, which do nothing themselves."""

    def all_reduce(tensor: Tensor, *, group: dist.ProcessGroup) -> None:
        """What is watched."""

    x, seen = torch.zeros(1), watched(all_reduce)
    with tempfile.TemporaryDirectory() as folder:  # a journal is mapped, so it outlives its file
        journal = Journal(Path(folder), run.rank)

    def calls(call: Call, *who: Watcher) -> Call:
        def thousand() -> None:
            with watching(*who) if who else contextlib.nullcontext():
                for _ in range(1000):
                    call(x, group=run.world)

        return thousand

    return Case(
        "1000 calls",
        {
            "watched by a journal": calls(seen, journal),
            "watched by a ledger": calls(seen, Ledger()),
            "nobody watching": calls(seen),
            "not decorated": calls(all_reduce),
        },
    )


def _in_pieces(draw: Callable[[int, Tensor], Tensor], n: int) -> Call:
    pieces = torch.arange(n).split(PIECE)
    return lambda: [draw(1, piece) for piece in pieces]


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(1, 2, 4, 8)))
