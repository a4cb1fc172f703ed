"""Backward in two halves, against torch.autograd.backward: I and W together are B, and each weight counts once."""

import copy
import gc
import weakref
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collectives.allocated import built_bytes
from collectives.saved import saving
from pipeline import backward
from pipeline.backward import Root, backward_input
from tests.pipeline.stages import CASES, FROZEN, Of


def built(name, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    case = CASES[name]
    stage, inputs = case.make().to(dtype), [x.to(dtype) if x.is_floating_point() else x for x in case.inputs()]
    return stage, [x.requires_grad_(x.is_floating_point()) for x in inputs]


def rooted(outputs, seed=1):
    """Outputs that want a gradient, and a gradient for each."""
    draw = torch.Generator().manual_seed(seed)
    wanting = [y for y in tree_leaves(outputs) if isinstance(y, torch.Tensor) and y.requires_grad]
    return wanting, [torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y.dtype) for y in wanting]


def whole(stage, inputs):
    """By autograd: the gradients of inputs and of weights."""
    outputs, grads = rooted(stage(*inputs))
    torch.autograd.backward(outputs, grads)
    return [x.grad for x in inputs], {name: param.grad for name, param in stage.named_parameters()}


def started(stage, inputs, seed=1):
    """I: the gradients of inputs, those that want none have None, and what is left for W."""
    wanting = [x for x in inputs if x.requires_grad]
    outputs, grads = rooted(stage(*inputs), seed)
    roots = [Root(get_gradient_edge(y), grad) for y, grad in zip(outputs, grads, strict=True)]
    found, weights = backward_input(roots, wanting)
    found = dict(zip(map(id, wanting), found, strict=True))
    return [found.get(id(x)) for x in inputs], weights


def halves(stage, inputs):
    found, weights = started(stage, inputs)
    assert all(x.grad is None for x in inputs) and all(param.grad is None for param in stage.parameters())
    weights.run()
    return found, {name: param.grad for name, param in stage.named_parameters()}


def same(ours, theirs, tolerance=1e-13):
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            assert mine.shape == its.shape and mine.dtype == its.dtype
            if its.numel():
                assert (mine - its).abs().max() <= tolerance * max(1.0, its.abs().max())


def compare(stage, inputs, tolerance=1e-13):
    twin, twins = copy.deepcopy(stage), [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    (dx, dw), (dx_whole, dw_whole) = halves(stage, inputs), whole(twin, twins)
    same(dx, dx_whole, tolerance)
    same([dw[name] for name in dw_whole], dw_whole.values(), tolerance)


@pytest.mark.parametrize("name", CASES)
def test_halves_are_backward(name):
    compare(*built(name))


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("kept", ["none", "every other"])
def test_frozen_weights(name, kept):
    stage, inputs = built(name)
    for i, param in enumerate(stage.parameters()):
        param.requires_grad_(kept == "every other" and i % 2 == 1)
    compare(stage, inputs)


@pytest.mark.parametrize("name", ["two inputs", "lstm with states", "an output that is an input", "identity"])
def test_inputs_without_gradient(name):
    stage, inputs = built(name)
    inputs[0].requires_grad_(False)
    compare(stage, inputs)


@pytest.mark.parametrize("name", ["mlp", "residual", "attention", "same in series", "gru"])
def test_bfloat16(name):
    compare(*built(name, torch.bfloat16), tolerance=0.05)


def test_an_output_that_gets_no_gradient():
    """The next stage ignores it: roots are those with a gradient."""
    stage, (x,) = built("an output on the way to another")
    twin, its = copy.deepcopy(stage), x.detach().clone().requires_grad_()
    y, _ = stage(x)
    found, weights = backward_input([Root(get_gradient_edge(y), torch.ones_like(y))], [x])
    weights.run()
    y, _ = twin(its)
    y.backward(torch.ones_like(y))
    same(found, [its.grad])
    assert stage.b.weight.grad is None
    same([stage.a.weight.grad, stage.a.bias.grad], [twin.a.weight.grad, twin.a.bias.grad])


@pytest.mark.parametrize("name", CASES)
def test_halves_of_several_microbatches_add_up_in_any_order(name):
    """And a gradient on its way to the stage before stays what it is."""
    stage, inputs = built(name)
    twin = copy.deepcopy(stage)
    several = [CASES[name].inputs() for _ in range(2)]
    several = [[x.double().requires_grad_() if x.is_floating_point() else x for x in each] for each in several]
    first, second, third = (started(stage, each) for each in (inputs, *several))
    sent = [[None if grad is None else grad.clone() for grad in found] for found, _ in (first, second, third)]
    for _, weights in (second, first, third):
        weights.run()
    for each in (inputs, *several):
        whole(twin, each)
    same([p.grad for p in stage.parameters()], [p.grad for p in twin.parameters()])
    for (found, _), before in zip((first, second, third), sent, strict=True):
        same(found, before, 0)


def test_gradients_are_the_weights_own():
    """Autograd hands out what it holds: one tensor for two weights, what came in, a number that stands for many."""
    for name in ("a weight that is a sum", "added as it is", "an output that is a sum", "a transposed copy"):
        stage, inputs = built(name)
        _, weights = started(stage, inputs)
        held = [grad for layer in weights.layers for border in layer for grad in border.grads if grad is not None]
        weights.run()
        grads = [param.grad for param in stage.parameters()]
        places = [tensor.untyped_storage().data_ptr() for tensor in (*grads, *held)]
        assert len(set(places[: len(grads)])) == len(grads) and set(places[: len(grads)]).isdisjoint(
            places[len(grads) :]
        )
        assert all(param.grad.stride() == param.stride() for param in stage.parameters())


def test_a_second_w_adds_nothing():
    stage, inputs = built("mlp")
    _, weights = started(stage, inputs)
    weights.run()
    before = [param.grad.clone() for param in stage.parameters()]
    weights.run()
    same([param.grad for param in stage.parameters()], before, 0)


# -- what is computed --------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products by the shape of what they make."""

    def __init__(self):
        super().__init__()
        self.made = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.made[tuple(made.shape)] += 1
        return made


def products(call) -> Counter:
    with Products() as counted:
        call()
    return counted.made


def test_each_half_does_its_own_products():
    """Of three layers of unlike widths, on 5 rows: I makes what has 5 rows, W what has a weight's shape, each once."""
    stage, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7)), torch.randn(5, 2)
    left = []
    assert products(lambda: left.append(started(stage, [x.requires_grad_()])[1])) == {
        **{(5, 3): 1, (5, 4): 1 + 1, (5, 7): 1},  # forward, and the first of I
        **{(5, 3): 1 + 1, (5, 2): 1},
    }
    assert products(left[0].run) == {(3, 2): 1, (4, 3): 1, (7, 4): 1}


