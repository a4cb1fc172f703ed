"""A step in pieces is the step of the whole, for every elementwise optimizer; the others are refused, with a reason."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn, optim

from collectives.elementwise import check_elementwise
from zero.optimizer import PieceByPiece
from zero.pieces import cut_pieces

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
SIZES = (130, 1, 0, 700, 64, 65)  # of the shards; one is empty


class Counted(optim.Optimizer):
    """A user's own: its count of steps is a setting of the group, its state is replaced and not updated in place, and a
    part of it appears only in the third step.
    """

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                state["seen"] = state.get("seen", 0) + 1
                if group["steps"] == 3:
                    state["anchor"] = p.clone()
                p.sub_(group["lr"] / group["steps"] * state["mean"] / state["seen"])
                if "anchor" in state:
                    p.lerp_(state["anchor"], 0.5)


ELEMENTWISE = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD, momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "SGD, nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, maximize=True),
    "SGD, dampened": lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, foreach=True),
    "SGD, fused": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "Adam": lambda p: optim.Adam(p, 0.01, foreach=False),
    "Adam, amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True),
    "AdamW, foreach": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1, fused=True, amsgrad=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "Adagrad, fused": lambda p: optim.Adagrad(p, 0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Adamax": lambda p: optim.Adamax(p, 0.01),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "Adadelta": optim.Adadelta,
    "Rprop": lambda p: optim.Rprop(p, 0.01),
    "ASGD": lambda p: optim.ASGD(p, 0.1, t0=2),
    "a user's own": lambda p: Counted(p, 0.1),
}
each_optimizer = pytest.mark.parametrize("build", ELEMENTWISE.values(), ids=ELEMENTWISE)
adamw = functools.partial(optim.AdamW, lr=0.01, weight_decay=0.1)


def shards(dtype=F64, sizes=SIZES, seed=0):
    """A rank's shards: views of one tensor, as those of a bucket are."""
    values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)
    return [nn.Parameter(part) for part in values.split(sizes)]


def give_gradients(params, step, dtype=None):
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, dtype=F64) * 10.0 ** (step % 3 - 1)
        param.grad_dtype = None
        param.grad = grad.to(dtype or param.dtype)


def train(optimizer, params, steps=5, first=0):
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()


def assert_same(optimizer, params, reference, others):
    """Masters and state, bit for bit."""
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        mine, theirs = optimizer.state.get(param, {}), reference.state.get(other, {})
        assert mine.keys() == theirs.keys()
        for kind, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine[kind], value) and mine[kind].dtype == value.dtype, kind
            else:
                assert mine[kind] == value, kind


# -- what is stepped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "piece", "pieces"),
    [
        ([5, 3], 8, "a0:5 b0:3"),
        ([5, 3], 7, "a0:5 | b0:3"),
        ([5, 3], 2, "a0:2 | a2:4 | a4:5 | b0:2 | b2:3"),
        ([1, 1, 1, 1], 3, "a0:1 b0:1 c0:1 | d0:1"),
        ([0, 2, 0], 2, "a0:0 b0:2 c0:0"),
        ([0], 4, "a0:0"),
        ([], 4, ""),
        ([200], 64, "a0:64 | a64:128 | a128:192 | a192:200"),
        ([200, 60], 100, "a0:64 | a64:128 | a128:192 a192:200 | b0:60"),  # 100 is no multiple of 64
        ([300, 10], 256, "a0:256 | a256:300 b0:10"),
    ],
)
def test_cut_in_order_at_multiples_of_64_elements(sizes, piece, pieces):
    cut = cut_pieces(sizes, piece)
    assert " | ".join(" ".join(f"{'abcd'[i]}{start}:{stop}" for i, start, stop in part) for part in cut) == pieces


@each_optimizer
@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("piece", [64, 101, 1 << 20])  # 101 itself would cut a kernel's vectors
def test_in_pieces_it_ends_bit_for_bit_as_whole(build, dtype, piece):
    params, others = shards(dtype), shards(dtype)
    optimizer, reference = PieceByPiece(build(params), piece=piece), build(others)
    train(optimizer, params)
    train(reference, others)
    assert_same(optimizer, params, reference, others)
    assert not torch.equal(params[0], shards(dtype)[0])


