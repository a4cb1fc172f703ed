"""Parameters that are used by some ranks, by none, twice, later; frozen ones, and those that are unfrozen."""

import functools

import pytest
import torch
from torch import nn

from ddp import bucketed, naive, overlapped
from tests.ddp.training import ULP, sgd
from tests.ddp.versions import each_version, recording, snapshot

PLAIN = {"naive": naive.wrap, "bucketed": bucketed.wrap, "overlapped": overlapped.wrap}


def use_one_each(run, wrap):
    """Rank r uses n1 on even, n2 on odd ranks, with x = r + 1, in two steps: gradients of n1, n2, n3, and values."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(1, dtype=torch.float64)) for name in ("n1", "n2", "n3")})
    handle = wrap(model, run.world)
    optimizer = torch.optim.SGD(handle.parameters(), lr=1, momentum=0.5, weight_decay=0.5)
    grads = []
    for _ in range(2):
        optimizer.zero_grad()
        (model["n1" if run.rank % 2 == 0 else "n2"] * (run.rank + 1)).sum().backward()
        handle.finish()
        grads.append([None if p.grad is None else p.grad.item() for p in model.values()])
        optimizer.step()
    return grads, [p.item() for p in model.values()]


@each_version
def test_a_parameter_used_by_one_rank_counts_as_zero_on_the_others(pool, wrap):
    """T13: the divisor is the number of ranks, not of those that used it. One that nobody uses is not even decayed."""
    for grads, values in pool.run(2, use_one_each, wrap):
        assert grads == [[0.5, 1.0, None], [0.5, 1.0, None]]
        assert values == [-1.0, -2.0, 1.0]  # 1 - 1 - 1 and 1 - 1.5 - 1.5, with weight decay and momentum


def use_changes(run, wrap, uses):
    """In step s rank r uses the parameters uses[s][r], with x = 10^r: gradients of each step, by letter."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in "abcd"})
    handle = wrap(model, run.world, average=False)
    steps = []
    for used in uses:
        model.zero_grad()
        for name in used[run.rank]:
            (model[name] * 10**run.rank).sum().backward()
        handle.finish()
        steps.append({name: None if p.grad is None else p.grad.tolist() for name, p in model.items()})
    return steps


@each_version
def test_what_is_used_changes_from_step_to_step(pool, wrap):
    """And is reached in another order on every rank; a buffer never gives back what an earlier step left in it."""
    uses = [("ab", "b", "bcd"), ("d", "", "d"), ("", "", ""), ("abcd", "dcba", "cadb"), ("c", "a", "")]
    for steps in pool.run(3, use_changes, wrap, uses):
        for used, grads in zip(uses, steps, strict=True):
            for name, grad in grads.items():
                total = sum(10**rank for rank, names in enumerate(used) if name in names)
                assert grad == ([total, total] if total else None)


class Shared(nn.Module):
    """y = W(W x) + ..., and a bias that belongs to two layers, one of them unused."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.c.bias = self.b.bias

    def forward(self, x):
        return self.b(self.a(torch.tanh(self.a(x))))


def shared_parameters(run, wrap, x, cotangent):
    """(gradients by name, calls) of a step on this rank's rows."""
    torch.manual_seed(run.rank)
    model = Shared().double()
    handle = wrap(model, run.world, average=False)
    x, cotangent = (part.tensor_split(run.size)[run.rank] for part in (x, cotangent))
    with recording() as calls:
        (model(x) * cotangent).sum().backward()
        handle.finish()
    return snapshot(model)[0], [numel for _, numel in calls]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("naive", [5, 9, 3, 9, 3]),
        ("bucketed", [33 + 10]),
        ("overlapped", [33 + 10]),
        ("1 byte", [9, 3, 9, 3, 9 + 10]),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_reduction_for_each_distinct_parameter(pool, ranks, version, expected):
    """T16. Five parameters, one of them unused: a bucket has a place for it, the naive version leaves it out. Beside
    them the naive version's 5 numbers, and the last bucket's 10 notes.
    """
    torch.manual_seed(0)
    model, x, cotangent = Shared().double(), *torch.randn(2, 5, 3, dtype=torch.float64)
    (model(x) * cotangent).sum().backward()
    wrap = PLAIN.get(version) or functools.partial(overlapped.wrap, cap=1)
    for grads, calls in pool.run(ranks, shared_parameters, wrap, x, cotangent):
        assert calls == expected
        assert grads.pop("c.weight") is None
        for name, grad in grads.items():
            theirs = model.get_parameter(name).grad
            assert (grad - theirs).abs().max() <= 1e-12 * theirs.abs().max()


