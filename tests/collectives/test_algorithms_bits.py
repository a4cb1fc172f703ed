"""Bits: an all-reduce leaves the same ones on all ranks, and the direct exchange those of rank order, however called.

Numbers that any other order of addition rounds to other bits; and zeros of both signs and NaNs of several kinds, of
which a minimum depends on the order, and on the place in the buffer.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch

from collectives import comm
from collectives.algorithms import direct, ring
from collectives.algorithms.reduction import Reduction
from tests import ordered
from tests.collectives.algorithms import ALGORITHMS, Case, drilled, run_each

ALL_REDUCES = [key for key in ALGORITHMS if key[0] == "all_reduce"]
AS_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def bits(tensor):
    return tensor.view(AS_INTEGERS[tensor.dtype])


# -- the same on all ranks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strange(Case):
    """0, -0, three NaNs and two numbers."""

    def whole(self, rank, size):
        nans = torch.tensor([0x7FC00000, 0x7FD10000, -0x3F0000], dtype=torch.int32).view(torch.float32)
        values = torch.cat([nans, torch.tensor([0.0, -0.0, 1.0, -1.0])]).to(self.dtype)
        return values[torch.randint(7, (self.numbers,), generator=torch.Generator().manual_seed(rank))]


CASES = [
    *(Case(101, dtype, op) for dtype, op in itertools.product((torch.float32, torch.bfloat16), ("SUM", "AVG"))),
    *(Strange(101, dtype, op) for dtype, op in itertools.product((torch.float32, torch.bfloat16), ("MIN", "MAX"))),
]


def assert_same_bits(by_rank):
    """Results by case, by rank."""
    for i, case in enumerate(CASES):
        first, *others = [bits(results[i]) for results in by_rank]
        assert all(torch.equal(first, other) for other in others), f"bits differ: {case}"


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("key", ALL_REDUCES)
def test_all_ranks_have_the_same_bits(key, ranks):
    assert_same_bits(ordered.run(ranks, run_each, key, CASES).results)


def run_all(rank, keys):
    return [run_each(rank, key, CASES) for key in keys]


@pytest.mark.parametrize("ranks", [2, 3, 4, drilled(6)])
def test_all_real_ranks_have_the_same_bits(pool, ranks):
    for by_rank in zip(*pool.run(ranks, run_all, ALL_REDUCES), strict=True):
        assert_same_bits(by_rank)


ADD = Reduction.add


def mine_first(reduction, first, second, out):
    """What has arrived, over which the result is written, comes second on every rank."""
    return ADD(reduction, *((second, first) if first is out else (first, second)), out)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_order_that_differs_between_ranks_is_found(monkeypatch, ranks):
    monkeypatch.setattr(Reduction, "add", mine_first)
    with pytest.raises(AssertionError, match=r"bits differ: Strange"):
        assert_same_bits(ordered.run(ranks, run_each, ("all_reduce", "doubling"), CASES).results)


# -- the direct exchange, however it is called -------------------------------------------------------------------------


def whole_at_once(part, op, group):
    direct.all_reduce(part, op, group=group)
    return part


def asynchronously(part, op, group):
    work = direct.all_reduce(part, op, group=group, async_op=True)
    work.wait()
    return part


def far_into_a_buffer(part, op, group):
    buffer = torch.ones(part.numel() + 1017, dtype=part.dtype)
    place = buffer[1000 : 1000 + part.numel()].copy_(part)
    direct.all_reduce(buffer, op, group=group)
    return place


def from_an_odd_address(part, op, group):
    place = torch.ones(part.numel() + 1, dtype=part.dtype)[1:].copy_(part)
    direct.all_reduce(place, op, group=group)
    return place


def in_buckets(part, op, group):
    """All in flight at once, of sizes that are no multiple of each other."""
    works = [direct.all_reduce(bucket, op, group=group, async_op=True) for bucket in part.split(127)]
    for work in works:
        work.wait()
    return part


def packed_in_reverse(part, op, group):
    buckets = part.split(23)
    packed = torch.cat(buckets[::-1])
    direct.all_reduce(packed, op, group=group)
    return torch.cat(packed.split([len(bucket) for bucket in buckets[::-1]])[::-1])


def scattered_and_gathered(part, op, group):
    piece = torch.empty_like(part.tensor_split(group.size())[group.rank()])
    direct.reduce_scatter(piece, part, op, group=group)
    direct.all_gather(part, piece, group=group)
    return part


def in_uneven_pieces(part, op, group):
    """Nearly all of it belongs to the last rank."""
    pieces = part.split([*range(group.size() - 1), part.numel() - sum(range(group.size() - 1))])
    piece, gathered = torch.empty_like(pieces[group.rank()]), torch.empty_like(part)
    work = direct.reduce_scatter(piece, pieces, op, group=group, async_op=True)
    work.wait()
    direct.all_gather(gathered.split([len(piece) for piece in pieces]), piece, group=group)
    return gathered


WAYS = (whole_at_once, asynchronously, far_into_a_buffer, from_an_odd_address, in_buckets, packed_in_reverse)
WAYS += (scattered_and_gathered, in_uneven_pieces)
ORDERED = list(itertools.product((torch.float64, torch.float32, torch.bfloat16), ("SUM", "AVG")))


def all_ways(rank, elements):
    """The reduction of each dtype and op, in every way."""
    wholes = [(Case(elements, dtype).whole(rank.rank, rank.size), getattr(comm, op)) for dtype, op in ORDERED]
    return [[way(whole.clone(), op, rank.world) for way in WAYS] for whole, op in wholes]


def from_left_to_right(elements, dtype, op, ranks):
    """On this process; bfloat16 in float32, rounded at the end."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    total, *others = [Case(elements, dtype).whole(rank, ranks).to(wide) for rank in range(ranks)]
    for other in others:
        total = total + other
    return (total / ranks if op == "AVG" else total).to(dtype)


def assert_left_to_right(by_rank, elements):
    for i, pair in enumerate(ORDERED):
        expected = bits(from_left_to_right(elements, *pair, len(by_rank)))
        for results in by_rank:
            for way, result in zip(WAYS, results[i], strict=True):
                assert torch.equal(bits(result), expected), f"other bits: {way.__name__}, {pair}"


@pytest.mark.parametrize("ranks", [2, 3, 4, drilled(8)])
def test_direct_is_from_left_to_right_however_it_is_called(pool, ranks):
    assert_left_to_right(pool.run(ranks, all_ways, 509), 509)


def ring_in_its_place(rank, elements):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            patch.setattr(direct, name, getattr(ring, name))
        return all_ways(rank, elements)


def last_first(reduction, parts, output, scratch):
    IN_ORDER(reduction, parts[::-1], output, torch.empty_like(scratch))


IN_ORDER = Reduction.in_order


def test_the_order_of_a_ring_is_found(pool):
    with pytest.raises(AssertionError, match=r"other bits"):
        assert_left_to_right(pool.run(3, ring_in_its_place, 509), 509)


def test_another_order_is_found(monkeypatch):
    monkeypatch.setattr(Reduction, "in_order", last_first)
    with pytest.raises(AssertionError, match=r"other bits"):
        assert_left_to_right(ordered.run(3, all_ways, 509).results, 509)
