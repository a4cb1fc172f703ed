"""Two pipelines of two ranks beside each other, with every data strategy: parity, and what is gathered and reduced how
often. T111 of the traps: gradients of all microbatches are reduced once, a collective a bucket.
"""

import contextlib
import functools
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import layout, norm
from collectives.partials import sum_partials
from collectives.replicas import Replica
from ddp import overlapped
from fsdp import fully_shard
from pipeline import Microbatch, Pipeline, connect, schedule
from pipeline.ties import TIE, tie, tie_group
from tests.pipeline import models
from tests.pipeline.training import Recipe, microbatches_of, plain, stages_of
from tests.recorder import recording
from tests.training import ULP, furthest
from zero import stage1, stage2, stage3
from zero.mixed import Mixed

RANKS, PIPELINES, REPLICAS = 4, [[0, 2], [1, 3]], [[0, 1], [2, 3]]
SIZES = (2, 1, 0, 2, 1, 1, 2, 1)  # rows of eight microbatches, four a pipeline
MICROBATCHES = len(SIZES) // 2
RECIPE, TIED = Recipe(steps=3, rows=SIZES), Recipe(steps=3, rows=SIZES, tied=True)


def units_of(root, group, apart=()):
    """fsdp: each part a unit; those that share a weight are left to the root."""
    for part in (part for stage in root for part in stage.parts if part not in apart):
        fully_shard(part, group, average=False)
    return fully_shard(root, group, average=False)


STRATEGIES = {
    "ddp": functools.partial(overlapped.wrap, cap=2000, average=False),
    "zero1": functools.partial(stage1.wrap, cap=2000, average=False),
    "zero2": functools.partial(stage2.wrap, cap=2000, average=False),
    "zero3": functools.partial(stage3.wrap, average=False),
    "fsdp": units_of,
}


def built(run, name, strategy, *, tied, **settings):
    """(pipeline, handle, data group) of one rank."""
    plan = schedule(name, 2, MICROBATCHES)
    [place] = [ranks.index(run.rank) for ranks in PIPELINES if run.rank in ranks]
    [pipe_group] = [g for g in map(run.new_group, PIPELINES) if g is not None]
    [data_group] = [g for g in map(run.new_group, REPLICAS) if g is not None]
    model = models.model(models.blocks_for(plan.length), tied=tied)
    stages = stages_of(plan, place, model)
    layout.declare(model, lambda name: layout.Constant(0.0), lambda name: True)
    root, units, more = nn.ModuleList(stages.values()), {s: [stage] for s, stage in stages.items()}, {}
    if tied and (ends := tie_group(plan, PIPELINES, run.new_group)) is not None:
        tie(model.parts[0].table.weight, ends)
    elif tied and strategy == "fsdp":
        more, units = {"apart": [model.parts[0], model.parts[-1]]}, {s: [root] for s in stages}
    layout.check(root.parameters(), run.world)  # who else holds them: zero deals by that into buckets
    handle = STRATEGIES[strategy](root, data_group, **more)
    layout.check(handle.parameters(), run.world)
    links = connect(plan, PIPELINES, run.new_group)
    settings |= {"loss": models.loss, "handle": handle, "units": units}
    return Pipeline(plan, stages, links, pipe_group, **settings), handle, data_group


