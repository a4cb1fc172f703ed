"""Stage 3: which layers there are, what a forward may do, what is whole and when, and who drives it."""

import contextlib

import pytest
import torch
from torch import nn

from tests.recorder import recording
from tests.shards import assembled, pieces, snapshot
from tests.zero.versions import vectors
from zero import stage1, stage3
from zero.layers import layers_of

F64 = torch.float64


def names(module):
    return [name for name, _ in layers_of(module)]


def test_layers_are_children_and_those_of_lists():
    block = nn.ModuleDict({"norm": nn.RMSNorm(2), "lists": nn.ModuleList([nn.Linear(2, 2)])})
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2)))
    model = nn.ModuleDict({"embed": nn.Embedding(2, 2), "blocks": inner, "tables": block, "drop": nn.Dropout()})
    model["layer"] = nn.TransformerEncoderLayer(2, 1, 2)
    model["none"] = nn.ModuleList()
    assert names(model) == ["embed", "blocks.0", "blocks.2.0", "tables.norm", "tables.lists.0", "layer"]
    assert names(nn.Linear(2, 2)) == [""]


# -- forwards and backwards --------------------------------------------------------------------------------------------


def two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def rows(number):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(number), dtype=F64)


def run_in_order(model, order):
    """Forwards of batches and their backwards, in this order: "+0 +1 -1 -0"; ?0 is a forward without gradients."""
    losses = {}
    for sign, number in order.split():
        if sign == "+":
            losses[number] = model(rows(int(number))).square().sum()
        elif sign == "?":
            with torch.no_grad():
                model(rows(int(number)))
        else:
            losses.pop(number).backward()


def in_this_order(run, order):
    """What this rank holds after these forwards and backwards, and reductions."""
    model = two_layers(run.rank)
    handle = stage3.wrap(model, run.world)
    with recording() as recorder:
        run_in_order(model, order)
        handle.finish()
    return pieces(handle), sum(getattr(call, "op", "") == "reduce_scatter_single" for call in recorder.calls)


