"""Every cut against one plain process, in float64: outputs, gradients of inputs, gradients before clipping, norms,
updates; copies keep the same bits. And the known traps, by their names.
"""

import functools
import itertools

import pytest
import torch
from torch import nn

from collectives import layout
from collectives.differentiable import all_gather_split, split_all_gather
from collectives.partials import sum_partials
from tensor_parallel import ColumnParallelLinear, KeyValue, Region, RowParallelLinear, parallelize
from tests import passthrough
from tests.recorder import recording
from tests.tensor_parallel.models import Shape, plan, zero_directions
from tests.tensor_parallel.training import (
    MODES,
    Recipe,
    batch,
    cut_module,
    forward,
    furthest,
    near,
    plain,
    trained,
    worst,
)

VARIANTS = {
    "separate": Shape(),
    "no bias": Shape(bias=False),
    "fused": Shape(fused=True),  # its keys cannot be shared
    "one key head": Shape(kv_heads=1),
    "norms of queries and keys, router": Shape(qk_norm=True, router=True),
    "one key head, norms, router, no bias": Shape(kv_heads=1, qk_norm=True, router=True, bias=False),
    "gathered": Shape(gathered=True),
    "gathered, fused, no bias": Shape(gathered=True, fused=True, bias=False),
    "vocabulary": Shape(vocab=37),
    "tied": Shape(vocab=37, tied=True, bias=False),
    "tied, norms, router": Shape(vocab=38, tied=True, qk_norm=True, router=True),
}
RECIPES = {
    "sgd": Recipe(),
    "adamw": Recipe("adamw", rows=1),
    "sgd, from meta": Recipe(rows=1, meta=True),
    "adamw, from meta": Recipe("adamw", meta=True),
    "7 tokens": Recipe(tokens=7),
}
OFTEN = [
    *((ranks, mode, "separate", "sgd") for ranks in (1, 2, 3, 4) for mode in MODES),
    *((ranks, mode, "no bias", "sgd, from meta") for ranks in (2, 3) for mode in MODES),
    *((2, mode, "fused", "adamw") for mode in MODES),
    (4, "sp", "no bias", "sgd"),
    (4, "sp", "fused", "sgd, from meta"),
    (4, "tp", "one key head", "sgd"),
    (3, "sp", "one key head, norms, router, no bias", "sgd"),
    (4, "sp, whole inputs kept", "norms of queries and keys, router", "adamw, from meta"),
    (2, "tp", "norms of queries and keys, router", "sgd"),
    (2, "sp", "gathered", "sgd"),
    (3, "tp", "gathered, fused, no bias", "7 tokens"),
    (3, "tp", "vocabulary", "7 tokens"),
    (4, "sp", "vocabulary", "sgd, from meta"),
    (2, "sp", "tied", "adamw"),
    (3, "sp, whole inputs kept", "tied, norms, router", "sgd"),
    (4, "tp", "tied, norms, router", "adamw, from meta"),
]
SELDOM = [
    case
    for case in itertools.product((1, 2, 3, 4), MODES, VARIANTS, RECIPES)
    if case not in OFTEN and (case[3] != "7 tokens" or case[1] == "tp")
]


def fitted(shape, ranks):
    """A shape that so many ranks can have: 6 heads for 3, as many keys as a fused matrix needs."""
    changes = {"heads": 6, "kv_heads": 1 if shape.kv_heads == 1 else 3} if ranks == 3 else {}
    if shape.fused and ranks == 4:
        changes["kv_heads"] = 4
    return Shape(**{**vars(shape), **changes})


@pytest.mark.parametrize(
    ("ranks", "mode", "variant", "recipe"), [*OFTEN, *(pytest.param(*case, marks=pytest.mark.drill) for case in SELDOM)]
)
def test_training_is_that_of_one_process(pool, ranks, mode, variant, recipe):
    shape, chosen = fitted(VARIANTS[variant], ranks), RECIPES[recipe]
    results = pool.run(ranks, trained, shape, MODES[mode], chosen)
    assert worst(results, plain(shape, chosen), zero_directions(shape)) <= 1


