"""The pool gives every rank's result, shows the fault of the rank that failed, and leaves no process behind."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankFailed, RankHung

NOTICED = 10.0  # seconds within which a failure must have ended the job


def process_id(runtime):
    return os.getpid()


def sum_of_ranks(runtime):
    total = torch.tensor([runtime.rank], dtype=torch.float64)
    dist.all_reduce(total)
    return total


def describe(runtime, offset):
    return runtime.rank + offset, runtime.size, dist.get_world_size(dist.group.WORLD), torch.get_num_threads()


def returned_kinds(runtime):
    weight = torch.ones(3, requires_grad=True)
    return {"bf16": torch.full((2, 2), 1.5, dtype=torch.bfloat16), "graph": weight * 2, "view": torch.arange(6.0)[::2]}


def die(how):
    if how == "raise":
        raise ValueError("the fault of this rank")
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        os._exit(0)


def die_alone(runtime, rank, how):
    """This rank ends in the given way while the others wait for it in an all_reduce."""
    if runtime.rank == rank:
        time.sleep(0.1)
        die(how)
    dist.all_reduce(torch.ones(1))


def stay_away(runtime, rank):
    """This rank returns and never calls the collective in which the others wait."""
    if runtime.rank != rank:
        dist.all_reduce(torch.ones(1))


def sleep_alone(runtime, seconds):
    """Rank 0 sleeps while the others wait for it in an all_reduce."""
    if runtime.rank == 0:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(1))


def group_identity(runtime, ranks):
    return id(runtime.new_group(ranks))


def sum_in_group(runtime, ranks):
    """(rank in the group, its size, sum of the members' global ranks), None on a rank that is no member."""
    group = runtime.new_group(ranks)
    if group is None:
        return None
    total = torch.tensor([runtime.rank])
    dist.all_reduce(total, group=group)
    return dist.get_rank(group), dist.get_world_size(group), total.item()


def is_running(pid):
    """Whether the process exists; one that has ended but was not waited for yet does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("ranks", range(1, 9))
def test_world_has_exactly_the_ranks_asked_for(pool, ranks):
    assert pool.run(ranks, describe, 10) == [(rank + 10, ranks, ranks, 1) for rank in range(ranks)]
    for total in pool.run(ranks, sum_of_ranks):
        assert torch.equal(total, torch.tensor([ranks * (ranks - 1) / 2], dtype=torch.float64))


@pytest.mark.parametrize("ranks", [0, 9])
def test_other_sizes_are_refused(pool, ranks):
    with pytest.raises(ValueError, match=f"1 to 8 ranks, not {ranks}"):
        pool.run(ranks, process_id)


def test_tensors_come_back_by_value(pool):
    for result in pool.run(2, returned_kinds):
        assert torch.equal(result["bf16"], torch.full((2, 2), 1.5, dtype=torch.bfloat16))
        assert torch.equal(result["graph"], torch.full((3,), 2.0))
        assert torch.equal(result["view"], torch.tensor([0.0, 2.0, 4.0]))
        assert not any(tensor.is_shared() for tensor in result.values())


def test_workers_are_kept_and_a_job_costs_milliseconds(pool):
    workers = pool.run(2, process_id)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        pool.run(2, sum_of_ranks)
        seconds.append(time.perf_counter() - begin)
    print(f"a tiny job on 2 ranks: {1e3 * statistics.median(seconds):.1f} ms")
    assert statistics.median(seconds) < 0.05
    assert pool.run(2, process_id) == workers


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", "ValueError: the fault of this rank"),
        ("SIGKILL", "killed by SIGKILL"),
        ("sys.exit", "SystemExit: 0"),
        ("os._exit", "exited with status 0"),
    ],
)
def test_the_rank_that_failed_is_shown_and_the_pool_goes_on(pool, how, told):
    workers = pool.run(4, process_id)
    begin = time.perf_counter()
    with pytest.raises(RankFailed, match=r"\Arank 2 failed") as failure:
        pool.run(4, die_alone, 2, how)
    assert time.perf_counter() - begin < NOTICED
    assert told in str(failure.value)
    assert ("in die\n" in str(failure.value)) == (how in {"raise", "sys.exit"})  # its traceback, where there is one
    assert "onnection closed" not in str(failure.value)
    assert not any(map(is_running, workers))
    assert not set(workers) & set(pool.run(4, process_id))


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_rank(pool):
    with pytest.raises(RankFailed, match=r"rank 0 failed(.|\n)*pickle"):
        pool.run(1, lambda_result)


def lambda_result(runtime):
    return lambda: None


def test_ranks_that_hang_are_named_with_their_stacks(pool):
    workers = pool.run(3, process_id)
    begin = time.perf_counter()
    with pytest.raises(RankHung, match=r"ranks \[0, 2\] of 3 hang") as failure:
        pool.run(3, stay_away, 1, timeout=1)
    assert time.perf_counter() - begin < NOTICED
    for rank in (0, 2):
        stack = str(failure.value).split(f"\nrank {rank}: ")[1].split("\nrank ")[0]
        assert "in all_reduce\n" in stack
        assert "in stay_away\n" in stack
    assert not any(map(is_running, workers))
    assert not set(workers) & set(pool.run(3, process_id))


def test_a_stopped_rank_is_named_and_killed(pool):
    workers = pool.run(3, process_id)
    begin = time.perf_counter()
    with pytest.raises(RankHung, match=r"ranks \[0, 1, 2\] of 3 hang") as failure:
        pool.run(3, die_alone, 1, "SIGSTOP", timeout=1)
    assert time.perf_counter() - begin < NOTICED
    assert "rank 1: no stack" in str(failure.value)
    assert str(failure.value).count("in all_reduce\n") == 2
    assert not any(map(is_running, workers))
    assert not set(workers) & set(pool.run(3, process_id))


def test_the_same_ranks_give_the_same_group_in_every_job(pool):
    first = pool.run(4, group_identity, [0, 2])
    assert first[0] != id(None)
    assert pool.run(4, group_identity, [0, 2]) == first


def test_a_group_counts_its_own_ranks(pool):
    assert pool.run(4, sum_in_group, [1, 3]) == [None, (0, 2, 4), None, (1, 2, 4)]


def test_workers_end_when_the_session_is_killed():
    """Also those that wait in a collective at that moment."""
    session = """
import sys, tempfile
from tests.pool import Pool
from tests.test_pool import process_id, sleep_alone
tempfile.tempdir = sys.argv[1]
pool = Pool()
print(*pool.run(2, process_id), flush=True)
pool.run(2, sleep_alone, 60, timeout=60)
"""
    root = Path(__file__).parents[1]
    with (
        tempfile.TemporaryDirectory() as left,  # a killed session cannot remove its files
        subprocess.Popen([sys.executable, "-c", session, left], cwd=root, stdout=subprocess.PIPE, text=True) as process,
    ):
        workers = process.stdout.readline().split()
        time.sleep(0.3)  # until the second job has begun
        assert len(workers) == 2
        assert all(map(is_running, workers))
        process.kill()
        deadline = time.perf_counter() + NOTICED
        while any(map(is_running, workers)) and time.perf_counter() < deadline:
            time.sleep(0.01)
        assert not any(map(is_running, workers))


def test_close_ends_all_workers():
    pool = Pool()
    workers = pool.run(2, process_id) + pool.run(1, process_id)
    pool.close()
    assert not any(map(is_running, workers))
