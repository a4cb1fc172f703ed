"""The demo: its claims hold, and each kind of them fails where the code does not keep it."""

from unittest import mock

import pytest

from collectives.demo import Demo
from collectives.rng import dropout
from tensor_parallel import __main__ as command
from tensor_parallel.region import Region


def forgets_sums(params, labels):
    """Gradients of the norms stay partial."""


true_enter = Region.enter


def enters_alone(region, x, column):
    """Every column has the gradient of the input reduced by itself."""
    region.columns, others = [column], region.columns
    try:
        return true_enter(region, x, column)
    finally:
        region.columns = others


def keeps_more(x, *rest):
    """Dropout, and something for backward that nobody needs."""
    return dropout(x, *rest) + 0 * (x + 1).cos()


FAULTS = {
    "": (),
    "sums": (command, "sum_partials", forgets_sums),
    "entrance": (Region, "enter", enters_alone),
    "memory": (command, "dropout", keeps_more),
}


def broken(run, fault):
    """What was measured where a claim does not hold on this rank, by (mode, name)."""
    show = Demo(run)
    with mock.patch.object(*FAULTS[fault]) if fault else mock.MagicMock():
        for mode in command.MODES:
            show.part = mode.name
            command.train(run, show, mode, run.world, command.alone())
            command.memory(show, mode, run.world)
    return {(claim.part, claim.name.strip()): claim.measured for claim in show.claims if not claim.holds()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_claims_hold(pool, ranks):
    assert pool.run(ranks, broken, "") == ranks * [{}]


def test_a_sum_that_is_forgotten(pool):
    """Without sequence parallelism nothing is partial."""
    seen = {"gradients", "update, 3 steps", "copies that differ", "partial sums"}
    expected = {(mode.name, name) for mode in command.MODES[1:] for name in seen}
    [found, _] = pool.run(2, broken, "sums")
    assert set(found) >= expected
    assert {mode for mode, _ in found} == {mode.name for mode in command.MODES[1:]}


def test_an_input_that_enters_once_a_matrix(pool):
    """The numbers are right, and too many of them travel. A layer has four columns, which share two inputs."""
    [found, _] = pool.run(2, broken, "entrance")
    sent = command.BTD / 2
    elements = {mode: measured / sent for (mode, name), measured in found.items() if name == "elements, layer"}
    assert elements == {"tp": 2 * (2 + 4), "tp + sp": 4 + 2 + 4 + 2 + 4, "tp + sp, gathered": 4 + 2 + 4 + 2}
    assert {name for _, name in found} == {"elements, layer", "collectives", "bytes on sockets", "bytes kept, layer"}


def test_something_kept_that_is_not_in_the_formula(pool):
    assert set(pool.run(2, broken, "memory")[0]) == {(mode.name, "bytes kept, layer") for mode in command.MODES}
