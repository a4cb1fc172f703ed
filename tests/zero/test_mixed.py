"""Mixed precision: float32 masters in the shards, 16-bit weights that are the masters rounded, sums in 32 bits."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from collectives import norm
from tests.shards import assembled, pieces, snapshot
from tests.zero.versions import STAGES, VERSIONS, drilled, each_stage, each_version, vectors
from zero import Mixed

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
UPDATES = 20  # of 6e-4, each less than half of the last place of a 1 in bfloat16


def digits(run, wrap, mixed, numbers, *, microbatches, average):
    """What this rank holds when its gradient is numbers[rank] in each of these microbatches."""
    model = vectors("5 3", F32)
    handle = wrap(model, run.world, mixed=mixed, average=average)
    for micro in range(microbatches):
        with handle.no_sync() if micro < microbatches - 1 else contextlib.nullcontext():
            model(torch.tensor(numbers[run.rank], dtype=mixed.weights)).backward()
    handle.finish()
    return pieces(handle)


def sums(pool, wrap, mixed, numbers, *, microbatches=1, average=False):
    """The one value, and the dtype, of all gradients."""
    job = functools.partial(digits, microbatches=microbatches, average=average)
    grads, _ = assembled(pool.run(len(numbers), job, wrap, mixed, numbers))
    [value] = {value for grad in grads.values() for value in grad.tolist()}
    [dtype] = {grad.dtype for grad in grads.values()}
    return value, dtype


@pytest.mark.parametrize(("weights", "number", "microbatches"), [(BF16, 1.0, 512), (F16, 1 + 2**-10, 3)])
@each_stage
def test_microbatches_are_added_in_32_bits(pool, wrap, weights, number, microbatches):
    """T52: in bfloat16 256 + 1 is 256; float16 has no 3 + 3 · 2^-10."""
    assert sums(pool, wrap, Mixed(weights=weights), (number,), microbatches=microbatches) == (
        microbatches * number,
        F32,
    )


@each_stage
def test_260_microbatches_in_bfloat16_stay_at_256(pool, wrap):
    """What the setting above is for."""
    assert sums(pool, wrap, Mixed(gradients=BF16), (1.0,), microbatches=260) == (256.0, BF16)


@each_version
def test_microbatches_of_several_ranks_are_added_in_32_bits(pool, wrap):
    assert sums(pool, wrap, Mixed(), (64.0, 1.0), microbatches=5, average=True) == (5 * 65 / 2, F32)


@pytest.mark.parametrize(
    ("numbers", "in_32", "in_16"),
    [((256.0, 1.0), 257.0, 256.0), ((256.0, 1.0, 1.0), 258.0, 258.0), ((256.0, *[1.0] * 3), 259.0, 260.0)],
)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_are_added_in_32_bits(pool, stage, numbers, in_32, in_16):
    """T53. Gradients that travel in 16 bits are added in 32 and rounded once, to an even last digit."""
    assert sums(pool, STAGES[stage], Mixed(), numbers) == (in_32, F32)
    assert sums(pool, STAGES[stage], Mixed(gradients=BF16), numbers) == (in_16, BF16)


@pytest.mark.parametrize("gradients", [F16, F32])
@pytest.mark.parametrize(("ranks", "number"), [drilled(2, 40000.0), (4, 20000.0), drilled(8, 10000.0)])
@each_stage
def test_a_mean_in_float16_does_not_overflow(pool, wrap, ranks, number, gradients):
    """T57: 80,000 would."""
    mixed = Mixed(weights=F16, gradients=gradients)
    assert sums(pool, wrap, mixed, (number,) * ranks, average=True) == (number, gradients)


def small_updates(run, wrap, mixed):
    """T54. Updates of 6e-4 on a weight of 1: masters and weights."""
    model = vectors("5 3", F32)
    handle = wrap(model, run.world, mixed=mixed)
    optimizer = torch.optim.SGD(handle.parameters(), lr=6e-4)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        model(torch.ones((), dtype=BF16)).backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
    with handle.whole():
        return pieces(handle), snapshot(model)


@each_stage
def test_small_updates_are_not_lost(pool, wrap):
    held, weights = zip(*pool.run(2, small_updates, wrap, Mixed()), strict=True)
    master = torch.tensor(1.0)
    for _ in range(UPDATES):
        master -= 6e-4
    assert abs(master.item() - 0.988) < 1e-5
    _, masters = assembled(held)
    for name, value in masters.items():
        assert value.dtype == F32 and value.eq(master).all()
        assert all(w[name].dtype == BF16 and w[name].eq(master.bfloat16()).all() for w in weights)


def test_small_updates_of_16_bits_are_lost():
    weight = torch.ones(3, dtype=BF16)
    for _ in range(UPDATES):
        weight -= 6e-4
    assert weight.eq(1).all()


class Dense(nn.Module):
    """Two layers and a parameter of its own, of sizes that do not divide."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.shift = nn.Linear(5, 7), nn.Linear(7, 3), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) + self.shift


