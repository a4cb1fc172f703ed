"""Mixed precision: masters in the shards' dtype, weights that are the masters rounded, sums in the masters' digits."""

import contextlib

import pytest
import torch
from torch import nn

from fsdp import MixedPrecision
from tests.fsdp.models import sharded
from tests.recorder import recording
from tests.shards import assembled, pieces, snapshot
from tests.zero.versions import drilled, vectors

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LOW = MixedPrecision(param=BF16)  # what travels to be reduced is in float32
LOWER = MixedPrecision(param=BF16, reduce=BF16)


def digits(run, mixed, numbers, microbatches, settings):
    """What this rank holds when its gradient is numbers[rank] in each of these microbatches."""
    model = vectors("5 3", F32)
    handle = sharded(run, model, list(model), mixed_precision=mixed, **settings)
    for micro in range(microbatches):
        with handle.no_sync() if micro < microbatches - 1 else contextlib.nullcontext():
            model(torch.tensor(numbers[run.rank])).backward()
    handle.finish()
    return pieces(handle)


def every_time(run, mixed, numbers, microbatches, settings):
    """The same, reduced in each microbatch."""
    model = vectors("5 3", F32)
    handle = sharded(run, model, list(model), mixed_precision=mixed, **settings)
    for _ in range(microbatches):
        model(torch.tensor(numbers[run.rank])).backward()
    handle.finish()
    return pieces(handle)


def sums(pool, job, mixed, numbers, microbatches=1, **settings):
    """The one value of all gradients, which are in the shards' dtype."""
    grads, _ = assembled(pool.run(len(numbers), job, mixed, numbers, microbatches, settings))
    [value] = {value for grad in grads.values() for value in grad.tolist()}
    assert all(grad.dtype == F32 for grad in grads.values())
    return value


@pytest.mark.parametrize("job", [digits, every_time])
@pytest.mark.parametrize(("ranks", "mixed"), [(1, LOW), drilled(1, MixedPrecision(param=F16)), drilled(2, LOWER)])
def test_512_microbatches_are_added_in_32_bits(pool, job, ranks, mixed):
    """T52: in bfloat16 256 + 1 is 256."""
    assert sums(pool, job, mixed, (1.0,) * ranks, 512, average=True) == 512.0


@pytest.mark.parametrize(
    ("numbers", "in_32", "in_16"),
    [((256.0, 1.0), 257.0, 256.0), ((256.0, 1.0, 1.0), 258.0, 258.0), drilled((256.0, *[1.0] * 7), 263.0, 264.0)],
)
def test_ranks_are_added_in_32_bits(pool, numbers, in_32, in_16):
    """T53. Gradients that travel in 16 bits are added in 32 and rounded once, to an even last digit."""
    assert sums(pool, digits, LOW, numbers) == in_32
    assert sums(pool, digits, MixedPrecision(param=BF16, reduce=F32), numbers) == in_32
    assert sums(pool, digits, LOWER, numbers) == in_16


@pytest.mark.parametrize("reduce", [F16, F32, None])
@pytest.mark.parametrize("ranks", [2, drilled(8)])
def test_a_mean_in_float16_does_not_overflow(pool, ranks, reduce):
    """T57: 80,000 would."""
    mixed, each = MixedPrecision(param=F16, reduce=reduce), 80000.0 / ranks
    assert sums(pool, digits, mixed, (each,) * ranks, average=True) == each


def small_updates(run, mixed):
    """T54. A hundred updates of 6e-4 on a weight of 1: masters and weights."""
    model = vectors("5 3", F32)
    handle = sharded(run, model, list(model), mixed_precision=mixed, average=True)
    optimizer = torch.optim.SGD(handle.parameters(), lr=6e-4)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(())).backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
    with handle.whole():
        return pieces(handle), snapshot(model)


def test_small_updates_are_not_lost(pool):
    held, weights = zip(*pool.run(2, small_updates, LOW), strict=True)
    master = torch.tensor(1.0)
    for _ in range(100):
        master -= 6e-4
    assert abs(master.item() - 0.94) < 1e-5
    for name, value in assembled(held)[1].items():
        assert value.dtype == F32 and value.eq(master).all()
        assert all(w[name].dtype == BF16 and w[name].eq(master.bfloat16()).all() for w in weights)