@pytest.mark.parametrize(
    ("ranks", "mode", "variant"),
    [
        (2, "sp", "tied, norms, router"),
        (3, "tp", "one key head"),
        (4, "sp", "one key head, norms, router, no bias"),
        *(
            pytest.param(*case, marks=pytest.mark.drill)
            for case in itertools.product((2, 3, 4), MODES, ("separate", "gathered", "vocabulary"))
        ),
    ],
)
def test_training_over_bare_torch_distributed(pool, ranks, mode, variant):
    """Copies may differ by rounding there: sums have no order."""
    shape, recipe = fitted(VARIANTS[variant], ranks), RECIPES["sgd"]
    results = pool.run(ranks, passed_through, shape, MODES[mode], recipe)
    assert worst(results, plain(shape, recipe), zero_directions(shape)) <= 1


def passed_through(run, shape, settings, recipe):
    return passthrough.run(run, functools.partial(trained, copies=False), shape, settings, recipe)


# -- T05: two meanings of a gradient of a sum --------------------------------------------------------------------------


def squared(run, sequence_parallel):
    """x_r = r + 1 leaves a region, every rank squares the sum: the gradient of x."""
    x = torch.full((2, 1), run.rank + 1.0, dtype=torch.float64, requires_grad=True)
    region = Region(run.world, sequence_parallel=sequence_parallel)
    region.leave(x).square().sum().backward()
    return x.grad.flatten().tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_t05_where_a_region_ends_the_ranks_go_on_alike(pool, sequence_parallel):
    """2 · (1 + 2) for each of the two tokens; 12 would be one loss a rank."""
    assert pool.run(2, squared, sequence_parallel) == [[6.0, 6.0]] * 2


# -- T61: norms saw a part of the tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_t61_gradients_of_what_saw_some_tokens(pool, ranks):
    """Norms, biases of rows and the router; without the sums over tp they are off by as much as themselves."""
    shape, recipe = Shape(router=True, heads=4), Recipe(rows=1)
    partial = [name for name in plan(shape) if "norm" in name or name == "router"]
    partial = [
        *(f"{name}.weight" for name in partial),
        "norm1.bias",
        "router.bias",
        "attention.o.bias",
        "mlp.down.bias",
    ]
    steps = plain(shape, recipe)[1]
    for sums, right in ((("kv", "tp"), True), (("kv",), False)):
        job = functools.partial(trained, sums=sums, copies=right)
        for on_rank in pool.run(ranks, job, shape, MODES["sp"], recipe):
            for (_, _, grads, _, _), (_, _, expected, _, _) in zip(on_rank[: 5 if right else 1], steps, strict=False):
                for name in partial:
                    off = furthest(grads[name][1], expected[name]) / float(expected[name].abs().max())
                    assert off < 1e-12 if right else off > 0.1, name


# -- T63: the bias of a row is added once ------------------------------------------------------------------------------


def with_bias(run, weight, x, cotangent, settings):
    """(output, gradient of the bias) of a row whose bias is 100, 200, 300."""
    linear = nn.Linear(*weight.shape[::-1]).double()
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(torch.tensor([100.0, 200.0, 300.0]))
    row = RowParallelLinear(linear, Region(run.world, **settings), input_is_cut=False)
    out = row(x)
    out = all_gather_split(out, -2, group=run.world) if settings else out
    out.backward(cotangent)
    sum_partials(row.parameters(), ("tp",))
    return out.detach(), row.bias.grad


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_t63_the_bias_of_a_row_is_added_once(pool, ranks, mode):
    numbers = torch.Generator().manual_seed(0)
    weight, x, cotangent = (
        torch.randn(size, generator=numbers, dtype=torch.float64) for size in ((3, 8), (2, 4, 8), (2, 4, 3))
    )
    expected = x @ weight.t() + torch.tensor([100.0, 200.0, 300.0])
    for out, dbias in pool.run(ranks, with_bias, weight, x, cotangent, MODES[mode]):
        assert near(out, expected) <= 1
        assert near(dbias, cotangent.sum((0, 1))) <= 1


