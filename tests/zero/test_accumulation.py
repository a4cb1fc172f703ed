"""What is added up: over ranks, read off by digits; over microbatches, uneven, empty, or broken off; over steps."""

import contextlib

import pytest
import torch
from torch import nn

from tests.recorder import recording
from tests.shards import assembled, pieces
from tests.zero.versions import STAGES, drilled, each_stage, each_version, vectors


def digits(run, wrap, microbatches, average):
    """Element j of every gradient is j + 1, shifted by two digits a rank, in microbatch m times m + 1."""
    model = vectors("16 40 1 7 0")
    handle = wrap(model, run.world, average=average)
    for micro in range(microbatches):
        with handle.no_sync() if micro < microbatches - 1 else contextlib.nullcontext():
            sum(
                layer(100.0**run.rank * (micro + 1) * torch.arange(1, len(layer.weight) + 1)) for layer in model
            ).backward()
    handle.finish()
    return pieces(handle)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "average"),
    [
        (3, 3, False),
        (4, 1, True),
        *(drilled(ranks, 1, True) for ranks in (1, 2, 3)),
        *(drilled(r, 3, False) for r in (1, 2, 4)),
    ],
)
@each_version
def test_digits(pool, wrap, ranks, microbatches, average):
    """A rank that is left out, counted twice, or added in the wrong place would be read off."""
    grads, _ = assembled(pool.run(ranks, digits, wrap, microbatches, average))
    times = sum(range(1, microbatches + 1))
    code = sum(100**rank for rank in range(ranks)) * times
    assert [len(grad) for grad in grads.values()] == [16, 40, 1, 7, 0]
    for grad in grads.values():
        assert torch.equal(grad * (ranks if average else 1), code * torch.arange(1, len(grad) + 1, dtype=grad.dtype))


def accumulate(run, wrap, covers):
    """T15. Four microbatches, no_sync around forward, backward or both of all but the last: gradients, reductions."""
    model = vectors("2 3")
    handle = wrap(model, run.world)
    with recording() as recorder:
        for micro in range(4):
            quiet = handle.no_sync if micro < 3 else contextlib.nullcontext
            with quiet() if "forward" in covers else contextlib.nullcontext():
                loss = model[1](model[0](torch.tensor(10.0**micro * (run.rank + 1), dtype=torch.float64)))
                if covers == "forward, backward":
                    loss.backward()
            with quiet() if covers == "backward" else contextlib.nullcontext():
                if covers != "forward, backward":
                    loss.backward()
        handle.finish()
    return pieces(handle), len([call for call in recorder.calls if call.op.startswith(("all_reduce", "reduce"))]) - 1


