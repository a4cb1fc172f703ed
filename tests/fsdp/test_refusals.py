"""What is refused: one clear line on every rank, within seconds, before anything is communicated where that can be."""

import pytest
import torch
from torch import nn

from fsdp import MixedPrecision, fully_shard
from tests.fsdp.models import F64
from tests.recorder import recording

SECONDS = 10.0


class Tied(nn.Module):
    """Embedding and head share a weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def attempt(run, kind, *args):
    """The message with which it is refused, and the operations that were called before; and that the ranks go on."""
    with recording() as recorder:
        try:
            WAYS[kind](run, *args)
            told = None
        except (ValueError, RuntimeError, NotImplementedError) as error:
            told = f"{type(error).__name__}: {error}"
    calls = [call.op for call in recorder.calls]
    model = nn.Linear(4, 4).double()
    handle = fully_shard(model, run.world, average=False)
    model(torch.ones(1, 4, dtype=F64)).sum().backward()
    handle.finish()
    assert all(shard.grad.eq(run.size).all() for shard in handle.parameters())
    return told, calls


def tied(run, units):
    model = Tied()
    for name in units.split():
        fully_shard(model.get_submodule(name), run.world)
    fully_shard(model, run.world)


def twice(run):
    model = nn.Linear(4, 4)
    fully_shard(model, run.world)
    fully_shard(model, run.world)


def outer_first(run):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = fully_shard(model, run.world)
    fully_shard(model[0], run.world)
    return handle


def settings(run, odd, others):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, run.world, **(odd if run.rank == 1 else others))


def model_differs(run, what):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if run.rank == 1:
        if what == "shape":
            model[1] = nn.Linear(4, 3)
        elif what == "frozen":
            model[1].requires_grad_(False)
        elif what == "dtype":
            model[1].double()
        elif what == "unit":
            pass
        elif what == "name":
            model = nn.ModuleDict({"0": model[0], "x": model[1]})
    fully_shard(model, run.world)


def replicas_differ(run):
    """Each is a group by itself, so that only the replicas can tell."""
    alone = next(group for group in map(run.new_group, ([0], [1])) if group is not None)
    fully_shard(nn.Linear(4, 4), alone, replicate_group=run.world, prefetch=run.rank)


def units_differ(run):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[run.rank % 2], run.world)
    fully_shard(model, run.world)


def sparse_embedding(run):
    fully_shard(nn.Embedding(7, 4, sparse=True), run.world)


def sparse_later(run):
    """Found only when the gradient comes."""
    model = nn.Embedding(7, 4)
    handle = fully_shard(model, run.world)
    model.sparse = True
    try:
        model(torch.tensor([1, 2])).sum().backward()
    finally:
        handle.finish()


def complex_numbers(run):
    fully_shard(nn.Linear(4, 4).to(torch.complex128), run.world)


class ReturnsWeight(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight


class ReturnsView(nn.Linear):
    def forward(self, x):
        return {"w": self.weight.t()[:2]}


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class ReturnsOpaque(nn.Linear):
    def forward(self, x):
        return Opaque(super().forward(x))


class ReturnsMixed(nn.Linear):
    """A tensor, and one that is hidden in an object."""

    def forward(self, x):
        y = super().forward(x)
        return y.detach(), Opaque(y)


def outputs(run, build, settings):
    model = nn.Sequential(nn.Linear(4, 4), build(4, 4))
    for unit in model:
        fully_shard(unit, run.world, **settings)
    handle = fully_shard(model, run.world, **settings)
    try:
        model(torch.ones(1, 4))
    finally:
        handle.finish()


class Whole(torch.optim.SGD):
    """Scales by the norm of the whole tensor, as LAMB and LARS do."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad /= param.grad.norm()
        super().step()


def optimizer(run, kind):
    model = nn.Linear(4, 4)
    handle = fully_shard(model, run.world)
    handle.optimizer(kind(handle.parameters(), lr=0.1))


def optimizer_of_the_module(run):
    """Made for the module's parameters, as with torch's fully_shard."""
    model = nn.Linear(4, 4)
    handle = fully_shard(model, run.world)
    handle.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def state_outside(run, what):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], run.world)
    handle = fully_shard(model, run.world)
    if what == "save":
        model.state_dict()
    elif what == "load":
        model.load_state_dict(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict())
    elif what == "assign":
        saved = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
        with handle.whole():
            model.load_state_dict(saved, assign=True)


def handle_gone(run):
    model = nn.Linear(4, 4)
    fully_shard(model, run.world)
    model(torch.ones(1, 4))


def driven_in_shards(run):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in model:
        fully_shard(unit, run.world)
    handle = fully_shard(model, run.world)
    handle.unshard(model[0])
    try:
        model(torch.ones(1, 4))
    finally:
        handle.finish()


