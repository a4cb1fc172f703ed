"""What a module may do while it is in units: inputs, outputs, weights that others are made of, torch's own modules."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.models import Case, check

MODES = {
    "reshard": {"reshard_after_forward": True},
    "default": {},
    "keep": {"reshard_after_forward": False},
    "prefetch 0": {"prefetch": 0},
    "prefetch 3": {"reshard_after_forward": True, "prefetch": 3},
}


def backward(out):
    """A loss of all tensors in an output."""
    leaves = out if isinstance(out, (tuple, list)) else out.values() if isinstance(out, dict) else [out]
    sum(leaf.square().sum() * number for number, leaf in enumerate(leaves, start=1)).backward()


def once(model, x, step):
    backward(model(x))


# -- inputs and outputs ------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Layers one after the other, by the letters of LAYERS."""

    def __init__(self, letters):
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[letter]() for letter in letters)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class InPlace(nn.Module):
    """Changes its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.mul_(2).relu_())


class InPlaceOut(nn.Module):
    """Adds its result to its input, which it returns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x.add_(torch.tanh(self.linear(torch.tanh(x))))


class Returns(nn.Module):
    """Returns its input beside what it computes, or alone."""

    def __init__(self, alone):
        super().__init__()
        self.linear, self.alone = nn.Linear(4, 4), alone

    def forward(self, x):
        return x if self.alone else (x, self.linear(x))


class Takes(nn.Module):
    """Positional, by name, a list, a dict, a number, nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, number, *, by_name, others, nothing=None):
        y = self.linear(x) * number + by_name + others["a"][0]
        return {"y": torch.tanh(y), "list": [y * 2, None, 3], "x": x.detach()}


class Structures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.takes, self.returns, self.last = nn.Linear(4, 4), Takes(), Returns(False), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        out = self.takes(h, 3, by_name=torch.tanh(h), others={"a": (h, "text")})
        before, after = self.returns(out["y"])
        return self.last(before + after), out["list"][0]


class Ids(nn.Module):
    """Token ids need no gradient."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.RMSNorm(4), nn.Linear(4, 7)

    def forward(self, x):
        ids = (x[:, 0] * 100).long() % 7
        return self.head(self.norm(self.embed(ids)))


class Siblings(nn.Module):
    """Two units of the same input, of which the second one's output is not used."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        self.b(h)
        return self.c(h) + h


class NoGradPart(nn.Module):
    """A unit under no_grad, one of a detached input, one whose output is detached."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
        h = self.b(h)
        return self.c(h.detach()) + self.d(h).detach() + h


def needs_grad(model, x, step):
    """The rows themselves need gradients."""
    x = x.clone().requires_grad_()
    backward(model(x))
    assert x.grad is not None and x.grad.isfinite().all()


LAYERS = {
    "L": lambda: nn.Linear(4, 4),
    "I": InPlace,
    "O": InPlaceOut,
    "R": lambda: nn.ReLU(inplace=True),
    "S": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "=": functools.partial(Returns, True),
}


def chain(letters, numbers, work=once):
    """These layers, those of these numbers units."""
    return Case(functools.partial(Chain, letters), " ".join(f"layers.{number}" for number in numbers), work)


