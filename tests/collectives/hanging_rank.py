"""A job that hangs: `python -m tests.collectives.hanging_rank FOLDER` starts 3 ranks that keep journals.

All make two calls; then ranks 0 and 2 sum with rank 1, which sleeps instead.
"""

import sys
import time
from pathlib import Path

import torch

from collectives import comm, runtime
from collectives.journal import Journal
from collectives.watch import watching


def main():
    """What one rank does."""
    with runtime.start(timeout=60.0) as run, watching(Journal(Path(sys.argv[1]), run.rank)):
        comm.broadcast(torch.ones(4), 0, group=run.world)
        comm.all_reduce(torch.ones(9), group=run.world, ordered=True)
        if run.rank == 1:
            time.sleep(60)
        comm.all_reduce(torch.ones(5), group=run.world)


if __name__ == "__main__":
    sys.exit(runtime.launch(main, 3))
