"""Who holds which rows: every cut of tensor parallelism as numbers, without tensors and without ranks.

Rows of a matrix come in units that must not be split: the K rows of a head. Units are dealt out evenly, or, in a
vocabulary, as evenly as can be, without padding: what is not there joins no softmax, no norm and no checkpoint. Keys
and values may have fewer heads than there are ranks; then neighbours hold the same one, as many as it takes:

    8 query heads, 2 key and value heads, tp = 4       rank      0     1     2     3
                                                       queries   0 1   2 3   4 5   6 7
                                                       keys      0     0     1     1

Shoeybi et al. 2019, §3; Ainslie et al. 2023, "GQA"; lecture A, "Tensor Parallel의 조건".
"""

import itertools
from collections.abc import Sequence


def even(rows: int, ranks: int, *, units: int | None = None, what: str = "rows") -> list[range]:
    """Each rank's rows, equally many, and whole units (default: of one row). Raises ValueError naming the degrees that
    divide.
    """
    units = rows if units is None else units
    if units < 1 or rows % units:
        raise ValueError(f"{rows} rows are not {units} {what} of equal size")
    if units % ranks:
        raise ValueError(f"tp={ranks} does not divide {units} {what}; use a tp of {listed(divisors(units))}")
    share = rows // ranks
    return [range(rank * share, (rank + 1) * share) for rank in range(ranks)]


def nearly_even(rows: int, ranks: int, *, what: str = "rows") -> list[range]:
    """Each rank's rows, the first ranks one more than the last; at least one each. Raises ValueError for fewer rows
    than ranks.
    """
    if rows < ranks:
        raise ValueError(f"tp={ranks} is more than {rows} {what}: each rank holds at least one; use a tp of {rows}")
    least, more = divmod(rows, ranks)
    starts = [rank * least + min(rank, more) for rank in range(ranks + 1)]
    return [range(*ends) for ends in itertools.pairwise(starts)]


def shared(rows: int, ranks: int, *, units: int, heads: int) -> list[range]:
    """Each rank's rows of keys (or values) with `units` heads, for `heads` query heads that are cut evenly: those that
    its own queries look at.

    Raises ValueError naming the degrees that work for both: tp divides the query heads, and divides the others or is a
    multiple of them.
    """
    if heads % units:
        raise ValueError(f"{units} key and value heads do not divide {heads} query heads")
    if ranks not in (fine := degrees(heads, units)):
        raise ValueError(
            f"tp={ranks} does not fit {heads} query heads and {units} key and value heads; use a tp of {listed(fine)}"
        )
    if units >= ranks:
        return even(rows, ranks, units=units)
    row = even(rows, units)
    # IDEA: query head q looks at key head q · units / heads, so the ranks of one key head are neighbours.
    return [row[rank * units // ranks] for rank in range(ranks)]


def degrees(heads: int, kv_heads: int) -> list[int]:
    """The tp that attention with these heads can have."""
    return [tp for tp in divisors(heads) if kv_heads % tp == 0 or tp % kv_heads == 0]


def sharers(ranks: Sequence[int], kv_heads: int) -> list[tuple[int, ...]]:
    """The ranks of a tp group, in runs that hold the same keys and values; runs of one where heads are enough."""
    run = max(1, len(ranks) // kv_heads)
    return [tuple(ranks[start : start + run]) for start in range(0, len(ranks), run)]


def divisors(number: int) -> list[int]:
    """In ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def listed(numbers: Sequence[int]) -> str:
    """For people: 1, 2 or 4."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