@pytest.mark.parametrize(
    "order", ["+0 -0", "+0 +1 -0 -1", "+0 +1 -1 -0", "+0 -0 +1 -1", "+0 ?1 -0", "?0 ?1 +2 -2 ?0", "+0 +1 -0 +2 -2 -1"]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_forwards_and_backwards_in_any_order(pool, ranks, order):
    """T50. Each backward gathers and reduces; the ranks have the same rows, so the mean is what one process has."""
    model = two_layers(0)
    run_in_order(model, order)
    held, reductions = zip(*pool.run(ranks, in_this_order, order), strict=True)
    grads, _ = assembled(held)
    assert set(reductions) == {2 * order.count("-")}
    for name, param in model.named_parameters():
        assert (grads[name] - param.grad).abs().max() <= 1e-12 * param.grad.abs().max()


def there(param):
    """Whether its layer is whole."""
    return bool(param.isfinite().all())


def backward_on_some(run, order, leave_out):
    """As in_this_order, but on rank 0 only; the others leave out these forwards and backwards."""
    if run.rank == 0:
        return in_this_order(run, order)
    return in_this_order(run, " ".join(word for word in order.split() if word not in leave_out.split()))


@pytest.mark.parametrize("order", ["+0 -0", "+0 +1 -1"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_forward_without_a_backward_on_some_ranks(pool, ranks, order):
    """As when a rank has no label: it joins in the reductions with zeros."""
    model = two_layers(0)
    run_in_order(model, order)
    held, reductions = zip(*pool.run(ranks, backward_on_some, order, order.split()[-1]), strict=True)
    grads, _ = assembled(held)
    assert set(reductions) == {2 * order.count("+")}  # each forward might have had its backward
    for name, param in model.named_parameters():
        assert (grads[name] - param.grad / ranks).abs().max() <= 1e-12 * param.grad.abs().max()


def backwards_under_no_sync(run, backwards):
    """Three forwards, all but the last under no_sync, of which this rank runs these backwards: what it holds."""
    model = two_layers(0)
    handle = stage3.wrap(model, run.world)
    for number in range(3):
        with handle.no_sync() if number < 2 else contextlib.nullcontext():
            loss = model(rows(number)).square().sum()
            if number in backwards[run.rank]:
                loss.backward()
    handle.finish()
    return pieces(handle)


@pytest.mark.parametrize("backwards", [((0, 1, 2), ()), ((0,), (1, 2)), ((2,), (0, 1)), ((1,), (1,))])
def test_microbatches_without_a_backward_on_some_ranks(pool, backwards):
    model = two_layers(0)
    for number in (number for mine in backwards for number in mine):
        model(rows(number)).square().sum().backward()
    grads, _ = assembled(pool.run(2, backwards_under_no_sync, backwards))
    for name, param in model.named_parameters():
        assert (grads[name] - param.grad / 2).abs().max() <= 1e-12 * param.grad.abs().max()


def test_an_evaluation_before_a_backward_that_some_ranks_leave_out(pool):
    pool.run(2, backward_on_some, "+0 ?1 -0", "-0", timeout=2.0)


def layers_by_hand(run):
    """Layers are called one by one, the module itself never; rank 1 has no backward."""
    model = two_layers(0)
    handle = stage3.wrap(model, run.world)
    loss = model[1](model[0](rows(0))).sum()
    if run.rank == 0:
        loss.backward()
    handle.finish()


def test_layers_called_by_hand_without_a_backward_on_some_ranks(pool):
    pool.run(2, layers_by_hand, timeout=2.0)


class Order(nn.Module):
    """Layers in this order; the numbers of `skipped` on odd ranks not at all."""

    def __init__(self):
        super().__init__()
        self.layers = vectors("3 4 5")

    def forward(self, x, order):
        for i in order:
            x = self.layers[i](x)
        return x


def another_order(run, order):
    model = Order()
    handle = stage3.wrap(model, run.world)
    with pytest.raises(ValueError) as error:
        model(torch.ones((), dtype=F64), order)
    assert handle.layers[handle.program.at].name in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("order", "first", "second"), [((0, 1, 1), 1, 1), ((0, 2, 1), 1, 2), ((1, 0), 0, 1), ((0, 1, 2, 0), 0, 2)]
)
def test_layers_twice_or_in_another_order_are_refused(pool, order, first, second):
    """Naming both, on every rank."""
    message = (
        f"stage 3 gathers each layer once a forward, in one order, but layers.{first} runs after layers.{second}: "
        "leave it out of `layers`, then it stays whole"
    )
    assert pool.run(2, another_order, order, timeout=10.0) == [message] * 2


def in_layers_order(run, chosen, order):
    """The remedy: layers in the order in which they run, or left out. Gradients, twice."""
    model, steps = Order(), []
    handle = stage3.wrap(model, run.world, layers=[model.layers[i] for i in chosen], average=False)
    for _ in range(2):
        for shard in handle.parameters():
            shard.grad = None
        model(torch.tensor(10.0**run.rank, dtype=F64), order).backward()
        handle.finish()
        steps.append(pieces(handle))
    return steps


@pytest.mark.parametrize(
    ("chosen", "order"), [((2, 0, 1), (2, 0, 1)), ((0, 2), (0, 1, 2, 1)), ((), (1, 0, 1, 2)), ((1,), (2, 1, 0, 2))]
)
def test_layers_may_be_chosen(pool, chosen, order):
    model = Order()
    model(torch.tensor(11.0, dtype=F64), order).backward()
    for ranks in zip(*pool.run(2, in_layers_order, chosen, order), strict=True):
        grads, _ = assembled(ranks)
        for name, param in model.named_parameters():
            assert torch.allclose(grads[name], param.grad, rtol=1e-12)


class Skipping(nn.Module):
    """The first layer has two outputs, one of which is used at the very end."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            return {"on": y * 2, "skip": [torch.tanh(y)]}

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Skipping.First(), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        out = self.first(x)
        return self.third(torch.tanh(self.second(out["on"]))) + out["skip"][0]


def skipping(run, x):
    torch.manual_seed(run.rank)
    model = Skipping().double()
    handle = stage3.wrap(model, run.world)
    model(x).square().sum().backward()
    handle.finish()
    return pieces(handle)


def test_an_output_that_skips_layers(pool):
    torch.manual_seed(0)
    model, x = Skipping().double(), torch.randn(4, 3, dtype=F64)
    model(x).square().sum().backward()
    grads, _ = assembled(pool.run(2, skipping, x))
    for name, param in model.named_parameters():
        assert (grads[name] - param.grad).abs().max() <= 1e-12 * param.grad.abs().max()


class Fails(nn.Module):
    """A layer that raises on some ranks in the first forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.fails = nn.Parameter(torch.ones((), dtype=F64)), True

    def forward(self, x):
        failing, self.fails = self.fails, False
        if failing and x > 5:
            raise ZeroDivisionError
        return self.weight * x


def raises_in_forward(run, quiet):
    """Rank 1's first forward breaks off in the second of three layers; then all train on. The gradients."""
    model = nn.Sequential(Fails(), Fails(), Fails())
    model[0].fails = model[2].fails = False
    handle = stage3.wrap(model, run.world, average=False)
    breaks_off = pytest.raises(ZeroDivisionError) if run.rank == 1 else contextlib.nullcontext()
    with breaks_off, handle.no_sync() if quiet else contextlib.nullcontext():
        model(torch.tensor(10.0**run.rank, dtype=F64)).backward()
    handle.finish()
    for shard in handle.parameters():
        shard.grad = None
    model(torch.tensor(10.0**run.rank, dtype=F64)).backward()
    handle.finish()
    return pieces(handle)


@pytest.mark.parametrize("quiet", [True, False])
def test_a_step_after_a_forward_that_raised_on_one_rank(pool, quiet):
    grads, _ = assembled(pool.run(2, raises_in_forward, quiet))
    assert [grad.item() for grad in grads.values()] == [11.0] * 3


def sub_module(run):
    """A layer called by itself, right after a step; then a step."""
    model = two_layers(0)
    handle = stage3.wrap(model, run.world)
    model(rows(0)).sum().backward()
    handle.finish()
    handle.after_step()
    with torch.no_grad():
        out = model[0](rows(1))
    for shard in handle.parameters():
        shard.grad = None
    model(rows(0)).sum().backward()
    handle.finish()
    return out, pieces(handle)


def test_a_layer_by_itself(pool):
    """T50."""
    model = two_layers(0)
    model(rows(0)).sum().backward()
    outs, held = zip(*pool.run(2, sub_module), strict=True)
    assert all(torch.equal(out, model[0](rows(1))) for out in outs)
    grads, _ = assembled(held)
    assert all(torch.allclose(grads[name], param.grad, rtol=1e-12) for name, param in model.named_parameters())


# -- what stays whole --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Input and output share a weight (T44); a layer of three sizes; a parameter in no layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": nn.RMSNorm(4)})
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        x = self.middle["norm"](self.middle["linear"](self.embed(ids)))
        return self.head(self.inner(x)) * self.scale


def kept(run, threshold):
    """Names of the parameters that have memory between steps; the optimizer's values after three steps."""
    torch.manual_seed(run.rank)
    model = Tied().double()
    handle = stage3.wrap(model, run.world, average=False, threshold=threshold)
    optimizer = torch.optim.SGD(handle.parameters(), lr=1e-3, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([step, run.rank + 3])).square().sum().backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
    whole = [name for name, param in model.named_parameters() if there(param)]
    with handle.whole():
        assert model.head.weight is model.embed.weight
        return whole, pieces(handle), snapshot(model)


@pytest.mark.parametrize(
    ("threshold", "whole"),
    [
        (0, "embed.weight scale"),
        (3, "embed.weight scale"),
        (4, "embed.weight middle.linear.bias middle.norm.weight inner.bias scale"),
        (16, "embed.weight middle.linear.bias middle.norm.weight inner.bias inner.weight middle.linear.weight scale"),
    ],
)
def test_what_stays_whole(pool, threshold, whole):
    """What two layers share, what is in none, and what is small."""
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        sum(model(torch.tensor([step, rank + 3])).square().sum() for rank in range(2)).backward()
        optimizer.step()
    found, held, values = zip(*pool.run(2, kept, threshold), strict=True)
    assert all(set(names) == set(whole.split()) for names in found)
    _, shards = assembled(held)
    for name, param in model.named_parameters():
        assert (shards[name] - param).abs().max() <= 1e-12
        assert all(torch.equal(on_rank[name], shards[name]) for on_rank in values)


class Reused(nn.Module):
    """A tied layer and one of small weights run twice, and not in the order of their names."""

    def __init__(self):
        super().__init__()
        self.norm, self.head, self.embed = nn.RMSNorm(4), nn.Linear(4, 7, bias=False), nn.Embedding(7, 4)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.norm(self.embed(ids))))


