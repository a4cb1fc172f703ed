"""On a network stricter than gloo: every handle is waited for, nothing is read before, nothing in flight is changed,
and no rank waits for ever, in whatever order the ranks run.
"""

import contextlib
from unittest import mock

import pytest
import torch

from collectives import comm
from collectives.algorithms import direct
from expert_parallel import exchange
from expert_parallel.exchange import Exchange
from tests import ordered
from tests.expert_parallel.cases import Case, outcome, worst
from tests.expert_parallel.reference import Layer

LAYERS = (
    Layer(capacity=0.75),
    Layer(choices=3, shared=4, renormalise=False),
    Layer(over="batch", capacity=1.25),
    Layer(choices=1, score="sigmoid", bias=(50.0, *(0.0,) * 11)),  # T88: all to the first expert
)


def all_reduce(tensor, op=comm.SUM, *, group, async_op=False, ordered=False):
    return direct.all_reduce(tensor, op, group=group, async_op=async_op)


@contextlib.contextmanager
def written_out():
    """The collectives by our own sends and receives, of any size."""
    with mock.patch.multiple(
        comm,
        all_reduce=all_reduce,
        all_gather_single=direct.all_gather,
        all_to_all_single=direct.all_to_all,
    ):
        yield


def unchecked(run, case):
    return outcome(run, case, check=False)


@pytest.mark.parametrize("lanes", ["pair", "group"])
@pytest.mark.parametrize("mesh", [(2, 2, 1), (3, 3, 1), (4, 2, 1), (4, 4, 2), (4, 2, 2)])
def test_a_step_on_a_strict_network(mesh, lanes):
    for seed, layer in enumerate(LAYERS):
        case = Case(layer, *mesh, microbatches=1 + seed % 2)
        with written_out():
            report = ordered.run(case.ranks, unchecked, case, lanes=lanes, seed=seed)
        assert worst(case, report.results) <= 1


# -- planted -----------------------------------------------------------------------------------------------------------


def never_waited(ctx, dx):
    """dx as it is, whether it has arrived or not."""
    return dx, None


def read_too_early(travelling):
    """The rows in the buffer, without a wait."""
    return travelling.taken


def changed_while_they_travel(travelling, x, gives, takes):
    """The rows that are sent are used again before they have arrived."""
    true_start(travelling, x := x.clone(), gives, takes)
    x.zero_()


true_start = Exchange.start


def one_rank_returns_nothing(ctx, dy):
    """A path that an empty rank does not take."""
    if not dy.numel():
        ctx.exchange.taken, ctx.exchange.work = dy.new_zeros(sum(ctx.exchange.gives), *dy.shape[1:]), mock.Mock()
        return ctx.exchange.taken, None
    return true_return(ctx, dy)


true_return = exchange._Arrive.backward


@pytest.mark.parametrize(
    ("where", "name", "change", "text"),
    [
        (exchange._Depart, "backward", staticmethod(never_waited), "without waiting"),
        (Exchange, "finish", read_too_early, "without waiting|in flight"),
        (Exchange, "start", changed_while_they_travel, "changed while it was in flight"),
        (exchange._Arrive, "backward", staticmethod(one_rank_returns_nothing), "rank"),
    ],
)
def test_what_is_wrong_in_flight_shows(where, name, change, text):
    with written_out(), mock.patch.object(where, name, change), pytest.raises(ordered.Refused, match=text):
        ordered.run(2, unchecked, Case(LAYERS[-1], 2, 2))


def test_as_they_are_these_pass():
    case = Case(LAYERS[-1], 2, 2)
    with written_out():
        assert worst(case, ordered.run(2, unchecked, case).results) <= 1


def chained(run):
    """What was made between start and wait needs no message of theirs."""
    x = torch.ones(2 * run.size, 3, requires_grad=True)
    travelling = Exchange(x, [2] * run.size, [2] * run.size, group=run.world)
    travelling.wait().sum().backward()
    return x.grad.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_one_step_there_and_one_back(ranks):
    with written_out():
        report = ordered.run(ranks, chained)
    assert report.steps == (2 if ranks > 1 else 0) and report.messages == 2 * ranks * (ranks - 1)
    assert report.results == [[[1.0] * 3] * (2 * ranks)] * ranks
