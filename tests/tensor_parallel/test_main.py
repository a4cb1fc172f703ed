"""The demo: its claims hold, and each kind of them fails where the code does not keep it."""

from unittest import mock

import pytest

from collectives.demo import Demo
from collectives.rng import dropout
from tensor_parallel import __main__ as command
from tensor_parallel.region import Entrance, Region


def forgets_sums(params, labels):
    """Gradients of the norms stay partial."""


def enters_alone(region, x, column):
    """Every column has the gradient of the input reduced by itself."""
    return Entrance(region, x)


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
    """The claims that do not hold on this rank, as (mode, name)."""
    show = Demo(run)
    with mock.patch.object(*FAULTS[fault]) if fault else mock.MagicMock():
        for mode in command.MODES:
            show.part = mode.name
            command.train(run, show, mode, run.world, command.alone())
            command.memory(show, mode, run.world)
    return {(claim.part, claim.name.strip()) for claim in show.claims if not claim.holds()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_claims_hold(pool, ranks):
    assert pool.run(ranks, broken, "") == ranks * [set()]


def test_a_sum_that_is_forgotten(pool):
    """Without sequence parallelism nothing is partial."""
    seen = {"gradients", "update, 3 steps", "copies that differ", "partial sums"}
    expected = {(mode.name, name) for mode in command.MODES[1:] for name in seen}
    [found, _] = pool.run(2, broken, "sums")
    assert found >= expected
    assert {mode for mode, _ in found} == {mode.name for mode in command.MODES[1:]}


def test_an_input_that_is_reduced_once_a_matrix(pool):
    """The numbers are right, and too many of them travel; with sequence parallelism it is gathered thrice as well."""
    seen = ("elements, layer", "collectives", "bytes on sockets")
    expected = {(mode.name, name) for mode in command.MODES for name in seen}
    assert {claim for claim in pool.run(2, broken, "entrance")[0] if "kept" not in claim[1]} == expected


def test_something_kept_that_is_not_in_the_formula(pool):
    assert pool.run(2, broken, "memory")[0] == {(mode.name, "bytes kept, layer") for mode in command.MODES}
