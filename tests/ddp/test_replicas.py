"""What wrap does to weights, buffers, layouts, dtypes and groups."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import layout
from ddp import naive, replicas
from tests.ddp.versions import each_version, recording


class Buffers(nn.Module):
    """Parameters, and buffers of several dtypes, one of them strided, one not saved."""

    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(3)
        self.weight = nn.Parameter(torch.randn(3, 4).t())
        self.batch.num_batches_tracked += int(torch.randint(1000, ()))
        self.batch.running_mean.normal_()
        self.register_buffer("table", torch.randn(4, 3).t(), persistent=False)
        self.register_buffer("mask", torch.rand(20) < 0.5)
        self.register_buffer("low", torch.randn(5).bfloat16())
        self.register_buffer("short", torch.randint(-1000, 1000, (3,)).short())
        self.register_buffer("eighth", torch.randn(7).to(torch.float8_e4m3fn))
        self.register_buffer("scalar", torch.randn(()).double())
        self.register_buffer("gaps", torch.randn(6, 4)[::2, ::3])
        self.register_buffer("complex", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0, 3))


def bits(named):
    """Copies of tensors by name, as bytes: NaN equals itself, and every dtype travels."""
    return {name: tensor.detach().clone().contiguous().view(-1).view(torch.uint8) for name, tensor in named}


def wrapped_buffers(run, wrap, ranks):
    """Everything that the module holds after wrap, on the members of this group."""
    torch.manual_seed(run.rank)
    model, group = Buffers(), run.new_group(ranks) if ranks else None
    if group is not None:
        wrap(model, group)
    return bits((*model.named_parameters(), *model.named_buffers()))


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [2, 3], [1, 3]])
@each_version
def test_after_wrap_all_have_the_first_members_values(pool, wrap, members):
    """T48, T20, T06: bit for bit, buffers as well; the root is the first rank of the group."""
    results = pool.run(4, wrapped_buffers, wrap, members)
    untouched = pool.run(4, wrapped_buffers, wrap, [])
    for rank, tensors in enumerate(results):
        for name, tensor in tensors.items():
            source = members[0] if rank in members else rank
            assert torch.equal(tensor, untouched[source][name]), (rank, name)


def wrapped_frozen(run):
    torch.manual_seed(run.rank)
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    naive.wrap(model, run.world)
    return model.weight.detach().clone()


def test_frozen_weights_are_the_first_members_too(pool):
    """T48: a frozen weight that differs from rank to rank is a different model on each."""
    first, second = pool.run(2, wrapped_frozen)
    assert torch.equal(first, second)


# -- buffers after each step (T20) -------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Buffers that every forward changes: in place, by rebinding, one that belongs to two modules, one made late."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("in_place", torch.zeros(2, 2).t())
        self.register_buffer("rebound", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("eighth", torch.zeros(3, dtype=torch.float8_e5m2))
        self.other = nn.Module()
        self.other.register_buffer("shared", self.seen)
        self.register_buffer("late", None)

    def forward(self, x):
        self.in_place += x.mean()
        self.rebound = self.rebound + x.mean()
        self.seen += int(x[0, 0] * 10)
        self.flags = x.flatten()[:5] > 0
        self.eighth = x[0].to(torch.float8_e5m2)
        self.late = x.sum(0) if self.late is None else self.late + x.sum(0)
        return self.norm(x) * self.weight


def stepped_buffers(run, wrap, members, change):
    """Buffers after each of two steps on rows of this rank's own, and those that it would have alone."""
    group, model, steps = run.new_group(members), Counting(), []
    if group is None:
        return None
    with change():
        handle = wrap(model, group)
        for step in range(2):
            numbers = torch.Generator().manual_seed(10 * step + run.rank)
            with handle.no_sync():
                model(torch.randn(4, 3, generator=numbers)).sum().backward()
            model(torch.randn(4, 3, generator=numbers)).sum().backward()  # a second forward before backward is over
            before = bits(model.named_buffers())
            handle.finish()
            assert model.other.shared is model.seen
            steps.append((before, bits(model.named_buffers())))
    return steps


def other_buffers(mine, first):
    """Names of the buffers in which a rank has other bits than the first member had before finish."""
    return {name for name, buffer in mine.items() if not torch.equal(buffer, first[name])}


