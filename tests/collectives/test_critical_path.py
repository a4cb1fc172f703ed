"""Steps counted from what real ranks posted, beside those that tests/ordered.py counts by another way."""

import pytest
import torch

from collectives import comm, p2p
from collectives.algorithms import pieces, ring
from collectives.critical_path import CriticalPath, steps
from collectives.watch import watching
from tests import ordered
from tests.collectives.algorithms import ALGORITHMS, Case, drilled
from tests.collectives.algorithms import run as run_algorithm


def events_of(run, job, *args):
    with watching(path := CriticalPath()):
        job(run, *args)
    return path.events


@pytest.mark.parametrize("ranks", [1, 2, 3, drilled(4), drilled(6)])
def test_every_algorithm_takes_as_many_steps_as_on_the_ordered_network(pool, ranks):
    for key in ALGORITHMS:
        counted = steps(pool.run(ranks, events_of, run_algorithm, key, Case(24)))
        assert counted == ordered.run(ranks, run_algorithm, key, Case(24)).steps, key


def chunks(run, count):
    """Chunks go along the line one after the other, around the ring side by side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "CHUNK", 8)
        ring.broadcast(torch.zeros(count, dtype=torch.float64), 0, group=run.world)
        ring.all_gather(torch.zeros(4 * count, dtype=torch.float64), torch.zeros(count).double(), group=run.world)


def test_chunks_in_flight_together_count_once(pool):
    assert steps(pool.run(4, events_of, chunks, 5)) == (4 - 2 + 5) + (4 - 1)


def one_after_the_other(run):
    """A token goes along three ranks and back; what the backend sends in between is not counted."""
    token = torch.zeros(1)
    for source, target in ((0, 1), (1, 2), (2, 1), (1, 0)):
        if run.rank == source:
            p2p.send(token, target, group=run.world)
        elif run.rank == target:
            p2p.recv(token, source, group=run.world)
        comm.all_reduce(torch.ones(1), group=run.world)


def test_a_chain_is_as_long_as_its_messages(pool):
    assert steps(pool.run(3, events_of, one_after_the_other)) == 4


def only_the_first_watches(run):
    job = watching(path := CriticalPath()) if run.rank == 0 else watching()
    with job:
        ring.all_reduce(torch.ones(4), group=run.world)
    return path.events if run.rank == 0 else []


def test_a_message_with_one_end_is_refused(pool):
    with pytest.raises(ValueError, match="watch the same on all ranks"):
        steps(pool.run(2, only_the_first_watches))
