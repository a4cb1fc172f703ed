"""A module of models.py trained by one plain process and by ranks that share its tensors, and how far apart they are.

Every rank is judged by itself, against its part of the whole tensors: what all have in common hides no fault.
"""

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
from torch import nn

from collectives import layout, norm, rng
from collectives.differentiable import all_gather_split, split_all_gather
from collectives.layout import Box
from collectives.partials import sum_partials
from tensor_parallel import cut, parallelize, vocab_parallel_cross_entropy
from tests.shards import snapshot
from tests.tensor_parallel import models
from tests.training import ULP, furthest

MODES = {
    "tp": {},
    "sp": {"sequence_parallel": True},
    "sp, whole inputs kept": {"sequence_parallel": True, "save_gathered": True},
}


@dataclass(frozen=True)
class Recipe:
    """How to train. rows, tokens: B and T. meta: ranks make their parts by box, not by slicing."""

    optimizer: str = "sgd"
    rows: int = 3
    tokens: int = 12
    steps: int = 5
    limit: float = 0.5
    meta: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def made(self, params):
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=0.3, momentum=0.9)
        return torch.optim.AdamW(params, lr=0.02, eps=1e-4)  # at 1e-8 the noise of a gradient over eps is 1e-9


SGD = Recipe()


def batch(shape, recipe, step):
    """(input, cotangent) of a block; (ids, labels, factors of the losses) of a model, with ignored labels."""
    numbers = torch.Generator().manual_seed(100 * recipe.seed + step)
    size = recipe.rows, recipe.tokens
    if not shape.vocab:
        return tuple(
            torch.randn(*size, shape.width, generator=numbers, dtype=torch.float64).to(recipe.dtype) for _ in range(2)
        )
    ids, labels = (torch.randint(shape.vocab, size, generator=numbers) for _ in range(2))
    labels[torch.rand(size, generator=numbers) < 0.3] = -100
    return ids, labels, torch.rand(size, generator=numbers, dtype=torch.float64).to(recipe.dtype)


def forward(model, given):
    """(output, input, the scalar to differentiate)."""
    first, *rest = given
    if not first.is_floating_point():
        losses = model(first, rest[0])
        return losses, None, (losses * rest[1]).sum()
    out = model(x := first.clone().requires_grad_())
    return out, x, (out * rest[0]).sum()


@functools.cache
def plain(shape, recipe):
    """What one process does: the values at first, and of each step (output, gradient of the input, gradients before
    clipping, norm, values).
    """
    model, done = models.plain(shape).to(recipe.dtype), []
    optimizer, first = recipe.made(model.parameters()), snapshot(model)
    for step in range(recipe.steps):
        optimizer.zero_grad()
        out, x, loss = forward(model, batch(shape, recipe, step))
        loss.backward()
        grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        total = nn.utils.clip_grad_norm_(model.parameters(), recipe.limit)
        assert total > recipe.limit, "a step that clips nothing tests no norm"
        optimizer.step()
        done.append((out.detach(), None if x is None else x.grad, grads, total, snapshot(model)))
    return first, done


class Cut(nn.Module):
    """The same module on ranks, with whole inputs and outputs."""

    def __init__(self, run, module, shape, sequence_parallel):
        super().__init__()
        self.module, self.group = module, run.world
        self.cuts = sequence_parallel and not shape.vocab  # an embedding cuts by itself, and a loss is whole

    def forward(self, x, *more):
        if self.cuts:
            return all_gather_split(self.module(split_all_gather(x, 1, group=self.group)), 1, group=self.group)
        return self.module(x, *more)


