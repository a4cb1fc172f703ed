"""What every algorithm sends and receives, rank by rank, and how many steps it takes, against formulas of its own.

The expected values are derived on paper and typed here: nothing of the algorithms is used for them. Bytes on the
network of tests/ordered.py are exact; on the pool's ranks they are what a process wrote to its sockets.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil, floor, log2

import numpy as np
import pytest
import torch

from collectives import allocated, comm, demo
from collectives.algorithms import doubling, halving, naive, pieces, ring, star, tree
from collectives.algorithms.reduction import Reduction
from tests import ordered
from tests.collectives.algorithms import ALGORITHMS, RANKS, REDUCING, Case, drilled, nodes, run

N = 840  # numbers of a message; 1 to 8 divide it

# The binomial tree that hangs from rank 0: how many each rank tells, and how many are in its subtree.
CHILDREN = {
    1: [0],
    2: [1, 0],
    3: [2, 0, 0],
    4: [2, 0, 1, 0],
    5: [3, 0, 1, 0, 0],
    6: [3, 0, 1, 0, 1, 0],
    7: [3, 0, 1, 0, 2, 0, 0],
    8: [3, 0, 1, 0, 2, 0, 1, 0],
}
SUBTREE = {
    1: [1],
    2: [2, 1],
    3: [3, 1, 1],
    4: [4, 1, 2, 1],
    5: [5, 1, 2, 1, 1],
    6: [6, 1, 2, 1, 2, 1],
    7: [7, 1, 2, 1, 3, 1, 1],
    8: [8, 1, 2, 1, 4, 1, 2, 1],
}
# Seats, a power of two of them: of a host and its guest, or of one rank alone.
SEATS = {1: ".", 2: "..", 3: "hg.", 4: "....", 5: "hg...", 6: "hghg..", 7: "hghghg.", 8: "........"}
# The pieces that each rank sends in the steps of recursive doubling. Of five ranks, 0 has two pieces for 2, then three
# for 3; 2 has one for 0, then three for 4; and 1 is the guest of 0.
DOUBLED = {
    1: [0],
    2: [1, 1],
    3: [2, 0, 1],
    4: [1 + 2, 1 + 2, 1 + 2, 1 + 2],
    5: [2 + 3, 0, 1 + 3, 1 + 2, 1 + 2],
    6: [2 + 4, 0, 2 + 4, 0, 1 + 2, 1 + 2],
    7: [2 + 4, 0, 2 + 4, 0, 2 + 3, 0, 1 + 3],
    8: [1 + 2 + 4] * 8,
}
NODES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (1, 5), 6: (3, 2), 7: (1, 7), 8: (2, 4)}  # ranks in each, nodes


@dataclass(frozen=True)
class Moved:
    """By rank, how many numbers are sent and received as they are (plain), and how many as partial results (sums)."""

    plain: np.ndarray  # [2, P]
    sums: np.ndarray

    def __add__(self, other):
        return Moved(self.plain + other.plain, self.sums + other.sums)

    def nbytes(self, dtype):
        """[sent, received], each by rank. Partial results of 16-bit numbers are float32."""
        return (self.plain * dtype.itemsize + self.sums * max(dtype.itemsize, 4)).tolist()


def plain(sent, received):
    return Moved(np.stack([sent, received]), np.zeros((2, len(sent)), int))


def sums(sent, received):
    return Moved(np.zeros((2, len(sent)), int), np.stack([sent, received]))


def moved(ranks, n):
    """By algorithm, for a message of n numbers; of scatter and gather each piece has n, and all roots are rank 0."""
    order = np.arange(ranks)
    root, rest, piece, lacks = order == 0, order != 0, n // ranks, np.full(ranks, n - n // ranks)
    children, subtree = n * np.array(CHILDREN[ranks]), n * np.array(SUBTREE[ranks])
    hosts, guests = (np.array([who == kind for who in SEATS[ranks]]) for kind in "hg")
    doubled, of_others = piece * np.array(DOUBLED[ranks]), piece * (ranks - 1 - hosts) * ~guests
    from_root, to_root = plain(root * n * (ranks - 1), rest * n), plain(rest * n, root * n * (ranks - 1))
    up, down = sums(rest * n, children), plain(children, rest * n)
    folds = sums(guests * n, hosts * n)
    halves, doubles = sums(of_others, doubled), plain(doubled, of_others)
    inside, between = NODES[ranks]
    inside, between = (np.full(ranks, x) for x in (n - n // inside, n // inside - n // inside // between))
    rows = np.array([sum((rank + peer) % 3 for peer in order if peer != rank) for rank in order])

    def back(given):
        """From the hosts to their guests."""
        return plain(hosts * given, guests * given)

    return {
        ("broadcast", "star"): from_root,
        ("broadcast", "ring"): plain((order != ranks - 1) * n, rest * n),
        ("broadcast", "tree"): down,
        ("scatter", "star"): from_root,
        ("scatter", "tree"): plain(subtree - n, rest * subtree),
        ("gather", "star"): to_root,
        ("gather", "tree"): plain(rest * subtree, subtree - n),
        ("reduce", "star"): to_root,
        ("reduce", "ring"): sums(rest * n, (order != 1 % ranks) * n),  # from rank 1 on, around to the root
        ("reduce", "tree"): up,
        ("all_gather", "ring"): plain(lacks, lacks),
        ("all_gather", "doubling"): plain(guests * piece, hosts * piece) + doubles + back(n - piece),
        ("all_gather", "direct"): plain(lacks, lacks),
        ("reduce_scatter", "ring"): sums(lacks, lacks),
        ("reduce_scatter", "halving"): folds + halves + back(piece),
        ("reduce_scatter", "pairwise"): plain(lacks, lacks),
        ("reduce_scatter", "direct"): plain(lacks, lacks),
        ("all_reduce", "naive"): plain(lacks * ranks, lacks * ranks),
        ("all_reduce", "star"): to_root + from_root,
        ("all_reduce", "ring"): sums(lacks, lacks) + plain(lacks, lacks),
        ("all_reduce", "tree"): up + down,
        ("all_reduce", "doubling"): folds + sums(*[~guests * n * floor(log2(ranks))] * 2) + back(n),
        ("all_reduce", "halving"): folds + halves + doubles + back(n),
        ("all_reduce", "direct"): plain(2 * lacks, 2 * lacks),
        ("all_reduce", "hierarchical"): sums(*[inside + between] * 2) + plain(*[inside + between] * 2),
        ("all_to_all", "pairwise"): plain(rows, rows),
        ("all_to_all", "direct"): plain(rows, rows),
        ("barrier", "star"): plain(*[root * (ranks - 1) + rest] * 2),  # numbers of one byte
        ("barrier", "tree"): plain(*[rest + np.array(CHILDREN[ranks])] * 2),
        ("barrier", "doubling"): plain(*[np.full(ranks, ceil(log2(ranks)))] * 2),
    }


def check_bytes(key, ranks):
    """What the last run was like."""
    for dtype in (torch.float64, torch.bfloat16):
        report = ordered.run(ranks, run, key, Case(N, dtype))
        expected = moved(ranks, N)[key].nbytes(torch.uint8 if key[0] == "barrier" else dtype)
        assert [report.sent, report.received] == expected
    return report


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("key", ALGORITHMS)
def test_bytes_by_rank_and_steps(key, ranks):
    report = check_bytes(key, ranks)
    if key[0] == "all_to_all":  # the one above is uneven
        report = ordered.run(ranks, even_all_to_all, key)
    assert report.steps == steps(ranks)[key]


PARTIAL = [key for key in REDUCING if moved(4, N)[key].sums.any()]


@pytest.mark.parametrize("key", PARTIAL)
def test_partial_results_that_travel_too_short_are_found(monkeypatch, key):
    monkeypatch.setattr(Reduction, "wide", property(lambda reduction: reduction.dtype))
    with pytest.raises(AssertionError):
        check_bytes(key, 4)


OTHER_BYTES = {
    "direct": naive,
    "ring": naive,
    "naive": ring,
    "star": tree,
    "tree": star,
    "doubling": halving,
    "halving": doubling,
}


@pytest.mark.parametrize("name", OTHER_BYTES)
def test_the_bytes_of_another_algorithm_are_found(monkeypatch, name):
    monkeypatch.setitem(ALGORITHMS, ("all_reduce", name), OTHER_BYTES[name].all_reduce)
    with pytest.raises(AssertionError):
        check_bytes(("all_reduce", name), 4)


def moved_of_pieces(p):
    """The same for pieces of p[r] numbers."""
    n, others, before, after = p.sum(), len(p) - 1, np.roll(p, 1), np.roll(p, -1)
    around, straight = plain(n - after, n - p), plain(others * p, n - p)
    added_around, added_straight = sums(n - p, n - before), plain(n - p, others * p)
    return {
        ("all_gather", "ring"): around,
        ("all_gather", "direct"): straight,
        ("reduce_scatter", "ring"): added_around,
        ("reduce_scatter", "direct"): added_straight,
        ("reduce_scatter", "pairwise"): added_straight,
        ("all_reduce", "ring"): added_around + around,
        ("all_reduce", "direct"): added_straight + straight,
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("key", moved_of_pieces(np.ones(1, int)))
def test_bytes_of_uneven_pieces(key, ranks):
    """Of 13 numbers the first pieces are longer by one; of any sizes some are empty."""
    sizes = [(2 + 3 * rank) % 5 for rank in range(ranks)]
    cut = [13 // ranks + (rank < 13 % ranks) for rank in range(ranks)]
    cases = [(cut, Case(13, dtype)) for dtype in (torch.float64, torch.bfloat16)]
    if key[0] != "all_reduce":
        cases.append((sizes, Case(sum(sizes), sizes=sizes)))
    for lengths, case in cases:
        report = ordered.run(ranks, run, key, case)
        assert [report.sent, report.received] == moved_of_pieces(np.array(lengths))[key].nbytes(case.dtype)


# -- sockets -----------------------------------------------------------------------------------------------------------

LARGE = 120 * 2048  # float64 numbers, 2 MB; 1 to 6 divide it


def bytes_written(rank, keys):
    """By this rank to its sockets, in each algorithm."""
    groups, written = nodes(rank), []
    for key in keys:
        comm.barrier(group=rank.world)
        before = demo.bytes_written()
        run(rank, key, Case(LARGE), groups if key[1] == "hierarchical" else None)
        written.append(demo.bytes_since(before))
    return written


def assert_written(by_rank, keys):
    """Within 1 % and 4 KB a message, of which no rank sends more than 2(P-1)."""
    ranks, formulas = len(by_rank), moved(len(by_rank), LARGE)
    for i, key in enumerate(keys):
        formula, _ = formulas[key].nbytes(torch.uint8 if key[0] == "barrier" else torch.float64)
        for rank, written in enumerate(by_rank):
            allowed = 0.01 * formula[rank] + 4096 * 2 * (ranks - 1)
            assert abs(written[i] - formula[rank]) <= allowed, f"{key}: rank {rank} of {ranks} wrote {written[i]}"


@pytest.mark.skipif(demo.bytes_written() is None, reason="the system does not count what a process writes")
@pytest.mark.parametrize("ranks", [2, 3, drilled(4)])
def test_bytes_on_sockets(pool, ranks):
    assert_written(pool.run(ranks, bytes_written, list(ALGORITHMS)), list(ALGORITHMS))


def bytes_written_by_naive(rank, keys):
    with pytest.MonkeyPatch.context() as patch:
        for key in keys:
            patch.setitem(ALGORITHMS, key, naive.all_reduce)
        return bytes_written(rank, keys)


@pytest.mark.skipif(demo.bytes_written() is None, reason="the system does not count what a process writes")
def test_the_bytes_of_another_algorithm_are_found_on_sockets(pool):
    keys = [("all_reduce", "ring")]
    with pytest.raises(AssertionError, match=r"'ring'\): rank 0 of 3 wrote"):
        assert_written(pool.run(3, bytes_written_by_naive, keys), keys)


# -- memory ------------------------------------------------------------------------------------------------------------


# By algorithm of all_reduce and ranks: the most that a rank allocates, in 1/P of a message. Halving folded: a guest's
# whole message, and the larger half.
PEAKS = {
    "naive": {1: 0, 2: 2, 3: 6, 4: 12, 5: 20, 8: 56},
    "ring": {1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 8: 2},
    "direct": {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 8: 7},
    "doubling": {1: 0, 2: 2, 3: 6, 4: 8, 5: 10, 8: 16},
    "halving": {1: 0, 2: 1, 3: 3 + 2, 4: 3, 5: 5 + 3, 8: 6},
}


def peaks(rank):
    whole = torch.zeros(N * 8)
    calls = [partial(ALGORITHMS["all_reduce", name], whole, group=rank.world) for name in PEAKS]
    return [allocated.peak_bytes(call, rank.device) * rank.size / whole.nbytes for call in calls]


@pytest.mark.parametrize("ranks", [2, 3, *map(drilled, (1, 4, 5, 8))])
def test_memory(pool, ranks):
    highest = map(max, zip(*pool.run(ranks, peaks), strict=True))
    assert dict(zip(PEAKS, highest, strict=True)) == {name: by_ranks[ranks] for name, by_ranks in PEAKS.items()}


# -- steps -------------------------------------------------------------------------------------------------------------


def steps(ranks):
    """By algorithm: the messages that wait for one another. A group that is no power of two folds, before and after."""
    some, log, seats = int(ranks > 1), ceil(log2(ranks)), floor(log2(ranks))
    fold = 2 * (log - seats)
    inside, between = NODES[ranks]
    return {
        ("broadcast", "star"): some,
        ("broadcast", "ring"): ranks - 1,
        ("broadcast", "tree"): log,
        ("scatter", "star"): some,
        ("scatter", "tree"): log,
        ("gather", "star"): some,
        ("gather", "tree"): log,
        ("reduce", "star"): some,
        ("reduce", "ring"): ranks - 1,
        ("reduce", "tree"): log,
        ("all_gather", "ring"): ranks - 1,
        ("all_gather", "doubling"): seats + fold,
        ("all_gather", "direct"): some,
        ("reduce_scatter", "ring"): ranks - 1,
        ("reduce_scatter", "halving"): seats + fold,
        ("reduce_scatter", "pairwise"): ranks - 1,
        ("reduce_scatter", "direct"): some,
        ("all_reduce", "naive"): some,
        ("all_reduce", "star"): 2 * some,
        ("all_reduce", "ring"): 2 * (ranks - 1),
        ("all_reduce", "tree"): 2 * log,
        ("all_reduce", "doubling"): seats + fold,
        ("all_reduce", "halving"): 2 * seats + fold,
        ("all_reduce", "direct"): 2 * some,
        ("all_reduce", "hierarchical"): 2 * (inside - 1) + 2 * (between - 1),
        ("all_to_all", "pairwise"): ranks - 1,
        ("all_to_all", "direct"): some,
        ("barrier", "star"): 2 * some,
        ("barrier", "tree"): 2 * log,
        ("barrier", "doubling"): log,
    }


def even_all_to_all(rank, key):
    data = torch.zeros(rank.size)
    ALGORITHMS[key](torch.zeros(rank.size), data, group=rank.world)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 11])
def test_from_four_ranks_on_trees_take_fewer_steps_than_rings(ranks):
    taken = {
        name: ordered.run(ranks, run, ("all_reduce", name), Case(48)).steps for name in ("ring", "tree", "doubling")
    }
    assert (max(taken["tree"], taken["doubling"]) < taken["ring"]) == (ranks >= 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_chunks_follow_each_other_along_a_line_and_fly_side_by_side_around_a_ring(monkeypatch, ranks, chunks):
    """A line takes P-2 steps until the last rank has the first chunk, then one a chunk."""
    monkeypatch.setattr(pieces, "CHUNK", 8)
    for collective in ("broadcast", "reduce"):
        line = ordered.run(ranks, run, (collective, "ring"), Case(chunks))
        assert line.steps == (ranks - 2 + chunks if ranks > 1 else 0)
        assert line.messages == chunks * (ranks - 1)
    around = ordered.run(ranks, run, ("all_reduce", "ring"), Case(chunks * ranks))
    assert around.steps == 2 * (ranks - 1)
    assert around.messages == chunks * 2 * ranks * (ranks - 1)