def trained(run, name, strategy, tied, settings):
    """Of each step (losses, gradients and values as [(name, boxes, tensor)], norm), and collectives over replicas."""
    pipe, handle, group = built(run, name, strategy, tied=tied, **settings)
    params = [param for param in handle.parameters() if param.held.boxes]
    optimizer, done = RECIPE.made([p for p in params if p.requires_grad]), []
    first = REPLICAS[run.rank // 2].index(run.rank) * MICROBATCHES
    for step in range(RECIPE.steps):
        optimizer.zero_grad()
        pipe.evaluate(microbatches_of([1, 2], 7))  # which leaves nothing behind
        with recording() as recorder:
            losses = pipe.step(microbatches_of(SIZES, step)[first : first + MICROBATCHES])
            handle.finish()
        sum_partials(params, (TIE,))
        layout.check_copies([(p.held, p.grad) for p in params if p.grad is not None], run.world)
        grads = [(p.held.name, p.held.boxes, p.grad.clone()) for p in params if p.grad is not None]
        total = norm.grad_norm(params, group=run.world)
        norm.clip(params, total, RECIPE.limit)
        optimizer.step()
        handle.after_step()
        done.append((losses, grads, total, [(p.held.name, p.held.boxes, p.detach().clone()) for p in params]))
    calls = Counter(
        call.op for call in recorder.calls if (call.group == group and call.about != "") or large(call, group)
    )
    return done, calls, reducible(handle)


def reducible(handle):
    """How many buckets, or packs of units, have gradients."""
    if hasattr(handle, "units"):
        return sum(len(unit.trained) for unit in handle.units)
    return sum(bucket.trained if hasattr(bucket, "trained") else True for bucket in handle.buckets)


def large(call, group):
    """No agreement on which parameters were used."""
    return call.group == group and call.dtype == torch.float64


def part_of(whole, boxes):
    return torch.cat([whole[box.slices(layout.Box.whole(whole.shape))].flatten() for box in boxes])


def check(ranks, stages, recipe):
    """Every rank's shards are those of one process that does all eight microbatches."""
    before, steps = plain(models.blocks_for(stages), len(SIZES), recipe)
    for step, (true_loss, true_grads, true_total, true_values) in enumerate(steps):
        losses = sum(loss for of_rank in ranks for loss in of_rank[step][0])
        assert furthest(losses, true_loss) <= 1e-12 * float(true_loss)
        largest = max(float(grad.abs().max()) for grad in true_grads.values() if grad is not None)
        seen = set()
        for of_rank in ranks:
            _, grads, total, values = of_rank[step]
            assert furthest(total, true_total) <= 1e-12 * float(true_total)
            for name, boxes, grad in grads:
                seen.add(name)
                allowed = 1e-12 * float(true_grads[name].abs().max()) + 1e-14 * largest
                assert furthest(grad.flatten(), part_of(true_grads[name], boxes)) <= allowed, name
            for name, boxes, value in values:
                moved = float((true_values[name] - before[name]).abs().max())
                allowed = 1e-10 * moved + 4 * ULP * float(true_values[name].abs().max())
                assert furthest(value.flatten(), part_of(true_values[name], boxes)) <= allowed, name
        assert seen == {name for name, grad in true_grads.items() if grad is not None}
        before = true_values


SHORT = [("1f1b", "ddp"), ("zb_h1", "zero1"), ("zbv", "zero2"), ("zbv", "zero3"), ("zb_h1", "fsdp"), ("zbv", "fsdp")]
NAMES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"]
LONG = [
    pytest.param(name, strategy, marks=pytest.mark.drill)
    for name in NAMES
    for strategy in STRATEGIES
    if (name, strategy) not in SHORT
]


@pytest.mark.parametrize(("name", "strategy"), SHORT + LONG)
def test_T111_one_reduction_a_bucket_and_parity(pool, name, strategy):
    results = pool.run(RANKS, trained, name, strategy, True, {}, timeout=60)
    check([done for done, _, _ in results], schedule(name, 2, 1).stages, TIED)
    assert all(reductions(calls) == buckets for _, calls, buckets in results)


def reductions(calls):
    return calls["all_reduce"] + calls["reduce_scatter_single"]


WORDS = [{"open": o, "reduce": r} for o in ("step", "action") for r in ("step", "action")]


@pytest.mark.parametrize("settings", WORDS, ids=lambda words: "{open}-{reduce}".format(**words))
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
@pytest.mark.parametrize("name", ["1f1b", "zbv", *(pytest.param(n, marks=pytest.mark.drill) for n in ("zb_h1",))])
def test_weights_open_and_gradients_reduced_a_step_or_an_action(pool, name, strategy, settings):
    results = pool.run(RANKS, trained, name, strategy, False, settings, timeout=60)
    check([done for done, _, _ in results], schedule(name, 2, 1).stages, RECIPE)
    times = MICROBATCHES if settings["reduce"] == "action" else 1
    assert all(reductions(calls) == buckets * times for _, calls, buckets in results)


class Told(Replica):
    """A data strategy that does nothing; and a timeline: both note what they are told."""

    def __init__(self, stages):
        self.names = {stage: number for number, stage in stages.items()}
        self.words, self.syncing = [], True
        for verb in ("unshard", "reshard", "reduce"):
            setattr(self, verb, lambda stage, verb=verb: self.words.append(f"{verb} {self.names[stage]}"))

    @contextlib.contextmanager
    def span(self, lane, name):
        assert not self.syncing
        self.words.append(name)
        yield


def words(run, settings):
    plan = schedule("zbv", 1, 1)
    stages = stages_of(plan, 0, models.model(models.blocks_for(2)))
    told = Told(stages)
    settings = {"loss": models.loss, "handle": told, "timeline": told} | settings
    pipe = Pipeline(plan, stages, connect(plan, [range(1)], run.new_group), run.world, **settings)
    pipe.step(microbatches_of([2], 0))
    assert told.syncing
    return " · ".join(told.words)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {},
            "unshard 0 · forward 0.0 · unshard 1 · forward 1.0 · input 1.0 · weight 1.0 · reshard 1 · reduce 1 · "
            "backward 0.0 · reshard 0 · reduce 0",
        ),
        (
            {"open": "action"},
            "unshard 0 · forward 0.0 · reshard 0 · unshard 1 · forward 1.0 · input 1.0 · weight 1.0 · reshard 1 · "
            "reduce 1 · unshard 0 · backward 0.0 · reshard 0 · reduce 0",
        ),
    ],
)
def test_what_a_handle_is_told(pool, settings, expected):
    assert pool.run(1, words, settings) == [expected]


def not_deferred(run, *args):
    """In the place of a step's `deferring`, what is there for microbatches one by one."""
    with mock.patch.object(stage2.ZeRO2, "deferring", stage2.ZeRO2.no_sync):
        return trained(run, *args)


def test_T111_a_bucket_that_is_reduced_twice_shows(pool):
    for _, calls, buckets in pool.run(RANKS, not_deferred, "zbv", "zero2", True, {}):
        assert reductions(calls) == 2 * buckets


def in_bfloat16(run, wrap, name):
    """The gradients of weights of one, from nine microbatches: 256 and eight ones."""
    plan, mixed = schedule(name, 1, 9, 2), {"mixed": Mixed()}
    stages = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    for stage in stages:
        nn.init.ones_(stage.weight)
    handle = wrap(stages, run.world, average=False, **mixed)
    pipe = Pipeline(plan, dict(enumerate(stages)), {}, run.world, loss=lambda y, _: y.float().sum(), handle=handle)
    numbers = [256.0] + [1.0] * 8
    pipe.step([Microbatch((torch.full((1, 1), number, dtype=torch.bfloat16),)) for number in numbers])
    handle.finish()
    return [param.grad.item() for param in handle.parameters()]


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
@pytest.mark.parametrize("wrap", [stage1.wrap, stage2.wrap, stage3.wrap], ids=["zero1", "zero2", "zero3"])
def test_gradients_add_up_in_the_dtype_of_the_strategy(pool, wrap, name):
    """In bfloat16 256 + 1 is 256; W tells the strategy of each microbatch, as B does."""
    assert pool.run(1, in_bfloat16, wrap, name) == [[264.0, 264.0]]