# -- T64: fewer keys than ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_t64_fewer_key_heads_than_ranks(pool, kv_heads, mode):
    """Keys and values are held by 4 / kv_heads ranks each, whose copies keep the same bits."""
    shape, recipe = Shape(heads=4, kv_heads=kv_heads), Recipe(rows=1, seed=1)
    results = pool.run(4, trained, shape, MODES[mode], recipe)
    assert worst(results, plain(shape, recipe), zero_directions(shape)) <= 1
    for on_ranks in zip(*results, strict=True):
        for name in ("attention.k.weight", "attention.v.weight", "attention.v.bias"):
            tensors = [tensors[name][1] for *_, tensors in on_ranks]
            assert all(torch.equal(tensors[rank], tensors[rank - rank % (4 // kv_heads)]) for rank in range(4))


def refused(run, shape):
    try:
        parallelize(nn.ModuleDict({"k": nn.Linear(24, 12)}), {"k": KeyValue(shape.kv_heads, shape.heads)}, run.world)
    except ValueError as error:
        return str(error)


def test_t64_keys_that_do_not_fit_are_refused_at_build(pool):
    text = "k: tp=4 does not fit 6 query heads and 3 key and value heads; use a tp of 1, 3 or 6"
    assert pool.run(4, refused, Shape(heads=6, kv_heads=3)) == [text] * 4


# -- T70: tokens that tp does not divide -------------------------------------------------------------------------------


def of_ten_tokens(run, tokens, settings):
    """What is raised, and what was sent before."""
    shape = Shape(vocab=37)
    module = cut_module(run, shape, settings)
    with recording() as recorder:
        try:
            forward(module, batch(shape, Recipe(tokens=tokens), 0))
        except ValueError as error:
            return str(error), len(recorder.calls)


@pytest.mark.parametrize("mode", ["sp", "sp, whole inputs kept"])
@pytest.mark.parametrize(("tokens", "padded"), [(10, 12), (3, 4)])
def test_t70_tokens_that_do_not_divide_are_refused_before_anything_is_sent(pool, tokens, padded, mode):
    text = (
        f"sequence parallelism: tp=4 does not divide the {tokens} tokens of a row; "
        f"pad rows to {padded}, and mask what is added, or choose a tp that divides"
    )
    assert pool.run(4, of_ten_tokens, tokens, MODES[mode]) == [(text, 0)] * 4


# -- T71: copies stay the same -----------------------------------------------------------------------------------------


def first_and_last(run, *args):
    """Of the steps of `trained`, which looks at gradients and values after every one."""
    steps = trained(run, *args)
    return steps[0][4], steps[-1][4]


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(4, "sp"), *(pytest.param(4, mode, marks=pytest.mark.drill) for mode in ("tp", "sp, whole inputs kept"))],
)
def test_t71_copies_keep_the_same_bits_for_50_steps_of_float32(pool, ranks, mode):
    shape = Shape(kv_heads=2, qk_norm=True, router=True, vocab=37, tied=True)
    recipe = Recipe("adamw", dtype=torch.float32, steps=50, rows=1)
    first, last = pool.run(ranks, first_and_last, shape, MODES[mode], recipe)[0]
    assert all(not torch.equal(first[name][1], last[name][1]) for name in first)


# -- made alone -------------------------------------------------------------------------------------------------------


def pair(run, settings, pieces):
    """A column and a row without a plan and without declarations: (output, gradients of x, of both weights)."""
    torch.manual_seed(0)
    up, down = nn.Linear(8, 12).double(), nn.Linear(12, 8).double()
    region = Region(run.world, **settings)
    up = ColumnParallelLinear(up, region, pieces=pieces)
    down = RowParallelLinear(down, region)
    whole = torch.randn(2, 12, 8, dtype=torch.float64).requires_grad_()
    x = split_all_gather(whole, 1, group=run.world) if settings else whole
    y = down(up(x).relu())
    y = all_gather_split(y, 1, group=run.world) if settings else y
    y.square().sum().backward()
    sum_partials(down.parameters(), ("tp",))
    return y.detach(), whole.grad, up.weight.held.boxes, up.weight.grad, down.weight.grad, down.bias.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_layers_are_of_use_without_a_plan(pool, ranks, mode):
    torch.manual_seed(0)
    up, down = nn.Linear(8, 12).double(), nn.Linear(12, 8).double()
    x = torch.randn(2, 12, 8, dtype=torch.float64).requires_grad_()
    y = down(up(x).relu())
    y.square().sum().backward()
    for rank, (out, dx, boxes, dup, ddown, dbias) in enumerate(pool.run(ranks, pair, MODES[mode], None)):
        share = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
        assert near(out, y.detach()) <= 1 and near(dx, x.grad) <= 1
        assert near(dup, up.weight.grad[share]) <= 1 and near(ddown, down.weight.grad[:, share]) <= 1
        assert near(dbias, down.bias.grad) <= 1
        assert boxes == (layout.Box((12, 8), (share.start, 0), (12 // ranks, 8)),)