IN_AND_OUT = {
    "input in place": chain("LIIL", "12"),
    "input in place, all": chain("LIL", "012"),
    "output is the input in place": chain("LOOL", "012"),
    "relu in place after a unit": chain("LRLR", "02"),
    "a unit begins with relu in place": chain("LSL", "01"),
    "returns its input alone": chain("L=L", "012"),
    "structures": Case(Structures, "first takes returns last", once),
    "structures, rows need gradients": Case(Structures, "first takes returns last", needs_grad),
    "ids": Case(Ids, "embed norm head", once),
    "ids, in the root": Case(Ids, "norm", once),
    "an output that is not used": Case(Siblings, "a b c", once),
    "no_grad, detach": Case(NoGradPart, "a b c d", once),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", IN_AND_OUT)
def test_inputs_and_outputs(pool, case, mode):
    check(pool, IN_AND_OUT[case], **MODES[mode])


# -- weights that others are made of -----------------------------------------------------------------------------------


class Masked(nn.Module):
    """y = tanh(x (W * mask)^T), the mask a buffer; a chain of three weights."""

    def __init__(self):
        super().__init__()
        self.weight, self.gain, self.shift = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.register_buffer("mask", torch.ones(4, 4).triu())

    def forward(self, x):
        weight = torch.tanh(self.weight * self.mask * self.gain.exp()) @ self.shift.tanh()
        return torch.tanh(x @ weight)


class Lora(nn.Module):
    """y = x (W + A B)^T + x A^T B^T with W frozen; merged before the product, so A and B are read after x's gradient."""

    def __init__(self, merged):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.a, self.b, self.merged = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4)), merged

    def forward(self, x):
        if self.merged:
            return torch.tanh(nn.functional.linear(x, self.weight + self.a @ self.b))
        return torch.tanh(x @ self.weight + (x @ self.a) @ self.b)


class ExpertSum(nn.Module):
    """Weights in a ParameterList and a ParameterDict, chosen by index, stacked, unbound, viewed, transposed."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(2, 2)), "unused": nn.Parameter(torch.ones(3))})

    def forward(self, x):
        stacked = torch.stack(list(self.listed))  # [3, 4, 4]
        first, second, third = stacked.unbind()
        return torch.tanh(x @ first.t() @ second) + x @ third.view(16).view(4, 4) + self.named["bias"].flatten()


class NoInputs(nn.Module):
    """A weight from nothing, as a learned position; and one from a scalar."""

    def __init__(self):
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.tensor(1.5))

    def forward(self):
        return torch.tanh(self.table.sum(0)) * self.scale.exp()


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.positions, self.last = nn.Linear(4, 4), NoInputs(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.positions())


class Outside(nn.Module):
    """The root makes a weight, before its units run, with which a unit computes; and after them reads one of a unit's
    output and of its own.
    """

    def __init__(self):
        super().__init__()
        self.gain, self.mix = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))
        self.first, self.takes = nn.Linear(4, 4), Scaled()

    def forward(self, x):
        gain = self.gain.exp()
        return self.takes(self.first(x), gain) @ torch.tanh(self.mix @ self.mix)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, gain):
        return torch.tanh(self.linear(x * gain)) * gain


def weight_norm(old):
    layer = nn.Linear(4, 4)
    if old:
        return nn.utils.weight_norm(layer)
    return nn.utils.parametrizations.weight_norm(layer)


def spectral():
    return nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


def hooked():
    """A module whose own hooks, there before it is a unit, use its weight."""
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.sum(),))
    layer.register_forward_hook(lambda module, args, out: out + module.bias.exp())
    return layer


LAYERS.update(
    M=Masked,
    A=functools.partial(Lora, True),
    B=functools.partial(Lora, False),
    E=ExpertSum,
    W=functools.partial(weight_norm, False),
    V=functools.partial(weight_norm, True),
    Q=spectral,
    H=hooked,
)

CHAINS = {
    "masked": chain("LMML", "0123"),
    "merged lora": chain("LAAL", "0123"),
    "merged lora first": chain("AL", "01"),
    "lora": chain("LBBL", "12"),
    "weight norm": chain("LWWL", "0123"),
    "old weight norm": chain("LVVL", "0123"),
    "orthogonal": chain("LQL", "012"),
    "lists and dicts": chain("LEEL", "12"),
    "hooks of its own": chain("LHHL", "12"),
    "no inputs": Case(Positions, "first positions last", once),
    "a weight of the root": Case(Outside, "first takes", once),
    "all in one unit": chain("LMAEWVQHL", ""),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CHAINS)
def test_chains_of_weights(pool, case, mode):
    check(pool, CHAINS[case], **MODES[mode])


# -- recomputation, and other ways through autograd --------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A part that is computed again in backward."""

    def __init__(self, letters, reentrant):
        super().__init__()
        self.part, self.reentrant = Chain(letters), reentrant

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


