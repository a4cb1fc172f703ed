"""On a network stricter than gloo: every schedule ends, in whatever order the ranks run; every handle is waited for,
nothing is read before, nothing in flight is changed.
"""

import contextlib
import pickle
from unittest import mock

import pytest
import torch

from collectives import comm
from collectives.algorithms import direct
from pipeline import Pipeline, check, connect, links, run, schedule
from pipeline.program import one_a_direction
from tests import ordered
from tests.pipeline import models
from tests.pipeline.training import (
    EVERY_SCHEDULE,
    Case,
    alone,
    check_gradients,
    gradients,
    microbatches_of,
    possible,
    rows_of,
    stages_of,
)


def all_gather_object(value, *, group):
    """By tensors, as long as the longest."""
    own = torch.tensor(list(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(group.size(), dtype=torch.int64)
    direct.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = int(sizes.max())
    everyone = torch.empty(group.size() * longest, dtype=torch.uint8)
    padded = torch.cat([own, torch.zeros(longest - len(own), dtype=torch.uint8)])
    direct.all_gather(everyone, padded, group=group)
    return [pickle.loads(bytes(row.tolist())) for row in everyone.view(-1, longest)]


@contextlib.contextmanager
def written_out():
    """The collectives by our own sends and receives."""
    with mock.patch.multiple(comm, all_gather_object=all_gather_object, all_gather_single=direct.all_gather):
        yield


def steps(run, case):
    """(losses, gradients) of a second step, which knows what the first one had to describe, behind an evaluation."""
    plan = case.plan()
    model = models.model(models.blocks_for(plan.length))
    stages = stages_of(plan, run.rank, model)
    pipe = Pipeline(plan, stages, connect(plan, [range(run.size)], run.new_group), run.world, loss=models.loss)
    own = {param for stage in stages.values() for param in stage.parameters()}
    pipe.step(microbatches_of(rows_of(case.microbatches, 0), 0))
    pipe.evaluate(microbatches_of([1, 2], 1))
    model.zero_grad()
    losses = pipe.step(microbatches_of(rows_of(case.microbatches, 0), 0))
    return losses, gradients((name, param) for name, param in model.named_parameters() if param in own)


OFTEN = [("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipe_v", 2)]
SHORT = [(way, 2, 3, lanes) for way in OFTEN for lanes in ("pair", "group")] + [(("zbv", 2), 4, 3, "group")]
LONG = [
    pytest.param(way, ranks, microbatches, lanes, marks=pytest.mark.drill)
    for way in EVERY_SCHEDULE
    for ranks in (2, 3, 4)
    for microbatches in (1, 3, 2 * ranks + 1)
    for lanes in ("pair", "group")
    if way[0] != "dualpipe" and (way, ranks, microbatches, lanes) not in SHORT
]


@pytest.mark.parametrize(("way", "ranks", "microbatches", "lanes"), SHORT + LONG)
def test_a_step_on_a_strict_network(way, ranks, microbatches, lanes):
    case = Case(*way, ranks, microbatches)
    with written_out():
        report = ordered.run(ranks, steps, case, lanes=lanes, seed=microbatches)
    model = models.model(models.blocks_for(case.plan().length))
    check_gradients(report.results, *alone(model, rows_of(microbatches, 0), 0))


@pytest.mark.parametrize("lanes", ["pair", "group"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.drill)])
def test_two_copies_on_a_strict_network(ranks, lanes):
    """The gradients of both together."""
    case = Case("dualpipe", 2, ranks, 4)
    assert possible(case)
    with written_out():
        report = ordered.run(ranks, steps, case, lanes=lanes)
    _, true = alone(models.model(models.blocks_for(ranks)), rows_of(4, 0), 0)
    for name, expected in true.items():
        of_copies = [grads[name] for _, grads in report.results if grads.get(name) is not None]
        assert expected is None or torch.allclose(sum(of_copies), expected, rtol=1e-11, atol=1e-14)


# -- faults ------------------------------------------------------------------------------------------------------------


def never_settled(run, message):
    """A message that was sent is forgotten."""
    run.outgoing.pop(message)


def sent_backwards(run, message):
    """A buffer that is used again at once."""
    tensors = run.here[message.result]
    true_send(run, message)
    tensors[0].detach().zero_()


true_send = run.Run.send


def one_group(message):
    """A boundary's two channels are one."""
    return "activation", one_a_direction(message)[1]


@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        ("settle", never_settled, "has ended without waiting"),
        ("send", sent_backwards, "changed while it was in flight"),
    ],
)
def test_a_careless_executor_shows(name, fault, told):
    with (
        written_out(),
        mock.patch.object(run.Run, name, fault),
        pytest.raises(ordered.Refused, match=told),
    ):
        ordered.run(2, steps, Case("1f1b", 1, 2, 3))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_one_group_for_both_directions_hangs(name):
    """As the checker says, if it is asked about that."""
    with (
        written_out(),
        mock.patch.object(links, "one_a_direction", one_group),
        pytest.raises(ordered.Deadlock),
    ):
        ordered.run(3, steps, Case(name, 1, 3, 4))
    with pytest.raises(ValueError, match="hangs"):
        check(schedule(name, 3, 4), one_group)
