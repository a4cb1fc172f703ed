"""The ordered network: a gallery of programs that it refuses or accepts, and what it measures.

A program is a job of pool.run, so those that are accepted run on real ranks as well.
"""

import inspect
from unittest import mock

import pytest
import torch

from collectives import p2p
from collectives.algorithms import direct
from tests import in_flight, ordered

LANES = ("pair", "group")


def of(value, count=3):
    """A message of this many float32."""
    return torch.full((count,), float(value))


# -- refused: a deadlock -----------------------------------------------------------------------------------------------


def both_send_first(run):
    p2p.send(of(run.rank), 1 - run.rank, group=run.world)
    p2p.recv(of(0), 1 - run.rank, group=run.world)


def ring_of_sends(run):
    p2p.send(of(run.rank), (run.rank + 1) % run.size, group=run.world)
    p2p.recv(of(0), (run.rank - 1) % run.size, group=run.world)


def crossing(run):
    """Both are asynchronous, and still each send stands before the receive for which the other waits."""
    sending = p2p.isend(of(run.rank), 1 - run.rank, group=run.world)
    p2p.irecv(of(0), 1 - run.rank, group=run.world).wait()
    sending.wait()


def batches_in_opposite_order(run):
    """Each is one batch; there are two of them, and the ranks do not agree which comes first."""
    two, one = [of(1), of(2)], [of(3)]
    mine, its = (two, one) if run.rank == 0 else (one, two)
    sending = p2p.exchange([(x, 1 - run.rank) for x in mine], [], group=run.world)
    p2p.exchange([], [(x, 1 - run.rank) for x in its], group=run.world).wait()
    sending.wait()


def never_sent(run):
    if run.rank == 1:
        p2p.recv(of(0), 0, group=run.world)


def never_received(run):
    if run.rank == 0:
        p2p.send(of(0), 1, group=run.world)


def empty_at_one_end(run):
    p2p.exchange([(of(0, 0), 1)], [], group=run.world) if run.rank == 0 else p2p.recv(of(0), 0, group=run.world)


def two_groups_crossed(run):
    """Each group is in order; what is waited for first is not."""
    groups = [run.new_group(range(2), label) for label in ("a", "b")]
    first, second = groups if run.rank == 0 else reversed(groups)
    p2p.send(of(1), 1, group=first) if run.rank == 0 else p2p.recv(of(0), 0, group=first)
    p2p.send(of(2), 1, group=second) if run.rank == 0 else p2p.recv(of(0), 0, group=second)


def one_f_one_b(run, activations, gradients):
    """Two stages, four microbatches: stage 0 is one forward ahead. Returns what it was sent."""
    seen, sending = [], []
    for microbatch in range(4):
        if run.rank == 0:
            sending.append(p2p.isend(of(microbatch), 1, group=activations))
            if microbatch:
                p2p.recv(x := of(0), 1, group=gradients)
                seen.append(x[0].item())
        else:
            p2p.recv(x := of(0), 0, group=activations)
            sending.append(p2p.isend(10 * x, 0, group=gradients))
            seen.append(x[0].item())
    if run.rank == 0:
        p2p.recv(x := of(0), 1, group=gradients)
        seen.append(x[0].item())
    for work in sending:
        work.wait()
    return seen


def pipeline_on_one_group(run):
    return one_f_one_b(run, run.world, run.world)


