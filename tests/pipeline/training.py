"""The model of models.py trained by one plain process with whole batches, and by the ranks of a pipeline.

Every rank is judged by itself: each of its gradients and values against those of the same name.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from collectives import layout, norm
from collectives.partials import sum_partials
from pipeline import Microbatch, Pipeline, connect, schedule
from pipeline.ties import TIE, tie, tie_group
from tests.pipeline import models
from tests.training import furthest, gradient_error, update_error

COPY = "copy"  # the label of the sum over DualPipe's two copies
EVERY_SCHEDULE = [  # with stages a rank
    *(("layer_wise", v) for v in (1, 2)),
    *(("gpipe", v) for v in (1, 2, 3)),
    ("1f1b", 1),
    *(("interleaved", v) for v in (1, 2, 3)),
    *(("zb_h1", 1), ("zbv", 2), ("dualpipe", 2), ("dualpipe_v", 2)),
]


class Case(NamedTuple):
    """A plan."""

    name: str
    virtual: int
    ranks: int
    microbatches: int

    def plan(self):
        return schedule(self.name, self.ranks, self.microbatches, self.virtual)


def possible(case):
    """DualPipe halves ranks and microbatches."""
    return case.name != "dualpipe" or case.ranks % 2 == case.microbatches % 2 == 0


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    optimizer: str = "sgd"
    tied: bool = False
    steps: int = 4
    limit: float = 0.5  # of the gradient's norm
    rows: tuple[int, ...] = ()  # of each microbatch, default others in each step

    def sizes(self, microbatches, step):
        return list(self.rows or rows_of(microbatches, step))

    def made(self, params):
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=1.0, momentum=0.9)
        return torch.optim.AdamW(params, lr=0.02, eps=1e-4)  # at 1e-8 the noise of a gradient over eps is 1e-9


def rows_of(microbatches, step):
    """Rows of each microbatch: unequal, one empty; the third step's are others, the fourth's the first's again."""
    sizes = [2 - m % 2 for m in range(microbatches)]
    if microbatches > 2:
        sizes[1] = 0
    return sizes if step != 2 else [sizes[-1] + 1, *sizes[:-1]]


def batch(sizes, step):
    """(ids, labels, numbers of the rows, valid tokens) of a step: a third of the labels count not, and of the last
    microbatch, if there are several, none.
    """
    numbers = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(models.VOCAB, (sum(sizes), models.TOKENS), generator=numbers) for _ in range(2))
    labels[torch.rand(labels.shape, generator=numbers) < 0.3] = -100
    labels[0, 0] = 1
    if len(sizes) > 1:
        labels[max(1, sum(sizes[:-1])) :] = -100
    return ids, labels, 100 * step + torch.arange(len(ids)), int((labels != -100).sum())


def microbatches_of(sizes, step):
    """The same as a pipeline takes it."""
    *tensors, valid = batch(sizes, step)
    parts = zip(*(tensor.split(sizes) for tensor in tensors), strict=True)
    return [Microbatch((ids,), {"rows": rows, "step": step}, (labels, valid)) for ids, labels, rows in parts]


def alone(model, sizes, step):
    """(loss, gradients by name) of the whole batch in one process."""
    model.zero_grad()
    ids, labels, rows, valid = batch(sizes, step)
    loss = models.loss(model(ids, rows=rows, step=step), (labels, valid))
    loss.backward()
    return loss.detach(), gradients(model.named_parameters())


def in_turn(pipe, params, sizes, step):
    """(losses, gradients by name) of a pipeline's step on one rank, summed over ties and copies."""
    for param in params:
        param.grad = None
    losses = pipe.step(microbatches_of(sizes, step))
    sum_partials(params, (TIE, COPY))
    return losses, gradients((param.held.name, param) for param in params)


def gradients(named):
    return {name: None if param.grad is None else param.grad.clone() for name, param in named}


@functools.cache
def plain(blocks, microbatches, recipe):
    """What one process does with whole batches: the values at first, and of each step (loss, gradients before clipping,
    norm, values).
    """
    model, done = models.model(blocks, tied=recipe.tied), []
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, first = recipe.made(trained), values(model)
    for step in range(recipe.steps):
        loss, grads = alone(model, recipe.sizes(microbatches, step), step)
        total = nn.utils.clip_grad_norm_(trained, recipe.limit)
        assert total > recipe.limit, "a step that clips nothing tests no norm"
        optimizer.step()
        done.append((loss, grads, total, values(model)))
    return first, done


