"""Gradients that come after their bucket has started: in a second backward call, by hand, or not at all."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from ddp import bucketed, overlapped
from tests.ddp.versions import BUCKETED, each_version, elements, gradients, recording, vectors


def two_backwards(run, wrap, second, change=contextlib.nullcontext):
    """Two backward calls, no no_sync, the second on some ranks only: gradients of a, b and c in two steps.

    a has 10 from the second, on each rank that has it, c 1 from the first, b both. Buckets start with c.
    """
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3, dtype=torch.float64)) for name in "abc"})
    handle = wrap(model, run.world, average=False)
    steps = []
    with change():
        for _ in range(2):
            model.zero_grad()
            (model["b"] + model["c"]).sum().backward()
            if run.rank in second:
                (10 * (model["a"] + model["b"])).sum().backward()
            handle.finish()
            steps.append([None if p.grad is None else p.grad.tolist() for p in model.values()])
    return steps


@pytest.mark.parametrize(("ranks", "second"), [(1, (0,)), (2, (0, 1)), (2, (1,)), (3, (0,)), (3, ())])
@each_version
def test_a_gradient_that_comes_after_its_bucket_started_is_added(pool, wrap, ranks, second):
    a, b, c = 10 * len(second), ranks + 10 * len(second), ranks
    for steps in pool.run(ranks, two_backwards, wrap, second):
        assert steps == [[[a] * 3 if a else None, [b] * 3, [c] * 3]] * 2


def without_late_gradients():
    return mock.patch.object(bucketed.BucketedDDP, "_add", lambda handle, param, grad: None)


def test_dropping_late_gradients_shows(pool):
    for steps in pool.run(2, two_backwards, BUCKETED["overlapped, 1 byte"], (1,), without_late_gradients):
        assert [[b, c] for _, b, c in steps] == [[[2] * 3, [2] * 3]] * 2  # b lacks the 10 of the second backward


def autograd_under_way(run, wrap):
    """While the bucket of b is under way, the same backward or a second one adds to a, whose bucket is the last, and
    then to b.
    """
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(4, dtype=torch.float64)) for name in "ab"})
    handle = wrap(model, run.world, average=False)
    with recording() as calls:
        for factor in (1.0, 10.0, 100.0):
            (model["b"] * model["a"] * factor * (run.rank + 1)).sum().backward()
            calls.append("backward")
        handle.finish()
    return [p.grad.tolist() for p in model.values()], calls


def test_autograd_adds_beside_a_bucket_that_is_under_way(pool):
    """It finds no gradient, so it never writes into memory that is being sent; what it makes is reduced in finish."""
    for grads, calls in pool.run(3, autograd_under_way, BUCKETED["overlapped, 1 byte"]):
        assert grads == [[666.0] * 4] * 2
        step = [("all_reduce", 4), "backward", "backward", "backward"]
        assert calls == [*step, ("all_reduce", 4 + 4), ("all_reduce", 4)]


def second_backward(run, late, cap):
    """A whole backward, then another through the parameters in late[r]: what happens, and the gradients.

    Buckets, with a cap of 40: parameters 3 and 2, of 4 and 1 elements, and the last one with 1 and 0.
    """
    model = vectors("2 3 1 4")
    handle = overlapped.wrap(model, run.world, average=False, cap=cap)
    with recording() as calls:
        sum(param.sum() for param in model).backward()
        calls.append("backward")
        for i in late[run.rank]:
            (model[i].sum() * 10).backward()
        calls.append("finish")
        handle.finish()
    return elements(calls), gradients(model)


@pytest.mark.parametrize(
    ("late", "more"),
    [
        (((), (), ()), ""),
        (((0,), (), (0, 1)), ""),  # of the last bucket, which has not started: they just add up
        (((3,), (), ()), " 4"),
        (((), (2, 3), (3,)), " 1 4"),
        (((0, 3), (2,), (1, 2)), " 1 4"),
        (((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 2, 0)), " 1 4"),
    ],
)
def test_late_gradients_of_early_buckets_are_added_and_of_the_last_are_in_time(pool, late, more):
    """Where any rank has one, all reduce it, in the order of the parameters. Of the last bucket none is late."""
    expected = [[3.0 + 10 * sum(i in ranks for ranks in late)] * n for i, n in enumerate((2, 3, 1, 4))]
    assert pool.run(3, second_backward, late, 40) == [("5 backward finish 13" + more, expected)] * 3
    assert pool.run(3, second_backward, late, 80) == [("backward finish 18", expected)] * 3


MANY = 24


def many_late(run, wrap):
    """Twelve of 24 parameters of one size in two backwards, the others unfrozen in between: the gradients."""
    model = vectors("1 " * MANY)
    for param in model[1::2]:
        param.requires_grad_(False)
    handle = wrap(model, run.world, average=False)
    sum(param.sum() for param in model[::2]).backward()
    model.requires_grad_(True)
    order = torch.randperm(MANY, generator=torch.Generator().manual_seed(run.rank)).tolist()
    for i in order:
        (model[i].sum() * 100 * i).backward()
    handle.finish()
    return [param.grad.item() for param in model]


@pytest.mark.parametrize("ranks", [2, 3])
@each_version
def test_many_late_gradients_are_reduced_in_one_order_on_every_rank(pool, wrap, ranks):
    """Whatever order each rank's memory suggests: their sizes agree, so nothing else would tell."""
    expected = [float(ranks * (100 * i + (i % 2 == 0))) for i in range(MANY)]
    assert pool.run(ranks, many_late, wrap) == [expected] * ranks