@each_optimizer
def test_pieces_of_seven_elements_differ_by_a_rounding_at_most(build):
    """Bias corrections, too: every piece of a shard starts from the same count of steps. Only torch's fused kernels
    round the end of a slice that is no multiple of a vector otherwise than its middle.
    """
    params, others = shards(), shards()
    optimizer, reference = PieceByPiece(build(params), piece=7), build(others)
    train(optimizer, params, 3)
    train(reference, others, 3)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-13, atol=1e-15)
    if not reference.defaults.get("fused"):
        assert_same(optimizer, params, reference, others)


def test_bias_correction_in_pieces_is_the_formula():
    """Adam, by hand, for a shard cut in many."""
    (param,) = shards(sizes=(100,))
    expected, mean, square = param.detach().clone(), 0, 0
    optimizer = PieceByPiece(optim.Adam([param], lr=0.01, betas=(0.9, 0.99)), piece=7)
    for step in range(1, 5):
        give_gradients([param], step)
        mean, square = 0.9 * mean + 0.1 * param.grad, 0.99 * square + 0.01 * param.grad**2
        expected -= 0.01 * mean / (1 - 0.9**step) / ((square / (1 - 0.99**step)).sqrt() + 1e-8)
        optimizer.step()
        torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=1e-14)
        assert optimizer.state[param]["step"] == step


def test_few_calls_of_the_inner_step(monkeypatch):
    """Small shards share one, across groups."""
    calls = []
    params = shards(sizes=(30, 30, 40, 28))
    inner = optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], 0.1)
    optimizer = PieceByPiece(inner, piece=128)
    true = inner.step
    monkeypatch.setattr(inner, "step", lambda: (calls.append([len(g["params"]) for g in inner.param_groups]), true()))
    train(optimizer, params, 1)
    assert calls == [[2, 2]]


def test_a_shard_without_a_gradient_is_left_alone():
    params = shards(sizes=(100, 100, 100))
    before = [param.detach().clone() for param in params]
    optimizer = PieceByPiece(adamw(params), piece=64)
    for step in range(3):
        give_gradients(params, step)
        params[1].grad = None
        optimizer.step()
    assert [torch.equal(param, old) for param, old in zip(params, before, strict=True)] == [False, True, False]
    assert set(optimizer.state) == {params[0], params[2]}
    give_gradients(params, 3)
    optimizer.step()  # thawed later: its count begins then
    assert [optimizer.state[param]["step"].item() for param in params] == [4, 1, 4]


def test_no_gradient_at_all_is_a_step_of_nothing():
    params = shards()
    optimizer = PieceByPiece(adamw(params))
    optimizer.step()
    assert not optimizer.state and all(torch.equal(p, q) for p, q in zip(params, shards(), strict=True))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F64])
def test_gradients_of_another_dtype_are_taken_in_the_masters(dtype):
    params, others = shards(F32), shards(F32)
    optimizer, reference = PieceByPiece(adamw(params), piece=64), adamw(others)
    for step in range(3):
        give_gradients(params, step, dtype)
        give_gradients(others, step, dtype)
        for other in others:
            grad = other.grad.float()
            other.grad = None
            other.grad = grad
        optimizer.step()
        reference.step()
    assert_same(optimizer, params, reference, others)


# -- as an optimizer of torch ------------------------------------------------------------------------------------------


def test_groups_keep_their_settings():
    """One with weight decay and one without; one frozen by its learning rate."""

    def groups(params):
        return [
            {"params": params[:2], "weight_decay": 0.5},
            {"params": params[2:4], "weight_decay": 0.0, "lr": 0.3},
            {"params": params[4:], "lr": 0.0},
        ]

    params, others = shards(), shards()
    optimizer, reference = (
        PieceByPiece(optim.AdamW(groups(params), lr=0.01), piece=64),
        optim.AdamW(groups(others), 0.01),
    )
    train(optimizer, params)
    train(reference, others)
    assert_same(optimizer, params, reference, others)
    assert torch.equal(params[4], shards()[4]) and not torch.equal(params[3], shards()[3])
    assert optimizer.defaults == reference.defaults


SCHEDULES = {
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 3)),  # begins at zero
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 7),
    "one cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=12),  # moves beta1 as well
    "in a row": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "plateau": lambda o: optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("on_inner", [False, True], ids=["on it", "on the inner one"])
