"""The program of a step, without ranks: whatever a rank runs and skips, it enters and leaves the same units."""

import random
from unittest import mock

import pytest

from fsdp.program import ENTER, Program, nested, reverse

FLAT, DEEP = [None, 0, 0, 0], [None, 0, 1, 1, 0, 4]  # of each unit the number of the one around it
FORWARD = "+0 +1 -1 +2 -2 +3 -3 -0"  # + enters a unit, - leaves it
BACKWARD = "+0 +3 =3 +2 =2 +1 =1 =0"  # = leaves it in backward, its gradient complete


def text(events):
    return " ".join(f"{'+' if kind == ENTER else '-'}{unit}" for kind, unit in events)


@pytest.mark.parametrize(
    ("parents", "forward", "backward"),
    [
        ([None], "+0 -0", "+0 -0"),
        (FLAT, FORWARD, "+0 +3 -3 +2 -2 +1 -1 -0"),
        (DEEP, "+0 +1 +2 -2 +3 -3 -1 +4 +5 -5 -4 -0", "+0 +4 +5 -5 -4 +1 +3 -3 +2 -2 -1 -0"),
        ([None, 0, 1, 2], "+0 +1 +2 +3 -3 -2 -1 -0", "+0 +1 +2 +3 -3 -2 -1 -0"),
    ],
)
def test_a_forward_is_the_tree_and_a_backward_is_it_read_backwards(parents, forward, backward):
    assert text(nested(parents)) == forward
    assert text(reverse(nested(parents))) == backward
    assert reverse(reverse(nested(parents))) == nested(parents)


class Trace:
    """What a rank does that runs and skips as it is told."""

    def __init__(self, parents=FLAT, prefetch=0):
        self.done, self.ahead = [], []
        self.program = Program(nested(parents), prefetch, self.enter, self.leave)

    def enter(self, unit, ahead):
        self.done.append(f"+{unit}")
        self.ahead.append((unit, ahead))

    def leave(self, unit, backward, last):
        self.done.append(f"{('=' if last else '~') if backward else '-'}{unit}")

    def forward(self, events="+0 +1 -1 +2 -2 +3 -3 -0", differentiated=True):
        """Units as they are about to run, and have run. Which of them were in turn."""
        in_turn = {}
        for event in events.split():
            unit = int(event[1:])
            if event[0] == "+":
                in_turn[unit] = self.program.before_forward(unit, differentiated)
            else:
                self.program.after_forward(unit)
        self.in_turn = in_turn
        return self

    def backward(self, events="+3 -3 +2 -2 +1 -1"):
        for event in events.split():
            (self.program.before_backward if event[0] == "+" else self.program.after_backward)(int(event[1:]))
        return self

    def end(self):
        self.program.complete_all()
        assert not self.program.open and self.program.events is None and not self.program.owed
        return " ".join(self.done)


SKIPS = ["+0 -0", "+0 +1 -1 -0", "+0 +2 -2 -0", "+0 +3 -3 -0", "+0 +1 -1 +3 -3 -0", FORWARD]
BACK = ["", "+3 -3", "+2 -2", "+1 -1", "+3 -3 +1 -1", "+0 +2 -2", "+0 +3 -3 +2 -2 +1 -1 -0"]


@pytest.mark.parametrize("backward", BACK)
@pytest.mark.parametrize("forward", SKIPS)
def test_what_is_skipped_is_joined(forward, backward):
    assert Trace().forward(forward).backward(backward).end() == f"{FORWARD} {BACKWARD}"


def test_a_rank_joins_as_late_as_it_can():
    """It enters what it has skipped when it must go on, and not before."""
    trace = Trace().forward("+0 +2")
    assert " ".join(trace.done) == "+0 +1 -1 +2"
    trace.forward("-2")
    assert " ".join(trace.done) == "+0 +1 -1 +2 -2"
    trace.forward("-0")
    assert " ".join(trace.done) == FORWARD
    trace.backward("+2")
    assert " ".join(trace.done) == f"{FORWARD} +0 +3 =3 +2"


def test_nothing_is_done_where_nothing_was_run():
    assert Trace().end() == ""


def test_a_forward_without_gradients_has_no_backward():
    trace = Trace().forward("+0 +1 -1 -0", differentiated=False).forward(differentiated=False)
    assert trace.end() == f"{FORWARD} {FORWARD}"