def trained(run, wrap, mixed, microbatches):
    """Of each of three clipped steps what this rank holds, and the weights."""
    torch.manual_seed(run.rank)
    model, steps = Dense(), []
    handle = wrap(model, run.world, mixed=mixed)
    optimizer = torch.optim.AdamW(handle.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(microbatches):
            with handle.no_sync() if micro < microbatches - 1 else contextlib.nullcontext():
                model(rows(step, micro, run.rank).to(mixed.weights)).square().sum().backward()
        handle.finish()
        held = pieces(handle)
        norm.clip(handle.parameters(), norm.grad_norm(handle.parameters(), group=run.world), 1.0)
        optimizer.step()
        handle.after_step()
        with handle.whole():
            steps.append((held, pieces(handle), snapshot(model)))
    return steps


def rows(step, micro, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def trained_alone(mixed, ranks, microbatches):
    """The same by one process: a 16-bit model for each rank's microbatches, float32 masters beside it."""
    torch.manual_seed(0)
    masters, model = Dense(), Dense().to(mixed.weights)
    optimizer, steps = torch.optim.AdamW(masters.parameters(), lr=0.01), []
    model.load_state_dict(masters.state_dict())
    for step in range(3):
        sums = {name: torch.zeros_like(param) for name, param in masters.named_parameters()}
        for rank in range(ranks):
            for micro in range(microbatches):
                model.zero_grad()
                model(rows(step, micro, rank).to(mixed.weights)).square().sum().backward()
                for name, param in model.named_parameters():
                    sums[name] += param.grad.float() / ranks
        for name, param in masters.named_parameters():
            param.grad = sums[name].clone()
        nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()
        model.load_state_dict(masters.state_dict())
        steps.append((sums, snapshot(masters), snapshot(model)))
    return steps


@pytest.mark.parametrize("weights", [BF16, drilled(F16)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 3), drilled(2, 1), drilled(1, 3), drilled(3, 1)])
@each_stage
def test_training_is_that_of_one_process(pool, wrap, ranks, weights, microbatches):
    """Masters within float32's rounding errors; weights are the masters rounded, on every rank. A 16-bit weight that
    rounds another way changes the next gradients, so only the first step's are judged closely.
    """
    mixed = Mixed(weights=weights)
    expected = trained_alone(mixed, ranks, microbatches)
    for step, on_ranks in enumerate(zip(*pool.run(ranks, trained, wrap, mixed, microbatches), strict=True)):
        before, after, whole = zip(*on_ranks, strict=True)
        grads, _ = assembled(before)
        _, masters = assembled(after)
        true_grads, true_masters, _ = expected[step]
        for name, master in masters.items():
            assert master.dtype == grads[name].dtype == F32
            assert all(torch.equal(weights_of[name], master.to(weights)) for weights_of in whole)
            if step == 0:
                assert (grads[name] - true_grads[name]).abs().max() <= 1e-6 * true_grads[name].abs().max()
                assert (master - true_masters[name]).abs().max() <= 1e-6
            assert (master - true_masters[name]).abs().max() <= 2e-3  # of steps of 1e-2


@pytest.mark.parametrize("ranks", [drilled(2), 3])
def test_all_stages_have_the_same_bits_after_one_microbatch(pool, ranks):
    results = [pool.run(ranks, trained, wrap, Mixed(), 1) for wrap in VERSIONS.values()]
    first, *others = [assembled([steps[0][0] for steps in ranks_of])[0] for ranks_of in results]
    for grads in others:  # of the first step: then norms of different cuts, and what they clip, may differ by an ulp
        assert all(torch.equal(grads[name], grad) for name, grad in first.items())


def loaded(run, wrap, mixed):
    """Loading into the module, in a part of which nothing changes: masters after wrap and after loading, and after an
    update by nothing.
    """
    torch.manual_seed(run.rank)
    model = Dense()
    handle = wrap(model, run.world, mixed=mixed)
    before = pieces(handle)
    with handle.whole():
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["second.weight"] = torch.full((3, 7), 1 / 3)
        state["shift"][1] += 1.0
        model.load_state_dict(state)
    after = pieces(handle)
    handle.after_step()
    with handle.whole():
        return before, after, snapshot(model)


@each_version
def test_masters_follow_what_is_loaded(pool, wrap):
    """And keep their 32 bits where what is loaded is what they round to."""
    before, after, wholes = zip(*pool.run(3, loaded, wrap, Mixed()), strict=True)
    (_, old), (_, new) = assembled(before), assembled(after)
    torch.manual_seed(0)
    assert all(torch.equal(old[name], param) for name, param in Dense().named_parameters())
    third = torch.tensor(1 / 3).bfloat16()
    assert new["second.weight"].eq(third.float()).all()
    assert new["shift"][1] == (old["shift"][1].bfloat16() + 1).float()
    assert torch.equal(new["shift"][[0, 2]], old["shift"][[0, 2]])
    assert all(torch.equal(new[name], old[name]) for name in ("first.weight", "first.bias", "second.bias"))
    for whole in wholes:
        assert all(torch.equal(whole[name], value.bfloat16()) for name, value in new.items())


def loaded_outside(run, wrap, whole):
    """load_state_dict outside of `whole`, of the module or of one layer of it; then an update by nothing."""
    model = Dense()
    handle = wrap(model, run.world, mixed=Mixed())
    state = {"weight": torch.full((3, 7), 1 / 3), "bias": torch.zeros(3)}
    if whole:
        model.load_state_dict(model.state_dict() | {f"second.{name}": value for name, value in state.items()})
    else:
        model.second.load_state_dict(state)
    handle.after_step()
    return model.second.weight.detach().float()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("stage", ["stage 0", "stage 1", "stage 2"])
def test_masters_follow_what_is_loaded_outside_of_whole(pool, stage, whole):
    for weight in pool.run(2, loaded_outside, STAGES[stage], whole):
        assert weight.eq(torch.tensor(1 / 3).bfloat16().float()).all()


def unfrozen(run, wrap):
    """A frozen layer of weights that bfloat16 cannot tell, unfrozen before the second step: masters, twice."""
    torch.manual_seed(0)
    model, steps = Dense(), []
    model.first.requires_grad_(False)
    handle = wrap(model, run.world, mixed=Mixed())
    optimizer = torch.optim.SGD(handle.parameters(), lr=2.0**-10)
    for step in range(3):
        model.first.requires_grad_(step > 0)
        optimizer.zero_grad()
        model(torch.ones(1, 5, dtype=BF16)).sum().backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
        steps.append(pieces(handle))
    return steps


@each_version
def test_a_frozen_layer_gets_masters_when_it_trains(pool, wrap):
    first, second, third = [assembled(ranks) for ranks in zip(*pool.run(2, unfrozen, wrap), strict=True)]
    assert first[0]["first.weight"] is None and first[1]["first.weight"].dtype in (BF16, F32)
    torch.manual_seed(0)
    assert torch.equal(first[1]["first.weight"].bfloat16(), Dense().first.weight.bfloat16())
    for (_, before), (grads, after) in ((first, second), (second, third)):
        assert after["first.weight"].dtype == F32 and grads["first.weight"].any()
        for name in ("first.weight", "first.bias"):
            assert torch.equal(after[name], before[name].float() - 2.0**-10 * grads[name])


class Counting(nn.Module):
    """A buffer that counts in 32 bits."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count += 256 + x.float()
        return x * self.weight


def buffers(run, wrap):
    model = Counting()
    handle = wrap(model, run.world, mixed=Mixed())
    model(torch.full((3,), run.rank + 1.0, dtype=BF16)).sum().backward()
    handle.finish()
    return model.count.tolist(), model.count.dtype, model.weight.dtype


@each_stage
def test_buffers_keep_their_dtype(pool, wrap):
    """They are not cast: a module says itself in what it keeps them."""
    assert pool.run(2, buffers, wrap) == [([257.0] * 3, F32, BF16)] * 2


def not_zeroed(run, wrap):
    """Two steps without zero_grad, in bfloat16 gradients on float32 masters."""
    model = vectors("5 3", F32)
    handle = wrap(model, run.world, mixed=Mixed(gradients=BF16), average=False)
    for _ in range(2):
        model(torch.tensor(2.0**run.rank, dtype=BF16)).backward()
        handle.finish()
    return pieces(handle)


@each_stage
def test_gradients_of_16_bits_that_are_not_zeroed(pool, wrap):
    grads, _ = assembled(pool.run(2, not_zeroed, wrap))
    assert all(grad.dtype == BF16 and grad.eq(6).all() for grad in grads.values())
