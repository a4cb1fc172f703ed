"""What a watcher is told: every call once, in order, from every thread, with its parts and name; and slowed links."""

import contextlib
import threading
import time
from unittest import mock

import pytest
import torch

from collectives import comm, p2p
from collectives.call import Call, Part
from collectives.ledger import Ledger
from collectives.slow import Slow
from collectives.watch import Watcher, about, watches, watching
from tests.collectives.test_ledger import OPERATIONS


class Diary(Watcher):
    """Everything that it was told, as text."""

    def __init__(self):
        self.told = []

    def _write(self, event, call):
        inside = f" in {call.outer.op} {call.outer.number}" if call.outer else ""
        self.told.append(f"{event} {call.op} {call.number}{inside}")

    def begins(self, call):
        self._write("begins", call)

    def launched(self, call):
        self._write("launched", call)

    def waits(self, call):
        self._write("waits", call)

    def ends(self, call):
        self._write("ends", call)


def ordered(run):
    with watching(diary := Diary()):
        work = comm.all_reduce(torch.ones(500), group=run.world, async_op=True, ordered=True)
        comm.barrier(group=run.world)
        work.wait()
        work.wait()
    comm.barrier(group=run.world)
    return diary.told


def test_an_ordered_all_reduce_is_one_call_of_two_exchanges(pool):
    part, whole = "exchange 1 in all_reduce 1", "all_reduce 1"
    assert pool.run(3, ordered) == 3 * [
        [
            f"begins {whole}",
            *(f"begins {part}", f"launched {part}"),
            f"launched {whole}",
            *("begins barrier 2", "launched barrier 2", "ends barrier 2"),
            f"waits {whole}",
            *(f"waits {part}", f"ends {part}"),
            *(f"begins {part}", f"launched {part}", f"waits {part}", f"ends {part}"),
            f"ends {whole}",
        ]
    ]


def advanced(run, last):
    """A call part by part; its second part is waited for, or advanced as well."""
    with watching(diary := Diary()):
        work = comm.all_reduce(torch.ones(500), group=run.world, async_op=True, ordered=True)
        steps = [work.advance()]
        comm.barrier(group=run.world)
        steps.append(getattr(work, last)())
        work.wait()
    return steps, diary.told


@pytest.mark.parametrize("last", ["wait", "advance"])
def test_a_call_that_is_advanced_ends_with_its_last_part(pool, last):
    part, whole = "exchange 1 in all_reduce 1", "all_reduce 1"
    told = [
        f"begins {whole}",
        *(f"begins {part}", f"launched {part}"),
        f"launched {whole}",
        f"waits {whole}",
        *(f"waits {part}", f"ends {part}"),
        *(f"begins {part}", f"launched {part}"),
        *("begins barrier 2", "launched barrier 2", "ends barrier 2"),
        *(f"waits {part}", f"ends {part}"),
        f"ends {whole}",
    ]
    assert pool.run(3, advanced, last) == 3 * [([True, None if last == "wait" else False], told)]


def posts(run):
    """A send that is waited for, so that nothing stays behind."""
    with watching(diary := Diary()):
        if run.rank == 0:
            p2p.send(torch.ones(3), 1, group=run.world)
        else:
            p2p.irecv(torch.ones(3), 0, group=run.world).wait()
        comm.barrier(group=run.world)
    return diary.told


def test_point_to_point_is_counted_apart(pool):
    for rank, told in enumerate(pool.run(2, posts)):
        op = ("send", "recv")[rank]
        assert told == [
            *(f"{event} {op} 1" for event in ("begins", "launched", "waits", "ends")),
            *("begins barrier 1", "launched barrier 1", "ends barrier 1"),
        ]


def numbers(run):
    pair, seen = run.new_group([1, 2]), []

    class Numbers(Watcher):
        def begins(self, call):
            seen.append((call.op, call.ranks, call.rank, call.number, tuple(call.shape), call.elements, call.nbytes))

    with watching(Numbers()):
        comm.broadcast(torch.ones(2, 3), 0, group=run.world)
        if pair:
            comm.all_gather_single(torch.empty(4), torch.empty(2), group=pair)
        comm.barrier(group=run.world)
    return seen