def test_a_schedulers_rates_are_the_same_list(schedule, on_inner):
    def rates(wrap):
        params = shards(sizes=(100, 30))
        inner = adamw([{"params": params[:1]}, {"params": params[1:], "lr": 0.2}])
        earlier = schedule(inner) if on_inner else None
        optimizer = wrap(inner)
        scheduler = earlier or schedule(optimizer)
        seen = []
        for step in range(10):
            give_gradients(params, step)
            optimizer.step()
            scheduler.step(*[1.0] * isinstance(scheduler, optim.lr_scheduler.ReduceLROnPlateau))
            seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        return seen, [param.tolist() for param in params]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")
        ours = rates(lambda inner: PieceByPiece(inner, piece=64))
    assert ours == rates(lambda inner: inner)
    assert len({tuple(entry[0]) for entry in ours[0]}) > 2


def test_the_closure_is_called_once_with_gradients_on_and_its_loss_returned():
    (param,) = shards(sizes=(100,))
    optimizer = PieceByPiece(optim.SGD([param], 0.5), piece=64)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    before = param.detach().clone()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True] and loss.item() == (before**2).sum()
    assert torch.equal(param, torch.zeros(100))  # p - 0.5 · 2p
    optimizer.zero_grad()
    assert param.grad is None


def test_hooks_run_once_a_step():
    params, calls = shards(), []
    inner = adamw(params)
    inner.register_step_pre_hook(lambda *_: calls.append("pre"))
    handle = inner.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = PieceByPiece(inner, piece=64)
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    train(optimizer, params, 1)
    assert calls == ["pre", "post", "own"]
    handle.remove()
    train(optimizer, params, 1)
    assert calls == ["pre", "post", "own", "pre", "own"]


def test_a_group_added_later_is_stepped():
    params, others = shards(), shards()
    optimizer, reference = PieceByPiece(adamw(params[:2]), piece=64), adamw(others[:2])
    optimizer.add_param_group({"params": params[2:], "lr": 0.2})
    assert optimizer.inner.param_groups is optimizer.param_groups
    reference.add_param_group({"params": others[2:], "lr": 0.2})
    train(optimizer, params)
    train(reference, others)
    assert_same(optimizer, params, reference, others)


def test_named_parameters():
    params, others = shards(), shards()
    names = [(f"p{i}", param) for i, param in enumerate(params)]
    optimizer, reference = PieceByPiece(adamw(names), piece=64), adamw(others)
    train(optimizer, params)
    train(reference, others)
    assert_same(optimizer, params, reference, others)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [f"p{i}" for i in range(6)]


def test_an_optimizer_that_has_stepped_before_goes_on():
    params, others = shards(), shards()
    inner, reference = adamw(params), adamw(others)
    train(inner, params, 2)
    optimizer = PieceByPiece(inner, piece=64)
    train(optimizer, params, 2, first=2)
    train(reference, others, 4)
    assert_same(optimizer, params, reference, others)
    assert not inner.state


@each_optimizer
def test_saved_and_loaded_it_goes_on_with_the_same_bits(build):
    params = shards()
    optimizer = PieceByPiece(build(params), piece=64)
    train(optimizer, params, 3)
    saved, masters = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    train(optimizer, params, 3, first=3)
    others = [nn.Parameter(master) for master in masters]
    loaded = PieceByPiece(build(others), piece=200)
    loaded.load_state_dict(saved)
    train(loaded, others, 3, first=3)
    assert_same(loaded, others, optimizer, params)


def test_its_state_dict_is_that_of_the_whole_optimizer():
    """Either loads the other's."""
    params, others = shards(), shards()
    optimizer, reference = PieceByPiece(adamw(params), piece=64), adamw(others)
    train(optimizer, params, 3)
    train(reference, others, 3)
    mine, theirs = optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    reference.load_state_dict(mine)
    optimizer.load_state_dict(theirs)
    train(optimizer, params, 2, first=3)
    train(reference, others, 2, first=3)
    assert_same(optimizer, params, reference, others)


def test_loaded_settings_are_used():
    params, others = shards(), shards()
    optimizer = PieceByPiece(adamw(params), piece=64)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert optimizer.inner.param_groups is optimizer.param_groups  # where a scheduler of the inner one will look
    train(optimizer, params, 2)
    train(optim.AdamW(others, 0.5, weight_decay=0.1), others, 2)
    assert all(torch.equal(param, other) for param, other in zip(params, others, strict=True))


