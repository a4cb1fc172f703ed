"""A rank knows its place, a job starts and stops as often as asked, and a rank that fails ends it within seconds."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from collectives import comm, runtime
from tests.collectives import failing_rank

ROOT = Path(__file__).parents[2]
NOTICED = 10.0  # seconds within which a failure must have ended the job
VARIABLES = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


# ---- its place


def set_variables(monkeypatch, variables):
    for name in (*VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_variables_a_rank_is_a_world_of_one(monkeypatch):
    set_variables(monkeypatch, {})
    assert runtime.place() == runtime.Place(rank=0, size=1, local_rank=0, local_size=1)


def test_each_variable_has_its_own_meaning(monkeypatch):
    set_variables(monkeypatch, VARIABLES | {"LOCAL_WORLD_SIZE": "4"})
    assert runtime.place() == runtime.Place(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize("missing", [[name] for name in VARIABLES] + [["RANK", "MASTER_ADDR"]])
def test_missing_variables_are_named(monkeypatch, missing):
    set_variables(monkeypatch, {name: value for name, value in VARIABLES.items() if name not in missing})
    with pytest.raises(ValueError, match=rf"^{', '.join(missing)} not set"):
        runtime.place()


def test_the_device_is_the_one_of_the_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert runtime._own_device(runtime.Place(rank=5, size=8, local_rank=1, local_size=4)) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="local rank 8 has no GPU, this machine has 8"):
        runtime._own_device(runtime.Place(rank=8, size=16, local_rank=8, local_size=16))


# ---- jobs of several processes


@dataclass
class Ended:
    """How a job came to its end."""

    status: int | None  # None: it did not, in time
    seconds: float
    errors: str
    left: list[int]  # processes

    def first_traceback(self):
        return self.errors.split("Traceback (most recent call last):")[1]


def processes_in(folder):
    """Those whose working directory this is: a job stands in a folder of its own, and its processes inherit that."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
    return found


