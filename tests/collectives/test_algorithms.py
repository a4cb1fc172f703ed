"""Every algorithm, on any number of ranks: its values, beside torch.distributed's too, and faults that they show.

Ranks are those of tests/ordered.py where the pool is not named.
"""

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from collectives import p2p
from collectives.algorithms.reduction import Reduction
from tests import ordered
from tests.collectives.algorithms import (
    ALGORITHMS,
    MOVING,
    RANKS,
    REDUCING,
    ROOTED,
    Case,
    arguments,
    assert_right,
    check,
    drilled,
    nodes,
    run,
    run_each,
    seat,
)

LENGTHS = (0, 1, 5, 13)
LOW = (torch.float16, torch.bfloat16)
REDUCTIONS = [  # every dtype with every op
    (dtype, op)
    for dtype in (torch.float64, torch.float32, *LOW, torch.int64)
    for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
    if (dtype, op) != (torch.int64, "AVG")
]


def reduction(numbers, dtype, op):
    """On random numbers; on small whole ones where a random product would be 0 or too large."""
    small = dtype == torch.int64 or (op == "PRODUCT" and dtype in LOW)
    return Case(numbers, dtype, op, kind="whole" if small else "random")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("key", [*MOVING, *REDUCING])
def test_values(key, ranks):
    """Of all reductions those whose turn it is: each is seen with n and with n + 4 ranks."""
    cases = [Case(numbers) for numbers in LENGTHS]
    if key in REDUCING:
        cases += [reduction(13, *pair) for pair in REDUCTIONS[ranks % 4 :: 4]]
    else:
        cases += [Case(13, dtype) for dtype in (torch.bfloat16, torch.int64)]
    check(key, ranks, cases)


@pytest.mark.parametrize("ranks", [9, drilled(12), drilled(16)])
@pytest.mark.parametrize("key", [*MOVING, *REDUCING])
def test_values_on_many_ranks(key, ranks):
    check(key, ranks, [Case(13, op="AVG")])


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [*RANKS, 9, 12, 16])
@pytest.mark.parametrize("key", REDUCING)
def test_values_of_all_reductions(key, ranks):
    check(key, ranks, [reduction(n, *pair) for n, pair in itertools.product((*LENGTHS, 100), REDUCTIONS)])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("key", [key for key in ALGORITHMS if key[0] in ROOTED])
def test_every_root(key, ranks):
    check(key, ranks, [Case(5, root=root) for root in range(ranks)])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "key",
    [
        *(("reduce_scatter", name) for name in ("ring", "pairwise", "direct")),
        *(("all_gather", name) for name in ("ring", "direct")),
    ],
)
def test_pieces_of_any_sizes(key, ranks):
    sizes = [(2 + 3 * rank) % 5 for rank in range(ranks)]  # 2 0 3 1 4 …
    check(key, ranks, [Case(sum(sizes), sizes=sizes), Case(7, sizes=[0] * (ranks - 1) + [7])])


def changes(rank, key, case):
    """Whether a call changes one of its arguments that is not its output."""
    group = nodes(rank) if key[1] == "hierarchical" else rank.world
    given, output = arguments(key[0], case, *seat(group))
    tensors = [entry for entry in given if isinstance(entry, torch.Tensor) and entry is not output]
    before = [tensor.clone() for tensor in tensors]
    ALGORITHMS[key](*given, group=group)
    return not all(map(torch.equal, before, tensors))


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("key", ALGORITHMS)
def test_what_is_no_output_stays_as_it_was(key, ranks):
    """Also what a rank that is not the root of a reduce has brought."""
    for dtype in (torch.float64, torch.bfloat16):
        assert not any(ordered.run(ranks, changes, key, Case(13, dtype, root=ranks - 1)).results)


def in_its_place(rank, key, case):
    """The piece is this rank's part of the whole, where it is taken from or put."""
    (first, second, *op), _ = arguments(key[0], case, rank.rank, rank.size)
    if key[0] == "all_gather":
        first.tensor_split(rank.size)[rank.rank].copy_(second)
        ALGORITHMS[key](first, first.tensor_split(rank.size)[rank.rank], group=rank.world)
        return first
    piece = second.tensor_split(rank.size)[rank.rank]
    ALGORITHMS[key](piece, second, *op, group=rank.world)
    return piece


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("key", [key for key in ALGORITHMS if key[0] in ("all_gather", "reduce_scatter")])
def test_a_piece_may_lie_in_its_place_in_the_whole(key, ranks):
    for case in (Case(), Case(13, torch.bfloat16, "AVG")):
        assert_right(ordered.run(ranks, in_its_place, key, case).results, key, case, ranks)


# -- low precision -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneLarge(Case):
    """256 on one rank, 1 on the others."""

    large: int = 0

    def whole(self, rank, size):
        return torch.full((self.numbers,), 256.0 if rank == self.large else 1.0, dtype=self.dtype)


def check_one_large(key):
    for ranks in (3, 5, 7):  # the sums are 258, 260 and 262; bfloat16 has them, and no 257
        cases = [OneLarge(ranks, torch.bfloat16, large=large) for large in range(ranks)]
        results = itertools.chain(*ordered.run(ranks, run_each, key, cases).results)
        assert {x for result in results if result is not None for x in result.tolist()} == {255.0 + ranks}


ROUNDED_ONCE = [key for key in REDUCING if key[1] != "hierarchical"]  # which rounds at each level


