"""The layer on ranks against the reference, in float64: outputs, every gradient before clipping, choices and drops token
by token, what is observed; then a small model that is trained. Every rank is judged by itself.
"""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch

from expert_parallel import MoE
from tests import ordered, passthrough
from tests.expert_parallel import reference, training
from tests.expert_parallel.cases import (
    HOLES,
    Case,
    made,
    near,
    one_rank,
    outcome,
    same_choices,
    true,
    worst,
    written_out,
)
from tests.expert_parallel.reference import Layer
from tests.expert_parallel.training import Training
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
    results = pool.run(case.ranks, outcome, case)
    assert worst(case, results) <= 1
    return results


@EACH_LAYER
@pytest.mark.parametrize(("ranks", "ep"), [*MESHES, *LARGE])
def test_ranks_compute_what_one_process_does(pool, name, ranks, ep):
    judge(pool, Case(LAYERS[name], ranks, ep))


def test_cases_with_capacity_drop_some_and_not_all():
    for name, layer in LAYERS.items():
        result, *_ = true(Case(layer))
        assert bool(result.dropped) == (layer.capacity is not None), name
        assert len(result.dropped) < len(result.chosen) / 2


@pytest.mark.parametrize("name", ["top-2 within capacity", "sigmoid, bias, capacity", "by batch"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("ranks", "ep", "cp"), CUT)
def test_rows_that_are_cut(pool, name, ranks, ep, cp, order):
    """T = 7 divides by none of them, so there is padding; the ranks of a row share experts, or do not."""
    judge(pool, Case(LAYERS[name], ranks, ep, cp, order=order))


@pytest.mark.parametrize("T", [1, 3, 8, 24])
def test_lengths(pool, T):
    holes = tuple((b, t) for b, t in HOLES if t < T)
    for ranks, ep, cp in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        judge(pool, Case(Layer(capacity=1.0), ranks, ep, cp, T=T, holes=holes))


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize(("ranks", "ep", "cp"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (4, 2, 2)])
@pytest.mark.parametrize("name", ["top-2 within capacity", "sigmoid, bias, capacity"])
def test_drops_depend_on_no_microbatch(pool, name, ranks, ep, cp, microbatches):
    """Token by token the same, and gradients that are accumulated. Some ranks' last microbatches have no rows."""
    judge(pool, Case(LAYERS[name], ranks, ep, cp, microbatches=microbatches))


@pytest.mark.parametrize("name", ["top-2 within capacity", "top-3, shared"])
@pytest.mark.parametrize(("ranks", "ep", "cp", "tp"), [(2, 1, 1, 2), (4, 2, 1, 2), (4, 2, 2, 2), (3, 1, 1, 3)])
def test_experts_that_are_cut_as_well(pool, name, ranks, ep, cp, tp):
    """Each expert's hidden channels over ranks that see the same tokens."""
    layer = replace(LAYERS[name], hidden=6)
    judge(pool, Case(layer, ranks, ep, cp, tp))


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


@pytest.mark.parametrize("lanes", ["pair", "group"])
@pytest.mark.parametrize(("ranks", "ep", "cp"), [(2, 2, 1), (3, 3, 1), (4, 2, 1), (4, 4, 2)])
def test_on_a_strict_network(ranks, ep, cp, lanes):
    """Every handle is waited for, nothing is read before, nothing in flight is changed, in whatever order ranks run."""
    for seed, layer in enumerate((LAYERS["top-2 within capacity"], LAYERS["top-3, shared"], LAYERS["by batch"])):
        case = Case(layer, ranks, ep, cp)
        with written_out():
            report = ordered.run(ranks, unchecked, case, lanes=lanes, seed=seed)
        assert worst(case, report.results) <= 1


def unchecked(run, case):
    return outcome(run, case, check=False)


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


def test_initial_values_do_not_depend_on_the_default_dtype_of_ranks():
    """As wide as a matrix product keeps variance."""
    moe = MoE(64, 32, 8)
    for name, param in moe.named_parameters():
        assert float(param.std() * param.shape[-1] ** 0.5) == pytest.approx(1.0, abs=0.05), name


# -- in low precision --------------------------------------------------------------------------------------------------


def error(case, results):
    """Of y, dx and every gradient the error against float64, as a share of its size: the largest of all."""
    result, dx, grads = true(case)
    wholes = {"y": result.y.detach(), "dx": dx, **grads}
    missed = dict.fromkeys(wholes, 0.0)
    seen = set()
    for rank, ours in enumerate(results):
        rows = torch.cat(case.rows(rank))
        missed["y"] += float((ours.y.double() - wholes["y"][rows]).square().sum())
        missed["dx"] += float((ours.dx.double() - wholes["dx"][rows]).square().sum())
        for name, (boxes, grad) in ours.grads.items():
            if (name, boxes) not in seen:
                seen.add((name, boxes))
                [box] = boxes
                whole = wholes[name][box.offset[0] : box.offset[0] + box.local[0]]
                missed[name] += float((grad.double() - whole).square().sum())
    return {name: (off / float(wholes[name].square().sum())) ** 0.5 for name, off in missed.items()}


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", ["top-2 within capacity", "top-3, shared", "sigmoid, bias"])
@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_in_low_precision_as_near_as_one_rank(pool, name, ranks, ep, dtype, most):
    """Choices are the same; the error is not larger, but for the sums of gradients over ranks, rounded to bf16 once
    for each rank.
    """
    case = Case(LAYERS[name], ranks, ep, dtype=dtype)
    alone = one_rank(case)
    ours, single = (pool.run(each.ranks, outcome, each) for each in (case, alone))
    assert same_choices(case, ours) and same_choices(alone, single)
    for what, of_one in error(alone, single).items():
        assert of_one < most and error(case, ours)[what] <= (1.1 if what in ("y", "dx") else 2) * of_one + 1e-9, what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_dtype_of_what_they_belong_to(pool, dtype):
    for ours in pool.run(2, outcome, Case(Layer(shared=4), 2, 2, dtype=dtype)):
        assert {ours.y.dtype, ours.dx.dtype, *(grad.dtype for _, grad in ours.grads.values())} == {dtype}


def same_rows(run, case):
    """Twice, and on ranks that deal the rows out otherwise: y by rows."""
    return [outcome(run, case).y for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_runs_have_the_same_bits(pool, dtype):
    for first, second in pool.run(4, same_rows, Case(Layer(capacity=1.0), 4, 4, dtype=dtype)):
        assert torch.equal(first, second)


# -- training ----------------------------------------------------------------------------------------------------------

TRAINED = {
    "top-2": Layer(balance=0.05, z=0.01),
    "top-2 within capacity": Layer(capacity=0.75, balance=0.05, z=0.01, shared=4),
    "top-1, sigmoid, bias, capacity": Layer(
        choices=1, score="sigmoid", renormalise=False, bias=training.BIAS, capacity=1.0, balance=0.05, z=0.01
    ),
}
RUNS = [
    *[(1, 1, 1, 1), (2, 2, 1, 1), (3, 3, 1, 1), (4, 2, 1, 1), (4, 4, 1, 1), (2, 2, 2, 1), (4, 4, 2, 5)],
    *[pytest.param(6, 3, 1, 1, marks=pytest.mark.drill), pytest.param(8, 4, 1, 2, marks=pytest.mark.drill)],
    *[
        pytest.param(*mesh, marks=pytest.mark.drill)
        for mesh in ((3, 3, 3, 1), (4, 2, 2, 1), (4, 1, 1, 2), (2, 1, 1, 5))
    ],
]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(("ranks", "ep", "cp", "microbatches"), RUNS)
def test_a_model_is_trained_as_by_one_process(pool, name, ranks, ep, cp, microbatches, optimizer):
    """Three clipped steps: gradients before clipping, the norm, values after, choices and drops of both layers. One
    row has no token, one no label, one rank no rows.
    """
    case = Case(TRAINED[name], ranks, ep, cp, microbatches=microbatches)
    run = Training(case, optimizer)
    assert training.worst(run, pool.run(ranks, training.trained, run, contextlib.nullcontext)) <= 1


def test_training_drops_some():
    for name, layer in TRAINED.items():
        _, steps = training.plain(Training(Case(layer)))
        for *_, dropped in steps:
            assert all(bool(of_layer) == (layer.capacity is not None) for of_layer in dropped), name


def test_the_reference_agrees_with_itself_by_differences():
    """Its gradients, along a direction: so that what everything is held against is held against something."""
    for layer, seed in itertools.product((LAYERS["top-2 within capacity"], LAYERS["sigmoid, bias"]), (0, 1)):
        case = replace(Case(layer), seed=seed)
        x, dout = case.tensors()
        _, dx, grads = true(case)
        along = replace(case, seed=seed + 7)
        named, steps = case.weights(), along.weights()

        def value(by, x=x, dout=dout, named=named, steps=steps, case=case, along=along):
            moved = {name: tensor + by * steps[name] for name, tensor in named.items()}
            result = reference.apply(case.layer, moved, x + by * along.tensors()[0], case.routed())
            return float((result.y * dout).sum() + reference.loss(case.layer, result))

        slope = float((dx * along.tensors()[0]).sum()) + sum(float((grads[n] * steps[n]).sum()) for n in grads)
        assert (value(1e-6) - value(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-6)