# -- frozen, then unfrozen (T17) ---------------------------------------------------------------------------------------


def frozen_then_unfrozen(run, wrap, steps):
    """Layer 0 is frozen for two steps and trains in two more. Values after each step, and the optimizer's states."""
    model, dealt = two_layers(), [rows.tensor_split(run.size)[run.rank] for rows in two_layers_rows()]
    model[0].requires_grad_(False)
    handle = wrap(model, run.world, average=False)
    optimizer, values = sgd(model.parameters()), []
    for step in range(steps):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        model(dealt[step]).square().sum().backward()
        handle.finish()
        optimizer.step()
        values.append(snapshot(model)[1])
    return values, len(optimizer.state)


def two_layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()


def two_layers_rows():
    return torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def two_layers_alone():
    model = two_layers()
    optimizer, values = sgd(model.parameters()), []
    for step, x in enumerate(two_layers_rows()):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        values.append(snapshot(model)[1])
    return values


@each_version
def test_frozen_parameters_stay_and_have_no_state(pool, wrap):
    for values, states in pool.run(2, frozen_then_unfrozen, wrap, 2):
        assert states == 2
        assert all(torch.equal(step["0.weight"], two_layers()[0].weight) for step in values)


@each_version
def test_unfrozen_parameters_train(pool, wrap):
    """Frozen ones are treated too, so nothing is to be done when they are unfrozen."""
    expected = two_layers_alone()
    for values, _ in pool.run(2, frozen_then_unfrozen, wrap, 4):
        before = snapshot(two_layers())[1]
        for step, (ours, theirs) in enumerate(zip(values, expected, strict=True)):
            for name, value in theirs.items():
                moved = float((value - before[name]).abs().max())
                assert (moved == 0) == (step < 2 and name.startswith("0."))
                assert float((ours[name] - value).abs().max()) <= 1e-10 * moved + 4 * ULP * float(value.abs().max())
            before = theirs


def places(run, wrap):
    """Elements of the buckets before and after each of four steps, and of the steps' collectives, before and in finish.
    The middle one of three parameters trains in the second and third step only.
    """
    model = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (2, 30, 4))
    model[1].requires_grad_(False)
    handle = wrap(model, run.world, average=False)
    sizes, launches = [sizes_of(handle)], []
    for step in range(4):
        model[1].requires_grad_(step in (1, 2))
        model.zero_grad()
        with recording() as calls:
            sum(param.sum() * (run.rank + 1) for param in model if param.requires_grad).backward()
            calls.append(("", "finish"))
            handle.finish()
        assert [p.grad is None or p.grad.eq(3).all().item() for p in model] == [True] * 3
        assert (model[1].grad is None) == (step not in (1, 2))
        sizes.append(sizes_of(handle))
        launches.append(" ".join(str(numel) for _, numel in calls))
    return sizes, launches


def sizes_of(handle):
    return [bucket.buffer.numel() for bucket in handle.buckets]


@pytest.mark.parametrize(
    ("version", "cap", "launches"),
    [
        (bucketed, 1, ["finish 4 8", "finish 4 8 30", "finish 4 30 8", "finish 4 30 8"]),
        (bucketed, 1 << 20, ["finish 12", "finish 12 30", "finish 42", "finish 42"]),
        (overlapped, 1, ["4 finish 8", "4 finish 8 30", "4 30 finish 8", "4 finish 30 8"]),
        (overlapped, 100, ["finish 12", "finish 12 30", "4 30 finish 8", "4 finish 30 8"]),
        (overlapped, 1 << 20, ["finish 12", "finish 12 30", "finish 42", "finish 42"]),
    ],
)
def test_a_frozen_parameter_takes_no_memory_until_it_trains(pool, version, cap, launches):
    """Its first gradient travels by itself, after the last bucket with its 6 notes; then buckets are dealt anew, with
    its own place in the order, and start during backward. Frozen again, it holds up the buckets behind it until finish.
    """
    small = [4, 2 + 6] if cap == 1 else [6 + 6]
    large = [4, 30, 2 + 6] if cap <= 100 else [36 + 6]
    for sizes, found in pool.run(2, places, functools.partial(version.wrap, cap=cap)):
        assert sizes == [small, small, large, large, large]
        assert found == launches
