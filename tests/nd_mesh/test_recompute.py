"""Recomputation against the same modules without: the same bits, fewer saved bytes, and each rerun counted."""

import contextlib
import copy
import gc
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef

from collectives import comm, differentiable
from collectives.allocated import built_bytes
from nd_mesh import data
from nd_mesh.model import GPT
from nd_mesh.recompute import chosen, recompute
from tests import parity

CPU = torch.device("cpu")


def values(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def filled(module):
    """Parameters that depend on nothing but their order."""
    for i, param in enumerate(module.parameters()):
        param.data = values(*param.shape, seed=i) / 3
    return module


# ---- the GPT

DROPOUT = parity.config(dropout=0.1, width=16, heads=4, hidden=20).model
LISTS = [["block"], ["attend"], ["ffn"], ["attend", "ffn"]]


def batches():
    """Two microbatches of packed documents."""
    stream = parity.stream(parity.documents(), parity.CONTEXT)
    return [data.make_batch(stream, 4, rows, rows) for rows in (torch.arange(3), torch.arange(3, 5))]


def gradients(model, between=lambda: None):
    """Two forwards, then two backwards: the loss and every gradient."""
    losses = [model.loss(model(batch.ids, batch.where), batch.labels) for batch in batches()]
    between()
    for loss in losses:
        loss.backward()
    return [torch.stack(losses).detach(), *(param.grad for param in model.parameters())]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("names", LISTS, ids="+".join)
def test_the_gradients_of_a_gpt_have_the_same_bits(names):
    plain = filled(GPT(DROPOUT, seed=1))
    again = copy.deepcopy(plain)
    counts = recompute(chosen(again, names))
    assert equal(gradients(again), gradients(plain))
    assert counts.reruns == 2 * DROPOUT.layers * len(names)
    assert counts.report() == f"recomputation: {counts.reruns} forwards ran again, and in them no collective"


def test_a_rerun_with_other_dropout_shows():
    plain = filled(GPT(DROPOUT, seed=1))
    again = copy.deepcopy(plain)
    recompute(chosen(again, ["block"]))

    def other_seed():
        again.blocks["0"].ffn_drop.seed += 1

    assert not equal(gradients(again, other_seed), gradients(plain))


def saved_bytes(names, dtype):
    """What a forward leaves allocated for each layer: that of three layers less that of two."""
    batch, living = batches()[0], []
    assert batch.where.visible.any() and batch.where.tokens.any()  # made once a microbatch, not once a layer
    for layers in (2, 3):
        model = GPT(replace(DROPOUT, layers=layers), seed=1).to(dtype)
        recompute(chosen(model, names))
        living.append(built_bytes(lambda model=model: model(batch.ids, batch.where), CPU)[1])
    return living[1] - living[0]


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.drill)])
def test_saved_bytes_are_the_formula(dtype):
    """e bytes an element; T² is the mask, which the CPU's kernel makes a number for each pair, a layer."""
    config, e = DROPOUT, dtype.itemsize
    B, T, D, H, KV, F = 3, parity.CONTEXT, config.width, config.heads, config.kv_heads, config.hidden
    K = D // H
    norms = B * T * 2 * (2 * D + 1)  # twice: the input (the stream), one number a token, the normalised input
    attention = B * T * (D + 2 * K + (2 * H + 2 * KV) * K)  # input of q, k and v; sines; q, k, v; input of o
    core = B * T * (H * K + H) + B * T * T  # its output, log-sum-exp, mask
    hidden = B * T * 4 * F  # gate, up, silu(gate), their product
    dropout = 2 * B * T * D + 2 * 8  # bytes: two masks, two scales
    nothing = e * (norms + attention + core + B * T * D + hidden) + dropout  # B T D: the input of gate and up
    assert saved_bytes([], dtype) == nothing
    assert saved_bytes(["attend"], dtype) == nothing - e * core
    assert saved_bytes(["ffn"], dtype) == nothing - e * hidden
    assert saved_bytes(["attend", "ffn"], dtype) == nothing - e * (core + hidden)
    assert saved_bytes(["block"], dtype) == e * B * T * D + 2 * 8  # the stream; autograd asks nobody about scales


def test_names_become_modules():
    model = GPT(DROPOUT, seed=1)
    blocks = list(model.blocks.values())
    assert chosen(model, ["block"]) == blocks
    assert chosen(model, ["ffn", "attend"]) == [*(b.ffn for b in blocks), *(b.attend for b in blocks)]
    assert chosen(model, []) == []
    with pytest.raises(ValueError, match=r"'mlp' is unknown; use `block`, or some of .*attend, .*ffn"):
        chosen(model, ["attend", "mlp"])
    with pytest.raises(ValueError, match="give `block` alone"):
        chosen(model, ["block", "ffn"])


