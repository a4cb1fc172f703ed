"""Several backward calls in one step: under no_sync or without it, uneven over the ranks, or broken off."""

import contextlib

import pytest
import torch
from torch import nn

from ddp import bucketed, naive, overlapped
from tests.ddp.versions import each_version, recording

LAUNCHES = {  # elements of the collectives of a step, if one parameter of two elements gets its gradient in four parts
    "one part, then finish": {"naive": [1, 2], "bucketed": [2, 1], "overlapped": [2, 1]},
    "every part reaches a bucket": {"naive": [1, 2], "bucketed": [2, 1], "overlapped": [2, 1, 2]},
}


def accumulate(run, wrap, covers):
    """Four microbatches, no_sync around forward, backward or both of all but the last: (gradient, calls)."""
    weight = nn.Linear(2, 1, bias=False).double()
    handle = wrap(weight, run.world)
    with recording() as calls:
        for micro in range(4):
            quiet = handle.no_sync if micro < 3 else contextlib.nullcontext
            with quiet() if "forward" in covers else contextlib.nullcontext():
                out = weight(torch.tensor([[1.0, 10.0**micro * (run.rank + 1)]], dtype=torch.float64))
                if covers == "forward, backward":
                    out.sum().backward()
            with quiet() if covers == "backward" else contextlib.nullcontext():
                if covers != "forward, backward":
                    out.sum().backward()
        handle.finish()
    return weight.weight.grad, [numel for _, numel in calls]


@pytest.mark.parametrize("covers", ["forward, backward", "forward", "backward", "nothing"])
@pytest.mark.parametrize("version", ["naive", "bucketed", "overlapped"])
def test_no_sync_in_any_place_gives_the_mean_of_the_sums(pool, version, covers):
    """T15. A gradient is reduced once; without no_sync it is reduced when the first backward has been, and the rest of
    it in finish: twice, and not four times.
    """
    wrap = {"naive": naive.wrap, "bucketed": bucketed.wrap, "overlapped": overlapped.wrap}[version]
    case = "one part, then finish" if "backward" in covers else "every part reaches a bucket"
    for grad, calls in pool.run(2, accumulate, wrap, covers):
        assert grad.tolist() == [[4.0, 1111 * 1.5]]
        assert calls == LAUNCHES[case][version]


def fail_and_go_on(run, wrap):
    """An exception inside no_sync, then a step as usual."""
    weight = nn.Linear(1, 1, bias=False).double()
    handle = wrap(weight, run.world)
    with pytest.raises(ZeroDivisionError), handle.no_sync():
        weight(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        raise ZeroDivisionError
    weight.zero_grad()
    weight(torch.full((1, 1), run.rank + 1, dtype=torch.float64)).sum().backward()
    handle.finish()
    return weight.weight.grad.item(), handle.syncing


@each_version
def test_an_exception_inside_no_sync_leaves_nothing_switched_off(pool, wrap):
    assert pool.run(2, fail_and_go_on, wrap) == [(1.5, True)] * 2


def nested(run, wrap):
    """Three microbatches, the second after the end of a no_sync inside a no_sync: (gradient, collectives before the
    third).
    """
    weight = nn.Linear(1, 1, bias=False).double()
    handle = wrap(weight, run.world)
    x = torch.full((1, 1), run.rank + 1, dtype=torch.float64)
    with recording() as calls:
        with handle.no_sync():
            with handle.no_sync():
                weight(x).backward()
            weight(10 * x).backward()
        early = len(calls)
        weight(100 * x).backward()
        handle.finish()
    return weight.weight.grad.item(), early


@each_version
def test_a_no_sync_inside_another(pool, wrap):
    assert pool.run(2, nested, wrap) == [(166.5, 0)] * 2


class Failing(torch.autograd.Function):
    """The identity; backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        raise ZeroDivisionError


def backward_raises_on_one(run, wrap):
    """Rank 1's backward breaks off between two layers; all call finish, drop the gradients, and train on."""
    model = nn.ParameterList(nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    handle = wrap(model, run.world, average=False)
    hidden = model[0] * (run.rank + 1)
    loss = model[1] * (Failing.apply(hidden) if run.rank == 1 else hidden)
    with pytest.raises(ZeroDivisionError) if run.rank == 1 else contextlib.nullcontext():
        loss.backward()
    handle.finish()
    model.zero_grad()
    (model[1] * model[0] * (run.rank + 1)).backward()
    handle.finish()
    return [param.grad.item() for param in model]


@each_version
def test_a_step_after_a_backward_that_raised(pool, wrap):
    assert pool.run(3, backward_raises_on_one, wrap) == [[6.0, 6.0]] * 3


# -- another number of microbatches on each rank -----------------------------------------------------------------------


def uneven(run, wrap, microbatches, last_syncs):
    """This many microbatches on this rank, x = 10^rank in each: gradients of a used and of an unused parameter."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    handle = wrap(model, run.world, average=False)
    grads = []
    for _ in range(2):
        model.zero_grad()
        mine = microbatches[run.rank]
        for number in range(mine):
            last = last_syncs and number == mine - 1
            with contextlib.nullcontext() if last else handle.no_sync():
                (model[0] * 10.0**run.rank).sum().backward()
        handle.finish()
        grads.append([None if param.grad is None else param.grad.tolist() for param in model])
    return grads


@pytest.mark.parametrize("last_syncs", [True, False])
@pytest.mark.parametrize("microbatches", [(3, 0, 2), (0, 0, 1), (1, 1, 1), (0, 0, 0)])
@each_version
def test_ranks_with_different_numbers_of_microbatches(pool, wrap, microbatches, last_syncs):
    """Also none at all on a rank, or on all; and every one of them under no_sync."""
    total = sum(n * 10.0**rank for rank, n in enumerate(microbatches))
    used = [total, total] if total else None
    for grads in pool.run(3, uneven, wrap, microbatches, last_syncs):
        assert grads == [[used, None]] * 2


def only_before_the_last(run, wrap):
    """Layer 0 is used in the first microbatch, under no_sync, and by rank 0 only; layer 1 in the last."""
    model = nn.ParameterList(nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3))
    handle = wrap(model, run.world)
    grads = []
    for _ in range(2):
        model.zero_grad()
        with handle.no_sync():
            (model[1] + (model[0] * 6 if run.rank == 0 else 0)).backward()
        (model[1] * (run.rank + 1)).backward()
        handle.finish()
        grads.append([None if param.grad is None else param.grad.item() for param in model])
    return grads


@pytest.mark.parametrize("ranks", [1, 2, 3])
@each_version
def test_a_parameter_used_only_under_no_sync_is_reduced(pool, wrap, ranks):
    expected = [6 / ranks, 1 + sum(range(1, ranks + 1)) / ranks, None]
    for steps in pool.run(ranks, only_before_the_last, wrap):
        assert steps == [expected] * 2
