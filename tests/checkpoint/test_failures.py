"""Storage that fails on one rank, and folders that others use: an error on every rank, and nothing complete is lost."""

import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from checkpoint import Checkpoints, Keep, State, find, folder, lock
from checkpoint.files import Files
from collectives import comm
from collectives.agreement import Stopped
from collectives.layout import Box
from collectives.runtime import Runtime
from tests.checkpoint import tiny
from tests.pool import RankFailed

SOON = 10.0  # seconds in which all ranks know


class Failing(Files):
    """From the `after`-th operation on raises `error`: once, or until it is mended."""

    def __init__(self) -> None:
        self.done, self.after, self.once, self.error = 0, None, True, errno.ENOSPC

    def break_at(self, after: int, once: bool, error: int = errno.ENOSPC) -> None:
        self.done, self.after, self.once, self.error = 0, after, once, error

    def mend(self) -> None:
        self.after = None

    def _counted(self, path: Path) -> None:
        self.done += 1
        if self.after is not None and (self.done == self.after or (self.done > self.after and not self.once)):
            raise OSError(self.error, os.strerror(self.error), str(path))

    def make_folder(self, path):
        self._counted(path)
        super().make_folder(path)

    def write(self, path, chunks):
        try:
            self._counted(path)
        except OSError:
            path.write_bytes(b"half")
            raise
        super().write(path, chunks)

    def sync(self, path):
        self._counted(path)
        super().sync(path)

    def rename(self, path, to):
        self._counted(path)
        super().rename(path, to)

    def unlink(self, path):
        self._counted(path)
        super().unlink(path)

    def remove_folder(self, path):
        self._counted(path)
        super().remove_folder(path)


def save(saves: Checkpoints, run: Runtime, step: int, version: int = 0, behind: bool = False) -> str:
    """The words with which a save stops; "" if it does not."""
    began = time.monotonic()
    try:
        if behind:
            saves.save_async(step, tiny.state(run.rank, run.size, step, version))
            saves.wait()
        else:
            saves.save(step, tiny.state(run.rank, run.size, step, version))
    except Stopped as stopped:
        assert time.monotonic() - began < SOON
        return str(stopped)
    return ""


def found(run: Runtime, path: Path) -> tuple[int, int]:
    """(step, version) of the newest, which is whole and right."""
    saved = find(path, group=run.world, verify=True)
    assert tiny.right(saved)
    return saved.step, saved.shared["version"]


def clean(path: Path) -> bool:
    return all(entry.name == lock.NAME or re.fullmatch(r"step-\d+", entry.name) for entry in path.iterdir())


# -- every operation in turn -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Where and how storage fails."""

    rank: int
    behind: bool  # save_async
    once: bool  # or until it is mended
    again: bool  # a step that is there already


def fail_each(run: Runtime, base: Path, case: Case) -> list[str]:
    """Fail at the first operation of a save on one rank, then at the second, until there are no more; all words."""
    words = []
    for after in range(1, 100):
        told = fail(run, base / f"{after}", case, after)
        if not told:
            return words
        words.append(told)
    raise AssertionError("a save of a hundred operations")


def fail(run: Runtime, path: Path, case: Case, after: int) -> str:
    files, writers = Failing(), run.new_group(range(run.size), "writers")
    step, version = (2, 1) if case.again else (3, 0)
    with Checkpoints(path, run.world, writer_group=writers, keep=Keep(last=2), files=files) as saves:
        for before in (1, 2):
            saves.save(before, tiny.state(run.rank, run.size, before))
        if run.rank == case.rank:
            files.break_at(after, case.once)
        told = save(saves, run, step, version, case.behind)
        files.mend()
        if told:
            assert found(run, path) in [(2, 0), (step, version)], told
            assert {1, 2} <= {each for each, _ in folder.candidates(path)} or found(run, path) == (3, 0), told
        comm.barrier(group=run.world)
        assert clean(path) or not case.once, "what the failed save left takes up room"
        comm.barrier(group=run.world)
        assert save(saves, run, step, 7, case.behind) == "", "the next save fails too"
        assert found(run, path) == (step, 7)
        comm.barrier(group=run.world)
    if case.once:
        assert clean(path), sorted(path.iterdir())
    with Checkpoints(path, run.world) as saves:
        saves.take()
        assert found(run, path) == (step, 7) and clean(path), sorted(path.iterdir())
        comm.barrier(group=run.world)
    return told