def values(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def stages_of(plan, rank, model):
    """A rank's stages, of a whole model."""
    cut = models.cut(plan.length)
    return {stage: models.Stage(model.parts[i] for i in cut[stage % plan.length]) for stage in plan.stages_of(rank)}


def declared(run, plan, model, stages, *, tied):
    """This rank's parameters, with declarations that were checked, and the labels of the sums over pipeline ranks."""
    layout.declare(model, lambda name: layout.Constant(0.0), lambda name: True)
    own = {param for stage in stages.values() for param in stage.parameters()}
    params = [param for param in model.parameters() if param in own]  # in one order on all ranks, as sums need it
    if plan.copies > 1:
        pairs = [run.new_group([r, run.size - 1 - r], COPY) for r in range(run.size // 2)]
        [pair] = [group for group in pairs if group is not None]
        for param in params:
            param.held.sums[COPY] = pair
    elif tied:
        group = tie_group(plan, [range(run.size)], run.new_group)
        for param in params:
            if group is not None and param is model.parts[0].table.weight:
                tie(param, group)
    layout.check(params, run.world)
    return params


def built(run, plan, model=None, *, tied=False, **settings):
    """(the pipeline of one rank, its parameters), of a whole model."""
    model = model or models.model(models.blocks_for(plan.length), tied=tied)
    stages = stages_of(plan, run.rank, model)
    params = declared(run, plan, model, stages, tied=tied)
    links = connect(plan, [range(run.size)], run.new_group)
    return Pipeline(plan, stages, links, run.world, loss=models.loss, **settings), params


def trained(run, case, recipe, change=contextlib.nullcontext):
    """Of each step what this rank has: (losses, gradients before clipping, norm, values)."""
    plan, done = case.plan(), []
    with change():
        pipe, params = built(run, plan, tied=recipe.tied)
        optimizer = recipe.made([param for param in params if param.requires_grad] or [torch.zeros(1)])
        for step in range(recipe.steps):
            losses, grads = in_turn(pipe, params, recipe.sizes(case.microbatches, step), step)
            layout.check_copies([(p.held, p.grad) for p in params if p.grad is not None], run.world)
            total = norm.grad_norm(params, group=run.world)
            norm.clip(params, total, recipe.limit)
            optimizer.step()
            done.append((losses, grads, total, {p.held.name: p.detach().clone() for p in params}))
        layout.check_copies([(p.held, p) for p in params], run.world)
    return done


def several(run, job, *many):
    """A job's result for each of several sets of arguments."""
    return [job(run, *args) for args in zip(*many, strict=True)]


def check_gradients(ranks, true_loss, true_grads):
    """Of one step, (losses, gradients) by rank: all losses together and each rank's gradients are right."""
    losses = sum(loss for losses, _ in ranks for loss in losses)
    assert furthest(losses, true_loss) <= 1e-12 * float(true_loss)
    assert {name for _, grads in ranks for name in grads} == set(true_grads)
    for _, grads in ranks:
        assert gradient_error(true_grads | grads, true_grads) <= 1


def worst(ranks, case, recipe):
    """The largest error of any rank, as a share of what is allowed."""
    first, steps = plain(models.blocks_for(case.plan().length), case.microbatches, recipe)
    names = {name for of_rank in ranks for name in of_rank[0][1]}
    assert names == set(first), f"no rank has {set(first) - names}"
    before, share = first, 0.0
    for on_ranks, (true_loss, true_grads, true_total, true_values) in zip(zip(*ranks, strict=True), steps, strict=True):
        losses = [loss for losses, *_ in on_ranks for loss in losses]
        assert len(losses) == case.microbatches
        share = max(share, furthest(sum(losses), true_loss) / (1e-12 * float(true_loss)))
        for _, grads, total, values in on_ranks:
            share = max(share, furthest(total, true_total) / (1e-12 * float(true_total)))
            share = max(share, gradient_error(true_grads | grads, true_grads))
            share = max(share, update_error(true_values | values, true_values, before))
        before = true_values
    return share
