"""What else is done to a module in units: torch's own layers, freezing, buffers, errors, copies, a driver outside."""

import copy
import functools
import gc
import itertools

import pytest
import torch
from torch import nn

from tests.fsdp.models import F64, Case, built, check, check_grads, inner, rows, sharded
from tests.fsdp.test_use import MODES, chain, each_mode, once
from tests.recorder import recording
from tests.shards import assembled, pieces
from tests.zero.versions import drilled

# -- torch's own layers ------------------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """Rows as a sequence of one batch: through a layer of torch."""

    def __init__(self, kind):
        super().__init__()
        self.before, self.layer, self.after, self.kind = nn.Linear(4, 8), OWN[kind](), nn.Linear(8, 3), kind

    def forward(self, x):
        x = self.before(x)[None]  # [1, T, 8]
        if self.kind == "conv":
            return self.after(self.layer(x.transpose(1, 2)).transpose(1, 2))
        if self.kind == "attention":
            return self.after(self.layer(x, x, x)[0])
        if self.kind == "decoder":
            return self.after(self.layer(x, torch.tanh(x)))
        out = self.layer(x)
        return self.after(out[0] if isinstance(out, tuple) else out)


OWN = {
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "norm first": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
    "decoder": lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 8, 2, batch_first=True, bidirectional=False),
    "gru": lambda: nn.GRU(8, 8, batch_first=True),
    "conv": lambda: nn.Sequential(nn.Conv1d(8, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.Conv1d(6, 8, 1)),
}


def trains_and_evaluates(model, x, step):
    model.eval()
    with torch.no_grad():
        assert model(x).isfinite().all()
    model.train()
    model(x).square().sum().backward()


@pytest.mark.parametrize("units", ["before layer after", pytest.param("layer", marks=pytest.mark.drill)])
@pytest.mark.parametrize("kind", OWN)
def test_layers_of_torch(pool, kind, units):
    check(pool, Case(functools.partial(Sequence, kind), units, trains_and_evaluates))


class Attention(nn.Module):
    """Projections by themselves, and a merged mask."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x, attention_mask=None):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return (self.o((scores + attention_mask).softmax(-1) @ self.v(x)), scores)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(4), Attention(), nn.Linear(4, 4)

    def forward(self, hidden_states, *, attention_mask):
        hidden_states = hidden_states + self.attention(self.norm(hidden_states), attention_mask=attention_mask)[0]
        return (hidden_states + torch.tanh(self.mlp(hidden_states)),)


class Pretrained(nn.Module):
    """As models of transformers are: a model in a model, keywords, tuples, a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "norm": nn.LayerNorm(4)})
        self.model["layers"] = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.model["embed"].weight

    def forward(self, input_ids=None, labels=None):
        x = self.model["embed"](input_ids)
        mask = torch.full((len(input_ids),) * 2, -torch.inf, dtype=x.dtype).triu(1)
        for layer in self.model["layers"]:
            x = layer(x, attention_mask=mask)[0]
        logits = self.lm_head(self.model["norm"](x))
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum"), "logits": logits}


def with_labels(model, x, step):
    ids = (x[:, 0] * 100).long() % 7
    model(input_ids=ids, labels=ids.roll(1))["loss"].backward()


@each_mode
def test_a_tied_model_with_layers_as_units(pool, mode):
    """T44."""
    check(pool, Case(Pretrained, "model.layers.0.mlp model.layers.0 model.layers.1", with_labels), **MODES[mode])


# -- gradients and freezing --------------------------------------------------------------------------------------------


