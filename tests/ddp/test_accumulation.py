"""Several backward calls in one step: under no_sync, without it, uneven over the ranks; what a loss is divided by."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from collectives import comm
from ddp import bucketed, naive, overlapped
from tests.ddp.versions import BUCKETED, each_bucketed, each_version, recording

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


# -- two backward calls in one synced step -----------------------------------------------------------------------------


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
    def keep_bucket(handle, param):
        param.grad = handle.bucket_of[param].views[param]

    return mock.patch.object(bucketed.BucketedDDP, "_add_outside", keep_bucket)


def test_dropping_late_gradients_shows(pool):
    for steps in pool.run(2, two_backwards, BUCKETED["overlapped, 1 byte"], (1,), without_late_gradients):
        assert steps == [[[10] * 3, [2] * 3, [2] * 3]] * 2  # b lacks the 10 of the second backward


def autograd_under_way(run, wrap):
    """While the bucket of b is under way, the same backward or a second one adds to a, and then to b."""
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
        step = [("all_reduce", 4), ("all_reduce", 4), "backward", "backward", "backward"]
        assert calls == [*step, ("all_reduce", 2), ("all_reduce", 4), ("all_reduce", 4)]


# -- zero_grad, and not ------------------------------------------------------------------------------------------------


def zeroed(run, wrap, set_to_none):
    """Three steps, the second of which uses layer 0 only: gradients."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    handle = wrap(model, run.world, average=False)
    steps = []
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        used = model[0] if step == 1 else model[0] + model[1]
        (used * (step + 1) * (run.rank + 1)).sum().backward()
        handle.finish()
        steps.append([None if p.grad is None else p.grad.tolist() for p in model])
    return steps


@pytest.mark.parametrize("set_to_none", [True, False])
@each_version
def test_both_ways_to_zero_gradients(pool, wrap, set_to_none):
    unused = None if set_to_none else [0.0, 0.0]
    for steps in pool.run(2, zeroed, wrap, set_to_none):
        assert steps == [[[3.0] * 2] * 2, [[6.0] * 2, unused], [[9.0] * 2] * 2]


def second_order(run, wrap):
    """Gradients of a loss that holds a gradient, in two steps, and whether they hold a graph."""
    weight = nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64))
    handle = wrap(nn.ParameterList([weight]), run.world, average=False)
    grads = []
    for _ in range(2):
        weight.grad = None
        (first,) = torch.autograd.grad((weight**3 * (run.rank + 1)).sum(), weight, create_graph=True)
        first.sum().backward(create_graph=True)
        handle.finish()
        grads.append((weight.grad.tolist(), weight.grad.requires_grad))
    return grads


@each_bucketed
def test_a_backward_that_makes_a_graph(pool, wrap):
    """The buckets are no part of it: the graph of one step would hold that of the step before."""
    assert pool.run(2, second_order, wrap) == [[([54.0, 54.0], False)] * 2] * 2


# -- what the loss is divided by ---------------------------------------------------------------------------------------


def mean_of_all_tokens(run, wrap, tokens):
    """Loss w x of a token; the mean over all tokens of all ranks: its gradient by w, None if no rank has a token."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    handle = wrap(nn.ParameterList([weight]), run.world, average=False)
    x = torch.tensor(tokens[run.rank], dtype=torch.float64)
    count = torch.tensor(len(x))
    comm.all_reduce(count, group=run.world)
    if len(x):
        ((weight * x).sum() / count).backward()
    handle.finish()
    return None if weight.grad is None else weight.grad.item()


@pytest.mark.parametrize(
    ("tokens", "grad"), [(([1], [5, 5, 5]), 4), (([1, 2, 6], []), 3), (([], [], [7]), 7), (([], []), None)]
)
@each_version
def test_the_mean_over_tokens_is_no_mean_of_means(pool, wrap, tokens, grad):
    """T24: 4, where a mean of the ranks' means is 3. A rank without a token adds nothing."""
    assert pool.run(len(tokens), mean_of_all_tokens, wrap, tokens) == [grad] * len(tokens)


def masked(run, wrap, labels):
    """(finite loss, gradients, whether the weights moved) of a step with weight decay; -100 is no label."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    handle = wrap(model, run.world, average=False)
    optimizer = torch.optim.AdamW(handle.parameters(), lr=0.1)
    mine = torch.tensor(labels[run.rank])
    count = (mine >= 0).sum()
    comm.all_reduce(count, group=run.world)
    x = torch.randn(len(mine), 3, generator=torch.Generator().manual_seed(run.rank), dtype=torch.float64)
    loss = cross_entropy(model(x), mine, reduction="sum") / count.clamp(min=1)
    loss.backward()
    handle.finish()
    before = model.weight.detach().clone()
    if count:
        optimizer.step()
    return loss.isfinite().item(), [p.grad.clone() for p in model.parameters()], not model.weight.equal(before)


@each_version
def test_ranks_without_a_valid_label(pool, wrap):
    """T26: one masked rank adds exact zeros; if all are masked the gradient is zero and nobody steps."""
    some, none = ([1, -100, 3], [-100, -100]), ([-100], [-100, -100])
    alone = pool.run(1, masked, naive.wrap, some[:1])[0]
    for finite, grads, moved in pool.run(2, masked, wrap, some):
        assert finite and moved and all(map(torch.equal, grads, alone[1]))
    for finite, grads, moved in pool.run(2, masked, wrap, none):
        assert finite and not moved and not any(grad.any() for grad in grads)