def test_a_weight_that_is_used_twice_gets_two_products():
    """And one for nothing: on the way from its later use to its earlier one, before that way is closed."""
    stage = Of(lambda m, h: m.b(torch.tanh(m.a(torch.tanh(m.a(h))))), a=nn.Linear(3, 3), b=nn.Linear(3, 4))
    _, weights = started(stage, [torch.randn(5, 3).requires_grad_()])
    assert products(weights.run) == {(3, 3): 2, (4, 3): 1, (5, 3): 1}


def test_recomputation_runs_forward_once():
    """What I has run again W finds there."""
    stage, (x,) = built("recomputed")
    counts = stage[0].forward.counts
    _, weights = started(stage, [x])
    assert counts.reruns == 2
    weights.run()
    assert counts.reruns == 2


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", [name for name in CASES if "batch norm" not in name])
def test_saved_tensors_live_until_w(name, no_collector):
    """Nothing but reference counts frees them."""
    stage, inputs = built(name)
    with saving() as saved:
        found, weights = started(stage, inputs)
    del found
    kept = [weakref.ref(tensor) for tensor in saved.tensors()]
    weights.run()
    del saved, weights
    assert not [ref for ref in kept if ref() is not None]


def test_w_frees_as_it_goes(no_collector):
    """What a border has saved is gone before its weights have their gradients."""
    stage, (x,) = built("mlp")
    with saving() as saved:
        _, weights = started(stage, [x])
    before, left = saved.nbytes(without=stage.parameters()), []
    with mock.patch.object(backward, "add", lambda *_: left.append(saved.nbytes(without=stage.parameters()))):
        weights.run()
    assert before > left[0] > left[-1] == 0


def test_memory_between_the_halves():
    """What forward saved, the gradient that came into each border, and the input's; nothing of the ways between."""
    rows, width, layers = 64, 32, 4
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
    stage, x = nn.Sequential(*parts), torch.randn(rows, width).requires_grad_()

    def forward_and_input():
        y = stage(x)
        return backward_input([Root(get_gradient_edge(y), torch.ones_like(y))], [x])

    _, kept = built_bytes(forward_and_input, torch.device("cpu"))
    saved, borders, dx = layers - 1, layers, 1  # the last tanh is above all borders and goes with its output
    assert kept == (saved + borders + dx) * rows * width * 4