@pytest.mark.parametrize("key", ROUNDED_ONCE)
def test_low_precision_is_rounded_once(key):
    check_one_large(key)


@dataclass(frozen=True)
class Full(Case):
    """40000 everywhere, of which float16 cannot hold the sum of two."""

    def whole(self, rank, size):
        return torch.full((self.numbers,), 40000.0, dtype=self.dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("key", REDUCING)
def test_a_mean_is_finite_where_the_sum_is_not(key, ranks):
    check(key, ranks, [Full(ranks, torch.float16, "AVG", kind="exact")])


# -- beside torch.distributed ------------------------------------------------------------------------------------------


def built_in(collective, given, world):
    """torch.distributed's own, on the same arguments."""
    pieces = functools.partial(torch.Tensor.chunk, chunks=world.size())
    match collective, given:
        case "broadcast", (tensor, root):
            dist.broadcast(tensor, group=world, group_src=root)
        case "scatter", (piece, whole, root):
            dist.scatter(piece, None if whole is None else list(pieces(whole)), group=world, group_src=root)
        case "gather", (whole, piece, root):
            dist.gather(piece, None if whole is None else list(pieces(whole)), group=world, group_dst=root)
        case "reduce", (tensor, root, op):
            dist.reduce(tensor, op=op, group=world, group_dst=root)
        case "all_reduce", (tensor, op):
            dist.all_reduce(tensor, op, group=world)
        case "reduce_scatter", (piece, whole, op):
            dist.reduce_scatter(piece, list(pieces(whole)), op, group=world)
        case "all_gather", (whole, piece):
            dist.all_gather(list(pieces(whole)), piece, group=world)
        case "all_to_all", (output, input, takes, gives):
            dist.all_to_all_single(output, input, takes, gives, group=world)


def both(rank, keys, cases):
    """Our result and the built-in's, by case and key."""
    pairs = []
    for case, key in itertools.product(cases, keys):
        given, output = arguments(key[0], case, rank.rank, rank.size)
        built_in(key[0], given, rank.world)
        pairs.append((run(rank, key, case), output))
    return pairs


BESIDE = [Case(24), Case(24, op="MAX"), Case(24, torch.int64, kind="whole"), Case(24, torch.bfloat16, "MIN", root=1)]


@pytest.mark.parametrize("ranks", [2, 3, drilled(4), drilled(8)])
def test_beside_the_built_in_on_real_ranks(pool, ranks):
    """Sums of float64 within rounding, the rest equal."""
    keys = [*MOVING, *REDUCING]
    by_rank = pool.run(ranks, both, keys, BESIDE)
    for i, (case, key) in enumerate(itertools.product(BESIDE, keys)):
        for results in zip(*(pairs[i] for pairs in by_rank), strict=True):
            assert_right(results, key, case, ranks)


# -- faults ------------------------------------------------------------------------------------------------------------


def nothing_moves(sends, receives, *, group):
    for tensor, _ in receives:
        tensor.zero_()
    return p2p.Handle([])


EXCHANGE = ordered.exchange


def to_the_next_but_me(sends, receives, *, group):
    """Each message goes to the rank after the one it is meant for."""
    others = [peer for peer in range(group.size()) if peer != group.rank()]
    wrong = [(tensor, others[(others.index(peer) + 1) % len(others)]) for tensor, peer in sends]
    return EXCHANGE(wrong, receives, group=group)


def first_alone(reduction, first, second, out):
    return out.copy_(first)


def undivided(reduction, total, output):
    output.copy_(total)


@pytest.mark.parametrize("key", [*MOVING, *REDUCING])
def test_a_message_that_does_not_arrive_is_found(monkeypatch, key):
    monkeypatch.setattr(ordered, "exchange", nothing_moves)
    with pytest.raises(AssertionError, match=r"rank \d of 4 has"):
        check(key, 4, [Case()])


# The same message for all peers: naive's, star's and direct's, and each message to the only peer that there is.
ALL_ALIKE = [("all_reduce", "naive"), ("broadcast", "star"), ("all_gather", "direct")]


@pytest.mark.parametrize("key", [key for key in [*MOVING, *REDUCING] if key not in ALL_ALIKE])
def test_a_wrong_neighbour_is_found(monkeypatch, key):
    """By a deadlock where its messages are not awaited, by the values where they are."""
    monkeypatch.setattr(ordered, "exchange", to_the_next_but_me)
    with pytest.raises((AssertionError, ordered.Refused)):
        check(key, 5, [Case(25)])


@pytest.mark.parametrize("key", REDUCING)
def test_a_part_that_is_not_added_is_found(monkeypatch, key):
    monkeypatch.setattr(Reduction, "add", first_alone)
    with pytest.raises(AssertionError, match=r"rank \d of 4 has"):
        check(key, 4, [Case()])


@pytest.mark.parametrize("key", REDUCING)
def test_a_mean_that_is_not_divided_is_found(monkeypatch, key):
    monkeypatch.setattr(Reduction, "finish", undivided)
    with pytest.raises(AssertionError, match=r"rank \d of 4 has"):
        check(key, 4, [Case(op="AVG")])


@pytest.mark.parametrize("key", ROUNDED_ONCE)
def test_a_sum_in_low_precision_is_found(monkeypatch, key):
    monkeypatch.setattr(Reduction, "low", False)
    with pytest.raises(AssertionError):
        check_one_large(key)