def reused(run):
    model = Reused()
    handle = stage3.wrap(model, run.world, threshold=4)
    model(torch.arange(3)).sum().backward()
    handle.finish()
    return pieces(handle)


def test_layers_with_nothing_to_gather_may_run_twice(pool):
    pool.run(2, reused)


# -- reading and writing weights ---------------------------------------------------------------------------------------

READS = {
    "linear": lambda p: nn.functional.linear(torch.ones(1, 3), p),
    "embedding": lambda p: nn.functional.embedding(torch.ones(1, dtype=torch.int64), p),
    "an element": lambda p: p[0, 0],
    "sum": torch.sum,
    "copy": torch.clone,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
}


def read_freed(run):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    stage3.wrap(model, run.world)
    weight = model[0].weight
    assert weight.shape == (4, 3) and "nan" in repr(weight)
    with pytest.raises(RuntimeError):
        weight.data.copy_(torch.ones(4, 3))
    return [name for name, read in READS.items() if not read(weight).isnan().all()]


def test_freed_weights_read_as_not_a_number(pool):
    """Neither as what they were nor as what is at address 0."""
    assert pool.run(2, read_freed) == [[], []]


def state_outside(run):
    model = two_layers(0)
    handle = stage3.wrap(model, run.world)
    saved = two_layers(1).state_dict()
    for call in (model.state_dict, lambda: model.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match=r"weights are in shards: .* `with handle.whole\(\):`"):
            call()
    with handle.whole():
        model.state_dict()
    with pytest.raises(RuntimeError, match="weights are in shards"):
        model.state_dict()


