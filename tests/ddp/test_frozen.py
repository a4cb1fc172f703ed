"""A model of which nothing trains, or nothing yet: its only bucket has notes and no parameters."""

import functools

import pytest
import torch
from torch import nn

from ddp import bucketed, overlapped
from tests.ddp.versions import each_bucketed, each_version, elements, gradients, recording, storage_bytes, vectors


def frozen_whole(run, wrap):
    """A frozen model for two steps, which then trains: (elements of the buckets, what happens, gradients) of each step.
    The second parameter is used by rank 1 only.
    """
    model, steps = vectors("2 3 4").requires_grad_(False), []
    handle = wrap(model, run.world, average=False)
    for step in range(5):
        sizes = [bucket.buffer.numel() for bucket in handle.buckets]
        for param in model:
            param.requires_grad_(step >= 2)
        model.zero_grad()
        with recording() as calls:
            for number, param in enumerate(model):
                if step >= 2 and (number != 1 or run.rank == 1):
                    (param.sum() * (run.rank + 1)).backward()
            calls.append("finish")
            handle.finish()
        steps.append((sizes, elements(calls), gradients(model)))
    return steps


@pytest.mark.parametrize(
    ("version", "cap", "sizes"),
    [(bucketed, 1, [4, 3, 2 + 6]), (bucketed, 100, [9 + 6]), (overlapped, 100, [9 + 6])],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_frozen_model_then_trains(pool, ranks, version, cap, sizes):
    """A bucket without parameters carries 2·3 notes; the first gradients go by themselves, then they have buckets."""
    total = float(sum(range(1, ranks + 1)))
    grads = [[total] * 2, [2.0] * 3, [total] * 4]
    frozen, first, usual = (
        ([6], "finish 6", [None] * 3),
        ([6], "finish 6 2 3 4", grads),
        (sizes, " ".join(["finish", *map(str, sizes)]), grads),
    )
    expected = [frozen, frozen, first, usual, usual]
    assert pool.run(ranks, frozen_whole, functools.partial(version.wrap, cap=cap)) == [expected] * ranks


def test_a_frozen_model_then_trains_beside_backward(pool):
    """A rank without a gradient of the second parameter starts the buckets behind it in finish."""
    first, second = pool.run(2, frozen_whole, functools.partial(overlapped.wrap, cap=1))
    grads = [[3.0] * 2, [2.0] * 3, [3.0] * 4]
    assert second[:3] == first[:3] == [([6], "finish 6", [None] * 3)] * 2 + [([6], "finish 6 2 3 4", grads)]
    assert first[3:] == [([4, 3, 8], "4 finish 3 8", grads)] * 2
    assert second[3:] == [([4, 3, 8], "4 3 finish 8", grads)] * 2


def frozen_then_one_rank(run, wrap):
    """The first parameter of a frozen model is unfrozen on all ranks and used by one: the gradients, twice."""
    model, steps = vectors("2 2").requires_grad_(False), []
    handle = wrap(model, run.world)
    model[0].requires_grad_(True)
    for _ in range(2):
        model.zero_grad()
        if run.rank == 1:
            (model[0] * 8).sum().backward()
        handle.finish()
        steps.append(gradients(model))
    return steps


@pytest.mark.parametrize("ranks", [2, 4])
@each_version
def test_what_is_unfrozen_and_used_by_one_rank_is_reduced_on_all(pool, wrap, ranks):
    assert pool.run(ranks, frozen_then_one_rank, wrap) == [[[[8 / ranks] * 2, None]] * 2] * ranks


def without_parameters(run, wrap):
    """Two steps of a module that has none, and what the next collective finds: (parameters, memory, gradient)."""
    handle = wrap(nn.Tanh(), run.world)
    for _ in range(2):
        with handle.no_sync():
            nn.Tanh()(torch.ones(2))
        handle.finish()
    model = vectors("2")
    other = wrap(model, run.world, average=False)
    (model[0] * (run.rank + 1)).sum().backward()
    other.finish()
    held = storage_bytes([bucket.buffer for bucket in getattr(handle, "buckets", [])])
    return handle.parameters(), held, gradients(model)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@each_version
def test_a_model_without_any_parameters(pool, wrap, ranks):
    total = float(sum(range(1, ranks + 1)))
    assert pool.run(ranks, without_parameters, wrap) == [([], 0, [[total] * 2])] * ranks


@each_bucketed
def test_a_model_without_any_parameters_in_bfloat16(pool, wrap):
    assert pool.run(3, without_parameters, functools.partial(wrap, wire=torch.bfloat16)) == [([], 0, [[6.0] * 2])] * 3


def trained_and_frozen_again(run, wrap):
    """The first parameter is frozen in wrap, trains in every second step, and is frozen again before finish."""
    model, steps = vectors("2 3"), []
    model[0].requires_grad_(False)
    handle = wrap(model, run.world, average=False)
    for step in range(5):
        model[0].requires_grad_(step % 2 == 1)
        model.zero_grad()
        sum(param.sum() * (run.rank + 1) for param in model if param.requires_grad).backward()
        model[0].requires_grad_(False)
        handle.finish()
        steps.append(gradients(model))
    return steps


@each_version
def test_a_parameter_that_is_frozen_again_before_finish(pool, wrap):
    for steps in pool.run(2, trained_and_frozen_again, wrap):
        assert steps == [[[3.0] * 2 if step % 2 else None, [3.0] * 3] for step in range(5)]
