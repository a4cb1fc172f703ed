"""Coverings against brute force, on a space that is small enough to write out."""

import itertools
import random
from collections import Counter

import pytest

from tests import grid
from tests.covering import Space, cover

BASES = [{"a": a, "b": b} for a in (1, 2, 3) for b in (1, 2) if a * b < 6]
ODD, EVEN = [{"c": "x", "d": 0}], [{"c": "x", "d": 0}, {"c": "y", "d": 1}, {"c": "y", "d": 2}]
FREE = {"e": (True, False)}


@pytest.fixture
def space():
    return Space(BASES, [lambda base: EVEN if base["a"] % 2 == 0 else ODD], FREE)


def everything():
    for base in BASES:
        for part in EVEN if base["a"] % 2 == 0 else ODD:
            for e in FREE["e"]:
                yield base | part | {"e": e}


@pytest.mark.parametrize("together", [1, 2, 3, 5])
def test_combinations_are_those_of_all_choices(space, together):
    for names in itertools.combinations("abcde", together):
        expected = {tuple(choice[name] for name in names) for choice in everything()}
        assert set(space.combinations(names)) == expected


@pytest.mark.parametrize("together", [1, 2, 3])
def test_all_combinations_are_covered_by_choices_that_there_are(space, together):
    groups = list(itertools.combinations("abcde", together))
    taken = list(cover(space, groups, lambda choice: 1, random.Random(0)))
    there = [tuple(choice.items()) for choice in everything()]
    assert all(tuple(choice.items()) in there for choice in taken)
    for names in groups:
        seen = {tuple(choice[name] for name in names) for choice in taken}
        assert seen == {tuple(choice[name] for name in names) for choice in everything()}
    assert len(taken) < len(there) or together == 3


def test_what_is_wanted_and_is_not_there(space):
    with pytest.raises(ValueError, match="no choice has"):
        space.draw(random.Random(0), {"a": 1, "c": "y"}, 1)


# -- the grid ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried():
    return grid.cases()


def test_every_mesh_is_tried_five_times(tried):
    """All 76 meshes of up to eight ranks with axes of one to four."""
    shapes = Counter(tuple(getattr(case.first.mesh, axis) for axis in grid.AXES) for case in tried)
    assert len(shapes) == 76 and min(shapes.values()) >= 5
    assert len(tried) >= 1000


def test_a_mesh_that_the_options_bring_too_seldom_is_tried_again(monkeypatch):
    monkeypatch.setattr(grid, "TIMES", 12)
    shapes = Counter(tuple(getattr(case.first.mesh, axis) for axis in grid.AXES) for case in grid.cases())
    assert min(shapes.values()) == 12


def test_every_run_goes_on_elsewhere(tried):
    def sizes(config):
        return tuple(getattr(config.mesh, axis) for axis in grid.AXES)

    assert all(sizes(case.first) != sizes(case.then) for case in tried)
    assert len({case.name for case in tried}) > 0.99 * len(tried)


def test_three_of_the_axes_data_strategy_and_schedule_meet(tried):
    """What there is of a pipeline, a data strategy and an expert degree, counted by hand: 6 schedules more than 1f1b
    are of pipelines; ep is 3, 6 or 4, 8 out of as many ranks with tokens of their own, so 3 and 4 fit beside pp 2.
    """
    met = {(c.first.parallel.schedule, c.first.parallel.data, c.first.mesh.ep) for c in tried}
    piped = [name for name in grid.WHERE["schedule"] if name != "1f1b"]
    assert {(s, d, e) for s in piped for d in grid.WHERE["data"] for e in (1, 2, 3, 4)} <= met


def test_another_seed_is_another_grid(tried):
    assert [case.name for case in grid.subset(4, 2, seed=1)] != [case.name for case in grid.subset(4, 2, seed=0)]
    assert [case.name for case in grid.subset(4, 2)] == [case.name for case in grid.subset(4, 2)]