WAYS = {
    function.__name__: function
    for function in (
        tied,
        twice,
        outer_first,
        settings,
        model_differs,
        replicas_differ,
        units_differ,
        sparse_embedding,
        sparse_later,
        complex_numbers,
        outputs,
        optimizer,
        optimizer_of_the_module,
        state_outside,
        handle_gone,
        driven_in_shards,
    )
}
AXIS = {"shard_dim": lambda name, tensor: 1}
REFUSED = {
    "tied, unit and root": (("tied", "head"), "embed.weight and head.weight are one parameter in two units"),
    "tied, root and unit": (("tied", "embed"), "embed.weight and head.weight are one parameter in two units"),
    "tied, two units": (("tied", "embed head"), "weight of Linear is weight of Embedding already"),
    "twice": (("twice",), "Linear is a unit already"),
    "outer first": (("outer_first",), "from the inside out"),
    "negative prefetch": (("settings", {"prefetch": -1}, {"prefetch": -1}), "prefetch=-1"),
    "reshard differs": (("settings", {"reshard_after_forward": True}, {}), "reshard_after_forward=True"),
    "prefetch differs": (("settings", {"prefetch": 2}, {}), "prefetch=2"),
    "replicas differ": (("replicas_differ",), "prefetch=1"),
    "mixed differs": (("settings", {"mixed_precision": MixedPrecision(torch.bfloat16)}, {}), "bfloat16"),
    "average differs": (("settings", {"average": False}, {}), "average=False"),
    "shape differs": (("model_differs", "shape"), "[3, 4]"),
    "frozen differs": (("model_differs", "frozen"), "frozen"),
    "dtype differs": (("model_differs", "dtype"), "float64"),
    "names differ": (("model_differs", "name"), "x.weight"),
    "units differ": (("units_differ",), "differ"),
    "sparse": (("sparse_embedding",), "sparse"),
    "sparse later": (("sparse_later",), "sparse"),
    "complex": (("complex_numbers",), "complex"),
    "returns weight": (("outputs", ReturnsWeight, {"reshard_after_forward": True}), "1 returns its weights"),
    "returns a view": (("outputs", ReturnsView, {}), "1 returns its weights"),
    "returns an object": (("outputs", ReturnsOpaque, {}), "1 returns a Opaque"),
    "returns an object too": (("outputs", ReturnsMixed, {}), "Opaque"),
    "whole optimizer": (("optimizer", Whole), "Whole cannot step shards"),
    "adafactor": (("optimizer", torch.optim.Adafactor), "Adafactor cannot step shards"),
    "another optimizer": (("optimizer_of_the_module",), "parameters()"),
    "state dict": (("state_outside", "save"), "the weights are in shards"),
    "load": (("state_outside", "load"), "the weights are in shards"),
    "assign": (("state_outside", "assign"), "assign"),
    "handle gone": (("handle_gone",), "the handle of Linear is gone"),
    "driven": (("driven_in_shards",), "1 runs in shards"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank(pool, case):
    args, expected = REFUSED[case]
    told = pool.run(2, attempt, *args, timeout=SECONDS)
    print(case, told)
    assert all(message and expected in message for message, _ in told), told


def dimension(run, dim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError) as error:
        fully_shard(model, run.world, shard_dim=lambda name, tensor: dim)
    with pytest.raises(ValueError, match="give the same on every rank"):
        fully_shard(model, run.world, shard_dim=lambda name, tensor: tensor.dim() - 1 if run.rank else 0)
    return str(error.value)


@pytest.mark.parametrize("dim", [2, 1, -1])
def test_a_dimension_that_is_none(pool, dim):
    for told in pool.run(2, dimension, dim, timeout=SECONDS):
        name, dims = ("0.weight", 2) if dim != 1 else ("0.bias", 1)
        assert told == f"shard_dim={dim} is no dimension of {name}, which has {dims}: count from 0"


def tied_in_root(run):
    model = Tied().double()
    fully_shard(model.block, run.world, average=False)
    handle = fully_shard(model, run.world, average=False)
    model(torch.tensor([run.rank, 3])).square().sum().backward()
    handle.finish()
    assert model.head.weight is model.embed.weight
    return len(handle.parameters())


def test_tied_weights_are_left_to_the_unit_around(pool):
    assert pool.run(2, tied_in_root) == [3, 3]


@pytest.mark.parametrize("name", ["param", "reduce", "output"])
def test_mixed_precision_of_whole_numbers(name):
    with pytest.raises(ValueError, match=f"{name}=torch.int32: use a floating-point dtype, or None"):
        MixedPrecision(**{name: torch.int32})
