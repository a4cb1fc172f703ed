"""Start and end a rank: its place in the job, its device, its backend, its time-out.

A rank is one process. Where it stands in the job comes from the variables that torchrun sets; without them it is a
world of one. The only file of the project that reads the environment. PyTorch's counterpart: init_process_group, the
elastic agent's environment.

What a failing rank does is decided here as well: it prints its own traceback at once and leaves hard, so that the
traceback stands before the "connection closed" of its peers, and no peer waits longer than it takes to notice. A rank
that hangs is cut by `timeout`, which every sub-group is given too.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

SETTLE_SECONDS = 0.05


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job, known before anything is started."""

    rank: int
    size: int  # ranks in the job
    local_rank: int  # this rank's number on its machine: the index of its device
    local_size: int  # ranks on this machine


def place() -> Place:
    """This process's place, from the variables that torchrun sets; a world of one without any of them.

    Raises ValueError naming the variables that are missing when only some are set.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if len(missing) == len(names):
        return Place(rank=0, size=1, local_rank=0, local_size=1)
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set, other variables of a launcher are: use torchrun, or unset all of {names}"
        )
    size = int(os.environ["WORLD_SIZE"])
    return Place(
        int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    )


def launched() -> bool:
    """Whether a launcher started this process, be it as the only rank."""
    return "RANK" in os.environ


@dataclass
class Runtime:
    """A started rank. `world` is the group of all ranks; `new_group` makes the others."""

    rank: int
    size: int
    device: torch.device
    backend: str
    timeout: timedelta
    world: dist.ProcessGroup
    store: dist.Store  # in which the ranks found each other; keys of one's own want a PrefixStore
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)

    def new_group(self, ranks: Sequence[int], label: str = "", backend: str = "") -> dist.ProcessGroup | None:
        """The group of these global ranks, in ascending order; None on a rank that is no member.

        Collective over the world: every rank calls it, members or not, all in the same order. The same ranks and label
        give the same group again; another label gives a second one (a pipeline needs one for each direction). backend:
        default that of the world; a label has one.
        """
        members = tuple(ranks)
        if members != tuple(sorted(set(members))):
            raise ValueError(f"group ranks {members} must be in ascending order and distinct")
        if (label, members) not in self.groups:
            whole = not label and members == tuple(range(self.size))
            group = (
                self.world if whole else dist.new_group(members, timeout=self.timeout, backend=backend or self.backend)
            )
            self.groups[label, members] = group
        return self.groups[label, members] if self.rank in members else None


@contextlib.contextmanager
def start(*, timeout: float = 600.0, device: str | None = None, backend: str | None = None) -> Iterator[Runtime]:
    """Join the job that `place()` tells of, and leave it together with all others.

    timeout: seconds after which a rank that waits for another gives up. device: default this rank's own GPU, the CPU
    where there is none. backend: default NCCL for a GPU, gloo for the CPU. A failure inside the block prints this
    rank's traceback and ends the process with 1; so does sys.exit, also with 0: a rank that leaves alone is a failure.
    (In a world of one the exception simply goes on.)
    """
    here = place()
    where = _own_device(here) if device in (None, "cuda") else torch.device(device)
    backend = backend or ("nccl" if where.type == "cuda" else "gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // here.local_size))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    patience = timedelta(seconds=timeout)
    eager = {"device_id": where} if backend == "nccl" else {}
    store = _store(here, patience)
    joining = {"store": store, "rank": here.rank, "world_size": here.size}
    dist.init_process_group(backend, timeout=patience, **joining, **eager)
    assert dist.group.WORLD is not None
    try:
        yield Runtime(here.rank, here.size, where, backend, patience, dist.group.WORLD, store)
        dist.barrier()
    except BaseException as failure:
        if here.size > 1:
            _leave(here.rank, failure)
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    # gloo's threads let go of the last tensors a moment after the wait for them has returned, for which they need the
    # interpreter: if it is ending by then, it aborts the process.
    time.sleep(SETTLE_SECONDS)


def _store(here: Place, timeout: timedelta) -> dist.Store:
    """Where the ranks find each other. A second start in one process gets keys of its own."""
    if here.size == 1:
        return dist.HashStore()
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"start {store.add(f'starts of rank {here.rank}', 1)}", store)


def _own_device(here: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if here.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {here.local_rank} has no GPU, this machine has {torch.cuda.device_count()}: start fewer ranks"
        )
    return torch.device("cuda", here.local_rank)


def _leave(rank: int, failure: BaseException) -> NoReturn:
    """Say why this rank fails, then end the process without waiting for any peer: destroying a group may hang in one
    that waits for us.
    """
    if isinstance(failure, SystemExit):
        print(f"rank {rank} left the job alone: sys.exit({failure.code})", file=sys.stderr)
    elif not isinstance(failure, KeyboardInterrupt):
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, end="")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def launch(main: Callable[[], int | None], ranks: int) -> int:
    """Run `main` in this many new local processes, with torchrun's variables set; the exit status, 0 when all ended so.

    The first rank that fails takes the others with it. The ranks are forks, so torch is imported once: call it before
    anything is computed, since neither OpenMP's threads nor CUDA survive a fork.
    """
    # Only this process keeps the writing end open: when it ends, however it ends, the ranks read an end of file.
    reader, writer = os.pipe()
    listener = socket.create_server(("localhost", 0))
    port = listener.getsockname()[1]
    shared = {
        **{"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port},
        **{"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0},  # the store is ours, not rank 0's
    }

    def rank_main(rank: int) -> None:
        os.close(writer)
        threading.Thread(target=lambda: (os.read(reader, 1), os._exit(1)), daemon=True).start()
        os.environ.update({name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()})
        sys.exit(main())

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(rank,)) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        # The store's threads start after the fork, which they would not survive; the ranks may knock already.
        store = dist.TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        status = _watch(processes)
        del store
        return status
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:  # all of them before we wait for one, or it would complain of its dead peers
            process.kill()
        for process in started:
            process.join()
        os.close(writer)
        os.close(reader)


def _watch(processes: Sequence[multiprocessing.process.BaseProcess]) -> int:
    """Wait until all have ended well, or until one has not; the exit status."""
    codes = [process.exitcode for process in processes]  # each is looked at once: another may end at any moment
    while None in codes and not any(codes):
        multiprocessing.connection.wait([p.sentinel for p, code in zip(processes, codes, strict=True) if code is None])
        codes = [process.exitcode for process in processes]
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
        elif code == 0 and any(codes):
            print(f"rank {rank} had ended before, with status 0", file=sys.stderr)
    return 1 if any(codes) else 0
