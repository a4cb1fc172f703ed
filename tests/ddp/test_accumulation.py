"""Several backward calls in one step: under no_sync or without it, uneven over the ranks, or broken off."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from ddp import bucketed, naive, overlapped
from tests.ddp.versions import each_version, recording

WRAPS = {
    "naive": naive.wrap,
    "bucketed": functools.partial(bucketed.wrap, cap=1),
    "overlapped": functools.partial(overlapped.wrap, cap=1),
    "overlapped, one bucket": overlapped.wrap,
}
# Elements of the collectives of a step, if two parameters, of two and of three elements, get gradients in four parts.
ONCE = {"naive": [2, 2, 3], "bucketed": [3, 2 + 4], "overlapped": [3, 2 + 4], "overlapped, one bucket": [5 + 4]}
LAUNCHES = {
    "one part, then finish": ONCE,
    "every part reaches a bucket": ONCE | {"overlapped": [3, 2 + 4, 3]},
}


def accumulate(run, wrap, covers):
    """Four microbatches, no_sync around forward, backward or both of all but the last: (gradients, calls)."""
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)]).double()
    handle = wrap(model, run.world)
    with recording() as calls:
        for micro in range(4):
            quiet = handle.no_sync if micro < 3 else contextlib.nullcontext
            with quiet() if "forward" in covers else contextlib.nullcontext():
                x = torch.tensor([[1.0, 10.0**micro * (run.rank + 1), 2.0]], dtype=torch.float64)
                out = model[0](x[:, :2]) + model[1](x)
                if covers == "forward, backward":
                    out.sum().backward()
            with quiet() if covers == "backward" else contextlib.nullcontext():
                if covers != "forward, backward":
                    out.sum().backward()
        handle.finish()
    return [param.grad.tolist() for param in model.parameters()], [numel for _, numel in calls]


@pytest.mark.parametrize("covers", ["forward, backward", "forward", "backward", "nothing"])
@pytest.mark.parametrize("version", WRAPS)
def test_no_sync_in_any_place_gives_the_mean_of_the_sums(pool, version, covers):
    """T15. A gradient is reduced once; without no_sync one that is not in the last bucket is reduced when the first
    backward has been, and the rest of it in finish: twice, and not four times.
    """
    case = "one part, then finish" if "backward" in covers else "every part reaches a bucket"
    for grads, calls in pool.run(2, accumulate, WRAPS[version], covers):
        assert grads == [[[4.0, 1111 * 1.5]], [[4.0, 1111 * 1.5, 8.0]]]
        assert calls == LAUNCHES[case][version]


def fail_and_go_on(run, wrap):
    """An exception inside no_sync, then a step as usual: its gradients, and whether reductions are switched on."""
    model = nn.Linear(1, 1).double()
    handle = wrap(model, run.world)
    with pytest.raises(ZeroDivisionError), handle.no_sync():
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        raise ZeroDivisionError
    model.zero_grad()
    (model(torch.full((1, 1), run.rank + 1, dtype=torch.float64)) * (run.rank + 1)).sum().backward()
    handle.finish()
    return model.weight.grad.item(), model.bias.grad.item(), handle.syncing


@each_version
def test_an_exception_inside_no_sync_leaves_nothing_switched_off(pool, wrap):
    assert pool.run(2, fail_and_go_on, wrap) == [(2.5, 1.5, True)] * 2


def nested(run, wrap):
    """Three microbatches, the second after the end of a no_sync inside a no_sync: (gradient, collectives before the
    third).
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    handle = wrap(model, run.world)
    nn.init.ones_(model[0].weight)
    x = torch.full((1, 1), run.rank + 1, dtype=torch.float64)
    with recording() as calls:
        with handle.no_sync():
            with handle.no_sync():
                model(x).backward()
            model(10 * x).backward()
        early = len(calls)
        model(100 * x).backward()
        handle.finish()
    return model[1].weight.grad.item(), early


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
    """This many microbatches on this rank, x = 10^rank in each: gradients of three parameters, the second unused."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))
    handle = wrap(model, run.world, average=False)
    grads = []
    for _ in range(2):
        model.zero_grad()
        mine = microbatches[run.rank]
        for number in range(mine):
            last = last_syncs and number == mine - 1
            with contextlib.nullcontext() if last else handle.no_sync():
                ((model[0] + model[2]) * 10.0**run.rank).sum().backward()
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
        assert grads == [[used, None, used]] * 2


def only_before_the_last(run, wrap):
    """Layers 0 and 3 are used in the first microbatch, under no_sync, and by rank 0 only; layer 1 in the last."""
    model = nn.ParameterList(nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(4))
    handle = wrap(model, run.world)
    grads = []
    for _ in range(2):
        model.zero_grad()
        with handle.no_sync():
            (model[1] + (model[0] * 6 + model[3] * 12 if run.rank == 0 else 0)).backward()
        (model[1] * (run.rank + 1)).backward()
        handle.finish()
        grads.append([None if param.grad is None else param.grad.item() for param in model])
    return grads


@pytest.mark.parametrize("ranks", [1, 2, 3])
@each_version
def test_a_parameter_used_only_under_no_sync_is_reduced(pool, wrap, ranks):
    expected = [6 / ranks, 1 + sum(range(1, ranks + 1)) / ranks, None, 12 / ranks]
    for steps in pool.run(ranks, only_before_the_last, wrap):
        assert steps == [expected] * 2