class Sees(nn.Module):
    """Notes the dtypes of what comes in; integers and masks among it."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(5, 3), []

    def forward(self, x, ids, *, by_name):
        self.seen = [x.dtype, ids.dtype, by_name["mask"].dtype, by_name["y"].dtype, self.linear.weight.dtype]
        return self.linear(x + by_name["y"]), ids


def dtypes(run, mixed):
    model = Sees()
    handle = sharded(run, model, [], mixed_precision=mixed)
    x = torch.ones(2, 5, requires_grad=True)
    y, ids = model(x, torch.arange(2), by_name={"mask": torch.ones(2, dtype=torch.bool), "y": torch.ones(2, 5)})
    y.float().sum().backward()
    handle.finish()
    return model.seen, y.dtype, ids.dtype, {shard.grad.dtype for shard in handle.parameters()}, x.grad.dtype


@pytest.mark.parametrize("output", [None, F32, torch.float64])
def test_inputs_and_outputs_are_cast(pool, output):
    """Numbers with a fraction only. Gradients of inputs come in the inputs' own dtype."""
    mixed = MixedPrecision(param=BF16, reduce=F32, output=output)
    for seen, out, ids, grads, dx in pool.run(2, dtypes, mixed):
        assert seen == [BF16, torch.int64, torch.bool, BF16, BF16]
        assert (out, ids, grads, dx) == (output or BF16, torch.int64, {F32}, F32)