# -- gradients that no backward brought --------------------------------------------------------------------------------


def set_by_hand(run, wrap, when):
    """p.grad is set by hand: of all without a backward, in place of backward's, or after a bucket has started."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    handle = wrap(model, run.world, average=False)
    steps = []
    for _ in range(2):
        model.zero_grad()
        if when == "in place of backward's":
            with handle.no_sync():
                (model[0] + model[1]).sum().backward()
        elif when == "after the last one's":
            model[1].sum().backward()
        loss = (model[0] * 10 * (run.rank + 1)).sum()
        (model[0].grad,) = torch.autograd.grad(loss, [model[0]])
        handle.finish()
        steps.append([None if p.grad is None else p.grad.tolist() for p in model])
    return steps


@pytest.mark.parametrize(
    ("when", "other"), [("alone", None), ("in place of backward's", [3.0] * 2), ("after the last one's", [3.0] * 2)]
)
@each_version
def test_gradients_set_by_hand_are_reduced(pool, wrap, when, other):
    """The weights' half of a split backward: no hook fires, finish starts what is there."""
    for steps in pool.run(3, set_by_hand, wrap, when):
        assert steps == [[[60.0] * 2, other]] * 2


def replaced_after_start(run, wrap):
    """While the first bucket of a whole backward is under way, a second part of the gradients is set by hand, on rank
    0: the gradients, and which of them were under way.
    """
    model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    handle = wrap(model, run.world, average=False)
    (model[0] + model[1]).sum().backward()
    under_way = [param.grad is None for param in model]
    if run.rank == 0:
        for param in model:
            param.grad = torch.full((2,), 10.0, dtype=torch.float64) + (0 if param.grad is None else param.grad)
    handle.finish()
    return [param.grad.tolist() for param in model], under_way


@each_version
def test_a_gradient_set_by_hand_while_a_bucket_is_under_way_is_added(pool, wrap):
    under_way = [False, wrap is BUCKETED["overlapped, 1 byte"]]
    assert pool.run(3, replaced_after_start, wrap) == [([[13.0, 13.0]] * 2, under_way)] * 3


class NoGradient(torch.autograd.Function):
    """x w, without a gradient for w on the ranks that say so."""

    @staticmethod
    def forward(ctx, x, w, gives):
        ctx.save_for_backward(x, w)
        ctx.gives = gives
        return x * w

    @staticmethod
    def backward(ctx, dout):
        x, w = ctx.saved_tensors
        return dout * w, dout * x if ctx.gives else None, None


def no_gradient(run, wrap, givers):
    """Two layers; backward reaches the last one's weight, and on some ranks brings it no gradient."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    handle = wrap(model, run.world, average=False)
    NoGradient.apply(model[0] * 2, model[1], run.rank in givers).sum().backward()
    handle.finish()
    return [None if p.grad is None else p.grad.tolist() for p in model]


@pytest.mark.parametrize(("givers", "last"), [((), None), ((1,), [2.0, 2.0]), ((0, 1, 2), [6.0, 6.0])])
@each_version
def test_a_parameter_that_backward_reaches_without_a_gradient(pool, wrap, givers, last):
    assert pool.run(3, no_gradient, wrap, givers) == [[[6.0, 6.0], last]] * 3
