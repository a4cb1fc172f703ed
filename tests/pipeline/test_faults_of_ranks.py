"""Faults that are planted in the executor, and that the tests of parity, of memory and of traffic see."""

import contextlib
import functools
from unittest import mock

import pytest
import torch

from pipeline import backward, executor
from pipeline.executor import Pipeline
from pipeline.plan import Result
from pipeline.program import program
from pipeline.run import Run
from tests.pipeline import training
from tests.pipeline.test_memory import peaks
from tests.pipeline.training import Case, Recipe, trained, worst
from tests.pool import RankFailed

RECIPE = Recipe(steps=3, rows=(2, 2, 2), tied=True)
wait, settle, end, hand_back = Run.wait, Run.settle, Run._end, Run._hand_back
forward, input_, weight = Run._forward, Run._input, Run._weight
add, agreed = backward.add, Pipeline._agreed


def lost_gradient(run, message):
    """One of the gradients that arrive is zero."""
    wait(run, message)
    if message.result.kind == "gradient" and message.result.microbatch == 1:
        for tensor in run.here[message.result]:
            tensor.zero_()


def other_labels(run, output, target, m):
    """The loss of a microbatch with the labels of another."""
    return end(run, output, run.microbatches[(m + 1) % 3].target, m)


def other_rows(run, stage, m):
    """A microbatch is told that it is another, from the second stage on."""
    given = run.microbatches
    if stage:
        run.microbatches = [given[0]] * 3
    forward(run, stage, m)
    run.microbatches = given


def no_weights(run, stage, m):
    """A W is left out."""
    run.live.pop((stage, m)) if m == 1 else weight(run, stage, m)


def added_twice(param, grad):
    add(param, grad)
    add(param, grad.clone())


def crossed_receives(plan, rank):
    """The first two activations are received in the wrong order."""
    steps = program(plan, rank)
    first, second = [i for i, step in enumerate(steps) if step.verb == "receive"][:2] if rank else (0, 0)
    steps[first], steps[second] = steps[second], steps[first]
    return steps


def no_sum(params, labels):
    """Each copy of a tied weight has its own gradient."""


def half_of_the_outputs(run, stage, m, live, grads):
    """Only the first of several gradients goes back."""
    hand_back(run, stage, m, live, grads)
    for tensor in run.here.get(Result("gradient", stage, m), [])[1:]:
        tensor.zero_()


FAULTS = {
    "a gradient is lost": ("1f1b", mock.patch.object, Run, "wait", lost_gradient),
    "labels of another microbatch": ("1f1b", mock.patch.object, Run, "_end", other_labels),
    "rows of another microbatch": ("gpipe", mock.patch.object, Run, "_forward", other_rows),
    "a W is left out": ("zb_h1", mock.patch.object, Run, "_weight", no_weights),
    "a gradient is added twice": ("zb_h1", mock.patch.object, backward, "add", added_twice),
    "receives are crossed": ("gpipe", mock.patch.object, executor, "program", crossed_receives),
    "a tied weight is not summed": ("1f1b", mock.patch.object, training, "sum_partials", no_sum),
    "one gradient of several goes back": ("1f1b", mock.patch.object, Run, "_hand_back", half_of_the_outputs),
}


@contextlib.contextmanager
def planted(fault):
    _, patch, *where = FAULTS[fault]
    with patch(*where):
        yield


def with_fault(run, case, fault):
    return trained(run, case, RECIPE, functools.partial(planted, fault))


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_sees_it(pool, fault):
    case = Case(FAULTS[fault][0], 1, 2, 3)
    with pytest.raises((AssertionError, RankFailed), match=r"assert|differ in bits"):
        assert worst(pool.run(2, with_fault, case, fault), case, RECIPE) <= 1


def one_kind_of_step(pipe, plan, microbatches, loss):
    """Shapes that have changed are taken for those of before."""
    return plan.name, len(microbatches), bool(agreed(pipe, plan, microbatches, loss))


def changing(run):
    with mock.patch.object(Pipeline, "_agreed", one_kind_of_step):
        return trained(run, Case("gpipe", 1, 2, 3), Recipe())


def test_shapes_of_before_are_seen(pool):
    with pytest.raises(RankFailed, match="for inputs of the same shapes"):
        pool.run(2, changing)


def kept_messages(run, message):
    """What has left is not let go."""
    sent = run.outgoing[message]
    settle(run, message)
    run.outgoing[message] = sent


def kept_graph(run, stage, m):
    """What I needed alone is kept until W."""
    live = run.live[stage, m]
    kept = live.inputs, live.outputs
    input_(run, stage, m)
    live.inputs, live.outputs = kept
    run.pipe.kept = live


KEPT = {"messages": ("settle", kept_messages), "a graph": ("_input", kept_graph)}


def with_leak(run, name):
    with mock.patch.object(Run, *KEPT[name]):
        return peaks(run, "zb_h1", 1, 12)


def test_what_is_kept_too_long_is_seen(pool):
    for _, _, sent, _, _ in pool.run(2, with_leak, "messages"):
        assert sent == 12
    assert any(left != (0, 0, 0) for *_, left in pool.run(2, with_leak, "a graph"))


def test_without_a_fault(pool):
    case = Case("gpipe", 1, 2, 3)
    assert worst(pool.run(2, trained, case, RECIPE), case, RECIPE) <= 1
    assert torch.equal(*[step[2] for step in (of_rank[0] for of_rank in pool.run(2, trained, case, RECIPE))])
