"""Which collectives a step makes of which unit, in which order, and when they start; typed as the picture."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fsdp.sharded import FullySharded
from tests.fsdp.chain import Chain, told
from tests.fsdp.versions import HYBRID, Mode, drilled
from tests.shards import assembled

KEPT = Mode(False, prefetch=0)


def step(model, handle, x, marks):
    model(x).backward()


def step_without_a_gradient_of_the_input(model, handle, x, marks):
    model(x.detach()).backward()


def judged(ranks, *expected):
    """The text of each step on every rank, and gradients once they are due."""
    for steps in ranks:
        assert [text for text, _ in steps] == list(expected)


def plainly(ranks, body, nested=False):
    """The gradients of one process that does what all ranks do."""
    model, nothing = Chain([], nested), SimpleNamespace(no_sync=contextlib.nullcontext)
    for rank in range(ranks):
        body(model, nothing, torch.tensor([0.1 * (rank + 1)], dtype=torch.float64, requires_grad=True), [])
    return {name: param.grad for name, param in model.named_parameters()}


def right(steps, expected):
    """Whether the gradients of every step are these."""
    for on_ranks in zip(*steps, strict=True):
        grads, _ = assembled([held for _, held in on_ranks])
        for name, grad in expected.items():
            assert (grad is None) == (grads[name] is None), name
            assert grad is None or (grads[name] - grad).abs().max() <= 1e-12 * grad.abs().max(), name


# -- one step ----------------------------------------------------------------------------------------------------------

FORWARD = {  # by prefetch: the next gather starts before a unit computes
    0: "gather root, gather 0, forward 0, gather 1, forward 1, gather 2, forward 2",
    1: "gather root, gather 0, gather 1, forward 0, gather 2, forward 1, forward 2",
    2: "gather root, gather 0, gather 1, gather 2, forward 0, forward 1, forward 2",
}
BACKWARD = {  # and a unit's reduction before the backward of the next one
    0: "gather 2, backward 2, reduce 2, gather 1, backward 1, reduce 1, gather 0, backward 0, reduce 0, reduce root",
    1: "gather 2, gather 1, backward 2, reduce 2, gather 0, backward 1, reduce 1, backward 0, reduce 0, reduce root",
    2: "gather 2, gather 1, gather 0, backward 2, reduce 2, backward 1, reduce 1, backward 0, reduce 0, reduce root",
}
FROM_WHOLE = "backward 2, reduce 2, backward 1, reduce 1, backward 0, reduce 0, reduce root"


def picture(reshard, prefetch):
    """A step up to the end of backward: with resharding each unit, the root and the last one included, is gathered
    twice and reduced once; the default keeps the root; without, each is gathered once.
    """
    root = "gather root, " if reshard else ""
    return f"{FORWARD[prefetch]}, " + (FROM_WHOLE if reshard is False else root + BACKWARD[prefetch])


@pytest.mark.parametrize("body", [step, step_without_a_gradient_of_the_input])
@pytest.mark.parametrize("prefetch", FORWARD)
@pytest.mark.parametrize("reshard", [True, None, False])
def test_a_step(pool, reshard, prefetch, body):
    """Reductions start long before backward ends, the root's too."""
    steps = pool.run(2, told, Mode(reshard, prefetch=prefetch), body)
    judged(steps, *[f"{picture(reshard, prefetch)}, finish"] * 2)
    right(steps, plainly(2, body))


@pytest.mark.parametrize("ranks", [1, 3, drilled(4)])
def test_a_step_on_other_numbers_of_ranks(pool, ranks):
    """A single rank gathers nothing."""
    text = f"{picture(True, 1)}, finish"
    if ranks == 1:
        text = ", ".join(word for word in text.split(", ") if not word.startswith("gather"))
    judged(pool.run(ranks, told, Mode(True), step), text, text)


