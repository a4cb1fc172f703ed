"""On a network stricter than gloo: every handle is waited for, nothing is read before, nothing in flight is changed,
and no rank waits for ever, in whatever order the ranks run.
"""

import contextlib
from unittest import mock

import pytest

from collectives import comm
from collectives.algorithms import direct
from context_parallel import ring
from tests import ordered
from tests.context_parallel.cases import METHODS, Case, outcome, worst


def reduce_scatter(output, input, op=comm.SUM, *, group, ordered=False):
    return direct.reduce_scatter(output, input, op, group=group)


@contextlib.contextmanager
def written_out():
    """The collectives by our own sends and receives, of any size."""
    with mock.patch.multiple(
        comm,
        all_gather_single=direct.all_gather,
        reduce_scatter_single=reduce_scatter,
        all_to_all_single=direct.all_to_all,
    ):
        yield


@pytest.mark.parametrize("lanes", ["pair", "group"])
@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        *((ranks, method) for ranks in (2, 3, 4) for method in METHODS),
        *[(4, "ring_ulysses 2"), (6, "ring_ulysses 2"), (6, "ring_ulysses 3")],
    ],
)
def test_a_step_on_a_strict_network(ranks, method, lanes):
    """Some blocks are skipped, so ranks are not alike."""
    for seed, lengths in enumerate(((), (5, 2), (1,) * 16)):
        case = Case(method, T=24, B=2, H=12, KV=12, lengths=lengths)
        with written_out():
            report = ordered.run(ranks, outcome, case, lanes=lanes, seed=seed)
        assert worst(case, report.results) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_how_long_the_chain_of_messages_is(ranks):
    """P-1 in forward, P in backward, where gradients travel beside the next block."""
    with written_out():
        assert ordered.run(ranks, outcome, Case(T=24, B=1)).steps == (2 * ranks - 1 if ranks > 1 else 0)


def handles_that_do_not_wait(x, group):
    """What is read may not have arrived."""
    _, coming = true_pass_on(x, group)
    return mock.Mock(), coming


def changed_while_it_travels(x, group):
    """The block in hand is used again before it has gone."""
    work, coming = true_pass_on(x, group)
    x.mul_(2.0)
    return work, coming


true_pass_on = ring.pass_on


@pytest.mark.parametrize("method", ["ring", "ring_ulysses 2"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (handles_that_do_not_wait, "without waiting|while it was in flight"),
        (changed_while_it_travels, "changed while it was in flight"),
    ],
)
def test_what_is_wrong_in_flight_shows(method, change, text):
    with (
        written_out(),
        mock.patch.object(ring, "pass_on", change),
        pytest.raises(ordered.Refused, match=text),
    ):
        ordered.run(4, outcome, Case(method, T=24, H=12, KV=12))