def test_state_dicts_outside_of_whole_are_refused(pool):
    pool.run(2, state_outside)


def save_load_save(run):
    """T51: save, load something else and save at once, load the first again, save."""
    model, seen = two_layers(run.rank), []
    handle = stage3.wrap(model, run.world)
    for saved in (None, two_layers(7).state_dict(), two_layers(0).state_dict()):
        with handle.whole():
            if saved is not None:
                model.load_state_dict(saved)
            seen.append({name: value.clone() for name, value in model.state_dict().items()})
        seen.append((pieces(handle), model(rows(0)).detach()))
    return seen


def test_save_load_save(pool):
    """What was loaded is in the shards, and in the next forward."""
    for seen in zip(*pool.run(3, save_load_save), strict=True):
        [first, *_] = seen
        if isinstance(first, dict):
            assert all(torch.equal(saved[name], value) for saved in seen for name, value in first.items())
            expected = first
        else:
            held, outs = zip(*seen, strict=True)
            _, values = assembled(held)
            assert all(torch.equal(values[name], value) for name, value in expected.items())
            model = two_layers(0)
            model.load_state_dict(expected)
            assert all(torch.equal(out, model(rows(0))) for out in outs)


def written_by_hand(run):
    """One weight is written inside of whole, on all ranks."""
    model = two_layers(0)
    handle = stage3.wrap(model, run.world)
    with handle.whole(), torch.no_grad():
        model[1].weight[1, 2] = 5.0
    return pieces(handle)


