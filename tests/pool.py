"""Worker ranks that stay alive for a whole test session, so that a distributed test costs milliseconds.

`Pool().run(4, job, x)` calls `job(runtime, x)` on 4 ranks, each a process of one thread, and returns their results by
rank. For each world size there is one set of workers, with a process group of exactly that size; it starts at its first
use and is kept, with its sub-groups. Workers are forked from a server process that has imported torch once; jobs,
arguments and results travel by one pipe a worker.

A job that fails spoils its set, because the other ranks may wait in a collective forever: the set is killed, and a new
one starts when next asked for. The error shown is that of the rank that failed, not its peers' "connection closed".
"""

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from collectives.runtime import Runtime

MAX_RANKS = 8
START_SECONDS = 60.0  # for a set to start and connect; the first of all imports torch
GROUP_SECONDS = 60.0  # a rank's patience with another: more than a job may take, so that the pool notices a hang first
LINGER_SECONDS = 0.1  # after a failure, for the death that may have caused it
STACK_SECONDS = 0.5  # for a rank that hangs to write its stack


class RankFailed(RuntimeError):
    """A rank raised, or its process ended. The message holds its own traceback, or how it ended."""


class RankHung(RuntimeError):
    """The job did not end in time. The message holds the stack of each rank that had not answered."""


class Pool:
    """Sets of worker ranks, one for each world size that was asked for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # torch._dynamo, because the first optimizer of a process imports it, which takes a rank seconds.
        self._context.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "einops", "pytest", __name__])
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        self._sets: dict[int, WorkerSet] = {}

    def run(self, ranks: int, job: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
        """What `job(runtime, *args)` returned on each of this many ranks, by rank. Every rank gets a copy of `args`.

        job: a function of a module, found again by its name in the workers; its `runtime.world` is exactly these ranks.
        A tensor comes back by value, with its whole storage: clone a small view. timeout: seconds, not counting the
        start of a new set. Raises RankFailed for the rank that failed first, RankHung when the time is over.
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"a pool has 1 to {MAX_RANKS} ranks, not {ranks}")
        message = pickle.dumps((job, args))
        if ranks not in self._sets:
            self._sets[ranks] = WorkerSet(self._context, ranks, Path(tempfile.mkdtemp(dir=self._folder.name)))
            self.run(ranks, _do_nothing, timeout=START_SECONDS)
        try:
            return self._sets[ranks].run(message, timeout)
        except BaseException:
            self._sets.pop(ranks).kill()
            raise

    def close(self) -> None:
        """Kill all workers. If this process ends without it, however it ends, they end as well."""
        while self._sets:
            self._sets.popitem()[1].kill()
        self._folder.cleanup()


def _do_nothing(runtime: Runtime) -> None:
    """A worker takes its first job when it has joined the group: once all have done this one, the set has started."""


class WorkerSet:
    """The workers of one world size, seen from the test session: process r and pipe r are those of rank r."""

    def __init__(self, context: Any, size: int, folder: Path) -> None:
        self.folder = folder
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, size, folder), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()  # the worker has the only other copy, so its death is the end of our pipe
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, message: bytes, timeout: float) -> list[Any]:
        """Each rank's result of this pickled (job, args). After an exception ranks may still be in it: kill the set."""
        deadline = time.monotonic() + timeout
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # this rank is dead, as the end of its pipe will tell
                pipe.send_bytes(message)
        silent = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        results, raised, died = {}, [], []
        # After a failure go on for a moment: a rank that dies makes its peers raise "connection closed", and what they
        # report may be here before the end of its own pipe.
        while silent:
            ready = wait(list(silent), LINGER_SECONDS if raised or died else deadline - time.monotonic())
            if not ready:
                break
            for pipe in ready:
                rank = silent.pop(pipe)
                try:
                    reply = pipe.recv_bytes()
                except (EOFError, OSError):
                    died.append(f"rank {rank} failed: {self._end(rank)}")
                    continue
                fine, value = pickle.loads(reply)
                if fine:
                    results[rank] = value
                else:
                    raised.append(f"rank {rank} failed:\n{value}")
        if died or raised:
            raise RankFailed((died + raised)[0])
        if silent:
            hanging = sorted(silent.values())
            raise RankHung(f"after {timeout:g} s ranks {hanging} of {len(self.pipes)} hang\n{self._stacks(hanging)}")
        return [results[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        """End every worker, wherever it is, and wait until it is gone."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()

    def _end(self, rank: int) -> str:
        """How the process of this rank, whose pipe has ended, came to its end."""
        process = self.processes[rank]
        process.join()
        if process.exitcode < 0:
            return f"its process was killed by {signal.Signals(-process.exitcode).name}"
        return f"its process exited with status {process.exitcode}"

    def _stacks(self, ranks: list[int]) -> str:
        """Where these ranks are, from the job inwards: each writes its stack when asked, also while in gloo."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        stacks = [_stack_file(self.folder, rank).read_text().split(f'  File "{__file__}"')[0] for rank in ranks]
        nothing = "no stack: it takes no signal, as when it was stopped\n"
        return "\n".join(f"rank {rank}: {stack or nothing}" for rank, stack in zip(ranks, stacks, strict=True))


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def _work(pipe: Connection, rank: int, size: int, folder: Path) -> None:
    """The life of a worker: join the group of its set, then answer one job after the other."""
    gc.freeze()  # no collection looks through what the server has imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the session acts on it
    faulthandler.register(signal.SIGUSR1, file=_stack_file(folder, rank).open("w"), all_threads=False)
    sys.stdout.reconfigure(line_buffering=True)  # what a job prints must not be lost when its worker is killed
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, jobs), daemon=True).start()
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = OneLoop
    store, patience = dist.FileStore(str(folder / "store"), size), timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    assert dist.group.WORLD is not None
    runtime = Runtime(rank, size, torch.device("cpu"), "gloo", patience, dist.group.WORLD, store)
    while True:
        pipe.send_bytes(_answer(runtime, jobs.get()))


class _Gloo(type):
    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, dist.ProcessGroupGloo)


class OneLoop(metaclass=_Gloo):
    """What torch finds in the place of ProcessGroupGloo: one whose device is that of all groups of this process.

    A device has a thread that wakes a hundred times a second. A worker keeps its groups from job to job, so they become
    dozens, and the threads of all workers, idle ones too, would take a third of two cores.
    """

    def __new__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [_device()], 2, timeout
        return dist.ProcessGroupGloo(store, rank, size, options)


@functools.cache
def _device() -> dist.ProcessGroupGloo.Device:
    return dist.ProcessGroupGloo.create_default_device()


def _listen(pipe: Connection, jobs: "queue.SimpleQueue[bytes]") -> None:
    """Hand on the jobs; in its own thread, to notice the session's end while the main one waits in a collective."""
    while True:
        try:
            jobs.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _answer(runtime: Runtime, message: bytes) -> bytes:
    """(True, result) or (False, traceback), by plain pickle: `pipe.send` would share a tensor's memory, not copy it."""
    try:
        job, args = pickle.loads(message)
        return pickle.dumps((True, job(runtime, *args)))
    except BaseException:  # SystemExit too: a rank that leaves alone has failed
        return pickle.dumps((False, traceback.format_exc()))