def test_calls_are_counted_by_group_and_ranks_in_it(pool):
    for rank, seen in enumerate(pool.run(3, numbers)):
        gathered = [("all_gather_single", (1, 2), rank - 1, 1, (2,), 4, 16)] if rank else []
        assert seen == [
            ("broadcast", (0, 1, 2), rank, 1, (2, 3), 6, 24),
            *gathered,
            ("barrier", (0, 1, 2), rank, 2, (), 0, 0),
        ]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        comm.all_reduce(grad, group=ctx.group, ordered=True)
        return grad, None


def in_other_threads(run):
    """Calls of a backward and of a thread; while one thread is in a call, another's is no part of it."""
    pair = run.new_group(range(run.size), "another thread's")
    with watching(diary := Diary()):
        x = torch.ones(400, requires_grad=True)
        _Sum.apply(x, run.world).sum().backward()

        class Within(Watcher):
            def begins(self, call):
                if call.op == "exchange":
                    thread = threading.Thread(target=lambda: comm.barrier(group=pair))
                    thread.start()
                    thread.join()

        with watching(Within()):
            comm.all_gather_single(torch.empty(run.size * 300_000), torch.ones(300_000), group=run.world)
    return [line for line in diary.told if line.startswith("begins")]


def test_threads_are_seen_and_kept_apart(pool):
    part = "begins exchange 1 in all_reduce 1"
    assert pool.run(3, in_other_threads) == 3 * [
        [
            *("begins all_reduce 1", part, part),
            *("begins all_gather_single 2", "begins exchange 2 in all_gather_single 2", "begins barrier 1"),
        ]
    ]


def nothing_seen(run):
    outer, inner = Diary(), Diary()
    with watching(outer):
        with watching(inner):
            comm.barrier(group=run.world)
        pending = comm.all_reduce(torch.ones(3), group=run.world, async_op=True)
    comm.barrier(group=run.world)
    pending.wait()
    return inner.told, outer.told


def test_watching_begins_and_ends_with_its_block(pool):
    barrier = ["begins barrier 1", "launched barrier 1", "ends barrier 1"]
    reduced = [f"{event} all_reduce 2" for event in ("begins", "launched", "waits", "ends")]
    assert pool.run(2, nothing_seen) == 2 * [(barrier, barrier + reduced)]


def waited_for_outside(run):
    """The second half of an ordered all_reduce starts in its wait: after the block, and in another's."""
    outer, inner = Ledger(), Ledger()
    with watching(outer):
        first = comm.all_reduce(torch.ones(30_000), group=run.world, async_op=True, ordered=True)
        with watching(inner):
            first.wait()
        second = comm.all_reduce(torch.ones(30_000), group=run.world, async_op=True, ordered=True)
    second.wait()
    [row] = outer.rows()
    return row.calls, row.algorithm, row.wire, inner.rows()


def test_a_call_is_seen_to_its_end_by_who_saw_it_begin(pool):
    assert pool.run(3, waited_for_outside) == 3 * [(2, 320_000.0, 320_000.0, [])]


# ---- what calls are about


def named(run):
    """A call whose second part begins in its wait, one of another thread, one inside of two, and one after them."""
    alone, seen = run.new_group(range(run.size), "another thread's"), []

    class Names(Watcher):
        def begins(self, call):
            seen.append((call.op, call.about, call.number if call.outer is None else call.outer.number))

    with watching(Names()):
        with about("blocks.0"):
            work = comm.all_reduce(torch.ones(500), group=run.world, async_op=True, ordered=True)
            thread = threading.Thread(target=lambda: comm.barrier(group=alone))
            thread.start()
            thread.join()
            with contextlib.suppress(KeyError), about("blocks.1"):
                comm.barrier(group=run.world)
                raise KeyError
            comm.barrier(group=run.world)
        with about("blocks.2"):
            work.wait()
        comm.barrier(group=run.world)
    return seen


def test_a_call_and_its_parts_are_about_what_the_program_said_when_it_began(pool):
    assert pool.run(3, named) == 3 * [
        [
            *(("all_reduce", "blocks.0", 1), ("exchange", "blocks.0", 1), ("barrier", "", 1)),
            *(("barrier", "blocks.1", 2), ("barrier", "blocks.0", 3)),
            *(("exchange", "blocks.0", 1), ("barrier", "", 4)),
        ]
    ]