def test_writing_by_hand(pool):
    _, values = assembled(pool.run(2, written_by_hand))
    expected = two_layers(0)[1].weight.detach().clone()
    expected[1, 2] = 5.0
    assert torch.equal(values["1.weight"], expected)


def forward_inside_whole(run):
    model = two_layers(0)
    handle = stage3.wrap(model, run.world)
    with handle.whole():
        out = model(rows(0)).detach()
        assert model[0].weight.isfinite().all()
    return out


def test_a_forward_inside_of_whole(pool):
    assert all(torch.equal(out, two_layers(0)(rows(0))) for out in pool.run(2, forward_inside_whole))


def raised_inside_whole(run):
    """After an error inside of whole: a step as usual, and what is left in memory."""
    model = two_layers(0)
    handle = stage3.wrap(model, run.world)
    with contextlib.suppress(ZeroDivisionError), handle.whole():
        raise ZeroDivisionError
    return [there(param) for param in model.parameters()]


def test_an_error_inside_of_whole_frees_the_weights(pool):
    assert pool.run(2, raised_inside_whole) == [[False] * 4] * 2


# -- driven from outside -----------------------------------------------------------------------------------------------


def driven(run, late):
    """Three microbatches with weights gathered once and gradients reduced once; in the second step hooks do it."""
    model = two_layers(0)
    handle, steps = stage3.wrap(model, run.world), []
    for step in range(2):
        for shard in handle.parameters():
            shard.grad = None
        with recording() as recorder:
            if step == 0:
                handle.unshard(model)
            for number in range(3):
                with contextlib.nullcontext() if number == 2 else handle.no_sync():
                    model(rows(number)).square().sum().backward()
            if step == 0 and not late:
                handle.reduce(model)
            if step == 0:
                handle.reshard(model)
            handle.finish()
        assert not any(there(param) for param in model.parameters())
        calls = [call.op.split("_single")[0] for call in recorder.calls if call.op != "all_reduce"]
        steps.append((pieces(handle), calls))
    return steps


@pytest.mark.parametrize("late", [False, True])
def test_driven_from_outside(pool, late):
    """As a pipeline does: two gathers, two reductions; what nobody reduced, finish does. Then hooks again."""
    model = two_layers(0)
    for number in range(3):
        model(rows(number)).square().sum().backward()
    expected = 2 * ["all_gather"] + 2 * ["reduce_scatter"]
    usual = 3 * (2 * ["all_gather"] + ["all_gather", "reduce_scatter"] * 2)
    for step, ranks in enumerate(zip(*pool.run(2, driven, late), strict=True)):
        held, calls = zip(*ranks, strict=True)
        grads, _ = assembled(held)
        assert [sorted(mine) for mine in calls] == [sorted(usual if step else expected)] * 2
        for name, param in model.named_parameters():
            assert (grads[name] - param.grad).abs().max() <= 1e-12 * param.grad.abs().max()


def parts_of_a_model(run):
    """Which layers are gathered when a part is; stages 0 to 2 have nothing to do."""
    model = nn.Sequential(two_layers(0), two_layers(1))
    handle = stage3.wrap(model, run.world)
    handle.unshard(model[1])
    seen = [there(param) for param in model.parameters()]
    handle.reshard(model[1][0])
    seen += [there(param) for param in model.parameters()]
    other = stage1.wrap(two_layers(0), run.world)
    with recording() as recorder:
        for call in (other.unshard, other.reduce, other.reshard):
            call(model)
    return seen, len(recorder.calls)


def test_parts_of_a_model(pool):
    expected = [False] * 4 + [True] * 4 + [False] * 6 + [True] * 2
    assert pool.run(2, parts_of_a_model) == [(expected, 0)] * 2
