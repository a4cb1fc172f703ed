"""The journal: what is written survives whatever happens to the writer, and says who waits for whom."""

import dataclasses
import functools
import resource
import subprocess
import sys
import time

import pytest
import torch

from collectives import comm, journal, runtime, verdict
from collectives.call import Call, Part, ranks_of, spelled
from collectives.journal import Journal, Record
from collectives.watch import watching
from tests.collectives import hanging_rank
from tests.collectives.test_runtime import launched, wait_until
from tests.demos import ROOT


def call(op="all_reduce", number=1, elements=4, **more):
    made = Call(op, None, (elements,), torch.float32, elements, 4 * elements, **more)
    made.name, made.ranks, made.number, made.began = "7", (1, 3, 5, 7), number, 100.0 + number
    return made


def only(folder):
    [(rank, records)] = journal.read(folder).items()
    return rank, records


def test_a_record_holds_what_the_call_was(tmp_path):
    kept, part = Journal(tmp_path, rank=3), Part(2, (4,), torch.float32, 16)
    kept.begins(first := call("broadcast", 1, root=1))
    kept.begins(inner := dataclasses.replace(call("exchange", 1, sends=[part], receives=[part]), outer=first))
    kept.begins(call("barrier", 2, elements=0, sends=[part, dataclasses.replace(part, peer=1)]))
    kept.ends(inner)
    rank, records = only(tmp_path)
    ended = records[1].ended
    assert rank == 3
    assert time.time() - 60 < ended < time.time()
    same = {"group": "7", "ranks": "1,3…7", "dtype": "float32"}
    assert records == [
        Record(1, 0.0, 101.0, 1, 4, 3, 0, "broadcast", **same),
        Record(2, ended, 101.0, 1, 4, 5, 1, "exchange", **same),
        Record(3, 0.0, 102.0, 2, 0, -1, 0, "barrier", **same),
    ]


def test_the_ring_keeps_the_last_and_ends_no_other_record(tmp_path):
    kept = Journal(tmp_path, 0, capacity=5)
    calls = [call(number=n) for n in range(1, 13)]
    for made in calls:
        kept.begins(made)
    kept.ends(calls[0])  # its place is that of calls 6 and 11 by now
    kept.ends(calls[11])
    assert [(record.number, bool(record.ended)) for record in only(tmp_path)[1]] == [
        *((n, False) for n in (8, 9, 10, 11)),
        (12, True),
    ]


class _Killed(Exception):
    """In place of a SIGKILL."""


def test_half_a_record_is_none(tmp_path, monkeypatch):
    kept = Journal(tmp_path, 0, capacity=3)
    for number in (1, 2, 3):
        kept.begins(call(number=number))

    class Dies:
        def pack_into(self, target, at, *values):
            target[at : at + 8] = b"halfhalf"
            raise _Killed

        unpack_from = journal._BODY.unpack_from

    monkeypatch.setattr(journal, "_BODY", Dies())
    with pytest.raises(_Killed):
        kept.begins(call(number=4))
    monkeypatch.undo()
    assert [record.number for record in only(tmp_path)[1]] == [2, 3]


def test_its_space_is_taken_at_the_start(tmp_path):
    Journal(tmp_path, 0)
    size = (tmp_path / "rank-0.journal").stat().st_size
    assert size > 100 * journal.CAPACITY
    assert 512 * (tmp_path / "rank-0.journal").stat().st_blocks >= size, "a hole would be a SIGBUS on a full disk"