DEADLOCKS = {
    both_send_first: """\
rank 0 waits for [send 3 float32 to 1; world]
rank 1 waits for [send 3 float32 to 0; world]""",
    ring_of_sends: """\
rank 0 waits for [send 3 float32 to 1; world]
rank 1 waits for [send 3 float32 to 2; world]
rank 2 waits for [send 3 float32 to 0; world]""",
    crossing: """\
rank 0 waits for [receive 3 float32 from 1; world], before which stand [send 3 float32 to 1; world]
rank 1 waits for [receive 3 float32 from 0; world], before which stand [send 3 float32 to 0; world]""",
    batches_in_opposite_order: """\
rank 0 waits for [receive 3 float32 from 1; world], before which stand [send 3 float32 to 1, send 3 float32 to 1; world]
rank 1 waits for [receive 3 float32 from 0, receive 3 float32 from 0; world], before which stand \
[send 3 float32 to 0; world]""",
    never_sent: """\
rank 0 has ended
rank 1 waits for [receive 3 float32 from 0; world]""",
    never_received: """\
rank 0 waits for [send 3 float32 to 1; world]
rank 1 has ended""",
    empty_at_one_end: """\
rank 0 has ended
rank 1 waits for [receive 3 float32 from 0; world]""",
    two_groups_crossed: """\
rank 0 waits for [send 3 float32 to 1; group a (0, 1)]
rank 1 waits for [receive 3 float32 from 0; group b (0, 1)]""",
    pipeline_on_one_group: """\
rank 0 waits for [receive 3 float32 from 1; world], before which stand [send 3 float32 to 1; world]
rank 1 waits for [receive 3 float32 from 0; world], before which stand [send 3 float32 to 0; world]""",
}


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("program", DEADLOCKS, ids=lambda program: program.__name__)
def test_deadlock(program, lanes):
    for seed in range(4):
        with pytest.raises(ordered.Deadlock) as caught:
            ordered.run(3 if program is ring_of_sends else 2, program, lanes=lanes, seed=seed)
        assert str(caught.value) == DEADLOCKS[program]


def circle(run):
    """Three ranks, each first with the next one, then with the one before: six messages, no two of a pair crossing."""
    after, before = (run.rank + 1) % 3, (run.rank - 1) % 3
    got = [of(0), of(0)]
    works = [
        p2p.exchange([(of(run.rank), peer)], [(x, peer)], group=run.world)
        for peer, x in zip((after, before), got, strict=True)
    ]
    for work in works:
        work.wait()
    return [x[0].item() for x in got]


def test_what_goes_well_in_a_queue_a_pair_and_not_in_one_a_group():
    """Everybody's first exchange waits for somebody's second."""
    assert ordered.run(3, circle).results == [[1, 2], [2, 0], [0, 1]]
    with pytest.raises(ordered.Deadlock) as caught:
        ordered.run(3, circle, lanes="group")
    assert str(caught.value).splitlines() == [
        f"rank {me} waits for [send 3 float32 to {after}, receive 3 float32 from {after}; world]"
        for me, after in ((0, 1), (1, 2), (2, 0))
    ]


def behind_a_batch(run):
    """Rank 0 waits for rank 2 behind a batch that stands, at rank 1, behind a message that rank 1 never receives."""
    if run.rank == 0:
        p2p.isend(of(0, 1), 1, group=run.world)
        p2p.exchange([(of(0, 2), 1), (of(0, 2), 2)], [], group=run.world)
        p2p.recv(of(0), 2, group=run.world)
    elif run.rank == 2:
        p2p.send(of(0), 0, group=run.world)


def test_a_line_goes_back_to_the_cause():
    with pytest.raises(ordered.Deadlock) as caught:
        ordered.run(3, behind_a_batch)
    assert str(caught.value).splitlines() == [
        "rank 0 waits for [receive 3 float32 from 2; world], before which stand [send 1 float32 to 1; world], "
        "[send 2 float32 to 1, send 2 float32 to 2; world]",
        "rank 1 has ended",
        "rank 2 waits for [send 3 float32 to 0; world]",
    ]


# -- refused: something else -------------------------------------------------------------------------------------------


def sizes_differ(run):
    p2p.send(of(0, 4), 1, group=run.world) if run.rank == 0 else p2p.recv(of(0, 5), 0, group=run.world)


def dtypes_differ(run):
    p2p.send(of(0).int(), 1, group=run.world) if run.rank == 0 else p2p.recv(of(0), 0, group=run.world)


