"""Every algorithm in flight: never a deadlock, in steps that are taken one by one, several at once.

Ranks are those of tests/ordered.py, under NCCL's rule for single operations (a lane for each pair of ranks) and for
batches (a lane for the whole group), where the pool is not named.
"""

import gc
import itertools
import time

import pytest
import torch

from collectives.algorithms import ring
from collectives.algorithms.reduction import Reduction
from tests import ordered
from tests.collectives.algorithms import ALGORITHMS, MOVING, REDUCING, Case, assert_right, check, nodes, run_each, start

LANES = ("pair", "group")
RING = [key for key in ALGORITHMS if key[1] == "ring"]


# -- no deadlock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(1, 9))
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
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("key", RING)
def test_many_chunks_in_flight(monkeypatch, key, ranks, lanes):
    monkeypatch.setattr(ring, "CHUNK", 24)
    check(key, ranks, chunky(ranks, key), lanes=lanes)


def in_chunks(rank, keys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK", 24)
        return [run_each(rank, key, chunky(rank.size, key)) for key in keys]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_chunks_in_flight_on_real_ranks(pool, ranks):
    by_rank = pool.run(ranks, in_chunks, RING)
    for i, key in enumerate(RING):
        for j, case in enumerate(chunky(ranks, key)):
            assert_right([results[i][j] for results in by_rank], key, case, ranks)


# -- two at once -------------------------------------------------------------------------------------------------------

TWO = [Case(13, async_op=True), Case(6, async_op=True)]


def two_in_flight(rank, key, labels=("", "")):
    """Both are started, then waited for in this order; on the groups of these labels."""
    groups = [rank.new_group(range(rank.size), label) for label in labels]
    pair = nodes(rank) if key[1] == "hierarchical" else None
    flying = [start(rank, key, case, pair or group) for case, group in zip(TWO, groups, strict=True)]
    for work, _ in flying:
        work.wait()
    return [output for _, output in flying]


def check_two(by_rank, key):
    for case, results in zip(TWO, zip(*by_rank, strict=True), strict=True):
        assert_right(results, key, case, len(by_rank))


# On some ranks the second call's first step comes before the first call's step with the same peer, on others after it.
ALONE_IN_ITS_GROUP = [("all_reduce", "tree"), ("all_reduce", "halving"), ("barrier", "tree")]
TOGETHER = [key for key in ALGORITHMS if key not in ALONE_IN_ITS_GROUP]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("key", TOGETHER)
def test_two_in_flight(key, ranks):
    for lanes in LANES:
        check_two(ordered.run(ranks, two_in_flight, key, lanes=lanes).results, key)


@pytest.mark.parametrize("key", ALONE_IN_ITS_GROUP)
def test_two_of_these_need_two_groups(key):
    with pytest.raises(ordered.Refused):
        ordered.run(3, two_in_flight, key)
    for ranks, lanes in itertools.product((2, 3, 4, 6, 7), LANES):
        check_two(ordered.run(ranks, two_in_flight, key, ("one", "two"), lanes=lanes).results, key)


def all_pairs_in_flight(rank, keys):
    return [two_in_flight(rank, key) for key in keys]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_in_flight_on_real_ranks(pool, ranks):
    for key, by_rank in zip(TOGETHER, zip(*pool.run(ranks, all_pairs_in_flight, TOGETHER), strict=True), strict=True):
        check_two(by_rank, key)


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
    monkeypatch.setattr(ring, "CHUNK", 16)
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
