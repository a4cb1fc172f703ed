"""Checked mode: what would hang or mix contents is an error on every rank that is in the call, naming both sides."""

import functools
import time
import uuid

import numpy
import pytest
import torch
import torch.distributed as dist

from collectives import comm, p2p
from collectives.checked import Checked
from collectives.watch import watching
from tests.collectives.test_ledger import OPERATIONS

PATIENCE = 0.7
POSTED = []  # a receive that is forgotten is cancelled, and the peer's send, which fits it, would wait for ever


def told(run, job, *args, patience=PATIENCE):
    """(What checked mode said on this rank or None, seconds), in groups of this test's own: a fault stays in them."""
    with watching(Checked(run, patience)):
        began = time.monotonic()
        try:
            job(run, *args)
        except RuntimeError as error:
            return str(error), time.monotonic() - began
        return None, time.monotonic() - began


def fresh(run, ranks=None):
    """A group without messages of another test: what these tests leave posted would be taken by the next."""
    label = comm.all_gather_object(uuid.uuid4().hex, group=run.world)[0]
    return run.new_group(ranks or range(run.size), label)


# ---- what is right passes


def all_operations(run):
    for name, operation in OPERATIONS.items():
        for _ in range(2):
            operation(run, 40), name
    peers = [peer for peer in range(run.size) if peer != run.rank]
    works = [p2p.isend(torch.ones(run.rank + 1), peer, group=run.world) for peer in peers]
    works += [p2p.irecv(torch.empty(peer + 1), peer, group=run.world) for peer in peers]
    for work in reversed(works):
        work.wait()
    early = [comm.all_reduce(torch.ones(9), group=run.world, async_op=True, ordered=True) for _ in range(3)]
    for work in early:
        work.wait()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_right_programs_pass(pool, ranks):
    assert [error for error, _ in pool.run(ranks, told, all_operations)] == [None] * ranks


def watched_twice(run):
    checked = Checked(run, PATIENCE)
    with watching(checked):
        comm.barrier(group=run.world)
    comm.barrier(group=run.world)
    total = torch.ones(3)
    with watching(checked):
        comm.all_reduce(total, group=run.world)
    return total.tolist()


def test_one_may_watch_again(pool):
    assert pool.run(2, watched_twice) == 2 * [[2.0] * 3]


def integers_of_other_kinds(run):
    """all_to_all takes whatever counts rows."""
    rows, kinds = run.size * [1], (list, torch.tensor, numpy.array, lambda rows: list(numpy.array(rows)))
    with watching(Checked(run, PATIENCE)):
        for kind in kinds:
            data = torch.ones(run.size)
            comm.all_to_all_single(torch.empty_like(data), data, kind(rows), kind(rows), group=run.world)


def test_rows_may_be_integers_of_any_kind(pool):
    pool.run(2, integers_of_other_kinds)


def keys_left(run):
    with watching(Checked(run, PATIENCE)):
        counts = []
        for _ in range(3):
            for _ in range(5):
                comm.all_reduce(torch.ones(9), group=run.world, ordered=True)
                comm.barrier(group=run.world)
            counts.append(run.store.num_keys())
            dist.barrier()  # not seen: nobody writes while another counts
    return counts


def test_the_store_does_not_grow(pool):
    for first, second, third in pool.run(3, keys_left):
        assert max(first, second, third) - min(first, second, third) <= 6, "a few of the last calls at most"


# ---- collectives: both sides are named, on every rank


def other_operation(run):
    group = fresh(run)
    if run.rank == 0:
        comm.all_reduce(torch.ones(4), group=group)
    else:
        comm.broadcast(torch.ones(4), 0, group=group)


def other_reduction(run):
    comm.all_reduce(torch.ones(4), comm.MAX if run.rank == 0 else comm.SUM, group=fresh(run))


def other_shape(run):
    comm.all_reduce(torch.ones(4 + (run.rank == 0)), group=fresh(run))


def transposed(run):
    comm.all_reduce(torch.ones((2, 3) if run.rank == 0 else (3, 2)), group=fresh(run))


