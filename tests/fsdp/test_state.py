"""The state: whole, as boxes that go on at any number of ranks, and in the middle of a step."""

import contextlib

import pytest
import torch
from torch import nn

from collectives import boxed, comm
from collectives.host import Pool
from fsdp import MixedPrecision
from tests.fsdp.models import F64, check_grads, sharded
from tests.shards import assembled, pieces, snapshot
from tests.zero import test_boxed
from tests.zero.test_boxed import copied, whole
from tests.zero.versions import drilled
from zero import stage1, stage3

ZERO = {"zero 1": stage1.wrap, "zero 3": stage3.wrap}


class Model(test_boxed.Model):
    """Sizes that divide by nothing, a scalar, a part that is never used, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(5, 2), requires_grad=False)
        self.register_buffer("table", torch.randn(3))

    def forward(self, ids):
        return super().forward(ids) + self.frozen.sum()


def built(run, kind, seed=0):
    torch.manual_seed(seed)
    model = Model().double()
    if isinstance(kind, str):
        handle = ZERO[kind](model, run.world, average=False)
    else:
        handle = sharded(run, model, [model.up, model.unused], **kind)
    return model, handle, handle.optimizer(torch.optim.AdamW(handle.parameters(), lr=0.05, eps=1e-4))


def weights(model, handle):
    with handle.whole():
        return snapshot(model)


def gathered(run, handle, optimizer):
    return boxed.merged(comm.all_gather_object(copied(boxed.save(handle.parameters(), optimizer)), group=run.world))


def trained(run, kind, more):
    """Three steps, the state of all ranks, and the weights after `more` steps."""
    model, handle, optimizer = built(run, kind)
    test_boxed.steps(run, model, handle, optimizer, range(3))
    state = gathered(run, handle, optimizer)
    test_boxed.steps(run, model, handle, optimizer, range(3, 3 + more))
    return state, weights(model, handle)


def resumed(run, kind, state, more):
    """The weights after `more` steps from this state, and the state at once after loading it."""
    model, handle, optimizer = built(run, kind, seed=5)
    boxed.load(state, handle.parameters(), optimizer)
    handle.after_load()
    again = gathered(run, handle, optimizer)
    test_boxed.steps(run, model, handle, optimizer, range(3, 3 + more))
    return weights(model, handle), again


CHANGES = [
    (({}, 4), ({}, 3)),
    (({"reshard_after_forward": True}, 3), ("zero 3", 2)),
    (("zero 1", 3), ({}, 2)),
    (("zero 3", 2), ({"reshard_after_forward": False}, 3)),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [*CHANGES[:3], drilled(*CHANGES[3])],
)
def test_goes_on_anywhere(pool, before, after):
    state, straight = pool.run(before[1], trained, before[0], 3)[0]
    for ours, again in pool.run(after[1], resumed, after[0], state, 3):
        for name, expected in straight.items():
            assert (ours[name] - expected).abs().max() <= 1e-12 * expected.abs().max(), name
        saved, loaded = whole(state), whole(again)
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(value, loaded[key]) for key, value in saved.items())


# -- whole -------------------------------------------------------------------------------------------------------------


def saves(run, settings):
    """T51: save; load something else and save at once, twice; and what the next forward makes of it."""
    ids, seen = torch.arange(11), []
    model, handle, _ = built(run, settings, seed=run.rank)
    for seed in (None, 7, 0):
        with handle.whole():
            if seed is not None:
                torch.manual_seed(seed)
                assert str(model.load_state_dict(Model().double().state_dict())) == "<All keys matched successfully>"
            saved = model.state_dict()
            again = model.state_dict()
        assert list(saved) == list(Model().state_dict()) and all(torch.equal(saved[n], again[n]) for n in saved)
        with torch.no_grad():
            saved["table"] = saved["table"].clone()  # a buffer is itself, as in any state dict
            seen.append((saved, pieces(handle), model(ids)))
    return seen


@pytest.mark.parametrize("ranks", [1, 3])
def test_save_load_save(pool, ranks):
    """A state dict outlives the weights; it is that of a plain module."""
    for seed, on_ranks in zip((0, 7, 0), zip(*pool.run(ranks, saves, {}), strict=True), strict=True):
        torch.manual_seed(seed)
        model = Model().double()
        saved, held, outs = zip(*on_ranks, strict=True)
        _, values = assembled(held)
        for name, value in model.state_dict().items():
            assert all(torch.equal(state[name], value) for state in saved)
            assert name == "table" or torch.equal(values[name], value)
        assert all(torch.equal(out, model(torch.arange(11))) for out in outs)


FULL = {
    "default": {"shard_dim": lambda name, tensor: max(0, tensor.dim() - 1)},
    "keep": {"reshard_after_forward": False},
    "mixed": {"mixed_precision": MixedPrecision(param=torch.bfloat16)},
    "offload": {"offload": Pool(torch.device("cpu"))},
}
WRONG = {"up.bias": "[37]", "frozen": "[5, 2]"}  # in a state that does not fit


def full_states(run, kind):
    """The whole state after a step, and what this rank held; of a module with other weights, which still has those of
    its last forward, the same after it took that state, and the outputs of both; what it refuses, and what it has then.
    """
    model, handle, optimizer = built(run, FULL[kind])
    test_boxed.steps(run, model, handle, optimizer, range(1))
    other, taking, _ = built(run, FULL[kind], seed=5)
    state, ids = handle.full_state(), torch.arange(11)
    with torch.no_grad():
        other(ids)
        taking.load_full_state(state)
        outs = model(ids), other(ids)
    refused = []
    for wrong in ({**state, "up.bias": state["down.bias"]}, {n: v + 1 for n, v in state.items() if n != "frozen"}):
        with pytest.raises(ValueError) as error:
            taking.load_full_state(wrong)
        refused.append(str(error.value))
    return state, pieces(handle), pieces(taking), outs, refused


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("ranks", [drilled(1), 3])
def test_the_full_state_is_all_pieces_and_back(pool, ranks, kind):
    """With mixed precision the masters to the last bit. A state that does not fit changes nothing."""
    states, held, taken, outs, refused = zip(*pool.run(ranks, full_states, kind), strict=True)
    (_, values), (_, again) = assembled(held), assembled(taken)
    names = [name for name, _ in Model().named_parameters()]
    for state in states:
        assert list(state) == names and all(value.dtype == F64 for value in state.values())
        assert all(torch.equal(state[name], values[name]) and torch.equal(again[name], values[name]) for name in names)
    assert all(torch.equal(first, second) for first, second in outs)
    told = [f"the state has no {name} of shape {shape}: is it of this model?" for name, shape in WRONG.items()]
    assert refused == (told,) * ranks


def part_of_a_state(run):
    """Of a sub-module, with keep_vars, into a module of its own; partly loaded, strict or not."""
    model, handle, _ = built(run, {})
    with handle.whole():
        up = nn.Linear(7, 37).double()
        up.load_state_dict(model.up.state_dict())
        model.down.load_state_dict({"bias": torch.ones(11, dtype=F64)}, strict=False)
    return pieces(handle), up.weight.detach()


def test_a_part_of_a_state(pool):
    torch.manual_seed(0)
    model = Model().double()
    held, copies = zip(*pool.run(2, part_of_a_state), strict=True)
    _, values = assembled(held)
    assert all(torch.equal(copy, model.up.weight) for copy in copies)
    assert values["down.bias"].eq(1).all() and torch.equal(values["down.weight"], model.down.weight)


def two_layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(number):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(number), dtype=F64)


def between(run, what, settings):
    """T50: something between the forward and the backward of the second step."""
    model = two_layers()
    handle = sharded(run, model, [model[0], model[2]], **settings)
    optimizer, seen = torch.optim.SGD(handle.parameters(), lr=0.1), []
    for step in range(2):
        optimizer.zero_grad()
        loss = model(batch(10 * step + run.rank)).square().sum()
        if what == "export":
            with handle.whole():
                seen.append(model.state_dict())
        elif what == "part":
            with torch.no_grad():
                seen.append(model[0](batch(7)))
        elif what == "evaluate":
            with torch.no_grad(), handle.no_sync():
                seen.append(model(batch(7)))
        loss.backward()
        handle.finish()
        held = pieces(handle)
        optimizer.step()
        handle.after_step()
    return held, seen


@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": True, "prefetch": 2}, {"reshard_after_forward": False}]
)
@pytest.mark.parametrize("what", ["export", "part", "evaluate"])
def test_between_forward_and_backward(pool, what, settings):
    model, true = two_layers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            model(batch(10 * step + rank)).square().sum().backward()
        with torch.no_grad():
            part = {"part": model[0], "evaluate": model}.get(what)
            true.append(part(batch(7)) if part else {name: v.clone() for name, v in model.state_dict().items()})
        grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
    held, seen = zip(*pool.run(2, between, what, settings), strict=True)
    check_grads(assembled(held)[0], grads)
    for mine in seen:
        for ours, expected in zip(mine, true, strict=True):
            pairs = zip(ours.values(), expected.values(), strict=True) if what == "export" else [(ours, expected)]
            assert all((a - b).abs().max() <= 1e-12 for a, b in pairs)


def masters(run):
    """Masters that round to their bfloat16 weights survive a state dict that is loaded again; others are replaced."""
    model = two_layers().float()
    handle = sharded(run, model, [model[0]], mixed_precision=MixedPrecision(param=torch.bfloat16))
    before = pieces(handle)
    with handle.whole():
        saved = model.state_dict()
        model.load_state_dict(saved)
    same = pieces(handle)
    with handle.whole():
        model.load_state_dict({name: value + 1 for name, value in saved.items()})
    return before, same, pieces(handle), {name: value.dtype for name, value in saved.items()}


def test_masters_stay_under_their_own_weights(pool):
    before, same, other, dtypes = zip(*pool.run(2, masters), strict=True)
    first, second, third = (assembled(held)[1] for held in (before, same, other))
    assert {dtype for mine in dtypes for dtype in mine.values()} == {torch.bfloat16}
    for name, value in first.items():
        assert torch.equal(second[name], value)
        assert torch.equal(third[name], (value.bfloat16() + 1).float())


def written_where_it_was(run):
    """Into weights that a forward before has left there."""
    model = two_layers()
    handle = sharded(run, model, [model[0]], reshard_after_forward=False)
    model(batch(run.rank))
    with handle.whole(), torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    return [float(shard.min()) for shard in handle.parameters() if len(shard)]


def test_what_is_written_into_weights_that_are_kept(pool):
    assert pool.run(2, written_where_it_was) == [[2.0] * 4] * 2


def left(run, settings):
    """An error inside of whole: what has memory afterwards, and a step."""
    model = two_layers()
    handle = sharded(run, model, [model[0], model[2]], **settings)
    with contextlib.suppress(ZeroDivisionError), handle.whole():
        raise ZeroDivisionError
    there = [bool(param.isfinite().all()) for param in model.parameters()]
    model(batch(run.rank)).sum().backward()
    handle.finish()
    return there


def test_an_error_inside_of_whole_frees_the_weights(pool):
    assert pool.run(2, left, {}) == [[False] * 4] * 2
