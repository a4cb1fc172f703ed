"""All algorithms of collectives/algorithms by collective and name, and one job that runs any of them on known numbers.

The job is the same on the pool's ranks and on the double of tests/ordered.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import comm
from collectives.algorithms import direct, doubling, halving, hierarchical, naive, pairwise, ring, star, tree
from tests import ordered


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
drilled = partial(pytest.param, marks=pytest.mark.drill)  # values for which a test is a drill
RANKS = [1, 2, 3, 5, 8, *map(drilled, (4, 6, 7))]


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
    work, output = start(rank, key, case, group)
    assert (work is None) != case.async_op
    if work is not None:
        work.wait()
        work.wait()
    return output


def run_each(rank: Any, key: tuple[str, str], cases: Sequence[Case]) -> list[Tensor | None]:
    """One after the other: the results by case."""
    return [run(rank, key, case) for case in cases]


def start(rank: Any, key: tuple[str, str], case: Case, group: Any = None) -> tuple[Any, Tensor | None]:
    """Call one algorithm; what it returned, and the tensor that holds, or will hold, its result."""
    group = group or (nodes(rank) if key[1] == "hierarchical" else rank.world)
    prepared, output = arguments(key[0], case, *seat(group))
    return ALGORITHMS[key](*prepared, group=group, async_op=case.async_op), output


def seat(group: Any) -> tuple[int, int]:
    """This rank in the group, or in the pair of groups of hierarchical, and how many there are."""
    if not isinstance(group, tuple):
        return group.rank(), group.size()
    inside, between = group
    return between.rank() * inside.size() + inside.rank(), between.size() * inside.size()


def arguments(collective: str, case: Case, me: int, size: int) -> tuple[tuple, Tensor | None]:
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
    if "reduce" in collective:
        return _placed(collective, _reduced(wholes, case), case, size)
    match collective:
        case "broadcast":
            result = [wholes[case.root]] * size
        case "scatter":
            result = wholes
        case "gather":
            result = [torch.cat(wholes) if rank == case.root else None for rank in range(size)]
        case "all_gather":
            result = [torch.cat([cut(whole, size, case)[rank] for rank, whole in enumerate(wholes)])] * size
        case "all_to_all":
            rows = [_rows(rank, size, whole) for rank, whole in enumerate(wholes)]
            result = [torch.cat([rows[peer][rank] for peer in range(size)]) for rank in range(size)]
        case "barrier":
            result = [None] * size
    return result


def _placed(collective: str, reduced: Tensor, case: Case, size: int) -> list[Tensor | None]:
    """By rank, of a tensor as long as the whole, the part that the rank gets."""
    match collective:
        case "reduce":
            return [reduced if rank == case.root else None for rank in range(size)]
        case "reduce_scatter":
            return cut(reduced, size, case)
        case _:
            return [reduced] * size


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


def check(key: tuple[str, str], ranks: int, cases: Sequence[Case], **network: Any) -> None:
    """On the ordered network, the values of all cases, one after the other."""
    by_rank = ordered.run(ranks, run_each, key, cases, **network).results
    for results, case in zip(zip(*by_rank, strict=True), cases, strict=True):
        assert_right(results, key, case, ranks)


def assert_right(results: Sequence[Tensor | None], key: tuple[str, str], case: Case, size: int) -> None:
    """What was returned by rank is the expected value, but for what rounding explains; nothing explains more."""
    wanted, allowed = expected(key[0], case, size), [torch.zeros(())] * size
    if "reduce" in key[0]:
        allowed = _placed(key[0], _rounding(key, case, size), case, size)
    for rank, (result, value, error) in enumerate(zip(results, wanted, allowed, strict=True)):
        message = f"{key}, {case}: rank {rank} of {size} has {result}, not {value}"
        assert (result is None) == (value is None), message
        if result is not None:
            assert result.dtype == case.dtype and result.shape == value.shape, message
            assert (result == value).logical_or((result.double() - value.double()).abs() <= error).all(), message


def _rounding(key: tuple[str, str], case: Case, size: int) -> Tensor:
    """By how much each element may be off. u·P·Σ|x| for P ranks, 1e-14·Σ|x| in float64; of 16-bit numbers, which are
    added in float32 and rounded once, half of the last digit and 1e-6·Σ|x|. hierarchical rounds them at each level.
    """
    wholes = torch.stack([case.whole(rank, size) for rank in range(size)]).double()
    if not case.dtype.is_floating_point or case.op in ("MIN", "MAX") or case.kind != "random":
        return torch.zeros(wholes[0].shape)
    sizes = wholes.abs().prod(0) if case.op == "PRODUCT" else wholes.abs().sum(0)
    if case.op == "AVG":
        sizes = sizes / size
    if case.dtype == torch.float64:
        return 1e-14 * sizes
    if case.dtype == torch.float32:
        return size * 2**-24 * sizes
    last, tiny = torch.finfo(case.dtype).eps, torch.finfo(case.dtype).smallest_normal
    if key[1] == "hierarchical":
        return (last + 1e-6) * sizes
    exponent = torch.frexp(_reduced(list(wholes), case).abs().clamp(min=tiny)).exponent
    return torch.ldexp(torch.full(exponent.shape, last / 4, dtype=torch.float64), exponent) + 1e-6 * sizes


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
