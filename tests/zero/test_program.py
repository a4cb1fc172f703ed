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
            assert self.program.forward(layer) is None
            self.program.leave()
        return self

    def backward(self, *layers):
        for layer in layers:
            self.program.backward(layer)
        return self

    def end(self, backward=True):
        self.program.complete(backward=backward)
        return " ".join(self.done)


SOME = [subset for size in range(1, 4) for subset in itertools.combinations(range(3), size)]


@pytest.mark.parametrize("backward", [(), *SOME])
@pytest.mark.parametrize("forward", SOME)
def test_what_is_skipped_is_joined(forward, backward):
    assert Trace().forward(*forward).backward(*reversed(backward)).end() == TRAINED


def test_nothing_is_done_where_nothing_was_run():
    assert Trace().end() == ""


def test_a_forward_without_gradients_has_no_backward():
    trace = Trace().forward(0, 1)
    trace.program.complete()
    assert " ".join(trace.done) == FORWARD
    assert trace.forward(0, 1, 2).end(backward=False) == f"{FORWARD} {FORWARD}"


def test_two_forwards_then_two_backwards():
    trace = Trace().forward(0, 1, 2)
    trace.program.complete()  # the model runs again
    trace.forward(0, 1, 2).backward(2, 1, 0).backward(2, 1, 0)
    assert trace.end() == f"{FORWARD} {FORWARD} {BACKWARD} {BACKWARD}"


def test_a_forward_after_a_backward_completes_it():
    assert Trace().forward(0, 1, 2).backward(2).forward(0, 1, 2).end() == f"{TRAINED} {TRAINED}"


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
    assert trace.program.forward(then) == first
    assert trace.done == before


def test_without_layers_nothing_happens():
    program = Program(0, None, None)
    program.complete(backward=True)
    assert program.at == -1