def test_a_forward_without_a_backward_is_owed_one():
    """Another rank may have had it."""
    assert Trace().forward().end() == f"{FORWARD} {BACKWARD}"


@pytest.mark.parametrize("first", BACK[:2] + BACK[-2:])
@pytest.mark.parametrize("second", BACK[:2] + BACK[-2:])
def test_two_forwards_then_two_backwards(first, second):
    """A backward begins where the one before cannot go on: with a unit that it has left, or that lies behind."""
    trace = Trace().forward().forward().backward(first).backward(second)
    assert trace.end() == f"{FORWARD} {FORWARD} {BACKWARD} {BACKWARD}"


def test_a_backward_after_a_forward_without_gradients():
    trace = Trace().forward().forward("+0 +1 -1 -0", differentiated=False).backward()
    assert trace.end() == f"{FORWARD} {FORWARD} {BACKWARD}"


def test_a_forward_completes_what_came_before():
    assert Trace().forward().backward("+3 -3 +2").forward().end() == f"{FORWARD} {BACKWARD} {FORWARD} {BACKWARD}"
    assert Trace().forward("+0 +1").forward().end() == f"{FORWARD} {FORWARD} {BACKWARD} {BACKWARD}"


def test_a_backward_before_the_forward_has_ended():
    """As of a loss inside of the model."""
    trace = Trace().forward("+0 +1 -1 +2 -2").backward("+2 -2 +1 -1")
    assert trace.end() == f"{FORWARD} {BACKWARD}"


def test_a_part_that_is_run_by_itself_is_not_in_the_program():
    trace = Trace().forward("+2 -2")
    assert trace.in_turn == {2: False} and trace.end() == ""


def test_a_unit_that_runs_once_more_or_earlier_than_its_turn_is_not_in_the_program():
    trace = Trace().forward("+0 +2 -2 +1 -1")
    assert trace.in_turn == {0: True, 2: True, 1: False}
    trace = Trace().forward("+0 +1 -1 +1 -1")
    assert trace.in_turn == {0: True, 1: False}
    assert trace.forward("+2 -2 +3 -3 -0").end() == f"{FORWARD} {BACKWARD}"


# -- the order is learned ----------------------------------------------------------------------------------------------


def adopted(seen, parents=FLAT):
    trace = Trace(parents).forward(seen)
    trace.program.complete_all()
    trace.program.adopt(trace.program.seen)
    trace.done.clear()
    return trace


def test_the_order_that_was_seen_is_followed():
    order = "+0 +3 -3 +1 -1 +2 -2 -0"
    trace = adopted(order).forward(order).backward("+2 -2 +1 -1 +3 -3")
    assert trace.in_turn == {0: True, 1: True, 2: True, 3: True}
    assert trace.end() == f"{order} +0 +2 =2 +1 =1 +3 =3 =0"


def test_a_unit_that_runs_twice_is_entered_twice_and_complete_at_the_end():
    order = "+0 +1 -1 +2 -2 +1 -1 +3 -3 -0"
    trace = adopted(order).forward(order).backward("+3 -3 +1 -1 +2 -2 +1 -1")
    assert trace.end() == f"{order} +0 +3 =3 +1 ~1 +2 =2 +1 =1 =0"


def test_a_nested_unit_that_runs_twice():
    """It is complete when it is left for the last time, inside of the one that runs first."""
    order = "+0 +1 +2 -2 -1 +3 +2 -2 -3 -0"
    trace = adopted(order, [None, 0, 1, 0]).forward(order).backward("+3 +2 -2 -3 +1 +2 -2 -1")
    assert trace.end() == f"{order} +0 +3 +2 ~2 =3 +1 +2 =2 =1 =0"


@pytest.mark.parametrize("seen", ["+0 +1 -1 -0", "+1 -1", "+0 +1 -1 +2 -2 +3 -3"])
def test_what_is_no_whole_forward_is_not_followed(seen):
    assert adopted(seen).forward().backward().end() == f"{FORWARD} {BACKWARD}"


def test_what_is_seen_is_the_first_whole_forward():
    trace = Trace().forward("+2 -2 +0 +3").forward("+0 +3 -3 +2 -2 +1 -1 -0").forward()
    assert text(trace.program.seen) == "+0 +3 -3 +2 -2 +1 -1 -0"


