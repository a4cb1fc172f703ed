"""Jobs in which one rank leaves the others alone: `python -m tests.collectives.failing_rank raise` starts 4 ranks.

Under torchrun, the same command is one of its ranks.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from collectives import comm, runtime

PATIENCE = 5.0  # seconds that a rank waits for another


def fail(mode):
    """Leave the others alone in this way."""
    match mode:
        case "raise":
            raise ValueError("the fault of this rank")
        case "sys.exit":
            sys.exit(0)
        case "os._exit":
            os._exit(0)
        case "SIGKILL" | "SIGSTOP":
            os.kill(os.getpid(), getattr(signal, mode))
        case "sleep":
            time.sleep(60)


def alone(mode, failing):
    """One rank fails while the others wait for it in an all_reduce."""
    with runtime.start(timeout=PATIENCE) as run:
        comm.barrier(group=run.world)
        if run.rank == failing:
            Path("started").touch()
            time.sleep(0.2)
            fail(mode)
        comm.all_reduce(torch.ones(1), group=run.world)


def before_start(mode, failing):
    """One rank fails before it joins the job."""
    if runtime.place().rank == failing:
        fail(mode)
    with runtime.start(timeout=PATIENCE):
        pass


def in_sub_group():
    """Rank 1 never enters a collective of a sub-group, and rank 3 is no member: only the sub-group can end the wait."""
    with runtime.start(timeout=3.0) as run:
        group = run.new_group([0, 1, 2])
        if run.rank in (1, 3):
            fail("sleep")
        comm.all_reduce(torch.ones(1), group=group)


def start_and_stop(times):
    """The sum over all ranks and over the groups {0, 2, …} and {1, 3, …}, several times in one process."""
    for _ in range(times):
        time.sleep(random.uniform(0, 0.2))
        with runtime.start(timeout=PATIENCE) as run:
            halves = [run.new_group(range(first, run.size, 2)) for first in (0, 1)]
            total, part = torch.tensor([run.rank]), torch.tensor([run.rank])
            comm.all_reduce(total, group=run.world)
            comm.all_reduce(part, group=halves[run.rank % 2])
            assert total.item() == sum(range(run.size))
            assert part.item() == sum(range(run.rank % 2, run.size, 2))


def end_with(statuses):
    """Each rank's exit status, without joining."""
    return statuses.get(runtime.place().rank)


def main():
    """What the command line asks for; rank 1 is the one that fails."""
    mode = sys.argv[1]
    return start_and_stop(3) if mode == "again" else alone(mode, failing=1)


if __name__ == "__main__":
    sys.exit(main() if runtime.place().size > 1 else runtime.launch(main, 4))