def test_state_of_another_size_is_refused_before_anything_changes():
    params, others = shards(), shards(sizes=(130, 1, 0, 700, 64, 66))
    optimizer, other = PieceByPiece(adamw(params)), PieceByPiece(adamw(others))
    train(optimizer, params, 2)
    train(other, others, 1)
    with pytest.raises(ValueError, match=r"'exp_avg' has 66 elements, for a shard of 65.*checkpoint"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state[params[0]]["step"] == 2
    with pytest.raises(ValueError, match="doesn't match the size"):
        PieceByPiece(adamw(params[:2])).load_state_dict(optimizer.state_dict())


# -- moments in bfloat16 -----------------------------------------------------------------------------------------------


def test_moments_in_bfloat16_are_rounded_once_a_step_and_computed_in_float32():
    """AdamW by hand in float32, its moments rounded after each step."""
    (param,) = shards(F32, sizes=(1000,))
    expected, mean, square = param.detach().clone(), torch.zeros(1000, dtype=BF16), torch.zeros(1000, dtype=BF16)
    optimizer = PieceByPiece(optim.AdamW([param], 0.01, (0.9, 0.95), weight_decay=0.1), piece=64, moments=BF16)
    for step in range(1, 6):
        give_gradients([param], step)
        exact = 0.9 * mean.float() + 0.1 * param.grad, 0.95 * square.float() + 0.05 * param.grad**2
        expected *= 1 - 0.01 * 0.1
        expected -= 0.01 * exact[0] / (1 - 0.9**step) / ((exact[1] / (1 - 0.95**step)).sqrt() + 1e-8)
        mean, square = (value.to(BF16) for value in exact)
        optimizer.step()
        state = optimizer.state[param]
        torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)
        for mine, theirs in ((state["exp_avg"], mean), (state["exp_avg_sq"], square)):
            assert mine.dtype == BF16 and (mine != theirs).sum() <= 5  # a tie that an ulp of float32 breaks
        mean, square = state["exp_avg"].clone(), state["exp_avg_sq"].clone()


@pytest.mark.parametrize(("moments", "expected"), [(None, 4 + 4 + 4), (BF16, 4 + 2 + 2)])
def test_bytes_a_parameter_by_storage(moments, expected):
    params = shards(F32)
    optimizer = PieceByPiece(adamw(params), moments=moments)
    train(optimizer, params, 2)
    kept = {params[0].untyped_storage()}
    for kinds in optimizer.state.values():
        kept |= {value.untyped_storage() for value in kinds.values() if value.dim()}
    assert sum(storage.nbytes() for storage in kept) == expected * sum(SIZES)


def test_state_that_is_no_float_keeps_its_dtype_and_numbers_theirs():
    params = shards(F32)
    optimizer = PieceByPiece(Signs(params), piece=64, moments=BF16)
    train(optimizer, params, 2)
    state = optimizer.state[params[0]]
    assert (state["positive"].dtype, state["mean"].dtype, state["count"].dtype) == (torch.bool, BF16, F64)