CHANGED = {"in_place", "rebound", "seen", "flags", "eighth", "late", "norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2, 3], [2, 3], [1, 3]])
@each_version
def test_buffers_are_the_first_members_after_each_step(pool, wrap, members):
    """In place and rebinding ones, what the first member's rows made of them."""
    results = pool.run(max(members) + 1, stepped_buffers, wrap, members, contextlib.nullcontext)
    first, *others = [results[rank] for rank in members]
    for steps in others:
        for (before, after), (expected, _) in zip(steps, first, strict=True):
            assert other_buffers(before, expected) == CHANGED
            assert other_buffers(after, expected) == set()
    assert all(other_buffers(after, before) == set() for before, after in first)


def buffers_left_alone():
    return mock.patch.object(replicas.Replica, "equalize_buffers", lambda handle: None)


def test_buffers_left_alone_show(pool):
    first, second = pool.run(2, stepped_buffers, naive.wrap, [0, 1], buffers_left_alone)
    assert other_buffers(second[0][1], first[0][0]) >= CHANGED


def only_buffers(run, wrap):
    """A module without parameters."""
    torch.manual_seed(run.rank)
    model = nn.BatchNorm1d(3, affine=False)
    handle = wrap(model, run.world)
    model(torch.randn(4, 3))
    handle.finish()
    return handle.parameters(), model.running_mean.clone()


@each_version
def test_a_module_without_parameters(pool, wrap):
    (params, mean), (_, other) = pool.run(2, only_buffers, wrap)
    assert params == [] and mean.any() and torch.equal(mean, other)


# -- the parameters that are treated -----------------------------------------------------------------------------------


def wrapped_twice(run, wrap):
    weight = nn.Parameter(torch.ones(2))
    handle = wrap(nn.ParameterList([weight]), run.world, params=[weight, weight], average=False)
    weight.grad = torch.ones(2)
    handle.finish()
    return weight.grad


@each_version
def test_a_parameter_named_twice_is_reduced_once(pool, wrap):
    assert all(grad.tolist() == [3, 3] for grad in pool.run(3, wrapped_twice, wrap))


def two_groups(run, wrap):
    """Dense parameters over all ranks, the expert's over every second: gradients, and values, of both."""
    torch.manual_seed(run.rank)
    model = nn.ModuleDict({"dense": nn.Linear(1, 1, bias=False), "expert": nn.Linear(1, 1, bias=False)}).double()
    pairs = [run.new_group([0, 2]), run.new_group([1, 3])]
    handles = [
        wrap(model, run.world, params=list(model["dense"].parameters()), average=False),
        wrap(model, pairs[run.rank % 2], params=list(model["expert"].parameters()), average=False),
    ]
    x = torch.full((1, 1), 10.0**run.rank, dtype=torch.float64)
    (model["dense"](x) + model["expert"](x)).sum().backward()
    for handle in handles:
        handle.finish()
    return [(p.grad.item(), p.item()) for p in model.parameters()]


@each_version
def test_two_groups_of_parameters_of_one_module(pool, wrap):
    results = pool.run(4, two_groups, wrap)
    assert [dense for (dense, _), _ in results] == [1111.0] * 4
    assert [expert for _, (expert, _) in results] == [101.0, 1010.0] * 2
    assert len({value for (_, value), _ in results}) == 1
    values = [value for _, (_, value) in results]
    assert values == values[:2] * 2 and values[0] != values[1]


def reduce_in_group(run, wrap, ranks):
    """A step over some of the ranks: (gradient, value before) here, None on the others."""
    torch.manual_seed(run.rank)
    group = run.new_group(ranks)
    if group is None:
        return None
    model = nn.Linear(1, 1, bias=False).double()
    handle = wrap(model, group, average=False)
    model(torch.full((1, 1), 10.0**run.rank, dtype=torch.float64)).sum().backward()
    handle.finish()
    return model.weight.grad.item(), model.weight.item()


@pytest.mark.parametrize("members", [[2, 3], [1, 3], [0, 1, 3]])
@each_version
def test_sums_over_the_members_only(pool, wrap, members):
    """T06."""
    results = pool.run(4, reduce_in_group, wrap, members)
    torch.manual_seed(members[0])
    weight = nn.Linear(1, 1, bias=False).double().weight.item()
    for rank, result in enumerate(results):
        assert result == ((sum(10.0**member for member in members), weight) if rank in members else None)


def mixed_model():
    """dtypes, layouts and sizes in one model."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    shapes = ((), (0, 3), (1,), (7,), (5, 4))
    flat = [torch.zeros(shape, dtype=dtype) for dtype in dtypes for shape in shapes]
    turned = [torch.zeros(4, 5, dtype=dtype).t() for dtype in dtypes]
    gaps = [torch.zeros(6, 4, dtype=dtype)[::2] for dtype in dtypes]
    permuted = [torch.zeros(2, 3, 4, dtype=dtype).permute(2, 0, 1) for dtype in dtypes]
    return nn.ParameterList(nn.Parameter(tensor) for tensor in (*flat, *turned, *gaps, *permuted))


def whole_numbers(param, rank):
    """A gradient whose sums are exact in any dtype: it tells position and rank."""
    return (torch.arange(param.numel()) % 5 + 8 * (rank + 1)).view(param.shape).to(param.dtype)


def reduce_mixed(run, wrap):
    """(values after wrap, gradients in each of two steps) of a model whose values were the rank's number."""
    model = mixed_model()
    for param in model:
        nn.init.constant_(param, run.rank + 1)
    handle = wrap(model, run.world, average=False)
    steps = []
    for _ in range(2):
        model.zero_grad()
        for param in model:
            (param * whole_numbers(param, run.rank)).sum().backward()
        handle.finish()
        steps.append([param.grad.clone() for param in model])
    return [param.detach() for param in model], steps


@pytest.mark.parametrize("ranks", [1, 2, 3])
@each_version
def test_every_dtype_and_layout_keeps_its_own(pool, wrap, ranks):
    """T22: also where a bucket would mix them."""
    for values, steps in pool.run(ranks, reduce_mixed, wrap):
        for grads in steps:
            for param, value, grad in zip(mixed_model(), values, grads, strict=True):
                assert torch.equal(value, torch.ones_like(param))
                assert grad.dtype == param.dtype and grad.shape == param.shape
                assert torch.equal(grad, sum(whole_numbers(param, rank) for rank in range(ranks)))


class Tied(nn.Module):
    """Input and output share a weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def wrap_on_meta(run, wrap):
    """(the same objects, still shared, still declared, device, calls of wrap, gradient) of a model built on meta."""
    with torch.device("meta"):
        model = Tied().double()
    layout.declare(model, lambda name: layout.Constant(0.5), lambda name: True)
    before, held = list(model.parameters()), model.embed.weight.held
    with recording() as calls:
        handle = wrap(model, run.world, average=False, device=torch.device("cpu"))
    nn.init.constant_(model.embed.weight, 0.5)
    model(torch.tensor([run.rank])).sum().backward()
    handle.finish()
    same = [id(p) for p in handle.parameters()] == [id(p) for p in before] == [id(p) for p in model.parameters()]
    weight = model.head.weight
    return same, weight is model.embed.weight, weight.held == held, weight.device.type, calls, weight.grad


@each_version
def test_meta_parameters_get_memory_and_stay_who_they_are(pool, wrap):
    """T44: still one tensor. Nothing is sent, there is nothing to send."""
    model = Tied().double()
    nn.init.constant_(model.embed.weight, 0.5)
    model(torch.arange(2)).sum().backward()
    for same, shared, declared, device, calls, grad in pool.run(2, wrap_on_meta, wrap):
        assert same and shared and declared
        assert device == "cpu"
        assert calls == []
        assert torch.equal(grad, model.embed.weight.grad)


def nothing_to_train(run, wrap):
    """A frozen model, and a step in which no rank has a gradient."""
    frozen = wrap(nn.Linear(2, 2).requires_grad_(False), run.world)
    frozen.finish()
    model = nn.Linear(2, 2)
    handle = wrap(model, run.world)
    handle.finish()
    return [param.grad for param in (*frozen.parameters(), *model.parameters())]


@each_version
def test_nothing_to_train(pool, wrap):
    assert pool.run(2, nothing_to_train, wrap) == [[None] * 4] * 2
