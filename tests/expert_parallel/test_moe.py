"""The layer on ranks against the reference, in float64: outputs, every gradient before clipping, choices and drops
token by token, what is observed. Every rank is judged by itself.
"""

from dataclasses import replace

import pytest
import torch

from expert_parallel import MoE
from tests import passthrough
from tests.expert_parallel import reference
from tests.expert_parallel.cases import HOLES, Case, expected, made, near, outcome, true, worst
from tests.expert_parallel.reference import Layer
from tests.recorder import recording

BIAS = tuple(0.4 * (-1) ** e for e in range(12))
MESHES = [(1, 1), (2, 2), (3, 3), (4, 4), (2, 1), (4, 2)]  # dp = ep, and dp = 2·ep
LARGE = [pytest.param(6, 3, marks=pytest.mark.drill), pytest.param(8, 4, marks=pytest.mark.drill)]
CUT = [(2, 1, 2), (2, 2, 2), (3, 3, 3), (3, 1, 3), (4, 2, 2), (4, 4, 2), (4, 1, 4), (4, 4, 4)]  # ranks, ep, cp
LAYERS = {
    "top-1": Layer(choices=1, renormalise=False),
    "top-1, weights are one": Layer(choices=1),
    "top-2": Layer(),
    "top-3, shared": Layer(choices=3, shared=4, scale=1.5, renormalise=False),
    "top-1 within capacity": Layer(choices=1, capacity=1.0, renormalise=False),
    "top-2 within capacity": Layer(capacity=0.75),
    "sigmoid, bias": Layer(score="sigmoid", bias=BIAS, scale=2.5, shared=4),
    "sigmoid, bias, capacity": Layer(choices=3, score="sigmoid", bias=BIAS, renormalise=False, capacity=0.5),
    "by batch": Layer(over="batch", capacity=1.25),
    "no losses": Layer(choices=3, balance=0.0, z=0.0, capacity=1.0),
    "z alone": Layer(balance=0.0),
}
EACH_LAYER = pytest.mark.parametrize("name", LAYERS)


def judge(pool, case):
    assert worst(case, pool.run(case.ranks, outcome, case)) <= 1


@EACH_LAYER
@pytest.mark.parametrize(("ranks", "ep"), [*MESHES, *LARGE])
def test_ranks_compute_what_one_process_does(pool, name, ranks, ep):
    judge(pool, Case(LAYERS[name], ranks, ep))


def test_cases_with_capacity_drop_some_and_not_all():
    for name, layer in LAYERS.items():
        result, *_ = true(Case(layer))
        assert bool(result.dropped) == (layer.capacity is not None), name
        assert len(result.dropped) < 0.75 * len(result.chosen)


@pytest.mark.parametrize("name", ["top-2 within capacity", "sigmoid, bias, capacity", "by batch"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("mesh", CUT)
def test_rows_that_are_cut(pool, name, mesh, order):
    """T = 7 divides by none of them, so there is padding; the ranks of a row share experts, or do not."""
    judge(pool, Case(LAYERS[name], *mesh, order=order))


@pytest.mark.parametrize("T", [1, 3, 8, 24])
def test_lengths(pool, T):
    holes = tuple((b, t) for b, t in HOLES if t < T)
    for ranks, ep, cp in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        judge(pool, Case(Layer(capacity=1.0), ranks, ep, cp, T=T, holes=holes))


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1), (4, 4, 1), (4, 2, 2)])
@pytest.mark.parametrize("name", ["top-2 within capacity", "sigmoid, bias, capacity"])
def test_drops_depend_on_no_microbatch(pool, name, mesh, microbatches):
    """Token by token the same, and gradients that are accumulated. Some ranks' last microbatches have no rows."""
    judge(pool, Case(LAYERS[name], *mesh, microbatches=microbatches))


@pytest.mark.parametrize("name", ["top-2 within capacity", "top-3, shared"])
@pytest.mark.parametrize("mesh", [(2, 1, 1, 2), (4, 2, 1, 2), (4, 2, 2, 2), (3, 1, 1, 3)])
def test_experts_that_are_cut_as_well(pool, name, mesh):
    """Each expert's hidden channels over ranks that see the same tokens."""
    ranks, ep, cp, tp = mesh
    judge(pool, Case(replace(LAYERS[name], hidden=6), ranks, ep, cp, tp=tp))


