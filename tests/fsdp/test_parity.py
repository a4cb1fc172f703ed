"""Every mode against one plain process with the whole batch, in float64: gradients before clipping, norms, updates,
outputs; every rank and microbatch counted once; and the faults that must show.
"""

import functools
from unittest import mock

import pytest
import torch

from collectives import comm
from collectives.p2p import Handle
from fsdp import simple
from fsdp.gradient import Gradient
from fsdp.pack import Pack
from fsdp.unit import Unit
from tests.fsdp import digits
from tests.fsdp.versions import HYBRID, MODES, UNITS, drilled, trained
from tests.training import SHARES, STEPS, Recipe, data, furthest, gradient_error, net, plain, worst

RECIPES = {
    "one microbatch": Recipe(),
    "averaged": Recipe(average=True),
    "accumulated": Recipe(microbatches=3),
    "accumulated, averaged and clipped": Recipe(microbatches=3, average=True, limit=5.0),
    "reduced in every microbatch": Recipe(microbatches=3, quiet="sync", limit=5.0),
    "replicas once": Recipe(microbatches=3, quiet="no_replica_sync", average=True),
    "clipped, zeros kept": Recipe(limit=5.0, keep_zeros=True),
    "AdamW, zeros kept": Recipe(optimizer="adamw", average=True, keep_zeros=True),
    "AdamW, accumulated and clipped": Recipe(optimizer="adamw", microbatches=3, limit=5.0),
}
ALL_MODES = MODES | HYBRID
OFTEN = [
    (1, "full", "accumulated, averaged and clipped"),
    *((2, mode, "accumulated, averaged and clipped") for mode in ("full", "shard grad-op", "no shard")),
    *((3, mode, "reduced in every microbatch") for mode in ("full", "nested")),
    *((3, mode, "AdamW, accumulated and clipped") for mode in ("default", "layer used twice", "root")),
    *((4, mode, "replicas once") for mode in ("hybrid", "no shard")),
    (3, "last dimension", "accumulated, averaged and clipped"),
    (4, "hybrid", "AdamW, zeros kept"),
    (4, "hybrid, nested, keeping", "accumulated, averaged and clipped"),
]
SELDOM = [
    (ranks, mode, recipe)
    for mode in ALL_MODES
    for ranks in ((2, 4) if mode in HYBRID else (1, 2, 3, 4))
    for recipe in RECIPES
    if (ranks, mode, recipe) not in OFTEN
]
expected = functools.cache(plain)


@pytest.mark.parametrize(("ranks", "mode", "recipe"), [*OFTEN, *(drilled(*case) for case in SELDOM)])
def test_training_is_that_of_one_process(pool, ranks, mode, recipe, record_property):
    """Ranks without rows, microbatches without rows, parameters used by one rank, by none, frozen ones."""
    chosen = RECIPES[recipe]
    share = worst(pool.run(ranks, trained, ALL_MODES[mode], chosen), expected(chosen, sum(SHARES[ranks])))
    record_property("share of what is allowed", share)
    assert share <= 1


# -- each rank and microbatch once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quiet", ["no_sync", "no_replica_sync", "sync"])
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(2, "no shard"), (4, "hybrid"), *(drilled(ranks, mode) for ranks in (1, 2, 3, 4) for mode in MODES)],
)
def test_each_rank_and_microbatch_is_counted_once(pool, ranks, mode, quiet):
    """A digit for each: 2 would be one counted twice, 0 one that is missing, and any other place one of its own."""
    plan = [[("0 1 2 2.left 2.right 3",) * ranks] * 3] * 2
    shown = list(digits.read(pool.run(ranks, digits.steps, ALL_MODES[mode], plan, quiet)))
    assert shown == [dict.fromkeys(("", *digits.NAMES), "1" * 3 * ranks)] * 2


# -- forty lines -------------------------------------------------------------------------------------------------------


def simply(run, units):
    """Of each step of SGD with momentum the gradients of whole tensors, and all values, on this rank."""
    model, shares, names = net(0), SHARES[run.size], {}
    left = {param: name for name, param in model.named_parameters()}
    for module in (*map(model.get_submodule, UNITS[units]), model):
        if own := {left.pop(p): p.shape for p in module.parameters() if p in left}:
            simple.fully_shard(module, run.world)
            names[module] = own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    done = []
    for step in range(STEPS):
        ids, rows, cotangent = (part.split(shares)[run.rank] for part in data(sum(shares), step))
        optimizer.zero_grad()
        ((model(ids, rows) * cotangent).sum() * run.size / sum(shares)).backward()
        grads = wholes(names, lambda module: module.shard.grad, run)
        optimizer.step()
        done.append((grads, wholes(names, lambda module: module.shard.detach(), run)))
    return done