def kept_zeros(run, settings):
    """Zeros are kept, then gradients are not zeroed at all."""
    case = chain("LEM", "012")
    model, seen = built(case), []
    handle = sharded(run, model, inner(model, case.units), **settings)
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.02)
    for step in range(4):
        if step < 2:
            optimizer.zero_grad(set_to_none=False)
        once(model, rows(case, run.rank, step), step)
        handle.finish()
        seen.append(pieces(handle))
        optimizer.step()
        handle.after_step()
    return seen


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": True}])
def test_zeros_that_are_kept_and_gradients_that_are_not_zeroed(pool, settings):
    case = chain("LEM", "012")
    model = built(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step, held in enumerate(zip(*pool.run(2, kept_zeros, settings), strict=True)):
        if step < 2:
            optimizer.zero_grad(set_to_none=False)
        for rank in range(2):
            once(model, rows(case, rank, step), step)
        check_grads(assembled(held)[0], {name: param.grad for name, param in model.named_parameters()})
        optimizer.step()


def thawing(model, step):
    """T17. Layer 0 is frozen in steps 0, 1 and 4, its bias in step 2 too, layer 1 in step 3, all of it in step 5."""
    for number, steps in enumerate(((2, 3, 5), (0, 1, 2, 4), (0, 1, 2, 3, 4))):
        model.layers[number].weight.requires_grad_(step in steps)
        model.layers[number].bias.requires_grad_(step in steps and (number, step) != (0, 2))


def thaws(run, settings, x_needs):
    case = chain("LLL", "012")
    model, seen = built(case), []
    thawing(model, 0)
    handle = sharded(run, model, inner(model, case.units), **settings)
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.02, momentum=0.9)
    for step in range(6):
        thawing(model, step)
        optimizer.zero_grad()
        once(model, rows(case, run.rank, step).requires_grad_(x_needs), step)
        handle.finish()
        before = pieces(handle)
        optimizer.step()
        handle.after_step()
        seen.append((before, pieces(handle)))
    return seen


@pytest.mark.parametrize("x_needs", [False, True])
@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("ranks", [drilled(1), 2, drilled(3)])
def test_frozen_then_unfrozen_then_frozen(pool, ranks, settings, x_needs):
    case = chain("LLL", "012")
    model = built(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step, on_ranks in enumerate(zip(*pool.run(ranks, thaws, settings, x_needs), strict=True)):
        thawing(model, step)
        optimizer.zero_grad()
        for rank in range(ranks):
            once(model, rows(case, rank, step), step)
        before, after = zip(*on_ranks, strict=True)
        check_grads(assembled(before)[0], {name: param.grad for name, param in model.named_parameters()})
        optimizer.step()
        for name, value in assembled(after)[1].items():
            assert (value - model.get_parameter(name)).abs().max() <= 1e-13, (step, name)


# -- buffers -----------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """T20. One buffer is rebound, one is changed in place; running statistics."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("rebound", torch.zeros(()))
        self.register_buffer("in_place", torch.zeros(2))

    def forward(self, x):
        self.rebound = self.rebound + x.detach().mean()
        self.in_place += x.detach().mean()
        return self.norm(self.linear(x))


def buffers(run, settings):
    torch.manual_seed(run.rank)
    model, seen = Counts().double(), []
    model.norm.running_mean += run.rank
    handle = sharded(run, model, [model.linear, model.norm], **settings)
    seen.append({name: value.clone() for name, value in model.named_buffers()})
    for step in range(2):
        x = torch.randn(run.rank + 3, 4, generator=torch.Generator().manual_seed(10 * step + run.rank), dtype=F64)
        first, second = model(x), model(x)
        (first.sum() + second.square().sum()).backward()
        handle.finish()
        seen.append({name: value.clone() for name, value in model.named_buffers()})
    return seen


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": True}])
def test_buffers_are_those_of_rank_0(pool, settings):
    torch.manual_seed(0)
    model = Counts().double()
    for step, on_ranks in enumerate(zip(*pool.run(3, buffers, settings), strict=True)):
        for name, value in model.named_buffers():
            assert all(torch.equal(mine[name], on_ranks[0][name]) for mine in on_ranks)
            assert torch.allclose(on_ranks[0][name].double(), value.double(), rtol=1e-12)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step), dtype=F64)
        model(x), model(x)


# -- errors, and what goes on after them -------------------------------------------------------------------------------


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        if ctx.fails:
            raise ZeroDivisionError("in backward")
        return dout, None


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.fails = nn.Linear(4, 4), ""

    def forward(self, x):
        if self.fails == "forward":
            raise ZeroDivisionError("in forward")
        return torch.tanh(Breaks.apply(self.linear(x), self.fails == "backward"))


def breaks(run, where, on, number, settings):
    """A step breaks off in a layer, on these ranks; it is dropped; two more steps."""
    torch.manual_seed(0)
    model, seen = nn.Sequential(*(Fragile() for _ in range(3))).double(), []
    handle = sharded(run, model, list(model), **settings)
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.02)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(run.rank), dtype=F64)
    for step in range(4):
        model[number].fails = where if step == 1 and run.rank in on else ""
        optimizer.zero_grad()
        try:
            model(x).square().sum().backward()
        except ZeroDivisionError:
            assert step == 1
        handle.finish()
        if step != 1:
            seen.append(pieces(handle))
            optimizer.step()
        handle.after_step()
    whole = [param for param in model.parameters() if param.isfinite().all()]
    assert not whole and not any(param.grad is not None for param in model.parameters())
    return seen