def test_a_full_disk_fails_at_the_start(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # no file may grow beyond
    try:
        with pytest.raises(OSError, match="too large"):
            Journal(tmp_path, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_new_journal_takes_the_place_of_the_old(tmp_path):
    Journal(tmp_path, 0).begins(call())
    kept = Journal(tmp_path, 0)
    assert only(tmp_path)[1] == []
    kept.begins(call(number=9))
    assert [record.number for record in only(tmp_path)[1]] == [9]


def test_a_folder_without_journals_is_told(tmp_path, capsys):
    assert verdict.main([str(tmp_path)]) == 1
    assert "holds no rank-*.journal" in capsys.readouterr().err
    (tmp_path / "rank-0.journal").write_bytes(b"something else")
    assert verdict.main([str(tmp_path)]) == 1
    assert "is no journal" in capsys.readouterr().err


@pytest.mark.parametrize("length", [20, 5000])
def test_a_journal_that_was_cut_off_is_told(tmp_path, capsys, length):
    Journal(tmp_path, 0)
    path = tmp_path / "rank-0.journal"
    path.write_bytes(path.read_bytes()[:length])
    assert verdict.main([str(tmp_path)]) == 1
    assert "is cut off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 2, 3), "0…3"),
        ((0, 4, 8), "0,4…8"),
        ((1, 2), "1,2"),
        ((5,), "5"),
        ((0, 1, 4), "0,1,4"),
        ((2, 5, 8, 11), "2,5…11"),
    ],
)
def test_ranks_in_few_characters(ranks, text):
    assert spelled(ranks) == text
    assert ranks_of(text) == list(ranks)


# ---- the verdict


def history(*calls, in_flight=False):
    """A rank's records: (op, elements) by number, all ended but the last one if it is in flight."""
    records = [
        Record(n, 50.0 + n, 40.0 + n, n, elements, -1, 0, op, "0", "0…2", "float32")
        for n, (op, elements) in enumerate(calls, start=1)
    ]
    return [*records[:-1], dataclasses.replace(records[-1], ended=0.0)] if in_flight else records


A, B, C = ("all_reduce", 5), ("broadcast", 3), ("all_reduce", 9)


def test_who_is_behind():
    journals = {0: history(A, B, C, in_flight=True), 1: history(A, B), 2: history(A, B, C, in_flight=True)}
    assert verdict.verdict(journals, 60.0) == [
        "group 0 (ranks 0…2): rank 1 is behind, ranks 0, 2 are in call 3; its last: "
        "broadcast of 3 float32, call 2 of group 0 (ranks 0…2): ended 8.0 s ago",
        "group 0 (ranks 0…2): ranks 0, 2 are in "
        "all_reduce of 9 float32, call 3 of group 0 (ranks 0…2): in flight for 17.0 s",
    ]


def test_who_is_behind_within_a_call():
    whole = history(A, C, in_flight=True)

    def parts(count):
        last = range(3, 3 + count)
        return [*whole, *(dataclasses.replace(whole[0], sequence=n, op="exchange", outer=2) for n in last)]

    found = verdict.verdict({0: parts(2), 1: parts(1), 2: parts(2)}, 60.0)
    assert found[1:] == ["  in it rank 1 is behind: in part 1 of it, where others are in part 2"]
    assert len(verdict.verdict({rank: parts(1) for rank in range(3)}, 60.0)) == 1


def test_who_is_behind_in_an_earlier_call():
    """Overlapped: all of them are launched before the first is waited for."""
    launched = [dataclasses.replace(record, ended=0.0) for record in history(A, C, C)]
    second_half = dataclasses.replace(launched[0], sequence=4, op="exchange", outer=1)
    found = verdict.verdict({0: [*launched, second_half], 1: launched, 2: [*launched, second_half]}, 60.0)
    assert "all_reduce of 5 float32, call 1" in found[0]
    assert found[1] == "  in it rank 1 is behind: in part 0 of it, where others are in part 1"
    assert "all_reduce of 9 float32, call 3" in found[2]
    assert len(found) == 3


def test_an_earlier_call_in_flight_is_told():
    first, *others = history(A, B)
    [line] = verdict.verdict({rank: [dataclasses.replace(first, ended=0.0), *others] for rank in range(3)}, 60.0)
    assert line.startswith("group 0 (ranks 0…2): ranks 0, 1, 2 are in all_reduce of 5 float32, call 1")


def test_nothing_is_said_of_calls_that_a_ring_has_dropped():
    """Rank 1 has been in other groups since."""
    elsewhere = [Record(n, 50.0, 40.0, n, 1, -1, 0, "barrier", "9", "1", "") for n in (7, 8)]
    done, waits = history(A, B), history(A, B, in_flight=True)
    nothing = verdict.verdict({0: done, 1: elsewhere, 2: done}, 60.0)
    assert nothing == ["nothing is in flight, and every group's ranks have made the same calls"]
    found = verdict.verdict({0: waits, 1: elsewhere, 2: waits}, 60.0)
    assert found[0].endswith("rank 1 may be behind, its journal has only later calls, of other groups")
    assert "ranks 0, 2 are in broadcast" in found[1]
    assert verdict.verdict({0: waits, 2: waits}, 60.0)[0].endswith("its journal is not in this folder")