class Signs(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["mean"] = state.get("mean", torch.zeros_like(p)).add(p.grad)
            state["positive"] = p.grad > 0
            state["count"] = state.get("count", torch.zeros((), dtype=F64)).add(1)
            p.sub_(0.01 * state["positive"] * state["mean"].sign())


def test_bfloat16_moments_saved_and_loaded_keep_bits_and_dtype():
    params = shards(F32)
    optimizer = PieceByPiece(adamw(params), piece=64, moments=BF16)
    train(optimizer, params, 3)
    saved, masters = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    assert saved["state"][0]["exp_avg"].dtype == BF16
    train(optimizer, params, 2, first=3)
    others = [nn.Parameter(master) for master in masters]
    loaded = PieceByPiece(adamw(others), piece=200, moments=BF16)
    loaded.load_state_dict(saved)
    train(loaded, others, 2, first=3)
    assert_same(loaded, others, optimizer, params)


def test_moments_change_their_dtype_as_they_are_loaded():
    params, others = shards(F32), shards(F32)
    rounded, exact = PieceByPiece(adamw(params), moments=BF16), PieceByPiece(adamw(others))
    train(rounded, params, 2)
    exact.load_state_dict(rounded.state_dict())
    assert exact.state[others[0]]["exp_avg"].dtype == F32
    train(exact, others, 1)
    rounded.load_state_dict(exact.state_dict())
    mine, theirs = rounded.state[params[0]]["exp_avg"], exact.state[others[0]]["exp_avg"]
    assert mine.dtype == BF16 and torch.equal(mine, theirs.to(BF16))


@pytest.mark.parametrize(("beta2", "decays"), [(0.999, False), (0.995, True), (0.95, True)])
def test_a_second_moment_in_bfloat16_decays_only_if_beta2_lets_it(beta2, decays):
    """What the header says: 0.1 % a step is less than half of its last place."""
    (param,) = shards(F32, sizes=(100,))
    optimizer = PieceByPiece(optim.AdamW([param], betas=(0.9, beta2)), moments=BF16)
    train(optimizer, [param], 1)
    before = optimizer.state[param]["exp_avg_sq"].clone()
    for _ in range(20):
        param.grad = torch.zeros(100)
        optimizer.step()
    after = optimizer.state[param]["exp_avg_sq"]
    assert bool((after < before).all()) is decays and (decays or torch.equal(after, before))


# -- what is refused ---------------------------------------------------------------------------------------------------


class Own(optim.Optimizer):
    """A base of the tests' own: `change(p, grad, state)` is the update."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, p.grad, self.state[p]))


class LambLike(Own):
    """Adam's first moment, times a trust ratio of norms."""

    def change(self, p, grad, state):
        mean = state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + grad * 0.1
        return mean * p.norm() / mean.norm()


class LarsLike(Own):
    def change(self, p, grad, state):
        return grad * (0.001 * p.norm() / (grad.norm() + 1e-9)).clamp(max=1.0)


class Sm3Like(Own):
    """A second moment for each row and column of a matrix, for each element of a vector."""

    def change(self, p, grad, state):
        sums = [grad.pow(2).amax([e for e in range(p.dim()) if e != d], keepdim=True) for d in range(p.dim())]
        if p.dim() == 1:
            sums = [grad.pow(2)]
        state["cover"] = [old + new for old, new in zip(state.get("cover", [0] * p.dim()), sums, strict=True)]
        return grad / functools.reduce(torch.minimum, state["cover"]).sqrt()


class RmsClipped(Own):
    """As Adafactor's updates are: only where the root mean square is above 1."""

    def change(self, p, grad, state):
        return grad / grad.pow(2).mean().sqrt().clamp(min=1.0)


class RarelyClipped(Own):
    def change(self, p, grad, state):
        return grad / (grad.norm() / 1e6).clamp(min=1.0)


class Centred(Own):
    """Only tensors of two dimensions are centred."""

    def change(self, p, grad, state):
        return grad - grad.mean(1, keepdim=True) if p.dim() > 1 else grad


class DecaysMatrices(Own):
    def change(self, p, grad, state):
        return grad + 0.1 * p if p.dim() > 1 else grad


class GloballyClipped(Own):
    """By the norm over all parameters of all groups: the same whole or cut, but not on another rank."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.norm = torch.cat([grad.flatten() for grad in grads]).norm()
        super().step()

    def change(self, p, grad, state):
        return grad / self.norm


class CountsInItself(Own):
    """Outside of state and groups, where a piece cannot be given its own."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        super().step()

    def change(self, p, grad, state):
        return grad / self.steps


class Noisy(Own):
    def change(self, p, grad, state):
        return grad + torch.randn_like(p)


class Last(Own):
    """Elementwise, but for a state that is a list of steps."""

    def change(self, p, grad, state):
        state["last"] = [*state.get("last", []), grad][-2:]
        return sum(state["last"])


class OfOne(Own):
    """A count of shape [1], which a shard of one element could not be told from."""

    def change(self, p, grad, state):
        state["count"] = state.get("count", torch.zeros(1)) + 1
        return grad


class NeedsClosure(Own):
    def step(self, closure):
        return super().step()


class NeedsMore(Own):
    def __init__(self, params, model):
        super().__init__(params)


DEPENDS, TRIED = "depends on other elements", "could not be tried"
REFUSED = {
    "LAMB-like": (LambLike, DEPENDS),
    "LAMB-like, from zero": (lambda p: LambLike(p, lr=0.0), DEPENDS),  # a warm-up's first rate
    "LAMB-like, slow": (lambda p: LambLike(p, lr=1e-15), DEPENDS),
    "LARS-like": (LarsLike, DEPENDS),
    "SM3-like": (Sm3Like, DEPENDS),
    "clipped by RMS": (RmsClipped, DEPENDS),
    "rarely clipped": (RarelyClipped, DEPENDS),
    "clipped by all": (GloballyClipped, DEPENDS),
    "centred": (Centred, DEPENDS),
    "decays matrices only": (DecaysMatrices, DEPENDS),
    "counts in itself": (CountsInItself, DEPENDS),
    "noisy": (Noisy, DEPENDS),
    "keeps a list": (Last, "state 'last' is neither a number nor a tensor of the shape"),
    "keeps one in a tensor": (OfOne, "state 'count' is neither a number nor a tensor of the shape"),
    "needs a closure": (NeedsClosure, f"{TRIED}.*closure"),
    "needs more": (lambda p: NeedsMore(p, nn.Linear(2, 2)), f"{TRIED}.*model"),
    "Adafactor": (optim.Adafactor, DEPENDS),
    "LBFGS": (optim.LBFGS, f"{TRIED}.*closure"),
    "SparseAdam": (optim.SparseAdam, f"{TRIED}.*dense gradients"),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_needs_more_than_the_element_is_refused_with_the_reason(build, reason):
    inner = build(shards())
    with pytest.raises(ValueError, match=f"^{type(inner).__name__} cannot step shards: .*{reason}.*AdamW"):
        PieceByPiece(inner)


def test_muon_is_refused_for_it_takes_matrices_only():
    with pytest.raises(ValueError, match=r"Muon cannot step shards: .*only supports 2D"):
        check_elementwise(optim.Muon([nn.Parameter(torch.ones(4, 4))]))


@each_optimizer
def test_elementwise_ones_are_accepted_also_at_a_rate_of_zero(build):
    optimizer = build(shards())
    check_elementwise(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    check_elementwise(optimizer)


def test_any_group_whose_settings_need_whole_tensors_is_seen():
    class Trusting(Own):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data -= group["lr"] * p.grad * (p.norm() if group.get("trust") else 1)

    params = shards()
    check_elementwise(Trusting([{"params": params[:2]}, {"params": params[2:]}]))
    with pytest.raises(ValueError, match=DEPENDS):
        check_elementwise(Trusting([{"params": params[:2]}, {"params": params[2:], "trust": True}]))


def test_a_rate_in_a_tensor_and_a_group_without_parameters_are_tried():
    params = shards()
    groups = [{"params": []}, {"params": params}]
    optimizer = optim.AdamW(groups, lr=torch.tensor(0.01))
    check_elementwise(optimizer)
    assert optimizer.param_groups[1]["lr"].item() == pytest.approx(0.01)


def test_the_trial_leaves_no_trace():
    params, calls = shards(), []
    optimizer = adamw([{"params": params[:3]}, {"params": params[3:], "lr": 0.2}])
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    train(optimizer, params, 1)
    before = copy.deepcopy(optimizer.state_dict())
    gradients, masters = [p.grad.clone() for p in params], [p.detach().clone() for p in params]
    random, calls[:] = torch.get_rng_state(), []
    check_elementwise(optimizer)
    with pytest.raises(ValueError):
        check_elementwise(Noisy(params))
    after = optimizer.state_dict()
    assert calls == [] and after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i][k], v) for i, kinds in before["state"].items() for k, v in kinds.items())
    assert all(torch.equal(p, old) for p, old in zip(params, masters, strict=True))
    assert all(torch.equal(p.grad, old) for p, old in zip(params, gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_shards_are_flat_and_pieces_have_elements():
    with pytest.raises(ValueError, match=r"flat tensor, not one of shape \(2, 3\)"):
        PieceByPiece(adamw([nn.Parameter(torch.ones(2, 3))]))
    with pytest.raises(ValueError, match="flat tensor"):
        PieceByPiece(adamw([nn.Parameter(torch.ones(6)[::2])]))
    with pytest.raises(ValueError, match="at least 1 element, not 0"):
        PieceByPiece(adamw(shards()), piece=0)