LAYERS.update(
    C=functools.partial(Checkpointed, "LW", False),
    D=functools.partial(Checkpointed, "LW", True),
    N=functools.partial(Checkpointed, "CL", False),
    P=functools.partial(Checkpointed, "DL", True),
)
PARTS = "part.layers.0 part.layers.1"


def recomputed(letter, units):
    """Two such parts between two layers; the units in each, "." for the part itself."""
    names = [f"layers.{i}.{unit}".rstrip(".") for i in (1, 2) for unit in units.split()]
    return Case(functools.partial(Chain, f"L{letter}{letter}L"), " ".join(["layers.0", *names]), once)


RECOMPUTED = {
    f"{'reentrant' if letter in 'DP' else 'plain'}, {letter}, {units}": recomputed(letter, units)
    for letter in "CDNP"
    for units in (".", "part", PARTS, f"{PARTS} part .", "part.layers.1")
}


@pytest.mark.parametrize("mode", ["reshard", "keep", "prefetch 3"])
@pytest.mark.parametrize("case", RECOMPUTED)
def test_checkpoint_around_and_inside_of_units(pool, case, mode):
    check(pool, RECOMPUTED[case], **MODES[mode])


def retained(model, x, step):
    """The same graph twice."""
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def only_inputs(model, x, step):
    """A gradient of the rows alone, before the step's own."""
    x = x.clone().requires_grad_()
    out = model(x)
    [grad] = torch.autograd.grad(out.square().sum(), [x], retain_graph=True)
    (out * grad[:, :1]).sum().backward()


def two_losses(model, x, step):
    """Two forwards, then their backwards, in the order of a list and of a stack; one forward without a backward."""
    first, second = model(x), model(x * 2)
    with torch.no_grad():
        model(x)
    for loss in (first, second) if step % 2 else (second, first):
        loss.square().sum().backward()


def of_two_forwards(model, x, step):
    """One loss of two forwards."""
    (model(x) * model(x + 1)).sum().backward()


def by_parts(model, x, step):
    """Layers are called one by one, the module itself never."""
    for layer in model.layers:
        x = layer(x)
    x.square().sum().backward()


def part_alone(model, x, step):
    """A layer by itself, before, between and after a forward and its backward."""
    with torch.no_grad():
        model.layers[1](x)
    loss = model(x).square().sum()
    with torch.no_grad():
        model.layers[1](x)
    loss = loss + model.layers[2](x).sum()
    loss.backward()
    model.layers[1](x).sum().backward()


def evaluates(model, x, step):
    """Training and evaluation in turns."""
    model.train()
    loss = model(x).square().sum()
    model.eval()
    with torch.inference_mode():
        model(x)
    with torch.no_grad():
        assert model(x).isfinite().all()
    loss.backward()
    with torch.no_grad():
        model(x)
    model.train()


def nothing(model, x, step):
    """No backward in the second step."""
    if step != 1:
        once(model, x, step)
    else:
        with torch.no_grad():
            model(x)


def penalty(model, x, step):
    """A loss of the gradient of the output by the rows."""
    x = x.clone().requires_grad_()
    out = model(x)
    [grad] = torch.autograd.grad(out.square().sum(), [x], create_graph=True)
    (grad.square().sum() + out.sum()).backward()


def tangents(model, x, step):
    """Saved tensors live elsewhere meanwhile."""
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().sum()
    loss.backward()


WORK = {
    function.__name__: chain("LEMLA", "0123", function)
    for function in (retained, only_inputs, two_losses, of_two_forwards, part_alone, evaluates, nothing)
} | {
    "by_parts": chain("LEMLA", "01234", by_parts),
    "penalty": chain("LTLTL", "024", penalty),
    "tangents": chain("LTLTL", "024", tangents),
}
LAYERS["T"] = nn.Tanh


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", WORK)
def test_ways_through_autograd(pool, case, mode):
    check(pool, WORK[case], **MODES[mode])
