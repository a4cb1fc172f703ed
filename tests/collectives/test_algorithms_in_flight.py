"""Every algorithm in flight: never a deadlock, in steps that are taken one by one, several at once.

Ranks are those of tests/ordered.py, under NCCL's rule for single operations (a lane for each pair of ranks) and for
batches (a lane for the whole group), where the pool is not named.
"""

import gc
import time
from unittest import mock

import pytest
import torch

from collectives import p2p
from collectives.algorithms import doubling, halving, pieces, ring, tree
from collectives.algorithms.reduction import Reduction
from tests import ordered
from tests.collectives.algorithms import (
    ALGORITHMS,
    MOVING,
    RANKS,
    REDUCING,
    Case,
    assert_right,
    check,
    drilled,
    nodes,
    run_each,
    start,
)

LANES = ("pair", "group")
RING = [key for key in ALGORITHMS if key[1] == "ring"]


# -- no deadlock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("key", ALGORITHMS)
def test_no_deadlock(key, ranks):
    for seed, lanes in enumerate(LANES, start=1):
        check(key, ranks, [Case(9, root=ranks // 2)], lanes=lanes, seed=seed)


@pytest.mark.drill
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("ranks", [*range(1, 9), 11, 16])
@pytest.mark.parametrize("key", ALGORITHMS)
def test_no_deadlock_in_many_orders_of_events(key, ranks, lanes):
    for seed in range(20):
        check(key, ranks, [Case(37, root=ranks - 1)], lanes=lanes, seed=seed)


def chunky(ranks, key):
    """100 numbers in chunks of three; and pieces of any sizes, of which some are shorter than a chunk."""
    cases = [Case(100), Case(100, torch.bfloat16, "AVG"), Case(100, root=ranks - 1)]
    if key[0] in ("all_gather", "reduce_scatter"):
        sizes = [(2 + 7 * rank) % 10 for rank in range(ranks)]  # 2 9 6 3 0 7 …
        cases += [Case(sum(sizes), sizes=sizes)]
    return cases


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("ranks", [1, 2, 3, drilled(6)])
@pytest.mark.parametrize("key", RING)
def test_many_chunks_in_flight(monkeypatch, key, ranks, lanes):
    monkeypatch.setattr(pieces, "CHUNK", 24)
    check(key, ranks, chunky(ranks, key), lanes=lanes)


def in_chunks(rank, keys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "CHUNK", 24)
        return [run_each(rank, key, chunky(rank.size, key)) for key in keys]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_chunks_in_flight_on_real_ranks(pool, ranks):
    by_rank = pool.run(ranks, in_chunks, RING)
    for i, key in enumerate(RING):
        for j, case in enumerate(chunky(ranks, key)):
            assert_right([results[i][j] for results in by_rank], key, case, ranks)


# -- several at once ---------------------------------------------------------------------------------------------------


def in_order(works):
    for work in works:
        work.wait()


def last_first(works):
    in_order(works[::-1])


def in_turn(works):
    """A step of each, until all are over."""
    while works:
        works = [work for work in works if work.advance()]


def several(rank, calls, wait):
    """All (algorithm, case) are started, then waited for."""
    pair = nodes(rank)
    flying = [start(rank, key, case, pair if key[1] == "hierarchical" else None) for key, case in calls]
    wait([work for work, _ in flying])
    return [output for _, output in flying]


def check_several(by_rank, calls):
    for (key, case), results in zip(calls, zip(*by_rank, strict=True), strict=True):
        assert_right(results, key, case, len(by_rank))


def two(key, ranks):
    """Two of the same, and as the tree and the line of another root are others, two with other roots."""
    return [(key, Case(13, async_op=True)), (key, Case(6, root=ranks // 2, async_op=True))]


@pytest.mark.parametrize("ranks", [3, drilled(6)])
@pytest.mark.parametrize("key", ALGORITHMS)
def test_two_in_flight(key, ranks):
    for lanes, wait in zip(LANES * 2, (in_order, last_first, in_turn, in_order), strict=True):
        check_several(ordered.run(ranks, several, two(key, ranks), wait, lanes=lanes).results, two(key, ranks))


def all_of_them(ranks):
    return [call for key in ALGORITHMS for call in two(key, ranks)]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("wait", [in_order, last_first, in_turn])
def test_all_algorithms_in_flight_at_once(ranks, lanes, wait):
    calls = all_of_them(ranks)
    check_several(ordered.run(ranks, several, calls, wait, lanes=lanes).results, calls)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_algorithms_in_flight_at_once_on_real_ranks(pool, ranks):
    calls = all_of_them(ranks)
    for wait in (in_order, in_turn):
        check_several(pool.run(ranks, several, calls, wait), calls)


@pytest.mark.parametrize("module", [doubling, halving, ring, tree])
def test_a_step_that_is_left_out_is_found(monkeypatch, module):
    monkeypatch.setattr(module, "idle", lambda steps=1: iter(()))
    with pytest.raises(ordered.Refused):
        ordered.run(7, several, all_of_them(7), in_turn, lanes="group")


# -- handles -----------------------------------------------------------------------------------------------------------


def before_and_after(rank, key):
    """What the output holds before the wait, and after it."""
    work, output = start(rank, key, Case(async_op=True))
    before = None if output is None else output.clone()
    work.wait()
    return before, output


@pytest.mark.parametrize("key", [*MOVING, *REDUCING])
def test_the_result_is_there_after_the_wait_and_not_before(key):
    before, after = zip(*ordered.run(3, before_and_after, key).results, strict=True)
    assert_right(after, key, Case(), 3)
    with pytest.raises(AssertionError):
        assert_right(before, key, Case(), 3)


ADVANCES = {  # on four ranks
    ("all_gather", "ring"): 3,
    ("reduce_scatter", "ring"): 3,
    ("all_reduce", "ring"): 6,
    ("all_gather", "direct"): 1,
    ("reduce_scatter", "direct"): 1,
    ("all_to_all", "direct"): 1,
    ("all_reduce", "direct"): 2,
    ("all_reduce", "naive"): 1,
    ("all_reduce", "star"): 2,
    ("all_gather", "doubling"): 2,
    ("all_reduce", "doubling"): 2,
    ("reduce_scatter", "halving"): 2,
    ("all_reduce", "halving"): 4,
    ("all_to_all", "pairwise"): 3,
    ("reduce_scatter", "pairwise"): 3,
    ("all_reduce", "hierarchical"): 3,  # each of which goes through a whole level
    ("barrier", "doubling"): 2,
}


def advances(rank, key):
    """How often a handle had to be advanced until it was over; what it says then; the output."""
    work, output = start(rank, key, Case(async_op=True))
    count = 1
    while work.advance():
        count += 1
    return count, work.advance(), output


@pytest.mark.parametrize("key", ADVANCES)
def test_a_handle_goes_step_by_step(key):
    counts, more, outputs = zip(*ordered.run(4, advances, key).results, strict=True)
    assert counts == (ADVANCES[key],) * 4 and not any(more)
    assert_right(outputs, key, Case(), 4)


def test_chunks_are_advanced_in_turn(monkeypatch):
    """13 numbers on 4 ranks, in pieces of up to 4, in chunks of up to 2: two rings of 6 steps."""
    monkeypatch.setattr(pieces, "CHUNK", 16)
    assert [count for count, *_ in ordered.run(4, advances, ("all_reduce", "ring")).results] == [12] * 4


def used_again(rank, key):
    """What an output that is used again after the wait holds after another one."""
    work, output = start(rank, key, Case(async_op=True))
    work.wait()
    if output is not None:
        output.fill_(55)
    work.wait()
    assert not work.advance()
    return output


@pytest.mark.parametrize("key", ALGORITHMS)
def test_a_second_wait_does_nothing(key):
    for output in ordered.run(4, used_again, key).results:
        assert output is None or (output == 55).all()


class Broken:
    """What a step waits for when a peer has died."""

    def wait(self):
        raise RuntimeError("the peer has died")


def goes_on_after_a_failure(rank, key):
    """How many exchanges are posted after the wait for one has failed."""
    posted = []

    def exchange(sends, receives, *, group):
        posted.append(group)
        return p2p.Handle([Broken()])

    with mock.patch.object(p2p, "exchange", exchange):
        work, _ = start(rank, key, Case(async_op=True))
        with pytest.raises(RuntimeError, match=r"^the peer has died$"):
            work.wait()
        before = len(posted)
        work.wait()
        assert not work.advance()
    return len(posted) - before


@pytest.mark.parametrize("key", [("all_reduce", "ring"), ("all_reduce", "direct"), ("all_reduce", "doubling")])
def test_a_handle_whose_wait_has_failed_does_not_go_on(key):
    """It would add what has not arrived."""
    assert ordered.run(1, lambda rank: goes_on_after_a_failure(ordered.Rank(0, 4, None), key)).results == [0]


EIGHT = [
    *(("all_reduce", name) for name in ("ring", "direct", "naive")),
    *(("reduce_scatter", name) for name in ("ring", "direct")),
    *(("all_gather", name) for name in ("ring", "direct")),
    ("all_to_all", "pairwise"),
]
FLYING = Case(3001, torch.float32, async_op=True)


def eight_in_flight(rank):
    """Rank 0 comes late: all is in flight while the others, who have let go of the inputs, use such memory again."""
    if rank.rank == 0:
        time.sleep(0.2)
    flying = [start(rank, key, FLYING) for key in EIGHT]
    gc.collect()
    garbage = [torch.full((3001 // cut,), 55.0) for cut in (1, 2, 3, 4) for _ in range(9)]
    for work, _ in flying:
        work.wait()
    assert all((tensor == 55).all() for tensor in garbage)
    return [output for _, output in flying]


def check_eight(by_rank):
    for i, key in enumerate(EIGHT):
        assert_right([outputs[i] for outputs in by_rank], key, FLYING, len(by_rank))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_eight_in_flight_on_real_ranks(pool, ranks):
    check_eight(pool.run(ranks, eight_in_flight))


def test_memory_that_two_share_is_found(monkeypatch):
    shared = torch.empty(3001)
    monkeypatch.setattr(Reduction, "room", lambda reduction, tensor: shared[: tensor.numel()])
    with pytest.raises((AssertionError, ordered.Refused)):
        check_eight(ordered.run(2, eight_in_flight).results)
