"""What wrap does to weights, buffers, layouts, dtypes and groups."""

import pytest
import torch
from torch import nn

from collectives import layout
from ddp import naive
from tests.ddp.versions import each_version, recording


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
    """Dense parameters over all ranks, the expert's over every second: gradients, and values, of both, with the biases'
    before the weights'.
    """
    torch.manual_seed(run.rank)
    model = nn.ModuleDict({"dense": nn.Linear(1, 1), "expert": nn.Linear(1, 1)}).double()
    pairs = [run.new_group([0, 2]), run.new_group([1, 3])]
    handles = [
        wrap(model, run.world, params=list(model["dense"].parameters()), average=False),
        wrap(model, pairs[run.rank % 2], params=list(model["expert"].parameters()), average=False),
    ]
    x = torch.full((1, 1), 10.0**run.rank, dtype=torch.float64)
    (model["dense"](x) + model["expert"](x)).sum().backward()
    for handle in handles:
        handle.finish()
    biases, weights = (
        [(p.grad.item(), p.item()) for name, p in model.named_parameters() if name.endswith(kind)]
        for kind in ("bias", "weight")
    )
    return biases, weights


@each_version
def test_two_groups_of_parameters_of_one_module(pool, wrap):
    biases, weights = zip(*pool.run(4, two_groups, wrap), strict=True)
    assert [grad for (grad, _), _ in weights] == [1111.0] * 4
    assert [grad for _, (grad, _) in weights] == [101.0, 1010.0] * 2
    assert [(dense, expert) for (dense, _), (expert, _) in biases] == [(4.0, 2.0)] * 4
    for tensors in (biases, weights):
        assert len({value for (_, value), _ in tensors}) == 1
        values = [value for _, (_, value) in tensors]
        assert values == values[:2] * 2 and values[0] != values[1]


def reduce_in_group(run, wrap, ranks):
    """A step over some of the ranks: (gradients, value before) here, None on the others."""
    torch.manual_seed(run.rank)
    group = run.new_group(ranks)
    if group is None:
        return None
    model = nn.Linear(1, 1).double()
    handle = wrap(model, group, average=False)
    model(torch.full((1, 1), 10.0**run.rank, dtype=torch.float64)).sum().backward()
    handle.finish()
    return model.weight.grad.item(), model.bias.grad.item(), model.weight.item()


@pytest.mark.parametrize("members", [[2, 3], [1, 3], [0, 1, 3]])
@each_version
def test_sums_over_the_members_only(pool, wrap, members):
    """T06."""
    results = pool.run(4, reduce_in_group, wrap, members)
    torch.manual_seed(members[0])
    weight, total = nn.Linear(1, 1).double().weight.item(), sum(10.0**member for member in members)
    for rank, result in enumerate(results):
        assert result == ((total, len(members), weight) if rank in members else None)


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
