"""Speed of the ground: numbers by counter beside torch's generators, the direct exchange beside gloo's own collectives.

    python -m collectives.bench                  all of it
    python -m collectives.bench --ranks 2        the exchange on 2 ranks only
    python -m collectives.bench --repeat 5       five whole runs, and the median of their ratios

On one rank the numbers, 2^20 of each kind on one thread, and the watchers around an operation that does nothing; on
more the exchange, by size of the whole message, float32.
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
from collectives.algorithms import direct
from collectives.journal import Journal
from collectives.layout import Box, Held, Normal
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.turns import Call, Case
from collectives.watch import Watcher, watched, watching

SIZES = (1 << 16, 1 << 20, 1 << 24)  # bytes of the whole message
NUMBERS = 1 << 20
PIECE = 1 << 14  # numbers at a time, as rng.fill draws them
WIDTH = 1 << 10  # of a row, for what is drawn by row

# torch 2.13 renamed these two.
_ALL_GATHER: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    if run.size > 1:
        return [exchange(run, nbytes) for nbytes in SIZES for exchange in EXCHANGES]
    torch.set_num_threads(1)
    return [*(draw(NUMBERS) for draw in RANDOMNESS), watchers(run)]


# -- the exchange, n bytes in all --------------------------------------------------------------------------------------


def all_reduce(run: Runtime, n: int) -> Case:
    """The sum of everything on every rank; ours in the order of ranks."""
    whole, _ = _buffers(run, n)
    return _exchange(
        f"all_reduce of {n:,} bytes",
        n,
        lambda: direct.all_reduce(whole, dist.ReduceOp.SUM, group=run.world),
        lambda: dist.all_reduce(whole, group=run.world),
    )


def reduce_scatter(run: Runtime, n: int) -> Case:
    """A piece of the sum on each rank."""
    whole, piece = _buffers(run, n)
    return _exchange(
        f"reduce_scatter of {n:,} bytes",
        n,
        lambda: direct.reduce_scatter(piece, whole, dist.ReduceOp.SUM, group=run.world),
        lambda: _REDUCE_SCATTER(piece, whole, group=run.world),
    )


def all_gather(run: Runtime, n: int) -> Case:
    """Everybody's piece on every rank."""
    whole, piece = _buffers(run, n)
    return _exchange(
        f"all_gather of {n:,} bytes",
        n,
        lambda: direct.all_gather(whole, piece, group=run.world),
        lambda: _ALL_GATHER(whole, piece, group=run.world),
    )


EXCHANGES = (all_reduce, reduce_scatter, all_gather)


def _buffers(run: Runtime, n: int) -> tuple[Tensor, Tensor]:
    piece = torch.zeros(n // 4 // run.size, device=run.device)
    return torch.zeros(run.size * len(piece), device=run.device), piece


def _exchange(name: str, n: int, ours: Call, theirs: Call) -> Case:
    return Case(name, {"direct exchange": ours, "the backend's": theirs}, repeat=max(1, (1 << 20) // n))


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
    sys.exit(comparison.main(cases, ranks=(1, 2, 4)))