@pytest.mark.parametrize(("ranks", "ep", "cp"), [(2, 2, 1), (3, 3, 3), (4, 2, 2)])
def test_over_bare_torch_distributed(pool, ranks, ep, cp):
    """And nothing goes by another way."""
    case = Case(LAYERS["by batch"], ranks, ep, cp)
    assert worst(case, pool.run(ranks, passed_through, case)) <= 1


def passed_through(run, case):
    with recording() as recorder:
        result = passthrough.run(run, outcome, case)
    assert not recorder.calls
    return result


# -- one rank ----------------------------------------------------------------------------------------------------------


@EACH_LAYER
def test_without_a_group_it_is_the_plain_layer(name):
    """Nothing is declared, nothing is called."""
    layer = LAYERS[name]
    case = Case(layer, holes=())
    moe = made(layer)
    moe.load_state_dict(case.weights(), strict=False)
    x, dout = case.tensors()
    with recording() as recorder:
        y = moe(x.requires_grad_())
        y.backward(dout)
    result, dx, grads = true(case)
    assert not recorder.calls
    assert near(y.detach(), result.y.detach(), 10.0) <= 1 and near(x.grad, dx, 10.0) <= 1
    for key, param in moe.named_parameters():
        assert near(param.grad, grads[key], float(grads[key].abs().max()) + 0.1) <= 1


def bits(run, case, grouped):
    moe = made(case.layer)
    moe.load_state_dict(case.weights(), strict=False)
    if grouped:
        moe.distribute(run.world, run.world, run.world)
    x, dout = case.tensors()
    moe(x.requires_grad_()).backward(dout)
    return [x.grad, *(param.grad for param in moe.parameters())]


def test_a_group_of_one_has_its_bits(pool):
    [plain], [grouped] = (pool.run(1, bits, Case(Layer(shared=4)), grouped) for grouped in (False, True))
    assert all(map(torch.equal, plain, grouped))


def by_constructor(run, case):
    """The experts are cut as the layer is made."""
    whole = made(case.layer)
    cut = made(case.layer, group=run.world)
    return [tuple(p.shape) for p in whole.experts.parameters()], [tuple(p.shape) for p in cut.experts.parameters()]


def test_a_group_given_to_the_constructor(pool):
    for whole, cut in pool.run(3, by_constructor, Case()):
        assert whole == [(12, 5, 6), (12, 5, 6), (12, 6, 5)] and cut == [(4, 5, 6), (4, 5, 6), (4, 6, 5)]


def test_a_dropped_token_keeps_its_residual():
    """Typed: of four tokens that choose one expert two find room; the others add nothing, to the bit."""
    layer = Layer(experts=2, choices=1, capacity=1.0, balance=0.0, z=0.0)
    moe = made(layer)
    with torch.no_grad():
        moe.router.weight.zero_()  # expert 0, of equal ones
    y = moe(torch.ones(1, 4, 6, dtype=torch.float64))
    assert y.any(-1).tolist() == [[True, True, False, False]]


def test_initial_values():
    """So wide that a matrix product keeps the variance."""
    moe = MoE(64, 32, 8)
    for name, param in moe.named_parameters():
        assert param.std().item() * param.shape[-1] ** 0.5 == pytest.approx(1.0, abs=0.05), name


# -- the reference itself ----------------------------------------------------------------------------------------------


def value(case, along, by):
    """What is differentiated, a step away."""
    (x, dout), (dx, _) = case.tensors(), along.tensors()
    steps = along.weights()
    moved = {name: tensor + by * steps[name] for name, tensor in case.weights().items()}
    result = reference.apply(case.layer, moved, x + by * dx, case.routed())
    return float((result.y * dout).sum() + reference.loss(case.layer, result))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["top-2 within capacity", "sigmoid, bias", "by batch"])
def test_its_gradients_by_differences(name, seed):
    """So what everything is held against is held against something."""
    case = Case(LAYERS[name], seed=seed)
    along, (_, dx, grads) = replace(case, seed=seed + 7), expected(case)
    slope = float((dx * along.tensors()[0]).sum())
    slope += sum(float((grads[key] * step).sum()) for key, step in along.weights().items())
    assert (value(case, along, 1e-6) - value(case, along, -1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-6)
