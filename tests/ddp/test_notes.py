"""The last bucket waits for finish and carries notes: which parameters have a gradient on any rank, which still need a
reduction of their own.
"""

import functools

import pytest
import torch

from ddp import bucketed, overlapped
from tests.ddp.versions import each_version, elements, gradients, recording, vectors

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
WRAPS = {
    "bucketed": bucketed.wrap,
    "bucketed, 1 byte": functools.partial(bucketed.wrap, cap=1),
    "overlapped": overlapped.wrap,
    "overlapped, 1 byte": functools.partial(overlapped.wrap, cap=1),
}
each_cap = pytest.mark.parametrize("wrap", list(WRAPS.values()), ids=list(WRAPS))


# -- the last bucket is started in finish ------------------------------------------------------------------------------


def started_in_backward(run, cap, order):
    """What happens in each of three steps, if backward reaches the parameters in this order, the last of them first."""
    model, steps = vectors("1 2 3 4"), []
    handle = overlapped.wrap(model, run.world, average=False, cap=cap)
    for _ in range(3):
        model.zero_grad()
        with recording() as calls:
            x = torch.ones((), dtype=F64)
            for i in order:
                x = x * model[i].sum()
            x.backward()
            assert handle.last.missing == set(), "it is complete"
            assert handle.last.work is None and all(bucket.work is not None for bucket in handle.early)
            assert all(param.grad is not None for param in handle.last.views)
            calls.append("finish")
            handle.finish()
        steps.append(elements(calls))
    return steps


STARTS = {  # 2·4 notes beside what the last bucket has
    1: "4 3 2 finish 9",
    24: "4 3 finish 11",
    56: "7 finish 11",
    72: "9 finish 9",
    80: "finish 18",
    bucketed.CAP: "finish 18",
}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("cap", STARTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_last_bucket_is_never_started_in_backward(pool, ranks, cap, order):
    """Not even when it is complete, and all others have started."""
    assert pool.run(ranks, started_in_backward, cap, order) == [[STARTS[cap]] * 3] * ranks


def after_an_empty_step(run, cap):
    """A step in which no rank has a gradient, so that no bucket waits for any; then one with all: what happens."""
    model = vectors("1 2 3")
    handle = overlapped.wrap(model, run.world, average=False, cap=cap)
    handle.finish()
    assert all(bucket.missing == set() for bucket in handle.buckets)
    with recording() as calls:
        for param in model:
            (param.sum() * (run.rank + 1)).backward()
            calls.append("backward")
        handle.finish()
    return elements(calls), gradients(model)


@pytest.mark.parametrize(
    ("cap", "launches"),
    [
        (1, "3 2 backward backward backward 7 2 3"),
        (40, "5 backward backward backward 7 2 3"),
        (48, "backward backward backward 12"),
    ],
)
def test_the_last_bucket_waits_though_no_gradient_is_expected(pool, cap, launches):
    """The first gradient, of the last bucket, starts all others, which get theirs in finish, in order."""
    grads = [[6.0], [6.0] * 2, [6.0] * 3]
    assert pool.run(3, after_an_empty_step, cap) == [(launches, grads)] * 3


# -- what the notes say ------------------------------------------------------------------------------------------------


def used_by_some(run, wrap, dtype, average, users):
    """Rank r uses, with x = 2^r, the parameters i with r in users[i]: the gradients of each of two steps."""
    model = vectors(" ".join("2" for _ in users), dtype)
    handle, steps = wrap(model, run.world, average=average), []
    for _ in range(2):
        model.zero_grad()
        for param, ranks in zip(model, users, strict=True):
            if run.rank in ranks:
                (param * 2**run.rank).sum().backward()
        handle.finish()
        steps.append(gradients(model))
    return steps


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("wire", [None, BF16])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@each_cap
def test_a_parameter_that_one_rank_of_four_uses_is_found(pool, wrap, dtype, wire, average):
    """In whatever dtype the notes travel, as a sum or a mean; one that nobody uses has no gradient anywhere."""
    users = [(3,), (), (0,), (1, 2), (), (0, 1, 2, 3), (2,)]
    grads = [sum(2.0**rank for rank in ranks) / (4 if average else 1) for ranks in users]
    expected = [[grad, grad] if grad else None for grad in grads]
    wrap = functools.partial(wrap, wire=wire)
    assert pool.run(4, used_by_some, wrap, dtype, average, users) == [[expected] * 2] * 4


@pytest.mark.parametrize("user", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
@each_version
def test_a_parameter_in_any_bucket_used_by_any_rank_is_found(pool, wrap, place, user):
    users = [(user,) if i == place else () for i in range(3)]
    expected = [[2.0**user] * 2 if i == place else None for i in range(3)]
    assert pool.run(3, used_by_some, wrap, F64, False, users) == [[expected] * 2] * 3


def with_values(run, wrap, dtype, average, values):
    """values[r][i] is rank r's gradient of parameter i, None for none: what is reduced."""
    model = vectors(" ".join("1" for _ in values[0]), dtype)
    handle = wrap(model, run.world, average=average)
    for param, value in zip(model, values[run.rank], strict=True):
        if value is not None:
            (param * value).sum().backward()
    handle.finish()
    return [None if param.grad is None else str(param.grad.item()) for param in model]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("wire", [None, BF16])
@pytest.mark.parametrize("dtype", [F64, BF16, F16])
@each_cap
def test_gradients_that_are_not_finite_disturb_no_note(pool, wrap, dtype, wire, average):
    """NaN, infinities of either sign and both, zeros: each where it was and nowhere else, None where nobody had one.
    The first parameter, which lies last in the buffer, is next to the notes.
    """
    values = [
        [None, None, INF, None, 0.0, INF, 16.0, NAN],
        [NAN, None, None, None, None, -INF, None, None],
        [None, None, INF, None, None, None, 16.0, -INF],
    ]
    mean = str(32.0 / 3 if dtype == F64 and wire is None else torch.tensor(32 / 3, dtype=wire or dtype).item())
    expected = ["nan", None, "inf", None, "0.0", "nan", mean if average else "32.0", "nan"]
    wrap = functools.partial(wrap, wire=wire)
    assert pool.run(3, with_values, wrap, dtype, average, values) == [expected] * 3


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@each_version
def test_a_model_of_nothing_but_nan(pool, wrap, value):
    """On one rank; the other has no gradient of the second."""
    values = [[value, None, value, None], [value, None, 1.0, None]]
    expected = [str(value), None, str(value), None]
    assert pool.run(2, with_values, wrap, F32, True, values) == [expected] * 2
