"""Events of a data strategy around a rank's actions, typed: + is unshard, - reshard, ! reduce."""

from itertools import product

import pytest

from pipeline import SCHEDULES, schedule
from pipeline.events import events
from pipeline.forward_only import forward_only
from pipeline.plan import B, F, I, W

SIGNS = {"unshard": "+", "reshard": "-", "reduce": "!"}
ONE_F_ONE_B = [F(0, 0), F(0, 1), B(0, 0), F(0, 2), B(0, 1), B(0, 2)]
HALVES = [F(0, 0), I(0, 0), F(0, 1), W(0, 0), I(0, 1), W(0, 1)]
TWO_STAGES = [F(0, 0), F(3, 0), B(3, 0), F(0, 1), B(0, 0), F(3, 1), B(3, 1), B(0, 1)]


def told(actions, units, **words) -> str:
    """ "+a F0 -a": each action between the events before it and those after it."""
    line = []
    for action, (before, after) in zip(actions, events(actions, units, **words), strict=True):
        line += [SIGNS[verb] + unit for verb, unit in before]
        line.append(f"{action.kind}{action.microbatch}")
        line += [SIGNS[verb] + unit for verb, unit in after]
    return " ".join(line)


@pytest.mark.parametrize(
    ("actions", "words", "expected"),
    [
        (ONE_F_ONE_B, {}, "+a F0 F1 B0 F2 B1 B2 -a !a"),
        (ONE_F_ONE_B, {"open": "step", "reduce": "step"}, "+a F0 F1 B0 F2 B1 B2 -a !a"),
        (ONE_F_ONE_B, {"reduce": "action"}, "+a F0 F1 B0 !a F2 B1 !a B2 -a !a"),
        (HALVES, {}, "+a F0 I0 F1 W0 I1 W1 -a !a"),
        (HALVES, {"reduce": "action"}, "+a F0 I0 F1 W0 !a I1 W1 -a !a"),
        (HALVES, {"open": "action", "reduce": "action"}, "+a F0 I0 F1 W0 !a I1 W1 -a !a"),  # one run of actions
        ([F(0, 0), F(0, 1)], {}, "+a F0 F1 -a"),
        ([F(0, 0), F(0, 1)], {"reduce": "action"}, "+a F0 F1 -a"),
    ],
)
def test_one_stage(actions, words, expected):
    assert told(actions, {0: "a"}, **words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, "+a F0 +b F0 B0 F1 B0 F1 B1 -b !b B1 -a !a"),
        ({"reduce": "action"}, "+a F0 +b F0 B0 !b F1 B0 !a F1 B1 -b !b B1 -a !a"),
        ({"open": "action"}, "+a F0 -a +b F0 B0 -b +a F1 B0 -a +b F1 B1 -b !b +a B1 -a !a"),
    ],
)
def test_two_stages(words, expected):
    assert told(TWO_STAGES, {0: "a", 3: "b"}, **words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, "+a +t F0 +b F0 B0 F1 B0 F1 B1 -b !b B1 -a !a -t !t"),
        ({"open": "action"}, "+a +t F0 -a +b F0 B0 -b +a F1 B0 -a +b F1 B1 -b !b +a B1 -a !a -t !t"),
        ({"reduce": "action"}, "+a +t F0 +b F0 B0 !t !b F1 B0 !a !t F1 B1 !t -b !b B1 -a !a -t !t"),
    ],
)
def test_a_unit_that_two_stages_share(words, expected):
    """A tied matrix of a V is open for both, and complete after the last backward of either."""
    assert told(TWO_STAGES, {0: "at", 3: ["b", "t"]}, **words) == expected


def test_several_units_of_a_stage_and_a_stage_without():
    assert told([F(0, 0), F(1, 0), B(1, 0), B(0, 0)], {0: "ab", 1: ""}) == "+a +b F0 F0 B0 B0 -a !a -b !b"


def test_a_reduction_comes_after_the_last_w_even_if_another_microbatch_ends_first():
    late = [F(0, 0), F(0, 1), I(0, 0), B(0, 1), W(0, 0)]
    assert told(late, {0: "a"}) == "+a F0 F1 I0 B1 W0 -a !a"


@pytest.mark.parametrize("words", list(product(("step", "action"), repeat=2)), ids=str)
def test_every_action_of_a_schedule_finds_its_unit_open(words):
    """And units are closed in the end, reduced once a step or once a backward, and not while forward alone runs."""
    for name, (ranks, microbatches) in product(SCHEDULES, ((1, 2), (2, 4), (4, 8))):
        if name == "dualpipe" and ranks == 1:
            continue
        plan = schedule(name, ranks, microbatches)
        for each, rank in product((plan, forward_only(plan, 3)), range(ranks)):
            units = {stage: [stage] for stage in plan.stages_of(rank)}
            open_, gathers, reduced = set(), 0, dict.fromkeys(units, 0)
            for action, (before, after) in zip(
                each.actions[rank], events(each.actions[rank], units, *words), strict=True
            ):
                for _, unit in before:
                    assert unit not in open_
                    open_.add(unit)
                    gathers += 1
                assert action.stage in open_
                for verb, unit in after:
                    if verb == "reshard":
                        open_.remove(unit)
                    else:
                        reduced[unit] += 1
                assert len(open_) <= (1 if words[0] == "action" else len(units))
            assert not open_
            microbatches_of = {stage: len(each.through(stage)) for stage in units}
            expected = {stage: m if words[1] == "action" else 1 for stage, m in microbatches_of.items()}
            assert reduced == (expected if each.trains else dict.fromkeys(units, 0))
            assert (
                gathers == len(units) if words[0] == "step" else gathers <= sum(3 * m for m in microbatches_of.values())
            )


@pytest.mark.parametrize("words", [{"open": "always"}, {"reduce": "never"}])
def test_refused_words(words):
    [(name, word)] = words.items()
    with pytest.raises(ValueError, match=f"{name}='{word}': use"):
        events(ONE_F_ONE_B, {0: "a"}, **words)