def changed_in_flight(run):
    x, peer = of(run.rank), 1 - run.rank
    work = p2p.exchange([(x, peer)], [(of(0), peer)], group=run.world)
    x += run.rank
    work.wait()


def changed_before_its_wait(run):
    """The message has passed, as what comes after it shows; who posted it has not yet been told."""
    if run.rank == 0:
        work = p2p.isend(x := of(1), 1, group=run.world)
        p2p.send(of(2), 1, group=run.world)
        x += 1
        work.wait()
    else:
        p2p.recv(of(0), 0, group=run.world)
        p2p.recv(of(0), 0, group=run.world)


def written_in_flight(run):
    if run.rank == 0:
        p2p.send(of(1), 1, group=run.world)
    else:
        work = p2p.irecv(x := of(0), 0, group=run.world)
        x.zero_()
        work.wait()


def in_place(run):
    """A rank sends and receives in one buffer."""
    x, peer = of(run.rank), 1 - run.rank
    p2p.exchange([(x, peer)], [(x, peer)], group=run.world).wait()


def two_into_one(run):
    """A buffer for the next message, which has not been read when the next one comes."""
    x, peer = of(0), 1 - run.rank
    works = [p2p.exchange([(of(i), peer)], [(x, peer)], group=run.world) for i in range(2)]
    for work in works:
        work.wait()


def never_waited(run):
    p2p.isend(of(1), 1, group=run.world) if run.rank == 0 else p2p.recv(of(0), 0, group=run.world)


def never_passed(run):
    if run.rank == 0:
        p2p.isend(of(1), 1, group=run.world)


def groups_of_members_only(run):
    if run.rank == 1:
        run.new_group([1])