NESTED = {
    0: "gather root, gather 0, forward 0, gather 1, gather 1a, forward 1a, gather 1b, forward 1b, forward 1, gather 2, "
    "forward 2, gather root, gather 2, backward 2, reduce 2, gather 1, backward 1, gather 1b, backward 1b, reduce 1b, "
    "gather 1a, backward 1a, reduce 1a, reduce 1, gather 0, backward 0, reduce 0, reduce root, finish",
    1: "gather root, gather 0, gather 1, forward 0, gather 1a, gather 1b, forward 1a, gather 2, forward 1b, forward 1, "
    "forward 2, gather root, gather 2, gather 1, backward 2, reduce 2, gather 1b, backward 1, gather 1a, backward 1b, "
    "reduce 1b, gather 0, backward 1a, reduce 1a, reduce 1, backward 0, reduce 0, reduce root, finish",
}


@pytest.mark.parametrize("prefetch", NESTED)
def test_units_inside_of_a_unit(pool, prefetch):
    steps = pool.run(2, told, Mode(True, prefetch=prefetch), step, True)
    judged(steps, *[NESTED[prefetch]] * 2)
    right(steps, plainly(2, step, True))


# -- microbatches ------------------------------------------------------------------------------------------------------


def microbatches(model, handle, x, marks, context):
    """Three, the first two under a context of the handle's."""
    for number in range(3):
        with getattr(handle, context, contextlib.nullcontext)() if number < 2 else contextlib.nullcontext():
            model(x).backward()
        marks.append("microbatch")


def reduced(model, handle, x, marks):
    microbatches(model, handle, x, marks, "sync")


def accumulated(model, handle, x, marks):
    microbatches(model, handle, x, marks, "no_sync")


def replicas_once(model, handle, x, marks):
    microbatches(model, handle, x, marks, "no_replica_sync")


def counts(text):
    return tuple(sum(word.startswith(kind) for word in text.split(", ")) for kind in ("gather", "reduce", "sum"))


@pytest.mark.parametrize(
    ("mode", "body", "expected"),
    [  # gathers, reductions over the shard group, over the replicas: of four units, with three microbatches
        (Mode(True), reduced, (4 * 6, 4 * 3, 0)),  # 3k
        (Mode(False), reduced, (4 * 3, 4 * 3, 0)),  # 2k
        (Mode(True), accumulated, (4 * 6, 4, 0)),  # 2k + 1
        (Mode(), reduced, (4 * 6 - 3, 4 * 3, 0)),  # the default keeps the root
        (Mode(), accumulated, (4 * 6 - 3, 4, 0)),
        (HYBRID["hybrid"], reduced, (4 * 6, 4 * 3, 4 * 3)),
        (HYBRID["hybrid"], replicas_once, (4 * 6, 4 * 3, 4)),
        (HYBRID["hybrid"], accumulated, (4 * 6, 4, 4)),
        (Mode(shards=1), reduced, (0, 4 * 3, 4 * 3)),  # the reductions of a group of one send nothing
        (Mode(shards=1), accumulated, (0, 4, 4)),
    ],
)
def test_collectives_of_three_microbatches(pool, mode, body, expected):
    ranks = 4 if mode.shards else 2
    steps = pool.run(ranks, told, mode, body)
    for texts in steps:
        assert [counts(text) for text, _ in texts] == [expected] * 2
    right(steps, plainly(ranks, body))


def driven(model, handle, x, marks):
    """Two microbatches, by hand; the replicas add once."""
    for context in (handle.no_replica_sync, contextlib.nullcontext):
        handle.unshard(model)
        model(x).backward()
        with context():
            handle.reduce(model)
        handle.reshard(model)


def twice(model, handle, x, marks):
    model(x).backward()
    model(x).backward()


def test_replicas_add_once_what_is_reduced_by_hand(pool):
    steps = pool.run(4, told, HYBRID["hybrid"], driven)
    assert {counts(text) for texts in steps for text, _ in texts} == {(4 * 2, 4 * 2, 4)}
    right(steps, plainly(4, twice))


