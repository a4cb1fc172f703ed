"""A job that hangs, on 3 ranks that keep journals.

All make two calls; then ranks 0 and 2 sum with rank 1, which sleeps instead.
"""

import time

import torch

from collectives import comm, runtime
from collectives.journal import Journal
from collectives.watch import watching


def hang(folder):
    """What one rank does."""
    with runtime.start(timeout=60.0) as run, watching(Journal(folder, run.rank)):
        comm.broadcast(torch.ones(4), 0, group=run.world)
        comm.all_reduce(torch.ones(9), group=run.world, ordered=True)
        if run.rank == 1:
            time.sleep(60)
        comm.all_reduce(torch.ones(5), group=run.world)