# ---- any module


class Toy(nn.Module):
    """Two linear layers, or one of them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        filled(self)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class ReturnsItsInput(Toy):
    def forward(self, x):
        return x


class ReturnsItsInputToo(Toy):
    def forward(self, x):
        return x, super().forward(x)


class Trees(Toy):
    """Nested inputs, some of which cannot be differentiated; nested outputs, some of which need no gradient."""

    def forward(self, pair, *, at, scale=None, name="a"):
        x, more = pair
        y = super().forward(x * more["weight"]) * scale
        return {"y": [y[at]], "best": y.argmax(-1), "fixed": y.detach() + 1, "name": name}


class InPlace(Toy):
    """In place, but not on its input."""

    def forward(self, x):
        return self.down(F.relu(self.up(x).mul_(2), inplace=True)).add_(1)


class PartWithout(Toy):
    def forward(self, x):
        with torch.no_grad():
            scale = self.up(x).abs().amax()
        return super().forward(x) / scale


class Frozen(Toy):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)


def once(module, x):
    return module(x * 1)


def twice(module, x):
    return module(module(x))


def of_a_leaf(module, x):
    return module(x)


def without_gradient(module, x):
    return module(x.detach()) + x


def in_part(module, x):
    """An output whose gradient nobody asks for."""
    module(x)
    kept, _ = module(x), module(2 * x)
    return kept


def second_of_two(module, x):
    left, right = module(x * 1)
    return left + right * x


def changed_after(module, x):
    """Changing an output in place is none of the module's business."""
    return module(x).mul_(3)


def of_trees(module, x):
    out = module((x * 1, {"weight": 2 * x}), at=torch.tensor([2, 0]), scale=torch.tensor(0.5), name="b")
    assert out["name"] == "b" and not out["best"].requires_grad and not out["fixed"].requires_grad
    return out["y"][0] + out["fixed"][:2] + out["best"][:2, None]


def results(module, use):
    x = values(5, 4, seed=7).requires_grad_()
    out = use(module, x)
    out.backward(values(*out.shape, seed=8))
    return [out.detach(), x.grad, *(param.grad for param in module.parameters() if param.grad is not None)]


@pytest.mark.parametrize(
    ("make", "use", "reruns"),
    [
        (Toy, once, 1),
        (Toy, twice, 2),
        (Toy, of_a_leaf, 1),
        (Toy, without_gradient, 1),
        (Toy, in_part, 1),
        (Toy, changed_after, 1),
        (ReturnsItsInput, once, 0),
        (ReturnsItsInput, twice, 0),
        (ReturnsItsInputToo, second_of_two, 1),
        (Trees, of_trees, 1),
        (InPlace, once, 1),
        (PartWithout, once, 1),
        (Frozen, once, 1),
    ],
)
def test_any_module_has_the_same_gradients(make, use, reruns):
    module = make()
    counts = recompute([module])
    assert equal(results(module, use), results(make(), use))
    assert counts.reruns == reruns


def test_without_gradients_nothing_is_kept():
    counts = recompute([module := Toy()])
    x = values(5, 4)
    with torch.no_grad(), mock.patch("nd_mesh.recompute._Once", side_effect=AssertionError):
        out = module(x)
    assert torch.equal(out, Toy()(x)) and counts.reruns == 0
    seen = weakref.ref(x)
    del x
    assert seen() is None


class Overwrites(Toy):
    """Its input gets a graph that is inside of it."""

    def forward(self, x):
        return super().forward(x.exp_())


@pytest.mark.parametrize(
    ("make", "backward"), [(Toy, False), (Toy, True), (ReturnsItsInputToo, True), (Overwrites, False)]
)
def test_a_graph_that_is_dropped_leaves_nothing(make, backward):
    """By reference counts alone: a cycle through autograd would stay for ever."""
    recompute([module := make()])
    gc.disable()
    try:
        leaf = values(5, 4).requires_grad_()
        living = weakref.ref(x := leaf * 2), weakref.ref(leaf)
        out = module(x)
        if backward:
            sum(tensor.sum() for tensor in out).backward()
        del leaf, x, out
        assert [ref() for ref in living] == [None, None]
    finally:
        gc.enable()


def test_recomputed_tensors_are_freed_as_backward_goes_on():
    """When backward has come to gelu, what `down` had saved is gone, though `up` still has to come."""
    recompute([module := Toy()])
    made, alive, real = [], [], F.gelu

    def gelu(x):
        x.register_hook(lambda _: alive.append([not memory.expired() for memory in made]))
        made.append(StorageWeakRef((out := real(x)).untyped_storage()))
        return out

    with mock.patch.object(F, "gelu", gelu):
        out = module(values(5, 4))
        assert [memory.expired() for memory in made] == [True]
        out.sum().backward()
    assert alive == [[False, False]]