def on_the_wire(run, mixed):
    """(collective, elements, bytes an element) of a forward and a backward."""
    model = vectors("64 32", F32)
    handle = sharded(run, model, list(model), mixed_precision=mixed, reshard_after_forward=True)
    with recording() as recorder:
        model(torch.ones(())).backward()
    handle.finish()
    return [(call.op, call.elements, call.nbytes // call.elements) for call in recorder.calls]


@pytest.mark.parametrize(("mixed", "reduced"), [(LOW, 4), (LOWER, 2), (MixedPrecision(param=BF16, reduce=F32), 4)])
def test_bytes_on_the_wire(pool, mixed, reduced):
    """Weights in two bytes, gradients in two or four."""
    for calls in pool.run(2, on_the_wire, mixed):
        sizes = {op: {size for name, _, size in calls if name == op} for op, *_ in calls}
        assert sizes == {"all_gather_single": {2}, "reduce_scatter_single": {reduced}}
        assert sum(n for op, n, _ in calls if op == "all_gather_single") == 2 * 96
        assert sum(n for op, n, _ in calls if op == "reduce_scatter_single") == 96


class Several(nn.Module):
    """T60. A norm in float32, matrices in float64 and bfloat16, a count of whole numbers, all in one unit."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.rand(5) + 1)
        self.matrix, self.low = nn.Parameter(torch.randn(5, 5).double()), nn.Parameter(torch.randn(5, 3).bfloat16())
        self.count = nn.Parameter(torch.tensor([1 << 60, 3]), requires_grad=False)

    def forward(self, x):
        y = (x.float() * self.norm).double() @ self.matrix
        return y.bfloat16() @ self.low * (self.count[0] == 1 << 60)


def several(run):
    torch.manual_seed(run.rank)
    model, steps = Several(), []
    handle = sharded(run, model, [])
    optimizer = torch.optim.SGD(handle.parameters(), lr=2.0**-8, momentum=0.5)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + run.rank))
        model(x).float().sum().backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
        steps.append(pieces(handle))
    with handle.whole():
        return steps, {name: (value.dtype, value) for name, value in model.state_dict().items()}


def test_several_dtypes_in_one_unit(pool):
    torch.manual_seed(0)
    model = Several()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8, momentum=0.5)
    steps, states = zip(*pool.run(2, several), strict=True)
    for step, held in enumerate(zip(*steps, strict=True)):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).float().sum().backward()
        optimizer.step()
        grads, values = assembled(held)
        for name, param in model.named_parameters():
            assert values[name].dtype == param.dtype
            near = 1e-2 if step or param.dtype == BF16 else {F32: 1e-6}.get(param.dtype, 1e-12)
            assert (values[name] - param).abs().max() <= near
            assert param.grad is None or (grads[name] - param.grad).abs().max() <= near * param.grad.abs().max()
    for state in states:
        for name, (dtype, value) in state.items():
            assert dtype == model.state_dict()[name].dtype and torch.equal(value, values[name])


def whole_numbers(run, mixed):
    """Frozen whole numbers stay what they are under mixed precision."""
    model = nn.Module()
    model.count = nn.Parameter(torch.tensor([1 << 60, 3, -5]), requires_grad=False)
    model.weight = nn.Parameter(torch.ones(3))
    handle = sharded(run, model, [], mixed_precision=mixed)
    with handle.whole():
        return snapshot(model)


def test_frozen_whole_numbers(pool):
    for values in pool.run(2, whole_numbers, LOWER):
        assert values["count"].tolist() == [1 << 60, 3, -5] and values["weight"].dtype == BF16


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.shift = nn.Linear(5, 7), nn.Linear(7, 3), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) + self.shift


def rows(step, micro, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def trained(run, mixed, microbatches, sync):
    torch.manual_seed(run.rank)
    model, steps = Dense(), []
    handle = sharded(run, model, [model.first, model.second], mixed_precision=mixed)
    optimizer = torch.optim.AdamW(handle.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(microbatches):
            with handle.no_sync() if micro < microbatches - 1 and not sync else contextlib.nullcontext():
                model(rows(step, micro, run.rank)).float().square().sum().backward()
        handle.finish()
        before = pieces(handle)
        optimizer.step()
        handle.after_step()
        with handle.whole():
            steps.append((before, pieces(handle), snapshot(model)))
    return steps


def trained_alone(mixed, ranks, microbatches):
    """The same by one process: a 16-bit model for each rank's microbatches, float32 masters beside it."""
    torch.manual_seed(0)
    masters, model = Dense(), Dense().to(mixed.param)
    optimizer, steps = torch.optim.AdamW(masters.parameters(), lr=0.01), []
    model.load_state_dict(masters.state_dict())
    for step in range(3):
        total = {name: torch.zeros_like(param) for name, param in masters.named_parameters()}
        for rank in range(ranks):
            for micro in range(microbatches):
                model.zero_grad()
                model(rows(step, micro, rank).to(mixed.param)).float().square().sum().backward()
                for name, param in model.named_parameters():
                    total[name] += param.grad.float()
        for name, param in masters.named_parameters():
            param.grad = total[name].clone()
        optimizer.step()
        model.load_state_dict(masters.state_dict())
        steps.append((total, snapshot(masters)))
    return steps


@pytest.mark.parametrize(
    ("ranks", "microbatches", "sync"), [(2, 1, True), (3, 3, False), drilled(3, 3, True), drilled(1, 3, False)]
)
def test_training_is_that_of_one_process(pool, ranks, microbatches, sync):
    """Masters within float32's rounding; weights are the masters rounded. A 16-bit weight that rounds another way
    changes the next gradients, so only the first step's are judged closely.
    """
    expected = trained_alone(LOW, ranks, microbatches)
    for step, on_ranks in enumerate(zip(*pool.run(ranks, trained, LOW, microbatches, sync), strict=True)):
        before, after, whole = zip(*on_ranks, strict=True)
        grads, masters = assembled(before)[0], assembled(after)[1]
        true_grads, true_masters = expected[step]
        for name, master in masters.items():
            assert master.dtype == grads[name].dtype == F32
            assert all(torch.equal(weights[name], master.to(BF16)) for weights in whole)
            if step == 0:
                assert (grads[name] - true_grads[name]).abs().max() <= 1e-6 * true_grads[name].abs().max()
                assert (master - true_masters[name]).abs().max() <= 1e-6
            assert (master - true_masters[name]).abs().max() <= 2e-3  # of steps of 1e-2