def kill_all_in(folder):
    for pid in processes_in(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition, seconds):
    """Whether the condition came true in this time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@contextmanager
def launched(folder, main, *args):
    """The process that runs this, started in the folder; whatever is left there in the end is killed.

    It is forked from the pool's server, so torch need not be imported again.
    """
    process = multiprocessing.get_context("forkserver").Process(target=in_folder, args=(folder, main, *args))
    process.start()
    try:
        yield process
    finally:
        kill_all_in(folder)
        process.join()


def in_folder(folder, main, *args):
    os.chdir(folder)
    Path("begun").touch()
    for name in (*VARIABLES, "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    sys.exit(main(*args))


def launch(job, *args):
    return runtime.launch(functools.partial(job, *args), 4)


@pytest.fixture
def run_to_end(pool, tmp_path):
    """Run something in a process of its own, and say how it ended."""

    def run(main, *args, seconds=20.0):
        with launched(tmp_path, main, *args) as process:
            return ending(process, tmp_path, seconds)

    return run


def ending(process, folder, seconds=20.0):
    process.join(seconds)
    took = time.time() - (folder / "begun").stat().st_mtime  # without the start of the pool's server
    return Ended(process.exitcode, took, (folder / "stderr").read_text(), processes_in(folder))


FAILURES = {  # how a rank ends → what stderr says before any traceback
    "raise": "rank {} failed:\n",
    "sys.exit": "rank {} left the job alone: sys.exit(0)\n",
    "os._exit": "",
    "SIGKILL": "",
    "SIGSTOP": "",
}


def assert_ended_by_failure(ended, mode, failing):
    assert ended.status not in (0, None)
    assert ended.seconds < NOTICED
    assert not ended.left
    assert FAILURES[mode].format(failing) in ended.errors.split("Traceback")[0]
    if mode == "raise":
        assert "ValueError: the fault of this rank" in ended.first_traceback()
        assert "onnection closed" not in ended.first_traceback()
    if mode == "SIGKILL":
        assert f"rank {failing} was killed by SIGKILL" in ended.errors


@pytest.mark.parametrize(
    ("mode", "failing"), [*((mode, 2) for mode in FAILURES if mode != "SIGSTOP"), ("raise", 0), ("SIGKILL", 0)]
)
def test_a_rank_that_fails_ends_the_job(run_to_end, mode, failing):
    assert_ended_by_failure(run_to_end(launch, failing_rank.alone, mode, failing), mode, failing)


@pytest.mark.parametrize("mode", ["raise", "SIGKILL"])
def test_a_rank_that_fails_before_it_joins_ends_the_job(run_to_end, mode):
    ended = run_to_end(launch, failing_rank.before_start, mode, 2)
    assert ended.status not in (0, None)
    assert ended.seconds < failing_rank.PATIENCE / 2  # at once, not when the others lose patience
    assert not ended.left
    if mode == "raise":
        assert "ValueError: the fault of this rank" in ended.first_traceback()


def test_what_only_a_time_out_ends(pool, tmp_path):
    """The wait for a rank that is stopped, and the wait in a sub-group, which has the time-out too. Side by side."""
    stopped, apart = tmp_path / "stopped", tmp_path / "apart"
    stopped.mkdir()
    apart.mkdir()
    with (
        launched(stopped, launch, failing_rank.alone, "SIGSTOP", 2) as first,
        launched(apart, launch, failing_rank.in_sub_group) as second,
    ):
        ended = ending(second, apart)
        assert ended.status not in (0, None)
        assert 3 < ended.seconds < 8
        assert "in_sub_group" in ended.first_traceback()
        assert not ended.left
        assert_ended_by_failure(ending(first, stopped), "SIGSTOP", 2)


class Process:
    """Looks like a process to the launcher; its exit code is another one at each look, then stays."""

    def __init__(self, *codes):
        self.codes = list(codes)
        self.sentinel = object()

    @property
    def exitcode(self):
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]


@pytest.mark.parametrize("looks", range(1, 5))
def test_a_death_between_two_looks_is_not_missed(monkeypatch, looks):
    living, dying = Process(None), Process(*[None] * looks, -signal.SIGKILL)

    def wait(sentinels):
        assert dying.sentinel in sentinels, "the launcher waits for the living only"

    monkeypatch.setattr(multiprocessing.connection, "wait", wait)
    assert runtime._watch([living, dying]) == 1


STATUSES = [({}, 0), ({0: 0, 3: 0}, 0), ({1: 3}, 1), ({0: 1, 1: 1, 2: 1, 3: 1}, 1), ({3: "a word"}, 1)]


@pytest.mark.parametrize(("statuses", "expected"), STATUSES)
def test_the_exit_status_is_0_when_all_are(run_to_end, statuses, expected):
    ended = run_to_end(launch, failing_rank.end_with, statuses)
    assert ended.status == expected
    assert not ended.left


def test_no_rank_outlives_its_launcher(pool, tmp_path):
    with launched(tmp_path, launch, failing_rank.alone, "sleep", 1) as process:
        assert wait_until((tmp_path / "started").exists, 20)
        assert len(processes_in(tmp_path)) == 5
        process.kill()
        assert wait_until(lambda: not processes_in(tmp_path), failing_rank.PATIENCE / 2)


# ---- start and stop


def test_a_job_starts_and_stops_several_times_in_one_process(run_to_end):
    ended = run_to_end(launch, failing_rank.start_and_stop, 3)
    assert ended.status == 0, ended.errors
    assert not ended.left


def world_of_one():
    for _ in range(2):
        with runtime.start() as run:
            assert (run.rank, run.size, run.world.size()) == (0, 1, 1)
            assert run.new_group([0]) is run.world
            total = torch.ones(3)
            comm.all_reduce(total, group=run.new_group([0], "another"))
            assert total.tolist() == [1, 1, 1]
        with suppress(KeyError), runtime.start():
            raise KeyError("goes on, and the next start works")


def test_a_world_of_one_starts_and_stops_and_raises(run_to_end):
    ended = run_to_end(world_of_one)
    assert ended.status == 0, ended.errors


# ---- groups


def groups_after_sleep(run, seed):
    """All pairs and some triples, made by all ranks in one order after random sleeps: the sum of each one's members."""
    draw = random.Random(seed + run.rank)
    members = [(0, 1), (0, 3), (1, 2), (2, 3), (0, 1, 2), (1, 2, 3), (0, 2), (1, 3)]
    sums = {}
    for ranks in members:
        time.sleep(draw.uniform(0, 0.05))
        group = run.new_group(ranks, f"pass {seed}")
        if group is not None:
            total = torch.tensor([run.rank])
            comm.all_reduce(total, group=group)
            sums[ranks] = total.item()
    return sums