class Fails(Toy):
    fails = False

    def forward(self, x):
        y = super().forward(x)
        if self.fails:
            raise ArithmeticError("in the middle")
        return y


def test_after_an_exception_in_forward_it_goes_on():
    counts = recompute([module := Fails()])
    module.fails = True
    with pytest.raises(ArithmeticError, match="in the middle"):
        module(values(5, 4))
    kept = values(5, 4).requires_grad_()
    assert kept.exp().grad_fn._saved_result is not None  # no hook of ours is left behind
    module.fails = False
    assert equal(results(module, once), results(Fails(), once))
    assert counts.reruns == 1


def halves(module, x):
    """A pipeline's I, then its W, over the same graph, and at last a whole backward over it."""
    out = module(x * 1)
    dout, params = values(*out.shape, seed=8), list(module.parameters())
    inputs = torch.autograd.grad(out, [x], dout, retain_graph=True)
    weights = torch.autograd.grad(out, params, dout, retain_graph=True)
    out.backward(dout)
    return [*inputs, *weights, x.grad, *(param.grad for param in params)]


def test_a_backward_in_halves_needs_one_rerun():
    counts = recompute([module := Toy()])
    plain, recomputed = (halves(m, values(5, 4).requires_grad_()) for m in (Toy(), module))
    assert equal(recomputed, plain)
    assert counts.reruns == 1


def test_gradients_of_gradients():
    recompute([module := Toy()])
    x = values(2, 4).requires_grad_()
    assert gradcheck(module, [x])
    assert gradgradcheck(module, [x])


def test_a_copy_is_recomputed_with_its_own_weights():
    recompute([module := Toy()])
    other = copy.deepcopy(module)
    plain = Toy()
    for each in (other, plain):
        each.up.weight.data.mul_(2)
    assert equal(results(other, once), results(plain, once))
    assert all(param.grad is None for param in module.parameters())


def test_the_autocast_of_the_forward_comes_back():
    def cast(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x.float())
        assert out.dtype == torch.bfloat16
        return out.double()

    counts = recompute([module := Toy().float()])
    assert equal(results(module, cast), results(Toy().float(), cast))
    assert counts.reruns == 1


# ---- what cannot be run again


class Changes(Toy):
    def forward(self, x):
        return super().forward(x.mul_(2))


def test_an_input_that_was_changed_in_place_is_refused():
    counts = recompute([module := Changes()])
    with pytest.raises(RuntimeError, match="recomputed module 0, a Changes, cannot run again: an input was changed"):
        results(module, once)
    recompute([module := Toy()])
    x = values(5, 4)
    out = module(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="a Toy, cannot run again: an input was changed in place"):
        out.sum().backward()
    assert counts.reruns == 0


class Moody(Toy):
    """Does something else the second time."""

    def __init__(self, second):
        super().__init__()
        self.second, self.calls = second, 0

    def forward(self, x):
        self.calls += 1
        x = self.second(x) if self.calls > 1 else x
        return super().forward(x)


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (lambda x: x.exp(), "saved 5 tensors, not 4, when it ran again"),
        (lambda x: x.detach(), "saved 1 tensors, not 4, when it ran again"),
        (lambda x: torch.cat([x, x]), "saved tensors of another kind when it ran again"),
    ],
    ids=["more", "fewer", "other shapes"],
)
def test_a_rerun_that_saves_something_else_is_an_error(second, what):
    module = Moody(second)
    module.up.requires_grad_(False)  # then it matters whether the input needs a gradient
    recompute([Toy(), module])
    with pytest.raises(RuntimeError, match=f"recomputed module 1, a Moody, {what}: its mode, ") as error:
        results(module, once)
    assert "\n" not in str(error.value)


def test_modules_inside_of_others_are_refused():
    toy, other = Toy(), Toy()
    for modules in ([toy, other, toy], [toy, toy.up], [toy.up, other, toy]):
        with pytest.raises(ValueError, match=r"recomputed module \d, a \w+, is given twice or inside of another one"):
            recompute(modules)
    assert "forward" not in vars(toy)


# ---- buffers