def other_dtype(run):
    comm.broadcast(torch.ones(4, dtype=torch.int32 if run.rank == 0 else torch.float32), 0, group=fresh(run))


def other_root(run):
    comm.broadcast(torch.ones(4), int(run.rank == 0), group=fresh(run))


def other_choice(run):
    comm.all_reduce(torch.ones(4), group=fresh(run), ordered=run.rank == 0)


def other_order(run):
    """Equal shapes: the gradients would be mixed without an error."""
    group, a, b = fresh(run), torch.tensor([1.0 + run.rank]), torch.tensor([10.0 + run.rank])
    if run.rank == 0:
        comm.all_reduce(a, group=group)
        comm.all_reduce(b, group=group)
    else:
        comm.all_reduce(b, group=group)
        comm.all_reduce(a, group=group)


def other_order_of_lists(run):
    """From two lines."""
    group, a, b = fresh(run), [torch.ones(1)] * run.size, [torch.zeros(1)] * run.size
    if run.rank == 0:
        comm.reduce_scatter(torch.empty(1), a, group=group)
    else:
        comm.reduce_scatter(torch.empty(1), b, group=group)


def other_dtype_of_a_piece(run):
    """Rank 0 alone would refuse it, where the others would wait."""
    dtype = torch.float64 if run.rank == 0 else torch.float32
    comm.all_gather([torch.empty(4)] * run.size, torch.ones(4, dtype=dtype), group=fresh(run))


def uneven(run):
    """Rank 1 expects 2 rows of rank 0, which gives 3; all else fits."""
    group = fresh(run)
    gives = [2] * run.size
    takes = [2] * run.size
    if run.rank == 0:
        gives[1] = 3
    comm.all_to_all_single(torch.empty(sum(takes), 5), torch.empty(sum(gives), 5), takes, gives, group=group)


def other_output(run):
    """gloo refuses it on rank 0, where the others would wait."""
    comm.all_gather_single(torch.empty(4 * run.size + (run.rank == 0)), torch.ones(4), group=fresh(run))


def other_row(run):
    data = torch.ones(run.size, 4)
    comm.all_to_all_single(torch.empty(run.size, 4 + (run.rank == 0)), data, group=fresh(run))


def nowhere_to_gather(run):
    comm.gather(None, torch.ones(4), 0, group=fresh(run))


def gathers_elsewhere(run):
    comm.gather(torch.empty(4 * run.size), torch.ones(4), 0, group=fresh(run))


def scatters_another_dtype(run):
    whole = torch.ones(4 * run.size, dtype=torch.float64) if run.rank == 0 else None
    comm.scatter(torch.ones(4), whole, 0, group=fresh(run))


def skipped(run):
    """Rank 1 leaves out the second of three calls."""
    group = fresh(run)
    comm.all_reduce(torch.ones(4), group=group)
    if run.rank != 1:
        comm.reduce(torch.ones(7), 0, group=group)
    comm.all_gather_single(torch.ones(2 * run.size), torch.ones(2), group=group)