def test_a_rank_without_any_call_is_behind():
    found = verdict.verdict({0: history(A, in_flight=True), 1: [], 2: history(A, in_flight=True)}, 60.0)
    assert "rank 1 is behind, ranks 0, 2 are in call 1; its last: it has made none" in found[0]


def test_where_they_differ_first():
    journals = {0: history(A, B, C, in_flight=True), 1: history(A, C, B, in_flight=True), 2: history(A, B)}
    assert verdict.verdict(journals, 60.0)[0] == (
        "group 0 (ranks 0…2): the ranks differ first in call 2: "
        "ranks 0, 2 are in broadcast of 3 float32; rank 1 is in all_reduce of 9 float32"
    )


def test_another_root_is_another_call():
    journals = {rank: [dataclasses.replace(history(B)[0], peer=int(rank == 2))] for rank in range(3)}
    assert verdict.verdict(journals, 60.0) == [
        "group 0 (ranks 0…2): the ranks differ first in call 1: "
        "ranks 0, 1 are in broadcast of 3 float32, root 0; rank 2 is in broadcast of 3 float32, root 1"
    ]


def test_nothing_to_say():
    journals = {rank: history(A, ("all_to_all_single", rank), C) for rank in range(3)}
    assert verdict.verdict(journals, 60.0) == ["nothing is in flight, and every group's ranks have made the same calls"]


def test_a_send_in_flight_is_told():
    waiting = Record(1, 0.0, 50.0, 1, 4, 2, 0, "send", "0", "0…2", "float32")
    [line] = verdict.verdict({0: [waiting], 1: [], 2: []}, 60.0)
    assert line == "rank 0 waits in send of 4 float32, rank 2, call 1 of group 0 (ranks 0…2): in flight for 10.0 s"


# ---- real ranks


def a_few_calls(run, folder):
    with watching(Journal(folder, run.rank)):
        for _ in range(3):
            comm.all_reduce(torch.ones(600), group=run.world, ordered=True)
        comm.barrier(group=run.world)
    comm.barrier(group=run.world)


def test_the_journal_of_a_job_that_went_well(pool, tmp_path):
    pool.run(3, a_few_calls, tmp_path)
    journals = journal.read(tmp_path)
    assert list(journals) == [0, 1, 2]
    for records in journals.values():
        assert [record.op for record in records] == [*(3 * ["all_reduce", "exchange", "exchange"]), "barrier"]
        assert [record.outer for record in records] == [0, 1, 1, 0, 4, 4, 0, 7, 7, 0]
        assert all(record.began <= record.ended for record in records)
    assert len(verdict.verdict(journals, time.time())) == 1


def test_a_hanging_job_is_read_from_outside_and_after_it_was_killed(pool, tmp_path):
    folder = tmp_path / "journals"
    folder.mkdir()

    def said():
        read = [sys.executable, "-m", "collectives.journal", str(folder)]
        return subprocess.run(read, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    def hangs():
        begun = any(folder.glob("rank-*.journal"))  # a journal gets its name when it is whole
        return begun and [len(records) for records in journal.read(folder).values()] == [5, 4, 5]

    with launched(tmp_path, runtime.launch, functools.partial(hanging_rank.hang, folder), 3):
        assert wait_until(hangs, 60)
        hanging = journal.read(folder)
    assert journal.read(folder) == hanging
    words = said()
    assert "rank 1 is behind, ranks 0, 2 are in call 3; its last: all_reduce of 9 float32, call 2 of group 0" in words
    assert "ranks 0, 2 are in all_reduce of 5 float32, call 3 of group 0 (ranks 0…2): in flight for" in words


def test_a_group_too_long_for_its_field_is_cut_at_a_rank():
    ranks = tuple(n * n for n in range(40))
    call = Call("barrier", None, name="7", ranks=ranks)
    _, field = journal._names(call)
    assert len(field) <= 64 and field.endswith(b",+")
    assert ranks_of(field.decode()) == list(ranks[: len(ranks_of(field.decode()))])
