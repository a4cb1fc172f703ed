"""The program of stage 3, without ranks: whatever a rank runs and skips, it starts the same collectives."""

import itertools

import pytest

from zero.program import Program

FORWARD = "+0 -0 +1 -1 +2 -2"  # + enters a layer, - leaves it
BACKWARD = "+2 =2 +1 =1 +0 =0"  # = leaves it in backward
TRAINED = f"{FORWARD} {BACKWARD}"


class Trace:
    """A program of three layers, and what it has done. A layer that is not whole is left without a word."""

    def __init__(self):
        self.done, self.whole = [], set()
        self.program = Program(3, self.enter, self.leave)

    def enter(self, layer):
        self.whole.add(layer)
        self.done.append(f"+{layer}")

    def leave(self, layer, backward):
        if layer in self.whole:
            self.whole.remove(layer)
            self.done.append(f"{'=' if backward else '-'}{layer}")

    def forward(self, *layers):
        for layer in layers:
            assert self.program.forward(layer, True) is None
            self.program.leave()
        return self

    def backward(self, *layers):
        for layer in layers:
            self.program.backward(layer)
        return self

    def begin(self, differentiated=True):
        self.program.begin(differentiated)
        return self

    def end(self):
        self.program.complete_all()
        return " ".join(self.done)


SOME = [subset for size in range(1, 4) for subset in itertools.combinations(range(3), size)]


@pytest.mark.parametrize("backward", [(), *SOME])
@pytest.mark.parametrize("forward", SOME)
def test_what_is_skipped_is_joined(forward, backward):
    assert Trace().forward(*forward).backward(*reversed(backward)).end() == TRAINED


def test_nothing_is_done_where_nothing_was_run():
    assert Trace().end() == ""


def test_a_forward_that_runs_no_layer():
    assert Trace().begin().end() == TRAINED
    assert Trace().begin(differentiated=False).end() == FORWARD


def test_a_forward_without_gradients_has_no_backward():
    trace = Trace().begin(differentiated=False).forward(0, 1).begin(differentiated=False).forward(0, 1, 2)
    assert trace.end() == f"{FORWARD} {FORWARD}"


@pytest.mark.parametrize("first", [(), (2,), (2, 1, 0)])
@pytest.mark.parametrize("second", [(), (2, 1, 0), (1,)])
def test_two_forwards_then_two_backwards(first, second):
    """Or one, or none: the others have two."""
    trace = Trace().begin().forward(0, 1, 2).begin().forward(0, 1, 2).backward(*first)
    assert trace.backward(*second).end() == f"{FORWARD} {FORWARD} {BACKWARD} {BACKWARD}"


@pytest.mark.parametrize("backward", [(), (2, 1, 0)])
def test_a_backward_after_a_forward_without_gradients(backward):
    trace = Trace().begin().forward(0, 1, 2).begin(differentiated=False).forward(0, 2).backward(*backward)
    assert trace.end() == f"{FORWARD} {FORWARD} {BACKWARD}"


def test_a_forward_after_a_backward_completes_it():
    assert Trace().forward(0, 1, 2).backward(2).forward(0, 1, 2).end() == f"{TRAINED} {TRAINED}"
    assert Trace().begin().forward(0).backward(2).begin().end() == f"{TRAINED} {TRAINED}"


def test_the_first_output_of_a_layer_begins_its_backward():
    assert Trace().forward(0, 1, 2).backward(2, 2, 1, 1, 1, 0).end() == TRAINED


def test_one_layer_is_whole_at_a_time():
    trace = Trace()
    trace.forward(0, 2).backward(1)
    assert trace.whole == {1}
    trace.end()
    assert trace.whole == set()


@pytest.mark.parametrize(("first", "then"), [(1, 1), (1, 0), (2, 0)])
def test_another_order_is_told_and_does_nothing(first, then):
    trace = Trace().forward(first)
    before = list(trace.done)
    assert trace.program.forward(then, True) == first
    assert trace.done == before


def test_without_layers_nothing_happens():
    program = Program(0, None, None)
    program.begin(True)
    program.complete_all()
    assert program.at is None and not program.owed
