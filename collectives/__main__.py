"""Demo of the ground: what each collective does, what it sends, and how boxes and counters make one tensor on any cut.

    python -m collectives                                       4 local ranks
    torchrun --standalone --nproc-per-node 2 -m collectives     the ranks of torchrun
    python -m collectives cost                                  what each collective costs on a given machine
    python -m collectives calibrate                             the model of costs beside measurements

The pictures are of a few numbers a rank, the bytes of messages of 4 MB.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from collectives import allocated, calibrate, comm, cost_table, demo, layout, p2p, rng
from collectives.demo import Demo
from collectives.layout import Box, Held, Normal
from collectives.line_up import line_up, table
from collectives.runtime import Runtime

COUNT = 1_000_000  # float32 numbers of a message, rounded down to a multiple of the ranks
SHAPE = (11, 6)  # of the tensor that is cut
SAMPLES = 23  # in the permutation


def work(run: Runtime, show: Demo) -> None:
    """The six parts, one after the other."""
    pictures(run, show)
    traffic(run, show)
    memory(run, show)
    order_of_addition(run, show)
    boxes(run, show)
    permutation(run, show)


def pictures(run: Runtime, show: Demo) -> None:
    """What every rank holds before and after each collective; number i of rank r is 10r + i."""
    wrong = 0
    for name, marks, before, after, expected in _small_collectives(run):
        wrong += int((after != expected).sum())
        everyone = comm.all_gather_object((before.tolist(), after.tolist()), group=run.world)
        width = max(len(_digits(row)) for row, _ in everyone)
        lines = [f"  rank {rank}  {_digits(a):{width}}  →  {_digits(b)}" for rank, (a, b) in enumerate(everyone)]
        _print(run, f"{name}: {marks}", *lines)
    show.claim("wrong numbers above", "0", 0, wrong)


def _small_collectives(run: Runtime) -> Iterator[tuple[str, str, Tensor, Tensor, Tensor]]:
    """(name, what happens, before, after, what must come out), all of this rank."""
    size, rank, group = run.size, run.rank, run.world
    of = [10 * r + torch.arange(size) for r in range(size)]  # what each rank starts from, [P]
    mine, total, firsts = of[rank], torch.stack(of).sum(0), torch.stack(of)[:, 0]

    whole = mine.clone()
    comm.all_reduce(whole, group=group)
    yield "all_reduce", "a sum over the ranks, whole on each", mine, whole, total

    piece = torch.empty(1, dtype=torch.int64)
    comm.reduce_scatter_single(piece, mine, group=group)
    yield "reduce_scatter", "piece r of the sum on rank r", mine, piece, total[rank : rank + 1]

    whole = torch.empty_like(mine)
    comm.all_gather_single(whole, mine[:1], group=group)
    yield "all_gather", "all pieces on each rank", mine[:1], whole, firsts

    pieces = torch.empty_like(mine)
    comm.all_to_all_single(pieces, mine, group=group)
    yield "all_to_all", "piece p goes to rank p: a transpose", mine, pieces, torch.stack(of)[:, rank]

    copy = mine.clone()
    comm.broadcast(copy, size - 1, group=group)
    yield "broadcast", f"what rank {size - 1} has, on each", mine, copy, of[-1]

    got = torch.empty_like(mine)
    _shift(got, mine, run)
    yield "exchange", "to the next rank, from the one before", mine, got, of[rank - 1]


def _shift(output: Tensor, input: Tensor, run: Runtime) -> None:
    if run.size == 1:
        output.copy_(input)  # nobody sends to itself
        return
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    p2p.exchange([(input, after)], [(output, before)], group=run.world).wait()


def traffic(run: Runtime, show: Demo) -> None:
    """Every collective by every algorithm and by the backend, for a message of n bytes: formula, bytes, steps, time."""
    n = 4 * (COUNT // run.size) * run.size
    with show.time("every collective by all who can do it"):
        rows = line_up(run, n)
    _print(run, f"n = {n:,} bytes; P = {run.size} ranks; a bare log₂P, and n/2, are of powers of two", table(rows))
    ours = [row for row in rows if row.expected]
    other_bytes = sum(not row.sends_as_predicted() for row in ours)
    other_steps = sum(row.steps != row.expected.steps for row in ours)
    show.claim(f"bytes sent by {len(ours)} algorithms", "0 differ", 0, other_bytes)
    show.claim(f"steps of {len(ours)} algorithms", "0 differ", 0, other_steps)


def memory(run: Runtime, show: Demo) -> None:
    """Bytes that the direct exchange allocates for a message of n bytes: the pieces that arrive."""
    piece = torch.ones(COUNT // run.size)
    whole = torch.ones(run.size * len(piece))
    scattering, gathering = (
        allocated.peak_bytes(call, run.device)
        for call in (
            lambda: comm.reduce_scatter_single(piece, whole, group=run.world),
            lambda: comm.all_gather_single(whole, piece, group=run.world),
        )
    )
    show.claim("reduce_scatter memory", "n(P-1)/P", (run.size - 1) * piece.nbytes, scattering)
    show.claim("all_gather memory", "0", 0, gathering)


def order_of_addition(run: Runtime, show: Demo) -> None:
    """Reduce the same numbers as one buffer and as three: an ordered sum keeps its bits."""
    numbers = rng.normal(rng.key(run.rank, "numbers"), torch.arange(10_000)).float()

    def changed(ordered: bool) -> int:
        one, three = numbers.clone(), numbers.clone()
        comm.all_reduce(one, group=run.world, ordered=ordered)
        for part in three.split([1_000, 3_333, 5_667]):
            comm.all_reduce(part, group=run.world, ordered=ordered)
        return int((one != three).sum())

    show.claim("ordered, cut anew", "0 change bits", 0, changed(ordered=True))
    share = f"{changed(ordered=False):,} of {len(numbers):,}"
    _print(run, f"gloo's own all_reduce: {share} sums change bits when the buffer is cut in three")


def boxes(run: Runtime, show: Demo) -> None:
    """One tensor cut three ways: each rank draws the numbers of its own boxes, and together they are the same whole."""
    whole = _drawn([Box.whole(SHAPE)]).view(SHAPE)
    for name, mine in _cuts(run.size, run.rank):
        part = _drawn(mine)
        layout.check([part], run.world)  # raises on every rank where boxes overlap or leave a gap
        everyone = comm.all_gather_object((mine, part.detach()), group=run.world)
        gathered = torch.full(SHAPE, torch.nan)
        for held, flat in everyone:
            for box, numbers in zip(held, flat.split([box.numel for box in held]), strict=True):
                gathered[box.slices(Box.whole(SHAPE))] = numbers.view(box.local)
        lines = [f"  rank {rank}  {_intervals(held)}" for rank, (held, _) in enumerate(everyone)]
        _print(run, f"boxes of a tensor {SHAPE}, cut by {name}", *lines)
        show.claim(f"weights, {name}", "0 differ", 0, int((gathered != whole).sum()))


def _cuts(size: int, rank: int) -> Iterator[tuple[str, list[Box]]]:
    """This rank's boxes of a tensor cut by rows, by columns, and as a flat range; pieces may be uneven or empty."""
    whole = Box.whole(SHAPE)
    for dim, name in enumerate(("rows", "columns")):
        start, stop = list(pairwise(_edges(SHAPE[dim], size)))[rank]
        yield name, [whole.cut(dim, start, stop - start)]
    yield "flat range", layout.flat_range(SHAPE, *list(pairwise(_edges(whole.numel, size)))[rank])