def test_under_no_sync_nothing_is_reduced(pool):
    quiet = ", ".join(word for word in picture(True, 1).split(", ") if not word.startswith("reduce"))
    one = f"{quiet}, microbatch, {quiet}, microbatch, {picture(True, 1)}, microbatch, finish"
    judged(pool.run(2, told, Mode(True), accumulated), one, one)


def test_replicas_add_what_a_shard_group_has_added(pool):
    """As soon as the next unit's reduction starts."""
    text = (
        "gather root, gather 0, gather 1, forward 0, gather 2, forward 1, forward 2, gather root, gather 2, gather 1, "
        "backward 2, reduce 2, gather 0, backward 1, sum 2, reduce 1, backward 0, sum 1, reduce 0, sum 0, reduce root, "
        "finish, sum root"
    )
    steps = pool.run(4, told, HYBRID["hybrid"], step)
    judged(steps, text, text)
    right(steps, plainly(4, step))


# -- in another order, and more than once ------------------------------------------------------------------------------


def another_order(model, handle, x, marks):
    model(x, (2, 0, 1)).backward()


def test_another_order_is_learned_in_the_first_step(pool):
    """At first what is earlier than its turn is gathered as it comes, and reduced when its turn comes."""
    steps = pool.run(2, told, Mode(True), another_order)
    first = (
        "gather root, gather 0, gather 1, gather 2, forward 2, gather 0, forward 0, gather 1, forward 1, gather 1, "
        "gather root, gather 2, backward 1, gather 0, backward 0, gather 1, backward 2, reduce 2, gather 0, reduce 1, "
        "reduce 0, reduce root, finish"
    )
    second = (
        "gather root, gather 2, gather 0, forward 2, gather 1, forward 0, forward 1, gather root, gather 1, gather 0, "
        "backward 1, reduce 1, gather 2, backward 0, reduce 0, backward 2, reduce 2, reduce root, finish"
    )
    judged(steps, first, second)
    right(steps, plainly(2, another_order))


def once_more(model, handle, x, marks):
    model(x, (0, 1, 0, 2)).backward()


def test_a_unit_that_runs_twice_is_reduced_once(pool):
    """It too is learned: the second time is gathered ahead, and the reduction waits for the last backward."""
    steps = pool.run(2, told, Mode(True), once_more)
    second = (
        "gather root, gather 0, gather 1, forward 0, gather 0, forward 1, gather 2, forward 0, forward 2, gather root, "
        "gather 2, gather 0, backward 2, reduce 2, gather 1, backward 0, gather 0, backward 1, reduce 1, backward 0, "
        "reduce 0, reduce root, finish"
    )
    for texts in steps:
        assert texts[1][0] == second
        assert all(counts(text) == (10, 4, 0) for text, _ in texts)
    right(steps, plainly(2, once_more))


def test_a_unit_that_is_kept_and_runs_twice_is_gathered_once(pool):
    steps = pool.run(2, told, KEPT, once_more)
    right(steps, plainly(2, once_more))
    for texts in steps:
        assert all(counts(text) == (4, 4, 0) for text, _ in texts)


# -- forwards and backwards --------------------------------------------------------------------------------------------


def two_and_two(model, handle, x, marks):
    first, second = model(x), model(2 * x)
    marks.append("both")
    first.backward()
    marks.append("first")
    second.backward()


def two_at_once(model, handle, x, marks):
    first, second = model(x), model(2 * x)
    marks.append("both")
    (first * second).backward()


def test_two_forwards_then_two_backwards(pool):
    steps = pool.run(2, told, Mode(True), two_and_two)
    back = f"gather root, {BACKWARD[1]}"
    judged(steps, *[f"{FORWARD[1]}, {FORWARD[1]}, both, {back}, first, {back}, finish"] * 2)
    right(steps, plainly(2, two_and_two))


