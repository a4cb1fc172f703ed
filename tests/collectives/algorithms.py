"""All algorithms of collectives/algorithms by collective and name, and one job that runs any of them on known numbers.

The job is the same on the pool's ranks and on the double of tests/ordered.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collectives import comm
from collectives.algorithms import direct, doubling, halving, hierarchical, naive, pairwise, ring, star, tree


def two_levels(tensor: Tensor, op: Any, *, group: Any, async_op: bool = False) -> Any:
    """hierarchical.all_reduce; `group` is the pair of its groups."""
    inside, between = group
    return hierarchical.all_reduce(tensor, op, inside=inside, between=between, async_op=async_op)


ALGORITHMS: dict[tuple[str, str], Callable[..., Any]] = {
    (collective, module.__name__.split(".")[-1]): getattr(module, collective)
    for collective, modules in {
        "broadcast": (star, ring, tree),
        "scatter": (star, tree),
        "gather": (star, tree),
        "reduce": (star, ring, tree),
        "all_gather": (ring, doubling, direct),
        "reduce_scatter": (ring, halving, pairwise, direct),
        "all_reduce": (naive, star, ring, tree, doubling, halving, direct),
        "all_to_all": (pairwise, direct),
        "barrier": (star, tree, doubling),
    }.items()
    for module in modules
} | {("all_reduce", "hierarchical"): two_levels}

REDUCING = [key for key in ALGORITHMS if "reduce" in key[0]]
MOVING = [key for key in ALGORITHMS if "reduce" not in key[0] and key[0] != "barrier"]
ROOTED = ("broadcast", "scatter", "gather", "reduce")


@dataclass(frozen=True)
class Case:
    """What an algorithm is run on. `numbers` of a whole that is cut, or not; scatter and gather: of a piece."""

    numbers: int = 13
    dtype: torch.dtype = torch.float64
    op: str = "SUM"
    root: int = 0
    kind: str = "random"  # or "whole", of numbers so small that every reduction is exact
    async_op: bool = False
    sizes: Sequence[int] | None = field(default=None, hash=False)  # lengths of pieces, for what takes them

    def whole(self, rank: int, size: int) -> Tensor:
        """What a rank starts from: `numbers` numbers, of scatter, gather and all_to_all as many for each rank."""
        draw = torch.Generator().manual_seed(1000 * rank + size)
        shape = (self.numbers,)
        if self.kind == "random":
            exponents = torch.randint(-4, 5, shape, generator=draw)
            return torch.ldexp(torch.randn(shape, generator=draw, dtype=torch.float64), exponents).to(self.dtype)
        values = [1, -1, 2] if self.op == "PRODUCT" else [-2 * size, -size, 0, size, 3 * size]
        return torch.tensor(values)[torch.randint(len(values), shape, generator=draw)].to(self.dtype)


def cut(whole: Tensor, size: int, case: Case) -> list[Tensor]:
    return list(whole.split(list(case.sizes)) if case.sizes else whole.tensor_split(size))


def run(rank: Any, key: tuple[str, str], case: Case, group: Any = None) -> Tensor | None:
    """Run one algorithm on this rank; its result, None where the collective leaves none."""
    group = group or (nodes(rank) if key[1] == "hierarchical" else rank.world)
    me, size = (rank.rank, rank.size) if isinstance(group, tuple) else (group.rank(), group.size())
    prepared, output = _arguments(key[0], case, me, size)
    work = ALGORITHMS[key](*prepared, group=group, async_op=case.async_op)
    assert (work is None) != case.async_op
    del prepared
    if work is not None:
        work.wait()
        work.wait()
    return output


def _arguments(collective: str, case: Case, me: int, size: int) -> tuple[tuple, Tensor | None]:
    """The call's arguments, and the tensor that holds its result."""
    op, mine = getattr(comm, case.op), case.whole(me, size)
    empty = torch.full_like(mine, 77)
    match collective:
        case "broadcast":
            result = (mine, case.root), mine
        case "reduce":
            result = (mine, case.root, op), mine if me == case.root else None
        case "all_reduce":
            result = (mine, op), mine
        case "scatter":
            whole = torch.cat([case.whole(other, size) for other in range(size)])
            result = (empty, whole if me == case.root else None, case.root), empty
        case "gather":
            whole = empty.repeat(size) if me == case.root else None
            result = (whole, mine, case.root), whole
        case "reduce_scatter":
            pieces = cut(mine, size, case)
            output = torch.full_like(pieces[me], 77)
            result = (output, pieces if case.sizes else mine, op), output
        case "all_gather":
            pieces = cut(empty, size, case)
            given = cut(case.whole(me, size), size, case)[me]
            result = (pieces if case.sizes else empty, given), empty
        case "all_to_all":
            gives = _rows(me, size, mine)
            output = torch.full((sum(takes := [len(_rows(other, size, mine)[me]) for other in range(size)]),), 77)
            output = output.to(case.dtype)
            result = (output, torch.cat(gives), takes, [len(piece) for piece in gives]), output
        case "barrier":
            result = (), None
    return result


def _rows(me: int, size: int, mine: Tensor) -> list[Tensor]:
    """What a rank gives to each: its first (rank + peer) % 3 numbers, so some get nothing."""
    return [mine[: (me + peer) % 3] for peer in range(size)]


def expected(collective: str, case: Case, size: int) -> list[Tensor | None]:
    """By rank, computed on this process alone. Of a sum of floats the nearest number in float64."""
    wholes = [case.whole(rank, size) for rank in range(size)]
    reduced = _reduced(wholes, case)
    match collective:
        case "broadcast":
            result = [wholes[case.root]] * size
        case "reduce":
            result = [reduced if rank == case.root else None for rank in range(size)]
        case "all_reduce":
            result = [reduced] * size
        case "scatter":
            result = wholes
        case "gather":
            result = [torch.cat(wholes) if rank == case.root else None for rank in range(size)]
        case "reduce_scatter":
            result = cut(reduced, size, case)
        case "all_gather":
            result = [torch.cat([cut(whole, size, case)[rank] for rank, whole in enumerate(wholes)])] * size
        case "all_to_all":
            rows = [_rows(rank, size, whole) for rank, whole in enumerate(wholes)]
            result = [torch.cat([rows[peer][rank] for peer in range(size)]) for rank in range(size)]
        case "barrier":
            result = [None] * size
    return result


def _reduced(wholes: list[Tensor], case: Case) -> Tensor:
    parts = torch.stack(wholes)
    if parts.is_floating_point():
        parts = parts.double()
    match case.op:
        case "MIN":
            return parts.amin(0)
        case "MAX":
            return parts.amax(0)
        case "PRODUCT":
            return parts.prod(0)
        case _:
            return parts.sum(0) / (len(wholes) if case.op == "AVG" else 1)


def nodes(rank: Any) -> tuple[Any, Any]:
    """The groups of two levels: nodes of as many ranks as the largest divisor of the world up to its root."""
    size = rank.size
    inside = max(d for d in range(1, size + 1) if size % d == 0 and d * d <= size) if size > 1 else 1
    inside = size // inside if rank.size in (2, 6) else inside
    groups = [list(range(first, first + inside)) for first in range(0, size, inside)]
    groups += [list(range(place, size, inside)) for place in range(inside)]
    made = [rank.new_group(group) for group in groups]
    mine = [group for group, members in zip(made, groups, strict=True) if rank.rank in members]
    return mine[0], mine[1]