def test_a_call_says_what_it_is_about():
    call = Call("all_gather_single", None, (4096,), torch.float32, name="fsdp", ranks=(0, 1), number=12)
    where = "call 12 of group fsdp (ranks 0,1)"
    assert str(call) == f"all_gather_single [4096] float32, {where}"
    call.about = "blocks.3"
    assert str(call) == f"all_gather_single [4096] float32, of blocks.3, {where}"


def test_a_watcher_watches_inside_of_its_block():
    diary = Diary()
    with watching(diary), watching(Diary()):
        assert watches(diary)
    assert not watches(diary)
    with watching(Diary()):
        assert not watches(diary)


# ---- slowed links

LATENCY, BANDWIDTH = 0.02, 2.5e6  # seconds, bytes a second
TRANSFER = 0.04  # seconds for 100 KB


def slowed(run):
    """Seconds of calls on a slow link, by name, and whether launches and a wait after long work slept."""
    slept, sleep = [], time.sleep

    def gather():
        output, own = torch.empty(run.size * 25_000), torch.ones(25_000)
        return comm.all_gather_single(output, own, group=run.world, async_op=True)

    def timed(body):
        began = time.monotonic()
        body()
        return time.monotonic() - began

    def two():
        for work in [gather(), gather()]:
            work.wait()

    def record(seconds):
        slept.append(seconds)
        sleep(seconds)

    with watching(Slow(LATENCY, 1 / BANDWIDTH)), mock.patch.object(time, "sleep", record):
        comm.barrier(group=run.world)
        seconds = {
            "one": timed(lambda: gather().wait()),
            "two": timed(two),
            "broadcast": timed(lambda: comm.broadcast(torch.ones(25_000), 0, group=run.world)),
            "ordered": timed(lambda: comm.all_reduce(torch.ones(25_000), group=run.world, ordered=True)),
        }
        before = len(slept)
        work = gather()
        at_launch = slept[before:]
        sleep(LATENCY + TRANSFER * (run.size - 1) + 0.01)
        work.wait()
        return seconds, at_launch, slept[before:]


def test_slowed_links_take_their_time_and_overlap(pool):
    for ranks in (2, 3):
        transfer = LATENCY + (ranks - 1) * TRANSFER  # 100 KB to each of the others
        for rank, (seconds, at_launch, after_work) in enumerate(pool.run(ranks, slowed)):
            assert seconds["one"] >= transfer - 0.001
            assert seconds["two"] >= 2 * transfer - 0.001, "calls queue on the link"
            assert seconds["broadcast"] >= LATENCY + (TRANSFER if rank == 0 else 0) - 0.001
            halves = 1 if ranks == 2 else 2
            assert seconds["ordered"] >= halves * LATENCY + 2 * TRANSFER * (ranks - 1) / ranks - 0.001
            assert at_launch == [], "the launch does not sleep"
            assert after_work == [0.0], "work that took longer than the transfer has hidden it"


def test_a_slow_link_is_busy_for_the_larger_direction_and_once_for_a_call_of_others(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "gloo")
    slow, float32 = Slow(1.0, 0.01), torch.float32
    whole = Call("all_reduce", None, nbytes=300, ranks=(0, 1, 2), began=999.0)
    parts = [
        Call("exchange", None, nbytes=20, receives=[Part(1, (25,), float32, 100)], ranks=(0, 1, 2), began=999.0),
        Call("exchange", None, nbytes=50, receives=[Part(1, (5,), float32, 20)], ranks=(0, 1, 2), began=999.5),
    ]
    whole.parts = parts
    for call in (*parts, whole):
        slow.launched(call)
    assert [call.notes.get(slow) for call in (*parts, whole)] == [(99, 101), (101, 102.5), None]


def everything_slow(run):
    with watching(Slow(1e-4, 1e-9)):
        for operation in OPERATIONS.values():
            operation(run, 40)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_operation_can_be_slow(pool, ranks):
    pool.run(ranks, everything_slow)


def right_while_slow(run):
    with watching(Slow(0.001, 1e-9), Ledger()):
        total = torch.full((7,), float(run.rank))
        comm.all_reduce(total, group=run.world, ordered=True)
    return total.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_watched_results_are_right(pool, ranks):
    assert pool.run(ranks, right_while_slow) == ranks * [7 * [ranks * (ranks - 1) / 2]]
