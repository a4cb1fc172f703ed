"""What a module may do with its inputs, and what it may not do with itself; what may not be called inside `whole`."""

import gc
import weakref

import pytest
import torch
from torch import nn

from fsdp import fully_shard
from tests.shards import assembled, pieces


class Router(nn.Module):
    """Puts a loss aside in a list of the caller's, and its output in a dict."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x, aside, cache):
        aside.append(self.gate(x).square().sum())
        cache[len(cache)] = y = torch.tanh(self.up(x))
        return y


class Routers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(3))

    def forward(self, x):
        aside, cache = [], {}
        for layer in self.layers:
            x = layer(x, aside, cache)
        return x.sum() + sum(aside) + sum(value.sum() for value in cache.values())


def routers():
    torch.manual_seed(0)
    return Routers(), torch.randn(4, 3, 4, dtype=torch.float64)


def routed(run):
    model, rows = routers()
    for layer in model.layers:
        fully_shard(layer, run.world, average=False)
    handle = fully_shard(model, run.world, average=False)
    with torch.no_grad():
        before = model(rows[run.rank])
    loss = model(rows[run.rank])
    loss.backward()
    handle.finish()
    return before, loss.detach(), pieces(handle)


def test_lists_and_dicts_are_the_callers(pool):
    model, rows = routers()
    losses = [model(rows[rank]) for rank in range(2)]
    sum(losses).backward()
    ranks = pool.run(2, routed)
    for (before, loss, _), expected in zip(ranks, losses, strict=True):
        assert torch.equal(before, expected) and torch.equal(loss, expected)
    grads, _ = assembled([held for _, _, held in ranks])
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)


class Remembers(nn.Module):
    """Knows what it has returned, for as long as somebody keeps it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        out = self.weight * x
        self.returned = weakref.ref(out)
        return out


def dropped(run):
    model = nn.Sequential(*(Remembers() for _ in range(3)))
    for layer in model:
        fully_shard(layer, run.world)
    handle = fully_shard(model, run.world)
    gc.disable()
    try:
        model(torch.ones(4, requires_grad=True)).sum()
        return [layer.returned() for layer in model], handle.finish()
    finally:
        gc.enable()


def test_a_forward_without_a_backward_leaves_nothing(pool):
    assert pool.run(2, dropped) == [([None] * 3, None)] * 2


class Counts(nn.Module):
    """Has a buffer of its own."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.tensor(value))

    def forward(self, x):
        return self.weight * x


def experts(run):
    everyone = [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [group for ranks in everyone if (group := run.new_group(ranks)) is not None]
    model = nn.Sequential(Counts(float(run.rank)), Counts(10.0 + run.rank))
    fully_shard(model[1], groups[1])  # an expert of two, on ranks 0 and 2, or 1 and 3
    handle = fully_shard(model, groups[0], replicate_group=groups[1])
    counts = [part.count.item() for part in model]
    for part in model:
        part.count.fill_(100 * part.count + run.rank)
    handle.finish()
    return counts, [part.count.item() for part in model]


def test_buffers_are_those_of_the_units_own_group(pool):
    ranks = pool.run(4, experts)
    assert [counts for counts, _ in ranks] == [[0.0, 10.0], [0.0, 11.0]] * 2
    assert [counts for _, counts in ranks] == [[0.0, 1000.0], [0.0, 1101.0]] * 2


def empty(run):
    model = nn.Sequential(nn.Linear(0, 3, bias=False), nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer, run.world)
    handle = fully_shard(model, run.world)
    model(torch.ones(2, 0)).sum().backward()
    handle.finish()
    return [(tuple(shard.shape), shard.grad is not None) for shard in handle.parameters()]


def test_a_unit_whose_weights_have_no_elements(pool):
    assert pool.run(2, empty) == [
        [((2, 0), True), ((2, 3), True), ((2,), True)],
        [((1, 0), True), ((1, 3), True), ((1,), True)],
    ]


class Nested(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, depth=2):
        return self.weight * (self(x, depth - 1) if depth else x)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if x is None:
            raise KeyError("no rows")
        return self.weight * x


def recursive(run):
    handle = fully_shard(model := Nested(), run.world)
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(4))
    del handle
    return str(error.value)


def test_a_unit_inside_of_itself_is_refused(pool):
    assert set(pool.run(2, recursive)) == {"Nested runs inside of itself: leave it to the unit around it"}


def failing(run):
    handle = fully_shard(model := Fails(), run.world)
    with pytest.raises(KeyError):
        model(None)
    out = model(torch.ones(4))
    handle.after_step()
    return out.detach()


def test_after_an_error_a_unit_runs_again(pool):
    assert all(torch.equal(out, torch.ones(4)) for out in pool.run(2, failing))


CALLS = {
    "finish": lambda handle, model: handle.finish(),
    "after_step": lambda handle, model: handle.after_step(),
    "after_load": lambda handle, model: handle.after_load(),
    "reshard": lambda handle, model: handle.reshard(model),
    "load_full_state": lambda handle, model: handle.load_full_state({"weight": torch.ones(4)}),
}


def opened(run, name):
    handle = fully_shard(model := Fails(), run.world)
    with handle.whole(), pytest.raises(RuntimeError) as error:
        CALLS[name](handle, model)
    return str(error.value), handle.full_state()["weight"]


@pytest.mark.parametrize("name", CALLS)
def test_what_frees_weights_is_refused_inside_of_whole(pool, name):
    for told, weight in pool.run(2, opened, name):
        assert told == "inside of `with handle.whole():` weights stay: call this after it"
        assert torch.equal(weight, torch.ones(4))


class Again(nn.Module):
    """One layer twice, and between them one that not all rows need."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Fails() for _ in range(2))

    def forward(self, x, skips):
        x = self.layers[0](x)
        return self.layers[0](x if skips else self.layers[1](x))


def mixed_up(run):
    model = Again()
    for layer in model.layers:
        fully_shard(layer, run.world)
    handle = fully_shard(model, run.world, prefetch=0)
    model(torch.ones(4), run.rank == 1).sum().backward()
    with pytest.raises(RuntimeError) as error:
        handle.finish()
    return str(error.value)


def test_a_unit_that_runs_twice_around_one_that_some_skip_is_told(pool):
    expected = "layers.0 ran more than once, or before its turn, while ranks ran different units"
    assert all(told.startswith(expected) for told in pool.run(2, mixed_up))


class Cell(nn.Module):
    """A step over rows: with none, the state stays what it was."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, state, rows):
        return torch.tanh(self.weight * state + rows.sum(0)) if len(rows) else state


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.cell = nn.Parameter(torch.ones(4, dtype=torch.float64)), Cell()

    def forward(self, rows):
        state = self.start.exp()
        for _ in range(3):
            state = self.cell(state, rows)
        return state


def looped(run):
    fully_shard((model := Loop()).cell, run.world, average=False)
    handle = fully_shard(model, run.world, average=False, prefetch=0, reshard_after_forward=True)
    for _ in range(2):
        model(torch.ones(2 * (1 - run.rank), 4, dtype=torch.float64)).sum().backward()
    handle.finish()
    return pieces(handle)


def test_a_unit_that_returns_its_input_on_some_ranks(pool):
    """It runs three times, which only the second step knows beforehand."""
    model = Loop()
    for rows in (torch.ones(2, 4, dtype=torch.float64), torch.ones(0, 4)) * 2:
        model(rows).sum().backward()
    grads, _ = assembled(pool.run(2, looped))
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=0)