@pytest.mark.parametrize("covers", ["forward, backward", "backward", "nothing"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_in_any_place_gives_the_mean_of_the_sums(pool, stage, covers):
    """Stages 0 and 1 reduce once, stages 2 and 3 in every microbatch; what stage 2 could not know to be one, it adds
    up until finish.
    """
    held, reductions = zip(*pool.run(2, accumulate, STAGES[stage], covers), strict=True)
    grads, _ = assembled(held)
    assert [grad.tolist() for grad in grads.values()] == [[3 * 1111 * 1.5] * 2, [2 * 1111 * 1.5] * 3]
    once = {"stage 0": 1, "stage 1": 1, "stage 2": 2 if covers == "nothing" else 4, "stage 3": 4 * 2}
    assert set(reductions) == {once[stage]}


@each_stage
def test_no_sync_around_forward_alone_makes_no_difference(pool, wrap):
    grads, _ = assembled([held for held, _ in pool.run(2, accumulate, wrap, "forward")])
    assert [grad.tolist() for grad in grads.values()] == [[3 * 1111 * 1.5] * 2, [2 * 1111 * 1.5] * 3]


def nested(run, wrap):
    """Three microbatches, the second after the end of a no_sync inside a no_sync."""
    model = vectors("3 4")
    handle = wrap(model, run.world)
    with handle.no_sync():
        with handle.no_sync():
            model(torch.tensor(run.rank + 1.0, dtype=torch.float64)).backward()
        model(torch.tensor(10.0, dtype=torch.float64)).backward()
    model(torch.tensor(100.0, dtype=torch.float64)).backward()
    handle.finish()
    return pieces(handle)


@each_stage
def test_a_no_sync_inside_another(pool, wrap):
    grads, _ = assembled(pool.run(2, nested, wrap))
    assert all(grad.eq(111.5).all() for grad in grads.values())


def uneven(run, wrap, runs):
    """Three microbatches, of which rank r runs those in runs[r], in two steps. x = 10^r."""
    model, steps = vectors("2 3 5"), []
    handle = wrap(model, run.world, average=False)
    for _ in range(2):
        for shard in handle.parameters():
            shard.grad = None
        for micro in range(3):
            with handle.no_sync() if micro < 2 else contextlib.nullcontext():
                if micro in runs[run.rank]:
                    model(torch.tensor(10.0**run.rank, dtype=torch.float64), (0, 2)).backward()
                else:
                    model(torch.ones(0, 1, dtype=torch.float64), (0,))
        handle.finish()
        steps.append(pieces(handle))
    return steps


@pytest.mark.parametrize("runs", [((0, 1, 2), (), (0, 1)), drilled(((0,), (1,), (2,))), ((), (), (2,)), ((), (), ())])
@each_version
def test_empty_microbatches(pool, wrap, runs):
    """On some ranks, or on all; where there is nothing to do, a forward without rows is run."""
    total = sum(len(mine) * 10.0**rank for rank, mine in enumerate(runs))
    for ranks in zip(*pool.run(3, uneven, wrap, runs), strict=True):
        grads, _ = assembled(ranks)
        used = total or None
        assert [grad if grad is None else grad.unique().item() for grad in grads.values()] == [used, None, used]


def fail_and_go_on(run, wrap):
    """An exception inside no_sync, on one rank or on all, then a step as usual."""
    model, steps = vectors("1 2"), []
    handle = wrap(model, run.world)
    for failing in ((0, 1), (1,)):
        with contextlib.suppress(ZeroDivisionError), handle.no_sync():
            model[1](model[0](torch.tensor(7.0, dtype=torch.float64))).backward()
            if run.rank in failing:
                raise ZeroDivisionError
        handle.finish()
        for shard in handle.parameters():
            shard.grad = None
        model[1](model[0](torch.tensor(run.rank + 1.0, dtype=torch.float64))).backward()
        handle.finish()
        steps.append((pieces(handle), handle.syncing))
        for shard in handle.parameters():
            shard.grad = None
    return steps


@each_stage
def test_an_exception_inside_no_sync_leaves_nothing_behind(pool, wrap):
    for ranks in zip(*pool.run(2, fail_and_go_on, wrap), strict=True):
        held, syncing = zip(*ranks, strict=True)
        assert [grad.tolist() for grad in assembled(held)[0].values()] == [[3.0], [1.5, 1.5]]
        assert syncing == (True, True)


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
    model, x = vectors("1 1"), torch.tensor(run.rank + 1.0, dtype=torch.float64)
    handle = wrap(model, run.world, average=False)
    hidden = model[0](x)
    loss = model[1](Failing.apply(hidden) if run.rank == 1 else hidden)
    with pytest.raises(ZeroDivisionError) if run.rank == 1 else contextlib.nullcontext():
        loss.backward()
    handle.finish()
    for shard in handle.parameters():
        shard.grad = None
    model[1](model[0](x)).backward()
    handle.finish()
    return pieces(handle)


@each_stage
def test_a_step_after_a_backward_that_raised(pool, wrap):
    grads, _ = assembled(pool.run(3, backward_raises_on_one, wrap))
    assert [grad.item() for grad in grads.values()] == [6.0, 6.0]


def steps_without_zero_grad(run, wrap, finishes):
    """Gradients after each finish of two steps, between which nobody zeroes; several finishes in a row."""
    model, seen = vectors("3 4"), []
    handle = wrap(model, run.world, average=False)
    for step in range(2):
        model[step](torch.tensor(10.0**run.rank, dtype=torch.float64)).backward()
        for _ in range(finishes):
            handle.finish()
            seen.append(pieces(handle))
    return seen


@pytest.mark.parametrize("finishes", [1, 2])
@each_stage
def test_forgotten_zero_grad_adds_and_a_second_finish_changes_nothing(pool, wrap, finishes):
    """As autograd adds. A parameter that is not used in a step keeps what it has."""
    expected = [[11.0, None]] * finishes + [[11.0, 11.0]] * finishes
    found = []
    for ranks in zip(*pool.run(2, steps_without_zero_grad, wrap, finishes), strict=True):
        grads = assembled(ranks)[0].values()
        found.append([None if grad is None else grad.unique().item() for grad in grads])
    assert found == expected


def same_twice(run, wrap):
    """The same parameter in two steps without zero_grad, then a zeroed one: first elements."""
    model, seen = vectors("5"), []
    handle = wrap(model, run.world, average=False)
    for step in range(4):
        if step == 2:
            handle.parameters()[0].grad = None
        if step == 3:
            handle.parameters()[0].grad.zero_()
        with handle.no_sync():
            model[0](torch.tensor(10.0**run.rank, dtype=torch.float64)).backward()
        model[0](torch.tensor(10.0**run.rank, dtype=torch.float64)).backward()
        handle.finish()
        seen.append(pieces(handle))
    return seen


@each_version
def test_gradients_of_several_steps(pool, wrap):
    sums = [assembled(ranks)[0] for ranks in zip(*pool.run(2, same_twice, wrap), strict=True)]
    assert [grad.unique().tolist() for grads in sums for grad in grads.values()] == [[22.0], [44.0], [22.0], [22.0]]


def by_closure(run, wrap):
    """Three steps of which the optimizer itself asks for the gradients: values after each, and the losses."""
    torch.manual_seed(run.rank)
    model, steps = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double(), []
    handle = wrap(model, run.world)
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.01, momentum=0.9)
    x = closure_rows().split([4, 1])[run.rank]

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum() * 2
        loss.backward()
        handle.finish()
        return loss.item()

    for _ in range(3):
        loss = optimizer.step(closure)
        handle.after_step()
        steps.append((pieces(handle), loss))
    return steps


def closure_rows():
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@each_stage
def test_a_closure(pool, wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def closure():
        optimizer.zero_grad()
        loss = model(closure_rows()).square().sum()
        loss.backward()
        return loss.item()

    for ranks in zip(*pool.run(2, by_closure, wrap), strict=True):
        true = optimizer.step(closure)
        held, losses = zip(*ranks, strict=True)
        assert abs(sum(losses) / 2 - true) <= 1e-12 * true
        _, values = assembled(held)
        for name, param in model.named_parameters():
            assert (values[name] - param).abs().max() <= 1e-12 * param.grad.abs().max()


def finite_or_not(run, wrap, value):
    """Whether all gradients are finite, as each rank says, where one rank has one element that may not be."""
    model = vectors("9 5")
    handle = wrap(model, run.world)
    x = torch.ones(9, dtype=torch.float64)
    x[-1] = value if run.rank == 1 else 1.0
    (model[0](x) + model[1](torch.ones((), dtype=torch.float64))).backward()
    handle.finish()
    return handle.finite()


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
@each_stage
def test_finite_is_the_same_answer_on_all_ranks(pool, wrap, value):
    assert pool.run(3, finite_or_not, wrap, value) == [value == 1.0] * 3