def cut_module(run, shape, settings, recipe=Recipe()):
    """This rank's part of a module, with declarations that were checked."""
    module = models.made(shape, "meta") if recipe.meta else models.plain(shape).to(recipe.dtype)
    layout.declare(module, models.init, lambda name: True)
    kv_groups = [run.new_group(ranks) for ranks in cut.sharers(range(run.size), shape.kv_heads)]
    kv_group = next(group for group in kv_groups if group is not None)
    parallelize(module, models.plan(shape, kv_group), run.world, **settings)
    for param in set(module.parameters()) if recipe.meta else ():
        layout.materialize(param, run.device)
        rng.fill(param, models.SEED)
    if shape.vocab:
        module.cross_entropy = functools.partial(vocab_parallel_cross_entropy, vocab=shape.vocab, group=run.world)
    layout.check(module.parameters(), run.world)
    return module


def trained(run, shape, settings, recipe, change=contextlib.nullcontext, *, sums=("kv", "tp"), copies=True):
    """Of each step what this rank has: (output, gradient of the input, gradients before clipping, norm, values), the
    gradients and values as {name: (boxes, tensor)}. copies: whether equal boxes must have equal bits.
    """
    with change():
        module = cut_module(run, shape, settings, recipe)
        model, params, done = Cut(run, module, shape, settings.get("sequence_parallel")), list(module.parameters()), []
        optimizer = recipe.made(params)
        for step in range(recipe.steps):
            optimizer.zero_grad()
            out, x, loss = forward(model, batch(shape, recipe, step))
            loss.backward()
            sum_partials(params, sums)
            if copies:
                layout.check_copies([(param.held, param.grad) for param in params], run.world)
            grads = held(params, lambda param: param.grad)
            total = norm.grad_norm(params, group=run.world)
            norm.clip(params, total, recipe.limit)
            optimizer.step()
            if copies:
                layout.check_copies([(param.held, param) for param in params], run.world)
            done.append((out.detach(), None if x is None else x.grad, grads, total, held(params, lambda param: param)))
    return done


def held(params, tensor):
    return {param.held.name: (param.held.boxes, tensor(param).detach().clone()) for param in params}


def worst(ranks, expected, zeros=frozenset()):
    """The largest error of any rank, as a share of what is allowed. zeros: names of exact zeros, judged absolutely."""
    first, steps = expected
    share = 0.0
    for on_rank in ranks:
        before = first
        for (out, dx, grads, total, values), (true_out, true_dx, true_grads, true_total, true_values) in zip(
            on_rank, steps, strict=True
        ):
            share = max(share, near(out, true_out), near(total, true_total))
            share = max(share, 0.0 if true_dx is None else near(dx, true_dx))
            share = max(
                share, gradient_error(grads, true_grads, zeros), update_error(values, true_values, before, zeros)
            )
            before = true_values
    return share


def near(ours, expected):
    return furthest(ours, expected) / (1e-12 * float(expected.abs().max()))


def gradient_error(grads, expected, zeros):
    assert grads.keys() == expected.keys()
    largest = max(size(grad) for grad in expected.values())
    assert all(size(expected[name]) < 1e-14 * largest for name in zeros)
    return max(
        furthest(part, mine(boxes, expected[name])) / (1e-12 * size(expected[name]) + 1e-14 * largest)
        for name, (boxes, part) in grads.items()
    )


def update_error(values, expected, before, zeros):
    moved = {name: furthest(value, before[name]) for name, value in expected.items()}
    share = 0.0
    for name, (boxes, part) in values.items():
        if name not in zeros:
            assert moved[name] > 1e-4 * size(expected[name]), f"{name} moves too little to judge its update"
        allowed = (1e-12 if name in zeros else 1e-10 * moved[name]) + 4 * ULP * size(expected[name])
        share = max(share, furthest(part, mine(boxes, expected[name])) / allowed)
    return share


def size(tensor):
    return float(tensor.abs().max())


def mine(boxes, whole):
    """A rank's part of a whole tensor, by its boxes."""
    parts = [whole[box.slices(Box.whole(whole.shape))] for box in boxes]
    return torch.cat(parts) if math.prod(parts[0].shape[1:]) else parts[0]