@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": True, "prefetch": 2}, {"reshard_after_forward": False}]
)
@pytest.mark.parametrize("number", [0, drilled(1), drilled(2)])
@pytest.mark.parametrize("on", [(0, 1), (1,)])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_steps_after_one_that_broke_off(pool, where, on, number, settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(Fragile() for _ in range(3))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for held in zip(*pool.run(2, breaks, where, on, number, settings, timeout=20.0), strict=True):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=F64)
            model(x).square().sum().backward()
        check_grads(assembled(held)[0], {name: param.grad for name, param in model.named_parameters()})
        optimizer.step()


# -- backward without its weights --------------------------------------------------------------------------------------


each_settings = pytest.mark.parametrize("settings", [{"reshard_after_forward": True}, drilled({})])


class Scales(nn.Module):
    """Its backward reads a view of the weight, which a freed one cannot give."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return torch.tanh(x * self.weight.view(4))


def without_weights(run, way, settings):
    """The message with which a backward is refused whose weights nobody has gathered."""
    model = nn.Sequential(Scales(), Scales()).double()
    handle = sharded(run, model, list(model), **settings)
    x = torch.ones(1, 4, dtype=F64, requires_grad=True)
    if way == "driven":
        handle.unshard(model)
        loss = model(x).sum()
        handle.reshard(model)
    else:
        loss = model(x).sum()
    if "gone" in way:
        del handle
        if way == "all gone":
            del model
        gc.collect()
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(loss, [x], create_graph=way == "penalty")
    return str(error.value)


WITHOUT = {
    "driven": "the backward of 1 begins in shards: call `unshard` before",
    "penalty": "backward(create_graph=True) through 1: gradients of gradients find no weights",
    "handle gone": "the handle of 1 is gone: keep what fully_shard returns for the outermost module",
    "all gone": "the handle of 1 is gone: keep what fully_shard returns for the outermost module",
}


@each_settings
@pytest.mark.parametrize("way", WITHOUT)
def test_a_backward_without_weights_is_refused(pool, way, settings):
    assert pool.run(2, without_weights, way, settings, timeout=10.0) == [WITHOUT[way]] * 2


def backward_after_whole(run, settings):
    """A forward inside of whole, its backward outside."""
    model = nn.Sequential(Scales(), Scales()).double()
    handle = sharded(run, model, list(model), **settings)
    with handle.whole():
        loss = model(torch.full((1, 4), run.rank + 1.0, dtype=F64)).sum()
    loss.backward()
    handle.finish()
    return pieces(handle)


@each_settings
def test_a_backward_after_whole(pool, settings):
    model = nn.Sequential(Scales(), Scales()).double()
    for rank in range(2):
        model(torch.full((1, 4), rank + 1.0, dtype=F64)).sum().backward()
    held = pool.run(2, backward_after_whole, settings)
    check_grads(assembled(held)[0], {name: param.grad for name, param in model.named_parameters()})


# -- copies and replacements -------------------------------------------------------------------------------------------


def copied(run):
    """A deep copy is a module of its own with whole weights, made inside of whole; the units train on."""
    case = chain("LL", "01")
    model = built(case)
    handle = sharded(run, model, inner(model, case.units))
    with handle.whole():
        other = copy.deepcopy(model)
    x = rows(case, 0, 0)
    out = other(x)
    out.square().sum().backward()
    grads = {name: param.grad.clone() for name, param in other.named_parameters()}
    once(model, rows(case, run.rank, 0), 0)
    handle.finish()
    return out.detach(), grads, pieces(handle)


def test_a_deep_copy_is_a_module_of_its_own(pool):
    case = chain("LL", "01")
    model = built(case)
    x = rows(case, 0, 0)
    expected = model(x)
    expected.square().sum().backward()
    outs, grads, held = zip(*pool.run(2, copied), strict=True)
    for out, mine in zip(outs, grads, strict=True):
        assert torch.equal(out, expected)
        check_grads(mine, {name: param.grad for name, param in model.named_parameters()})
    once(model, rows(case, 1, 0), 0)
    check_grads(assembled(held)[0], {name: param.grad for name, param in model.named_parameters()})


WRITES = {
    "cast": lambda model: model.to(torch.float32),
    "replaced": lambda model: setattr(model.layers[0], "weight", nn.Parameter(torch.zeros(4, 4, dtype=F64))),
    "initialised": lambda model: nn.init.ones_(model.layers[0].weight),
    "from a vector": lambda model: nn.utils.vector_to_parameters(torch.zeros(40, dtype=F64), model.parameters()),
}


def written(run, way):
    """The message of the next forward after somebody wrote to weights that are in shards."""
    case = chain("LL", "01")
    model = built(case)
    handle = sharded(run, model, inner(model, case.units), prefetch=0)
    with pytest.raises(RuntimeError) as error:
        WRITES[way](model)
        once(model, rows(case, run.rank, 0), 0)
        handle.finish()
    return str(error.value)


TOLD = {
    "replaced": "a parameter of layers.0 was replaced after fully_shard",
    "initialised": "weights of layers.0 were written while they were in shards",
}


@pytest.mark.parametrize("way", ["cast", "replaced", "from a vector", "initialised"])
def test_what_is_written_in_shards_is_refused(pool, way):
    expected = TOLD.get(way, "weights of layers.0 were given other memory while they were in shards")
    assert all(told.startswith(expected) for told in pool.run(2, written, way))


def moved(run):
    """A move to where it is already leaves everything as it is."""
    case = chain("LL", "01")
    model = built(case)
    handle = sharded(run, model, inner(model, case.units))
    once(model.to(F64).to("cpu").train(), rows(case, run.rank, 0), 0)
    handle.finish()
    return pieces(handle)


def test_a_move_to_where_it_is(pool):
    case = chain("LL", "01")
    model = built(case)
    for rank in range(2):
        once(model, rows(case, rank, 0), 0)
    check_grads(assembled(pool.run(2, moved))[0], {name: param.grad for name, param in model.named_parameters()})


# -- driven from outside -----------------------------------------------------------------------------------------------


def pipeline(run, reductions, settings):
    """Three microbatches as a pipeline runs them: forwards, then of each I, the gradient of the rows, then W, those of
    the weights, which no hook sees; a reduction after each W, after some, once, or in finish. Then a step by hooks.
    """
    case, steps = chain("LEML", "0123"), []
    model = built(case)
    handle = sharded(run, model, inner(model, case.units), **settings)
    params = list(model.parameters())
    with recording() as recorder:
        handle.unshard(model)
        xs = [rows(case, run.rank, number).requires_grad_() for number in range(3)]
        outs = [model(x) for x in xs]
        douts = [2 * out.detach() for out in outs]
        dxs = [
            torch.autograd.grad(out, [x], d, retain_graph=True)[0] for out, x, d in zip(outs, xs, douts, strict=True)
        ]
        for number, (out, dout) in enumerate(zip(outs, douts, strict=True)):
            grads = torch.autograd.grad(out, params, dout, allow_unused=True)
            for param, grad in zip(params, grads, strict=True):
                if grad is not None:
                    param.grad = grad if param.grad is None else param.grad + grad
            if number in reductions:
                handle.reduce(model)
        handle.reshard(model)
        freed = not any(param.isfinite().all() for param in params)
        handle.finish()
    calls = [call.op for call in recorder.calls if call.op != "all_reduce"]
    steps.append(pieces(handle))
    for shard in handle.parameters():
        shard.grad = None
    for number in range(3):
        once(model, rows(case, run.rank, number), 0)
    handle.finish()
    steps.append(pieces(handle))
    return steps, dxs, freed, calls


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": True, "prefetch": 0}])
@pytest.mark.parametrize("reductions", [(), (0, 1, 2), (2,), (0, 1)])
def test_a_split_backward_driven_from_outside(pool, reductions, settings):
    case = chain("LEML", "0123")
    model, dxs = built(case), []
    for rank in range(2):
        for number in range(3):
            x = rows(case, rank, number).requires_grad_()
            model(x).square().sum().backward()
            dxs.append(x.grad)
    true = {name: param.grad for name, param in model.named_parameters()}
    steps, ours, freed, calls = zip(*pool.run(2, pipeline, reductions, settings), strict=True)
    assert all(freed)
    for dx, expected in zip(itertools.chain(*ours), dxs, strict=True):
        assert (dx - expected).abs().max() <= 1e-12 * expected.abs().max()
    for held in zip(*steps, strict=True):
        check_grads(assembled(held)[0], true)
    late = 2 not in reductions
    for mine in calls:
        assert mine.count("all_gather_single") == 4
        assert mine.count("reduce_scatter_single") == 4 * (len(reductions) + late)
