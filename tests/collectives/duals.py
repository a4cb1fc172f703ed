"""Uses of every function of collectives/differentiable.py, each with the same thing done by plain torch on one rank.

The plain version makes of the list of what the ranks have the list of what they get. What all ranks have alike is a
list of one, and so is its gradient: there the two meanings of a gradient differ.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from collectives import differentiable as d

UNEVEN = {1: [[3]], 2: [[3, 2], [0, 0]], 3: [[1, 0, 3]], 4: [[2, 2, 2, 1], [1, 1, 0, 0]]}


@dataclass(frozen=True)
class Case:
    """call: takes x and the group. shapes: of all ranks' x, or of the one that all have. plain: all xs to all ys."""

    call: Callable
    shapes: list[tuple[int, ...]]
    plain: Callable

    def inputs(self, layout="dense", dtype=torch.float64):
        return [draw(layout, dtype, shape, 0, rank).requires_grad_() for rank, shape in enumerate(self.shapes)]


# Small whole numbers, so that every sum is exact, in some memory; expanded is what a gradient of `.sum()` is.
LAYOUTS = {
    "dense": lambda numbers, shape: numbers(shape),
    "transposed": lambda numbers, shape: numbers(shape[::-1]).permute(*reversed(range(len(shape)))),
    "every second": lambda numbers, shape: numbers((*shape, 2))[..., 0],
    "expanded": lambda numbers, shape: numbers(()).expand(shape),
}


def draw(layout, dtype, shape, *who):
    generator = torch.Generator().manual_seed(hash(who) % 2**32)
    return LAYOUTS[layout](lambda s: torch.randint(-4, 5, s, generator=generator).to(dtype), tuple(shape))


def mine(everyone, rank):
    return everyone[rank if len(everyone) > 1 else 0]


def cases(size, shape=(1, 2, 2)):
    """By name, which begins with that of the function. shape: of x, but for the dims that are cut."""
    copy, own = [along(2, 3, shape)], size * [along(2, 3, shape)]
    found = {
        "identity_all_reduce": Case(d.identity_all_reduce, copy, lambda xs: size * xs),
        "all_reduce_identity": Case(d.all_reduce_identity, own, lambda xs: [sum(xs)]),
        "all_reduce_all_reduce": Case(d.all_reduce_all_reduce, own, lambda xs: size * [sum(xs)]),
    }
    for dim, lengths in itertools.product((0, 1, 2, -1, -3), (None, *UNEVEN[size])):
        found |= cut(size, dim, lengths, shape)
    uneven = UNEVEN[size][0]
    for dims, split, cat in itertools.product(itertools.permutations((0, 1, -1), 2), (None, uneven), (None, uneven)):
        found[f"all_to_all {dims} {split} {cat}"] = moved(size, dims, split, cat, shape)
    for name, gives in {"asymmetric": lambda r, p: (r + 2 * p) % 3, "symmetric": lambda r, p: (r + p) % 3}.items():
        found[f"all_to_all_rows {name}"] = dispatched([[gives(r, p) for p in range(size)] for r in range(size)])
    for root in {0, size - 1}:
        call = functools.partial(d.broadcast_reduce, group_src=root)
        found[f"broadcast_reduce {root}"] = Case(call, own, lambda xs, root=root: size * [xs[root]])
        call = functools.partial(d.reduce_broadcast, group_dst=root)
        found[f"reduce_broadcast {root}"] = Case(call, own, lambda xs, root=root: reduced(xs, root))
    return found


def cut(size, dim, sizes, shape):
    lengths = sizes or size * [2]
    pieces, whole = [along(dim, length, shape) for length in lengths], along(dim, sum(lengths), shape)

    def case(function, shapes, plain):
        name = f"{function} {dim} {sizes}"
        return {name: Case(functools.partial(getattr(d, function), dim=dim, sizes=sizes), shapes, plain)}

    return {
        **case("all_gather_reduce_scatter", pieces, lambda xs: size * [torch.cat(xs, dim)]),
        **case("all_gather_split", pieces, lambda xs: [torch.cat(xs, dim)]),
        **case("split_all_gather", [whole], lambda xs: list(xs[0].split(lengths, dim))),
        **case("reduce_scatter_all_gather", size * [whole], lambda xs: list(sum(xs).split(lengths, dim))),
    }


def along(dim, length, shape):
    shape = list(shape)
    shape[dim] = length
    return tuple(shape)


def moved(size, dims, split_sizes, cat_sizes, shape):
    (split_dim, cat_dim), splits, cats = dims, split_sizes or size * [1], cat_sizes or size * [2]
    shapes = [along(cat_dim, length, along(split_dim, sum(splits), shape)) for length in cats]
    call = functools.partial(d.all_to_all, split_dim=split_dim, cat_dim=cat_dim)
    call = functools.partial(call, split_sizes=split_sizes, cat_sizes=cat_sizes)

    def plain(xs):
        return [torch.cat([x.split(splits, split_dim)[rank] for x in xs], cat_dim) for rank in range(size)]

    return Case(call, shapes, plain)


def dispatched(gives):
    size, function = len(gives), d.all_to_all_rows

    def call(x, *, group):
        return function(x, gives[group.rank()], [row[group.rank()] for row in gives], group=group)

    def plain(xs):
        return [torch.cat([xs[p].split(gives[p])[rank] for p in range(size)]) for rank in range(size)]

    return Case(call, [(sum(row), 2) for row in gives], plain)


def reduced(xs, root):
    return [sum(xs) if rank == root else 0 * x for rank, x in enumerate(xs)]


def simplest(ranks):
    """The first case of each function."""
    return list({name.split()[0]: name for name in reversed(cases(ranks))}.values())


def ends_of(case):
    """The shapes of what all ranks get, or of the one that all get."""
    return [y.shape for y in case.plain(case.inputs())]