def _edges(length: int, parts: int) -> list[int]:
    return [length * part // parts for part in range(parts + 1)]


def _drawn(held: list[Box]) -> nn.Parameter:
    """A rank's part of the parameter "weight", initialised by its boxes alone."""
    param = nn.Parameter(torch.empty(sum(box.numel for box in held)))
    param.held = Held("weight", tuple(held), Normal(0.02), decay=True)
    rng.fill(param, seed=0)
    return param


def permutation(run: Runtime, show: Demo) -> None:
    """The order of the data: each rank computes the places of its own samples only, and each place is taken once."""
    key = rng.key(0, "data order", 0)
    mine = rng.permutation(key, torch.arange(SAMPLES).tensor_split(run.size)[run.rank], SAMPLES)
    everyone = comm.all_gather_object(mine.tolist(), group=run.world)
    _print(run, f"an order of {SAMPLES} samples", *(f"  rank {rank}  {_digits(p)}" for rank, p in enumerate(everyone)))
    places = sorted(place for part in everyone for place in part)
    show.claim("samples, each once", "all", SAMPLES, len(set(places)) if len(places) == SAMPLES else 0)


def _print(run: Runtime, *lines: str) -> None:
    if run.rank == 0:
        print(*lines, sep="\n")


def _digits(numbers: list[int]) -> str:
    return " ".join(f"{number:2}" for number in numbers)


def _intervals(held: list[Box]) -> str:
    parts = [",".join(f"{a}:{a + n}" for a, n in zip(box.offset, box.local, strict=True)) for box in held]
    return "  ".join(f"[{part}]" for part in parts)


if __name__ == "__main__":
    commands = {"calibrate": calibrate.main, "cost": cost_table.main}
    command = commands.get(sys.argv[1]) if len(sys.argv) > 1 else None
    sys.exit(command(sys.argv[2:]) if command else demo.main(work))