@pytest.mark.parametrize("prefetch", [0, drilled(1)])
def test_two_forwards_then_one_backward_of_both(pool, prefetch):
    steps = pool.run(2, told, Mode(True, prefetch=prefetch), two_at_once)
    back = f"gather root, {BACKWARD[prefetch]}"
    judged(steps, *[f"{FORWARD[prefetch]}, {FORWARD[prefetch]}, both, {back}, {back}, finish"] * 2)
    right(steps, plainly(2, two_at_once))


@pytest.mark.parametrize("body", [two_and_two, two_at_once])
@pytest.mark.parametrize("reshard", [None, False])
def test_two_forwards_where_weights_are_kept(pool, reshard, body):
    right(pool.run(2, told, Mode(reshard), body), plainly(2, body))


def evaluated(model, handle, x, marks):
    with torch.no_grad():
        model(x)
    marks.append("evaluated")
    model(x).backward()


@pytest.mark.parametrize("reshard", [True, None, False])
def test_a_forward_without_gradients(pool, reshard):
    """Weights that are kept serve the forward after it too."""
    steps = pool.run(2, told, Mode(reshard), evaluated)
    again = picture(reshard, 1).split(", ")
    if reshard is None:
        again.remove("gather root")
    if reshard is False:
        again = [word for word in again if not word.startswith("gather")]
    judged(steps, *[f"{FORWARD[1]}, evaluated, {', '.join(again)}, finish"] * 2)
    right(steps, plainly(2, step))


def without_a_backward(model, handle, x, marks):
    model(x)


def test_a_forward_without_a_backward(pool):
    """Another rank may have had one, so that all go through it in `finish`; nobody has a gradient."""
    steps = pool.run(2, told, Mode(True, prefetch=0), without_a_backward)
    back = "gather root, gather 2, reduce 2, gather 1, reduce 1, gather 0, reduce 0, reduce root"
    judged(steps, *[f"{FORWARD[0]}, finish, {back}"] * 2)
    right(steps, plainly(2, without_a_backward))


def part_by_itself(model, handle, x, marks):
    with torch.no_grad():
        model[1](x)
    marks.append("evaluated")
    model[1](x).backward()


def test_a_part_that_is_called_by_itself(pool):
    """It is gathered as it runs; its gradient is found in `finish`."""
    steps = pool.run(2, told, Mode(True), part_by_itself)
    text = "gather 1, forward 1, evaluated, gather 1, forward 1, gather 1, backward 1, finish, reduce 1"
    judged(steps, text, text)
    right(steps, plainly(2, part_by_itself))


def part_then_all(model, handle, x, marks):
    model[1](x).backward()
    model(x).backward()


@pytest.mark.parametrize("reshard", [True, False])
def test_a_part_by_itself_and_then_all(pool, reshard):
    right(pool.run(2, told, Mode(reshard), part_then_all), plainly(2, part_then_all))


def part_by_one_rank(model, handle, x, marks):
    """The others have no gradient of it, and join in its reduction."""
    out = model[1](x)
    if x < 0.15:
        out.backward()


def test_a_late_gradient_of_one_rank(pool):
    steps = pool.run(2, told, KEPT, part_by_one_rank, timeout=5.0)
    right(steps, plainly(2, part_by_one_rank))


# -- what must show ----------------------------------------------------------------------------------------------------


def told_without_prefetch(run, body):
    true = FullySharded._enter
    with mock.patch.object(FullySharded, "_enter", lambda handle, number, ahead: true(handle, number, [])):
        return told(run, Mode(True, prefetch=1), body)


def test_a_gather_that_starts_late_shows(pool):
    for steps in pool.run(2, told_without_prefetch, step):
        assert steps[0][0] == f"{picture(True, 0)}, finish" != f"{picture(True, 1)}, finish"