# -- prefetch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefetch", "forward", "backward"),
    [
        (0, [(0, []), (1, []), (2, []), (3, [])], [(0, []), (3, []), (2, []), (1, [])]),
        (1, [(0, [1]), (1, [2]), (2, [3]), (3, [])], [(0, [3]), (3, [2]), (2, [1]), (1, [])]),
        (2, [(0, [1, 2]), (1, [2, 3]), (2, [3]), (3, [])], [(0, [3, 2]), (3, [2, 1]), (2, [1]), (1, [])]),
        (9, [(0, [1, 2, 3]), (1, [2, 3]), (2, [3]), (3, [])], [(0, [3, 2, 1]), (3, [2, 1]), (2, [1]), (1, [])]),
    ],
)
def test_what_is_gathered_ahead(prefetch, forward, backward):
    trace = Trace(prefetch=prefetch).forward().backward()
    trace.end()
    assert trace.ahead == [*forward, *backward]


# -- any tree, any skips -----------------------------------------------------------------------------------------------


class Rank(Trace):
    """Keeps books of memory: the collectives in order, and which units are gathered, as FullySharded does it."""

    def __init__(self, parents, prefetch, keeps):
        self.parents, self.prefetch, self.keeps = parents, prefetch, keeps
        self.gathered, self.calls, self.most = set(), [], 0
        super().__init__(parents, prefetch)

    def gather(self, unit):
        if unit not in self.gathered:
            self.gathered.add(unit)
            self.calls.append(f"gather {unit}")

    def enter(self, unit, ahead):
        for each in (unit, *ahead):
            self.gather(each)
        around = set(self.around(unit))
        self.most = max(self.most, len(self.gathered - around - self.keeps))

    def leave(self, unit, backward, last):
        if last:
            self.calls.append(f"reduce {unit}")
        if backward or unit not in self.keeps:
            self.gathered.discard(unit)

    def around(self, unit):
        while (unit := self.parents[unit]) is not None:
            yield unit


def tree(dice):
    """Parents of up to 9 units."""
    parents, open_ = [None], [0]
    for unit in range(1, dice.randint(1, 9)):
        del open_[dice.randint(1, len(open_)) :]
        parents.append(open_[-1])
        open_.append(unit)
    return parents


def some(events, parents, dice):
    """What a rank runs that leaves out units, with all that are in them; in backward also the one around alone."""
    left_out = set()
    for unit, parent in enumerate(parents):
        if unit and (parent in left_out or dice.random() < 0.3):
            left_out.add(unit)
    return " ".join(text([event]) for event in events if event.unit not in left_out)


def run(parents, prefetch, keeps, forwards, dice=None):
    """A rank of two steps, each of some forwards and then as many backwards; with dice it skips what these say."""
    rank, forward = Rank(parents, prefetch, keeps), nested(parents)
    for _ in range(2):
        for _ in range(forwards):
            rank.forward(some(forward, parents, dice) if dice else text(forward))
        for _ in range(dice.randint(0, forwards) if dice else forwards):
            inside = reverse(forward)[1:-1]
            rank.backward(some(inside, parents, dice) if dice else text(inside))
        rank.program.complete_all()
    return rank


def drawn(seed):
    dice = random.Random(seed)
    parents = tree(dice)
    keeps = {unit for unit in range(len(parents)) if dice.random() < 0.2}
    return dice, (parents, dice.randint(0, 3), keeps, dice.choice([1, 1, 2]))


@pytest.mark.parametrize("seed", range(200))
def test_all_ranks_start_the_same_collectives_whatever_they_skip(seed):
    """And at most prefetch + 1 units are gathered at once, beside those around the one that computes."""
    dice, (parents, prefetch, keeps, forwards) = drawn(seed)
    whole, *ranks = (run(parents, prefetch, keeps, forwards, some_dice) for some_dice in (None, dice, dice, dice))
    for rank in (whole, *ranks):
        assert rank.calls == whole.calls
        assert rank.most <= prefetch + 1
        assert not rank.gathered
    for unit in range(len(parents)):
        assert whole.calls.count(f"reduce {unit}") == 2 * forwards
        if unit not in keeps:
            assert whole.calls.count(f"gather {unit}") == 4 * forwards


@pytest.mark.parametrize("method", ["complete", "complete_all"])
def test_a_rank_that_joins_in_nothing_shows(method):
    """If what is skipped at the end is not made up for, the comparison above fails."""
    with mock.patch.object(Program, method, lambda program: None):
        different = 0
        for seed in range(50):
            dice, settings = drawn(seed)
            different += run(*settings, dice).calls != run(*settings).calls
    assert different > 10