class Statistics(nn.Module):
    """Running statistics, one counter that is changed in place, one that is replaced, both used in what it returns."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = filled(nn.Linear(4, 4)), nn.BatchNorm1d(4, dtype=torch.float64)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(()))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.steps += 1
        self.replaced = self.replaced * 2
        return (self.norm(self.linear(x)) * self.steps.clone()).sin() * self.replaced


def trained(module):
    """Two forwards, then two backwards: outputs, gradients, and buffers, which must be the same tensors in the end."""
    own = [module.steps, *module.norm.buffers()]
    outs = [module(values(5, 4, seed=seed)) for seed in range(2)]
    for out in outs:
        out.backward(values(5, 4, seed=8))
    assert all(map(torch.Tensor.is_set_to, [module.steps, *module.norm.buffers()], own))
    return [*(out.detach() for out in outs), *(param.grad for param in module.parameters()), *module.buffers()]


def test_counters_and_statistics_change_once():
    recompute([module := Statistics()])
    assert equal(trained(module), trained(Statistics()))
    assert module.steps == 2 and module.replaced == 4


def test_buffers_that_are_not_put_back_show():
    recompute([module := Statistics()])
    with mock.patch("nd_mesh.recompute._stand_in", lambda buffers: contextlib.nullcontext()):
        assert not equal(trained(module), trained(Statistics()))
    assert module.steps == 4


# ---- weights that come and go


class Lent:
    """Hooks on a module that let its weights be there in its forward and its backward alone, as fully sharded data
    parallelism does: the storage is freed, or the parameter is pointed to another one.
    """

    def __init__(self, module, way):
        self.module, self.way, self.gathers = module, way, 0
        self.shards = [param.detach().clone() for param in module.parameters()]
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(self.after)
        self.free()

    def after(self, module, args, out):
        self.free()
        out.register_hook(lambda _: self.gather())

    def gather(self):
        self.gathers += 1
        for param, shard in zip(self.module.parameters(), self.shards, strict=True):
            if self.way == "resized":
                param.untyped_storage().resize_(shard.nbytes)
                param.data.copy_(shard)
            else:
                param.data = shard.clone()

    def renew(self):
        old = [param.detach() for param in self.module.parameters()]
        self.free()
        self.gather()
        for each in old:
            each.fill_(torch.nan)

    def free(self):
        for param in self.module.parameters():
            if self.way == "resized":
                param.untyped_storage().resize_(0)
            else:
                param.data = torch.empty(1, dtype=param.dtype).expand(param.shape)


@pytest.mark.parametrize("way", ["resized", "pointed elsewhere"])
def test_weights_that_were_freed_in_between(way):
    module = nn.Linear(4, 4, dtype=torch.float64)
    plain = copy.deepcopy(filled(module))
    lent = Lent(module, way)
    counts = recompute([module])
    assert equal(results(module, once), results(plain, once))
    assert counts.reruns == 1 and lent.gathers == 2, "the hooks stay outside of the rerun"


class Scales(nn.Module):
    """Weights that autograd saves as they are; the gradient of the first needs the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(values(4, seed=seed)) for seed in (0, 1))

    def forward(self, x):
        return (x * self.first).sin() * self.second


def test_weights_that_come_anew_for_the_second_half():
    """Between I and W they are freed; where they were before is another's memory by then."""
    module, plain = Scales(), Scales()
    lent = Lent(module, "pointed elsewhere")
    counts = recompute([module])
    halves = []
    for each, anew in ((module, lent.renew), (plain, lambda: None)):
        out = each(x := values(5, 4).requires_grad_())
        inputs = torch.autograd.grad(out, [x], out.detach(), retain_graph=True)
        anew()
        halves.append([*inputs, *torch.autograd.grad(out, list(each.parameters()), out.detach())])
    assert equal(*halves)
    assert counts.reruns == 1


# ---- collectives


class Columns(nn.Module):
    """Cut by columns, then by rows; the sum is whole first, then scattered and gathered."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.up, self.down = (filled(nn.Linear(4, 4, bias=False)) for _ in range(2))

    def forward(self, x):
        x = differentiable.identity_all_reduce(x, group=self.group)
        x = differentiable.all_reduce_identity(self.down(self.up(x).sin()), group=self.group)
        x = differentiable.reduce_scatter_all_gather(x.cos(), 1, group=self.group)  # ours: it consists of exchanges
        x = differentiable.all_gather_split(x.sin(), 1, group=self.group)
        comm.all_reduce(x.detach().clone(), group=self.group)  # after the last tensor that is saved
        return x


def counted(run):
    module, plain = Columns(run.world), Columns(run.world)
    counts = recompute([module])
    same = equal(results(module, once), results(plain, once))
    return same, counts.reruns, dict(counts.collectives), counts.report()


def test_collectives_that_run_again_are_counted(pool):
    """Those of backward are not, nor those of the first forward."""
    calls = {"all_reduce": 2, "reduce_scatter_single": 1, "all_gather_single": 1}
    report = "1 forwards ran again, and in them 1 all_gather_single, 2 all_reduce, 1 reduce_scatter_single"
    assert pool.run(2, counted) == 2 * [(True, 1, calls, f"recomputation: {report}")]