CASES = [Case(*case) for case in itertools.product((0, 1), *[(False, True)] * 3)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_disk_that_fails_at_any_operation(pool, memory, case):
    ranks = pool.run(2, fail_each, memory, case, timeout=120.0)
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 2 if case.rank else len(ranks[0]) >= 15
    for words in ranks[0]:
        assert words.startswith(f"rank {case.rank}: {memory}/") and words.endswith("No space left on device"), words


# -- disks that are full or take no writing ----------------------------------------------------------------------------


def large(run: Runtime, step: int) -> State:
    """60,000 bytes a rank."""
    rows = torch.full((1, 7500), float(step), dtype=torch.float64)
    return State({"rows": [(Box((run.size, 7500), (run.rank, 0), (1, 7500)), rows)]})


def fill(run: Runtime, path: Path, behind: bool) -> list[str]:
    """Save until the disk is full, make room, save again."""
    writers = run.new_group(range(run.size), "writers")
    told = []
    with Checkpoints(path, run.world, writer_group=writers) as saves:
        for step in range(1, 6):
            try:
                (saves.save_async if behind else saves.save)(step, large(run, step))
                saves.wait()
            except Stopped as stopped:
                told.append(str(stopped))
                break
        told.append(str(find(path, group=run.world, verify=True).step))
        comm.barrier(group=run.world)
        if run.rank == 0:
            saves.files.remove(path / folder.name(1))
        saves.save(step, large(run, step))
        told.append(str(find(path, group=run.world, verify=True).step))
    return told


@pytest.mark.parametrize("behind", [False, True], ids=["save", "save_async"])
def test_a_disk_that_is_full(pool, small_disk, behind):
    ranks = pool.run(2, fill, small_disk / "run", behind)
    assert ranks[0] == ranks[1]
    words, before, after = ranks[0]
    assert "No space left on device" in words and "step-000004.tmp" in words and (before, after) == ("3", "4"), ranks


def limited(run: Runtime, path: Path, rank: int) -> list[str]:
    """On one rank no file may be larger than 1,000 bytes, for a while."""
    told = []
    with Checkpoints(path, run.world) as saves:
        saves.save(1, large(run, 1))
        with no_large_files(run.rank == rank):
            try:
                saves.save(2, large(run, 2))
            except Stopped as stopped:
                told.append(str(stopped))
        told.append(str(find(path, group=run.world, verify=True).step))
        saves.save(2, large(run, 2))
        told.append(str(find(path, group=run.world, verify=True).step))
    return told


@contextmanager
def no_large_files(here: bool) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_may_not_grow(pool, tmp_path, rank):
    words = f"rank {rank}: {tmp_path}/step-000002.tmp/rank-{rank}.safetensors: File too large"
    assert pool.run(2, limited, tmp_path, rank) == [[words, "1", "2"]] * 2


def forbidden(run: Runtime, path: Path) -> str:
    try:
        with Checkpoints(path, run.world) as saves:
            saves.save(1, tiny.state(run.rank, run.size, 1))
    except Stopped as stopped:
        return str(stopped)
    return ""


def test_a_file_in_the_place_of_the_folder(pool, tmp_path):
    (tmp_path / "run").write_text("")
    words = pool.run(2, forbidden, tmp_path / "run")
    assert words[0] == words[1] and str(tmp_path / "run") in words[0], words


def test_storage_that_takes_no_writing(pool, tmp_path):
    options = ["-t", "tmpfs", "-o", "size=100k,ro", "tmpfs", tmp_path]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("needs a file system that is read-only: run as root")
    try:
        words = pool.run(2, forbidden, tmp_path / "run")
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert words == [f"rank 0: {tmp_path / 'run'}: Read-only file system"] * 2


def told_later(run: Runtime, path: Path) -> list[str]:
    """A save behind training fails; which of the next calls says so: each kind, in turn."""
    writers, words = run.new_group(range(run.size), "writers"), []
    for number, call in enumerate(("poll", "wait", "save", "save_async", "open", "exit")):
        files = Failing()
        saves = Checkpoints(path / f"{number}", run.world, writer_group=writers, files=files)
        saves.save(1, tiny.state(run.rank, run.size, 1))
        if run.rank == 1:
            files.break_at(1, once=True)
        saves.save_async(2, tiny.state(run.rank, run.size, 2))
        with pytest.raises(Stopped) as stopped:
            for _ in range(1000):
                act(saves, run, call)
                time.sleep(0.005)
        words.append(str(stopped.value))
        if call != "exit":
            saves.__exit__(None, None, None)
        assert found(run, path / f"{number}") == (1, 0) or call in ("save", "save_async")
    return words


def act(saves: Checkpoints, run: Runtime, call: str) -> None:
    if call.startswith("save"):
        getattr(saves, call)(3, tiny.state(run.rank, run.size, 3))
    elif call == "exit":
        saves.__exit__(None, None, None)
    else:
        getattr(saves, call)()


def test_the_next_call_tells(pool, tmp_path):
    ranks = pool.run(2, told_later, tmp_path)
    assert ranks[0] == ranks[1]
    for number, words in enumerate(ranks[0]):
        file = tmp_path / f"{number}" / "step-000002.tmp" / "rank-1.safetensors"
        assert words == f"rank 1: {file}: No space left on device"


# -- whose folder it is ------------------------------------------------------------------------------------------------


def two_jobs(run: Runtime, path: Path) -> tuple[list[str], tuple[int, int]]:
    """Two jobs of one rank each save ten steps into one folder, and start at once."""
    alone = [run.new_group([rank]) for rank in range(run.size)][run.rank]
    comm.barrier(group=run.world)
    words = []
    with Checkpoints(path, alone) as saves:
        for step in range(1, 11):
            try:
                saves.save(step, tiny.state(0, 1, step, version=run.rank))
            except Stopped as stopped:
                words.append(str(stopped))
        comm.barrier(group=run.world)
    saved = find(path, group=alone, verify=True)
    assert tiny.right(saved)
    return words, {Path(place).name: version(place, alone) for _, place in folder.candidates(path)}


def version(path: Path, alone: dist.ProcessGroup) -> int:
    saved = find(path, group=alone, verify=True)
    assert tiny.right(saved)
    return saved.shared["version"]


def test_two_jobs_in_one_folder(pool, tmp_path):
    ranks = pool.run(2, two_jobs, tmp_path / "run")
    [owner] = [rank for rank, (words, _) in enumerate(ranks) if not words]
    words, versions = ranks[1 - owner]
    assert len(words) == 10 and set(versions.values()) == {owner} and len(versions) == 10
    told = rf"{tmp_path / 'run'} belongs to a job that has not ended, process \d+ on {os.uname().nodename} since .*"
    assert all(
        re.fullmatch(rf"({told}|{tmp_path / 'run'} belongs to another job): wait for .*", word) for word in words
    )


def hold(path: str, ready) -> None:
    with lock.held(Path(path)):
        ready.set()
        time.sleep(60)


def a_dead_owner(path: Path, kill: bool = True):
    """A process that has taken the folder, and was killed."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=hold, args=(str(path), ready))
    owner.start()
    assert ready.wait(30)
    if kill:
        owner.kill()
        owner.join()
    return owner


def test_the_lock_of_a_killed_job_is_free(tmp_path):
    owner = a_dead_owner(tmp_path)
    assert f'"pid": {owner.pid}' in (tmp_path / lock.NAME).read_text()
    with lock.held(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / lock.NAME).read_text()
    assert (tmp_path / lock.NAME).read_text() == ""


@pytest.fixture
def no_locks() -> Iterator[None]:
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        yield


def test_a_dead_owner_on_storage_without_locks(tmp_path, no_locks):
    a_dead_owner(tmp_path)
    with lock.held(tmp_path), pytest.raises(lock.Locked, match=f"process {os.getpid()} on"), lock.held(tmp_path):
        pass
    with lock.held(tmp_path):
        pass


def test_a_living_owner_on_storage_without_locks(tmp_path, no_locks):
    owner = a_dead_owner(tmp_path, kill=False)
    try:
        words = f"process {owner.pid} on .* delete {tmp_path / lock.NAME}"
        with pytest.raises(lock.Locked, match=words), lock.held(tmp_path):
            pass
    finally:
        owner.kill()
        owner.join()


def test_a_later_process_of_the_owners_number(tmp_path, no_locks):
    words = {"host": os.uname().nodename, "pid": os.getpid(), "started": "0", "since": "yesterday"}
    (tmp_path / lock.NAME).write_text(json.dumps(words))
    assert lock.holder(tmp_path) == ""
    with lock.held(tmp_path):
        assert f"process {os.getpid()} on" in lock.holder(tmp_path)
    assert lock.holder(tmp_path) == ""


def test_an_owner_elsewhere_is_believed_on_storage_without_locks(tmp_path, no_locks):
    words = '{"host": "elsewhere", "pid": 1, "started": "0", "since": "yesterday"}'
    (tmp_path / lock.NAME).write_text(words)
    with pytest.raises(lock.Locked, match="process 1 on elsewhere since yesterday"), lock.held(tmp_path):
        pass
    assert (tmp_path / lock.NAME).read_text() == words
    for nonsense in ("", "{", "[]", "7", '{"host": "elsewhere"}'):
        (tmp_path / lock.NAME).write_text(nonsense)
        with lock.held(tmp_path):
            pass


# -- ranks that do not agree -------------------------------------------------------------------------------------------


def only_some(run: Runtime, path: Path, rank: int) -> str:
    """A save that only one rank calls."""
    group = dist.new_group(range(run.size), timeout=timedelta(seconds=2), backend="gloo")
    saves = Checkpoints(path, group)
    saves.save(1, tiny.state(run.rank, run.size, 1))
    told, began = "", time.monotonic()
    if run.rank == rank:
        with pytest.raises(Exception) as error:
            saves.save(2, tiny.state(run.rank, run.size, 2))
        assert time.monotonic() - began < SOON
        told = str(error.value)
    comm.barrier(group=run.world)
    saves.__exit__(None, None, None)
    assert found(run, path) == (1, 0)
    return told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_one_rank_calls_ends(pool, tmp_path, rank):
    told = pool.run(2, only_some, tmp_path, rank)
    assert told[rank] and not told[1 - rank]


def blind(run: Runtime, path: Path) -> list[tuple[int, int]]:
    """To the second rank the disk shows nothing of what is there when it asks what exists."""
    with ExitStack() as stack:
        if run.rank == 1:
            for method in ("exists", "is_dir", "is_file"):
                stack.enter_context(mock.patch.object(Path, method, return_value=False))
            stack.enter_context(mock.patch.object(Path, "iterdir", side_effect=OSError(errno.EIO, "cannot look")))
        seen = []
        saves = stack.enter_context(Checkpoints(path, run.world, keep=Keep(last=1)))
        for step, number in ((1, 0), (1, 1), (2, 0)):
            saves.save(step, tiny.state(run.rank, run.size, step, number))
            seen.append(found(run, path))
    return seen


def test_one_rank_decides_what_is_there(pool, tmp_path):
    assert pool.run(2, blind, tmp_path) == [[(1, 0), (1, 1), (2, 0)]] * 2


def unlike(run: Runtime, path: Path) -> list[str]:
    """Another step, another shared state, on one rank; then a tensor of which nobody has the last rows."""
    part = Box((4,), (run.rank,), (1,))
    wrong = (
        (1 + run.rank, State({})),
        (1, State({}, shared={"cursor": run.rank})),
        (1, State({"rows": [(part, torch.zeros(1))]})),
    )
    words = []
    with Checkpoints(path, run.world) as saves:
        for step, state in wrong:
            with pytest.raises(Stopped) as stopped:
                saves.save(step, state)
            words.append(str(stopped.value))
    return words


def test_ranks_that_do_not_agree(pool, tmp_path):
    ranks = pool.run(2, unlike, tmp_path)
    assert ranks[0] == ranks[1]
    steps, shared, rows = ranks[0]
    assert "[1, 2]" in steps and "cursor" in shared and "rows: 2 of its 4 elements" in rows


def test_a_killed_rank_is_an_error_on_the_others(pool, tmp_path):
    with pytest.raises(RankFailed, match="SIGKILL"):
        pool.run(2, dies, tmp_path)


def dies(run: Runtime, path: Path) -> None:
    class Dying(Files):
        def sync(self, path):
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            super().sync(path)

    with Checkpoints(path, run.world, files=Dying()) as saves:
        saves.save(1, tiny.state(run.rank, run.size, 1))