def wholes(names, row, run):
    """Whole tensors by name, from every rank's part of each unit's row."""
    tensors = {}
    for module, shapes in names.items():
        whole = torch.cat(comm.all_gather_object(row(module), group=run.world))
        sizes = [shape.numel() for shape in shapes.values()]
        parts = whole[: sum(sizes)].split(sizes)
        tensors |= {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return tensors


@pytest.mark.parametrize("units", ["blocks", "nested", drilled("root"), drilled("two blocks")])
@pytest.mark.parametrize("ranks", [1, drilled(2), 3, drilled(4)])
def test_forty_lines_do_the_same(pool, ranks, units):
    """Nothing is frozen there, and what nobody uses has a gradient of zero."""
    model, rows = net(0).requires_grad_(True), sum(SHARES[ranks])
    optimizer, shown = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), pool.run(ranks, simply, units)
    for step in range(STEPS):
        ids, numbers, cotangent = data(rows, step)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        ((model(ids, numbers) * cotangent).sum() / rows).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        for grads, values in (on_rank[step] for on_rank in shown):
            assert gradient_error(grads, {name: p.grad for name, p in model.named_parameters()}) <= 1
            for name, p in model.named_parameters():
                moved = float((p.detach() - before[name]).abs().max())
                assert furthest(values[name], p.detach()) <= 1e-10 * moved + 1e-15 * float(p.detach().abs().max())


# -- faults that parity must notice ------------------------------------------------------------------------------------


def last_rank_left_out():
    """Sums over the other ranks of a shard group only."""
    scatter = comm.reduce_scatter_single

    def scattered(output, input, *args, group, **more):
        return scatter(output, input * (group.rank() < group.size() - 1), *args, group=group, **more)

    return mock.patch.object(comm, "reduce_scatter_single", scattered)


def no_reduction():
    """Every rank keeps its own part of its own gradient."""

    def scattered(output, input, *args, group, **more):
        output.copy_(input[group.rank() * len(output) :][: len(output)])
        return Handle([])

    return mock.patch.object(comm, "reduce_scatter_single", scattered)


def replicas_left_out():
    """What a shard group has added stays so; what the ranks agree on is right."""
    reduce = comm.all_reduce

    def reduced(x, *args, async_op=False, **more):
        return Handle([]) if async_op else reduce(x, *args, async_op=async_op, **more)

    return mock.patch.object(comm, "all_reduce", reduced)


def no_gather():
    """Every rank sees its own shards only, and numbers where the others' would be."""

    def gathered(output, input, *, group, **more):
        output.fill_(0.5).view(group.size(), -1)[group.rank()] = input
        return Handle([])

    return mock.patch.object(comm, "all_gather_single", gathered)


def mean_for_sum():
    return mock.patch.object(comm, "SUM", comm.AVG)


def sum_for_mean():
    return mock.patch.object(comm, "AVG", comm.SUM)


def sums_of_the_last_microbatch_only():
    true = Gradient.finish_scatter

    def finish_scatter(gradient):
        gradient.sum = gradient.partial = None
        true(gradient)

    return mock.patch.object(Gradient, "finish_scatter", finish_scatter)


def gradients_of_the_last_microbatch_only():
    true = Unit.expect

    def expect(unit):
        for pack in unit.packs:
            for param in pack.params:
                param.grad = None
        true(unit)

    return mock.patch.object(Unit, "expect", expect)


def weights_that_stay():
    """Those of the first forward, for ever."""
    return mock.patch.object(Pack, "reshard", lambda pack: None)


FAULTS = {  # change, recipe, ranks, modes in which it must show
    "a rank is left out": (last_rank_left_out, "one microbatch", 2, ("full", "nested", "root")),
    "no reduction": (no_reduction, "one microbatch", 2, ("full", "shard grad-op")),
    "replicas left out": (replicas_left_out, "replicas once", 4, ("hybrid", "no shard")),
    "no gather": (no_gather, "one microbatch", 2, ("full", "default", "shard grad-op")),
    "a mean for a sum": (mean_for_sum, "one microbatch", 2, ("full", "no shard")),
    "a sum for a mean": (sum_for_mean, "averaged", 4, ("full", "hybrid")),
    "sums of the last microbatch": (sums_of_the_last_microbatch_only, "reduced in every microbatch", 2, ("full",)),
    "sums of it under replicas": (sums_of_the_last_microbatch_only, "replicas once", 4, ("hybrid",)),
    "gradients of the last microbatch": (gradients_of_the_last_microbatch_only, "accumulated", 2, ("full",)),
    "weights that stay": (weights_that_stay, "one microbatch", 2, ("full", "default")),
}


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        (drilled if number else lambda *case: case)(fault, mode)
        for fault, (*_, modes) in FAULTS.items()
        for number, mode in enumerate(modes)
    ],
)
def test_parity_sees_a_fault(pool, fault, mode):
    change, recipe, ranks, _ = FAULTS[fault]
    results = pool.run(ranks, functools.partial(trained, change=change), ALL_MODES[mode], RECIPES[recipe])
    with pytest.raises(AssertionError):
        assert worst(results, expected(RECIPES[recipe], sum(SHARES[ranks]))) <= 1