IN_FLIGHT = "changed while it was in flight"
REFUSED = {
    sizes_differ: r"on world rank 0 posted \[send 4 float32 to 1\], and rank 1 \[receive 5 float32 from 0\]",
    dtypes_differ: r"rank 0 posted \[send 3 int32 to 1\], and rank 1 \[receive 3 float32 from 0\]",
    changed_in_flight: rf"on world the tensor of rank 1's \[send 3 float32 to 0\] {IN_FLIGHT}",
    changed_before_its_wait: rf"rank 0's \[send 3 float32 to 1\] {IN_FLIGHT}",
    written_in_flight: rf"rank 1's \[receive 3 float32 from 0\] {IN_FLIGHT}",
    in_place: rf"\[send 3 float32 to \d\] {IN_FLIGHT}",
    two_into_one: rf"\[receive 3 float32 from \d\] {IN_FLIGHT}",
    never_waited: r"rank 0 has ended without waiting for \[send 3 float32 to 1; world\], which has passed",
    never_passed: r"rank 0 has ended without waiting for \[send 3 float32 to 1; world\], which never passed",
    groups_of_members_only: "the ranks made different groups",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_refused(program):
    for seed in range(4):
        with pytest.raises(ordered.Refused, match=REFUSED[program]):
            ordered.run(2, program, lanes="group", seed=seed)


def read_before_its_wait(run):
    """What has been received when a later message is there: before and after the wait for it."""
    if run.rank == 0:
        p2p.exchange([(of(1), 1), (torch.tensor([1, 2]), 1), (torch.tensor([False]), 1)], [], group=run.world).wait()
        p2p.send(of(2), 1, group=run.world)
        return None
    x, y, z = of(0), torch.zeros(2, dtype=torch.int64), torch.tensor([False])
    work = p2p.exchange([], [(x, 0), (y, 0), (z, 0)], group=run.world)
    p2p.recv(of(0), 0, group=run.world)
    before = [*x.tolist(), *y.tolist(), *z.tolist()]
    work.wait()
    return before, [*x.tolist(), *y.tolist(), *z.tolist()]


def test_a_buffer_holds_garbage_until_the_wait():
    odd = torch.iinfo(torch.int64).max // 3
    for seed in range(4):
        before, after = ordered.run(2, read_before_its_wait, seed=seed).results[1]
        assert str(before) == str([float("nan")] * 3 + [odd, odd, True])
        assert after == [1.0, 1.0, 1.0, 1, 2, False]


# -- accepted ----------------------------------------------------------------------------------------------------------


def both_ways(run):
    p2p.exchange([(of(run.rank), 1 - run.rank)], [(x := of(-1), 1 - run.rank)], group=run.world).wait()
    return x.tolist()


def ring(run):
    return around(run.rank, run.world)


def around(value, group):
    """Hand this rank's value around the group: what came by."""
    x, me, size = of(value), group.rank(), group.size()
    seen = [value]
    for _ in range(size - 1):
        p2p.exchange([(x, (me + 1) % size)], [(y := of(-1), (me - 1) % size)], group=group).wait()
        seen.append(y[0].item())
        x = y
    return seen


def even_ranks_first(run):
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    x, y = of(run.rank), of(-1)
    if run.rank % 2 == 0:
        p2p.send(x, after, group=run.world)
        p2p.recv(y, before, group=run.world)
    else:
        p2p.recv(y, before, group=run.world)
        p2p.send(x, after, group=run.world)
    return y.tolist()


def along_the_line(run):
    x = of(7 if run.rank == 0 else -1)
    if run.rank > 0:
        p2p.recv(x, run.rank - 1, group=run.world)
    if run.rank < run.size - 1:
        p2p.send(x, run.rank + 1, group=run.world)
    return x.tolist()


def waited_in_any_order(run):
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    got = [of(-1, i + 1) for i in range(6)]
    works = [
        p2p.exchange([(of(10 * run.rank + i, i + 1), after)], [(x, before)], group=run.world) for i, x in enumerate(got)
    ]
    for i in (3, 5, 0, 4, 1, 2):
        works[i].wait()
        works[i].wait()  # a second one does nothing
    return [x.tolist() for x in got]


def without_rank_0(run):
    groups = [run.new_group(members) for members in ([1, 3], [1, 2, 3], [2])]
    return [around(run.rank, group) for group in groups if group is not None]


def part_by_part(run):
    """Something in two steps, with another message in flight beside the second."""
    peer, got = 1 - run.rank, [of(-1), of(-1), of(-1)]

    def start(step):
        return p2p.exchange([(of(10 * run.rank + step), peer)], [(got[step], peer)], group=run.world)

    first = start(0)
    assert not first.advance()  # an exchange has one part
    second, other = start(1), start(2)
    other.wait()
    assert not second.advance()
    return [x.tolist() for x in got]


def pipeline_on_a_group_a_direction(run):
    return one_f_one_b(run, *(run.new_group(range(2), label) for label in ("down", "up")))


def pipeline_in_batches(run):
    """On one group: in each step the next activation and the last gradient are one exchange."""
    seen, x = [], of(-1)
    for step in range(5):
        mine, x = (of(step) if run.rank == 0 else 10 * x), of(-1)
        forward, backward = step < 4, step > 0  # which of the two there is
        sends, receives = (forward, backward) if run.rank == 0 else (backward, forward)
        p2p.exchange([(mine, 1 - run.rank)] * sends, [(x, 1 - run.rank)] * receives, group=run.world).wait()
        seen.append(x[0].item())
    return seen


def all_sorts(run):
    """Strided tensors, of other shapes at the two ends, of many dtypes, of no dimension, empty ones, a parameter."""
    table, peer = torch.arange(12.0).view(3, 4) + 100 * run.rank, 1 - run.rank
    sends = [table.t()[1:3], table[:, ::2], table[0, 0], table.bfloat16(), table.long(), table > 5, table[:0]]
    landing = torch.full((6, 5), -1.0)
    whole = [torch.empty_like(table, dtype=dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool)]
    receives = [landing[:, 1], landing.t()[2:4, :3], landing[0, 0], *whole, landing[:0]]
    sends.append(torch.nn.Parameter(table[1]))
    receives.append(parameter := torch.nn.Parameter(torch.zeros(4)))
    p2p.exchange([(x, peer) for x in sends], [(x, peer) for x in receives], group=run.world).wait()
    return [x.tolist() for x in (landing, *whole, parameter)]


ACCEPTED = {  # (program, ranks): steps
    (both_ways, 2): 1,
    **{(ring, size): size - 1 for size in range(1, 9)},
    (even_ranks_first, 2): 2,
    (even_ranks_first, 3): 3,  # 2 sends to 0 while 0 sends to 1, so 2 can receive from 1 only in the third
    (even_ranks_first, 4): 2,
    (along_the_line, 4): 3,
    (waited_in_any_order, 2): 1,
    (waited_in_any_order, 3): 1,
    (without_rank_0, 4): 3,
    (part_by_part, 2): 2,  # the second step is in flight beside the other message
    (pipeline_on_a_group_a_direction, 2): 5,
    (pipeline_in_batches, 2): 5,
    (all_sorts, 2): 1,
}
CASES = [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in ACCEPTED]


@pytest.mark.parametrize(("program", "ranks"), CASES)
def test_accepted(program, ranks):
    reports = [ordered.run(ranks, program, lanes=lanes, seed=seed) for lanes in LANES for seed in range(4)]
    assert all(report == reports[0] for report in reports)
    assert reports[0].steps == ACCEPTED[program, ranks]


@pytest.mark.parametrize(("program", "ranks"), [case for case in CASES if case.values[1] <= 4])
def test_real_ranks_agree(pool, program, ranks):
    assert ordered.run(ranks, program).results == pool.run(ranks, program)


def summed(run):
    x = of(run.rank, 8)
    direct.all_reduce(x, group=run.world)
    return x.tolist()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_direct_exchange(ranks, lanes):
    report = ordered.run(ranks, summed, lanes=lanes)
    assert report.results == [[sum(range(ranks))] * 8] * ranks
    assert (report.messages, report.steps) == (2 * ranks * (ranks - 1), 2 * (ranks > 1))


# -- faults planted in the network -------------------------------------------------------------------------------------

FAULTS = {  # what is put where, and programs that then go through
    "no queues": (
        *(ordered.Network, "_heads_its_queues", lambda *_: True),
        (crossing, batches_in_opposite_order, pipeline_on_one_group),
    ),
    "sends are buffered": (
        *(ordered.Entry, "done", property(lambda entry: all(end.sends for end in entry.left))),
        (two_groups_crossed, never_received),
    ),
    "messages need not fit": (ordered.Network, "_check_fit", lambda *_: None, (dtypes_differ,)),
    "nobody looks at what is in flight": (
        *(in_flight.End, "is_untouched", lambda _: True),
        (changed_in_flight, changed_before_its_wait, written_in_flight, in_place, two_into_one),
    ),
    "nobody looks at what is left": (
        *(ordered.Network, "check_end", lambda *_: None),
        (never_waited, never_passed, groups_of_members_only),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_lets_programs_through(fault):
    """So it is that rule, and no other, that refuses them."""
    *where, programs = FAULTS[fault]
    for program in programs:
        with mock.patch.object(*where):
            ordered.run(2, program)


@pytest.mark.parametrize("lanes", LANES)
def test_without_queues_the_circle_closes(lanes):
    with mock.patch.object(ordered.Network, "_heads_its_queues", lambda *_: True):
        assert ordered.run(3, circle, lanes=lanes).results == [[1, 2], [2, 0], [0, 1]]


def test_without_garbage_a_buffer_read_too_early_looks_right():
    with mock.patch.object(in_flight, "garbage", lambda _: 0):
        assert ordered.run(2, read_before_its_wait).results[1][0] == [0, 0, 0, 0, 0, False]


# -- what a job and its caller see -------------------------------------------------------------------------------------


def traffic(run):
    """Rank 0 sends 5 int64 to 1 and 3 bfloat16 to 2."""
    sends = [(torch.zeros(5, dtype=torch.int64), 1), (torch.zeros(3, dtype=torch.bfloat16), 2)]
    x = (None, *(torch.empty_like(x) for x, _ in sends))[run.rank]
    p2p.exchange(sends if run.rank == 0 else [], [] if run.rank == 0 else [(x, 0)], group=run.world).wait()


def test_traffic_is_counted():
    report = ordered.run(4, lambda run: traffic(run) if run.rank < 3 else None)
    assert (report.sent, report.received) == ([46, 0, 0, 0], [0, 40, 6, 0])
    assert (report.messages, report.steps) == (2, 1)


def test_it_stands_in_the_place_of_the_true_exchange():
    true, ours = (inspect.signature(f).parameters.values() for f in (p2p.exchange, ordered.exchange))
    assert [(p.name, p.kind, p.default) for p in true] == [(p.name, p.kind, p.default) for p in ours]
    before = p2p.exchange
    with pytest.raises(ordered.Deadlock):
        ordered.run(2, both_send_first)
    assert p2p.exchange is before


def test_every_rank_gets_the_deadlock():
    told = []

    def program(run):
        try:
            p2p.recv(of(0), (run.rank + 1) % run.size, group=run.world)
        except ordered.Deadlock as deadlock:
            told.append(str(deadlock))
            raise

    with pytest.raises(ordered.Deadlock) as caught:
        ordered.run(4, program)
    assert told == [str(caught.value)] * 4


def test_a_program_cannot_hide_that_it_was_refused():
    def program(run):
        with pytest.raises(ordered.Refused):
            sizes_differ(run)

    with pytest.raises(ordered.Refused, match="5 float32"):
        ordered.run(2, program)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_fails_ends_the_others(seed):
    ended = []

    def program(run):
        try:
            both_ways(run)
            if run.rank == 1:
                raise KeyError("on purpose")
            p2p.recv(of(0), 1, group=run.world)
        finally:
            ended.append(run.rank)

    with pytest.raises(KeyError, match="on purpose") as caught:
        ordered.run(2, program, seed=seed)
    assert caught.value.__notes__ == ["raised on rank 1"]
    assert sorted(ended) == [0, 1]


def test_arguments_are_copies():
    def program(run, mine):
        mine += run.rank
        return mine.tolist()

    x = torch.zeros(1)
    assert ordered.run(2, program, x).results == [[0.0], [1.0]]
    assert x == 0


def test_groups():
    def program(run):
        pair, other = run.new_group([1, 2]), run.new_group([1, 2], "other")
        assert run.new_group([0, 1, 2]) is run.world and run.new_group([1, 2]) is pair
        if run.rank == 0:
            assert pair is None
            with pytest.raises(ValueError, match="no member of the group"):
                p2p.send(of(0), 0, group=pair)
            return None
        assert pair.group_name != other.group_name
        return pair.rank(), pair.size(), str(run.device)

    assert ordered.run(3, program).results == [None, (0, 2, "cpu"), (1, 2, "cpu")]
    with pytest.raises(ValueError, match="ascending order"):
        ordered.run(2, lambda run: run.new_group([1, 0]))


@pytest.mark.parametrize("peer", [-1, 0, 2])
def test_a_peer_is_another_rank_of_the_group(peer):
    with pytest.raises(ValueError, match=f"rank 0 of 2 has no peer {peer}"):
        ordered.run(2, lambda run: p2p.send(of(0), peer, group=run.world) if run.rank == 0 else None)


def test_the_kind_of_queue_is_checked():
    with pytest.raises(ValueError, match="'rank'"):
        ordered.run(2, both_ways, lanes="rank")