def test_groups_are_made_by_all_ranks_at_different_speed(pool):
    for seed in range(2):
        for rank, sums in enumerate(pool.run(4, groups_after_sleep, seed)):
            assert len(sums) == 4 + (rank in (1, 2))
            assert all(rank in ranks and total == sum(ranks) for ranks, total in sums.items())


def groups_by_ranks_and_label(run):
    up, down = run.new_group([0, 1], "up"), run.new_group([0, 1], "down")
    refusals = []
    for ranks in ([1, 0], [0, 0]):
        try:
            run.new_group(ranks)
        except ValueError as refusal:
            refusals.append(str(refusal))
    return (
        run.new_group([0, 1]) is run.world,
        up is run.new_group((0, 1), "up"),
        up is not down,
        run.new_group([1]) is None,
        refusals,
    )


def test_a_group_is_its_ranks_and_its_label(pool):
    refusals = [f"group ranks {ranks} must be in ascending order and distinct" for ranks in ("(1, 0)", "(0, 0)")]
    assert pool.run(2, groups_by_ranks_and_label) == [(True, True, True, rank == 0, refusals) for rank in (0, 1)]


# ---- under torchrun


@contextmanager
def torchrun(folder, mode):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.collectives.failing_rank", mode]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            command, cwd=folder, stderr=errors, stdout=errors, env=environment | {"PYTHONPATH": str(ROOT)}
        ) as process,
    ):
        try:
            yield process
        finally:
            kill_all_in(folder)


SLOW = [pytest.param(mode, marks=pytest.mark.drill) for mode in ("raise", "sys.exit", "os._exit", "SIGSTOP")]


@pytest.mark.parametrize("mode", ["SIGKILL", *SLOW])
def test_under_torchrun_a_rank_that_fails_ends_the_job(tmp_path, mode):
    """A stopped rank is killed by torchrun half a minute after the other has failed; that one does so at once."""
    errors = tmp_path / "stderr"
    with torchrun(tmp_path, mode) as process:
        assert wait_until((tmp_path / "started").exists, 30)
        failed = time.monotonic()
        if mode in ("os._exit", "SIGSTOP"):  # torchrun takes the first for an end, and does not see the second
            assert wait_until(lambda: "rank 0 failed" in errors.read_text(), NOTICED)
        ended = Ended(process.wait(45), time.monotonic() - failed, errors.read_text(), processes_in(tmp_path))
    assert ended.status != 0
    assert ended.seconds < (45 if mode == "SIGSTOP" else NOTICED)
    assert not ended.left
    if mode == "raise":
        assert "ValueError: the fault of this rank" in ended.first_traceback()


@pytest.mark.drill
def test_under_torchrun_a_job_starts_and_stops_several_times(tmp_path):
    with torchrun(tmp_path, "again") as process:
        assert process.wait(45) == 0, (tmp_path / "stderr").read_text()
        assert not processes_in(tmp_path)