COLLECTIVES = {
    other_operation: ("all_reduce [4] float32", "broadcast [4] float32"),
    other_reduction: ("MAX", "SUM"),
    other_shape: ("all_reduce [5] float32", "all_reduce [4] float32"),
    transposed: ("[2, 3]", "[3, 2]"),
    other_dtype: ("[4] int32", "[4] float32"),
    other_root: ("root 1", "root 0"),
    other_choice: ("SUM ordered", "SUM at"),
    other_order: ("rank 0 all_reduce [1] float32, call 1", "all_reduce [1] float32, call 1"),
    other_order_of_lists: ("rank 0 reduce_scatter [1, 1", "rank 1"),
    other_dtype_of_a_piece: ("rank 0 all_gather [4, 4", "beside float64", "beside float32"),
    uneven: ("rank 0 gives rank 1 3 rows, which expects 2",),
    other_output: ("rank 0 all_gather_single [4] float32", "into ["),
    other_row: ("into [5] float32", "into [4] float32"),
    nowhere_to_gather: ("rank 0 gather [4] float32", "its output is None, and must be", "numbers of float32"),
    gathers_elsewhere: ("rank 1 gather [4] float32", "and must be None"),
    scatters_another_dtype: ("rank 0 scatter [4] float32", "its input is [", "float64, and must be"),
    skipped: ("reduce [7] float32, call 2", "all_gather_single [2] float32, call 2"),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", COLLECTIVES, ids=lambda fault: fault.__name__)
def test_calls_that_differ_are_named_on_every_rank(pool, ranks, fault):
    for rank, (error, seconds) in enumerate(pool.run(ranks, told, fault)):
        assert error, f"rank {rank} saw nothing"
        assert error.startswith(f"rank {rank}")
        for side in COLLECTIVES[fault]:
            assert side in error
        assert "test_checked.py:" in error, "the line of the program"
        assert seconds < 10 * PATIENCE


def one_never_comes(run):
    group = fresh(run)
    comm.all_reduce(torch.ones(4), group=group)
    if run.rank != 1:
        comm.barrier(group=group)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_never_comes_is_named_with_its_last_call(pool, ranks):
    found = pool.run(ranks, told, one_never_comes)
    assert found[1][0] is None
    for rank, (error, seconds) in enumerate(found):
        if rank != 1:
            assert "ranks [1] wrote nothing within 0.7 s" in error
            assert "barrier, call 2" in error
            assert "last call seen of rank 1: all_reduce [4] float32, call 1" in error
            assert PATIENCE < seconds < 10 * PATIENCE


def another_group(run):
    everyone, pair = fresh(run), fresh(run, [0, 1])
    if run.rank == 0:
        comm.all_reduce(torch.ones(3), group=pair)
    comm.all_reduce(torch.ones(4), group=everyone)


def test_ranks_that_wait_in_different_groups_are_told_where_the_other_is(pool):
    for error, seconds in pool.run(3, told, another_group):
        assert "all_reduce [3] float32, call 1" in error
        assert "all_reduce [4] float32, call 1" in error
        assert "ranks 0,1" in error
        assert "ranks 0…2" in error
        assert seconds < 10 * PATIENCE


def fault_elsewhere(run):
    pair, everyone = fresh(run, [0, 1]), fresh(run)
    if run.rank < 2:
        comm.all_reduce(torch.ones(3 + run.rank), group=pair)
    comm.barrier(group=everyone)


def test_whoever_waits_for_ranks_that_failed_is_told_at_once(pool):
    error, seconds = pool.run(3, functools.partial(told, patience=20.0), fault_elsewhere)[2]
    assert error.startswith("rank 2 in barrier")
    assert "rank 0 all_reduce [3] float32" in error
    assert "rank 1 all_reduce [4] float32" in error
    assert seconds < 10


def waits_crossed(run):
    group = fresh(run)
    works = [comm.all_reduce(torch.ones(9), group=group, async_op=True, ordered=True) for _ in range(2)]
    for work in reversed(works) if run.rank == 0 else works:
        work.wait()


def test_ordered_handles_waited_on_in_another_order_are_found(pool):
    for rank, (error, _) in enumerate(pool.run(3, told, waits_crossed)):
        assert error, f"rank {rank} saw nothing"
        assert "in all_reduce 1" in error
        assert "in all_reduce 2" in error


def in_a_group_that_is_not_the_world(run):
    pair, twice = fresh(run, [1, 3]), fresh(run, [2, 3])
    if run.rank in (2, 3):
        comm.broadcast(torch.ones(2), 1, group=twice)
    if run.rank in (1, 3):
        mine, peer = run.rank // 2, 1 - run.rank // 2
        gives, takes = torch.ones(2 + mine), torch.ones(2 + peer)
        p2p.exchange([(gives, peer)], [(takes, peer)], group=pair).wait()
        comm.all_reduce(torch.ones(run.rank), group=pair)


def test_ranks_are_those_of_the_world_in_what_is_said(pool):
    zero, one, two, three = (error for error, _ in pool.run(4, told, in_a_group_that_is_not_the_world))
    assert (zero, two) == (None, None)
    for error in (one, three):
        assert "rank 1 all_reduce [1] float32, call 1" in error
        assert "rank 3 all_reduce [3] float32, call 1" in error
        assert "(ranks 1,3)" in error


def nobody_answers(run):
    pair = fresh(run, [1, 3])
    if run.rank == 1:
        p2p.send(torch.ones(2), 1, group=pair)


def test_who_does_not_answer_is_a_rank_of_the_world(pool):
    [error, _] = pool.run(4, told, nobody_answers)[1]
    assert "ranks [3] has posted no message" in error
    assert "last call seen of rank 3: all_gather_object" in error


# ---- point-to-point


def one_message(run, sent, buffer):
    """From rank 0 to rank 1."""
    group = fresh(run)
    if run.rank == 0:
        p2p.send(sent, 1, group=group)
    elif run.rank == 1:
        p2p.recv(buffer, 0, group=group)


def shape_of_message(run):
    one_message(run, torch.ones(4), torch.ones(5))


def dtype_of_message(run):
    one_message(run, torch.ones(4), torch.ones(4, dtype=torch.int32))


def message_larger_than_its_buffer(run):
    """Without the check gloo ends the process of the receiver."""
    one_message(run, torch.ones(5), torch.ones(4))


def second_message(run):
    """The first fits, two are in flight, and of the second pair the shapes are exchanged."""
    group, sizes = fresh(run), ([3, 4, 5], [3, 5, 4])[run.rank % 2]
    post = (p2p.isend, p2p.irecv)[run.rank % 2]
    for n in sizes if run.rank < 2 else ():
        POSTED.append(post(torch.ones(n), 1 - run.rank, group=group))
    while POSTED:
        POSTED.pop(0).wait()


MESSAGES = {
    message_larger_than_its_buffer: ("rank 0 sends [5] float32 to rank 1", "rank 1 receives [4] float32 from rank 0"),
    shape_of_message: ("rank 0 sends [4] float32 to rank 1", "rank 1 receives [5] float32 from rank 0"),
    dtype_of_message: ("rank 0 sends [4] float32 to rank 1", "rank 1 receives [4] int32 from rank 0"),
    second_message: ("rank 0 sends [4] float32 to rank 1", "rank 1 receives [5] float32 from rank 0"),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", MESSAGES, ids=lambda fault: fault.__name__)
def test_messages_that_do_not_match_are_named_on_both_sides(pool, ranks, fault):
    found = pool.run(ranks, told, fault)
    for error, _ in found[:2]:
        assert all(side in error for side in MESSAGES[fault])
    assert [error for error, _ in found[2:]] == [None] * (ranks - 2)


def alone(run, sending):
    group, call = fresh(run), p2p.send if sending else p2p.recv
    if run.rank == 0:
        call(torch.ones(4), 1, group=group)


@pytest.mark.parametrize("sending", [True, False])
def test_a_message_without_its_other_side_is_named(pool, sending):
    [error, _], [nothing, _] = pool.run(2, told, alone, sending)
    assert nothing is None
    assert f"{'send' if sending else 'recv'} [4] float32" in error
    assert "ranks [1] has posted no message to match within 0.7 s" in error


def both_send_first(run):
    group, peer = fresh(run), 1 - run.rank
    p2p.send(torch.ones(1), peer, group=group)
    p2p.recv(torch.ones(1), peer, group=group)


def test_two_neighbours_that_send_first_are_told(pool):
    for rank, (error, seconds) in enumerate(pool.run(2, told, both_send_first)):
        assert error.startswith(f"rank {rank}")
        assert "send [1] float32" in error
        assert seconds < 10 * PATIENCE


def some_only(run):
    """Rank 0 alone saves: its barrier meets the gradient sum of the others."""
    group = fresh(run)
    if run.rank == 0:
        comm.barrier(group=group)
    comm.all_reduce(torch.ones(4), group=group)


def test_a_collective_made_by_one_rank_only_is_named(pool):
    for error, _ in pool.run(3, told, some_only):
        assert "rank 0 barrier, call 1" in error
        assert "all_reduce [4] float32, call 1" in error
