"""A small model with two mixtures, trained by one plain process and by ranks that share its experts."""

import contextlib
import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from collectives import layout, norm
from collectives.partials import sum_partials
from tests.expert_parallel import reference
from tests.expert_parallel.cases import Case, Seen, made, pairs, part, sequences, share_experts
from tests.tensor_parallel.training import gradient_error, held, near, update_error

VOCAB, LIMIT = 29, 0.5
BIAS = tuple(0.05 * (e % 3 - 1) for e in range(12))


@dataclass(frozen=True)
class Training:
    """case: layer and mesh. The labels of some tokens are ignored, other numbers of them on each rank."""

    case: Case
    optimizer: str = "sgd"
    steps: int = 3

    def made(self, params):
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=0.2, momentum=0.9)
        return torch.optim.AdamW(params, lr=0.02, eps=1e-4)  # at 1e-8 the noise of a gradient over eps is 1e-9

    def batch(self, step):
        """(ids, labels), whole."""
        numbers = torch.Generator().manual_seed(100 + step)
        size = sum(self.case.shares), self.case.T
        ids, labels = (torch.randint(VOCAB, size, generator=numbers) for _ in range(2))
        labels[torch.rand(size, generator=numbers) < 0.3] = -100
        labels[~torch.tensor(self.case.routed())] = -100
        labels[4] = -100
        return ids, labels

    def values(self):
        """The first values of all parameters by name."""
        numbers = torch.Generator().manual_seed(9)
        D = self.case.layer.width
        values = {
            "embed.weight": torch.randn(VOCAB, D, generator=numbers, dtype=torch.float64),
            "head.weight": torch.randn(VOCAB, D, generator=numbers, dtype=torch.float64) / 3,
        }
        for i in range(2):
            values[f"blocks.{i}.norm.weight"] = 1 + torch.rand(D, generator=numbers, dtype=torch.float64) / 2
            layer = reference.weights(self.case.layer, i)
            values |= {f"blocks.{i}.ffn.{name}": value for name, value in layer.items()}
        return values


# -- one process -------------------------------------------------------------------------------------------------------


def forward(training, named, ids, labels):
    """(the cross-entropy, what the layers add to it, their results)"""
    layer, routed, results = training.case.layer, training.case.routed(), []
    x = named["embed.weight"][ids]
    for i in range(2):
        mine = {name.removeprefix(f"blocks.{i}.ffn."): value for name, value in named.items()}
        scale = torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        results.append(reference.apply(layer, mine, x / scale * named[f"blocks.{i}.norm.weight"], routed))
        x = x + results[-1].y
    logits = x @ named["head.weight"].T
    there = [(b, t, label) for b, row in enumerate(labels.tolist()) for t, label in enumerate(row) if label >= 0]
    crosses = [logits[b, t].exp().sum().log() - logits[b, t, label] for b, t, label in there]
    return sum(crosses) / len(crosses), sum(reference.loss(layer, result) for result in results), results


@functools.cache
def _plain(training):
    named = {name: value.requires_grad_() for name, value in training.values().items()}
    optimizer, done = training.made(named.values()), []
    first = {name: value.detach().clone() for name, value in named.items()}
    for step in range(training.steps):
        optimizer.zero_grad()
        cross, extra, results = forward(training, named, *training.batch(step))
        (cross + extra).backward()
        grads = {name: value.grad.clone() for name, value in named.items()}
        total = nn.utils.clip_grad_norm_(named.values(), LIMIT)
        assert total > LIMIT, "a step that clips nothing tests no norm"
        optimizer.step()
        values = {name: value.detach().clone() for name, value in named.items()}
        dropped = [result.dropped for result in results]
        done.append((cross.detach(), grads, total, values, [result.chosen for result in results], dropped))
    return first, done


def plain(training):
    """What one process does: the values at first, and of each step (cross-entropy, gradients before clipping, norm,
    values, choices of each layer, those that were dropped).
    """
    case = replace(training.case, ranks=1, ep=1, cp=1, tp=1, microbatches=1, order="")
    return _plain(replace(training, case=case))


# -- on ranks ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + mixture(norm(x))."""

    def __init__(self, layer):
        super().__init__()
        self.norm = nn.RMSNorm(layer.width, eps=1e-6)
        self.ffn = made(layer)

    def forward(self, x, where):
        return x + self.ffn(self.norm(x), where)


class Tiny(nn.Module):
    """An embedding, two blocks, a head."""

    def __init__(self, layer):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, layer.width)
        self.blocks = nn.ModuleList(Block(layer) for _ in range(2))
        self.head = nn.Linear(layer.width, VOCAB, bias=False)

    def forward(self, ids, where):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, where)
        return self.head(x)


def trained(run, training, change=contextlib.nullcontext):
    """Of each step what this rank has: (its part of the cross-entropy, gradients before clipping, norm, values, choices
    of each layer, those that were dropped).
    """
    with change():
        model = Tiny(training.case.layer).double()
        model.load_state_dict(training.values(), strict=False)
        share_experts(run, training.case, model)
        params, done = list(model.parameters()), []
        layout.check(params, run.world)
        optimizer = training.made(params)
        for step in range(training.steps):
            optimizer.zero_grad()
            cross, chosen, dropped = one_batch(run, training, model, step)
            sum_partials(params, ("data",))
            layout.check_copies([(param.held, param.grad) for param in params], run.world)
            grads = held(params, lambda param: param.grad)
            total = norm.grad_norm(params, group=run.world)
            norm.clip(params, total, LIMIT)
            optimizer.step()
            done.append((cross, grads, total, held(params, lambda param: param), chosen, dropped))
    return done


def one_batch(run, training, model, step):
    """Forward and backward of all microbatches."""
    case, (ids, labels) = training.case, training.batch(step)
    count, mine, cross = int((labels >= 0).sum()), case.mine(run.rank), torch.zeros((), dtype=torch.float64)
    layers = [block.ffn for block in model.blocks]
    for layer in layers:
        layer.record = Seen(case.layer.experts)
    for rows in case.rows(run.rank):
        logits = model(part(ids, rows, mine, 1), sequences(case, run.rank, rows))
        losses = F.cross_entropy(logits.flatten(0, 1), part(labels, rows, mine, -100).flatten(), reduction="sum")
        (losses / count).backward()
        cross += losses.detach() / count
    chosen, dropped = [], []
    for layer in layers:
        calls = list(zip(layer.record.calls, case.rows(run.rank), strict=True))
        chosen.append(set().union(*(pairs(before, rows, mine) for (before, _), rows in calls)))
        dropped.append(chosen[-1] - set().union(*(pairs(after, rows, mine) for (_, after), rows in calls)))
    return cross, chosen, dropped


def worst(training, ranks):
    """The largest error of any rank, as a share of what is allowed; that choices are the same is asserted."""
    before, steps = plain(training)
    share = 0.0
    for of_ranks, (cross, grads, total, values, chosen, dropped) in zip(zip(*ranks, strict=True), steps, strict=True):
        parts, *_, all_chosen, all_dropped = zip(*of_ranks, strict=True)
        for everyones, right in ((all_chosen, chosen), (all_dropped, dropped)):
            assert [set().union(*of_layer) for of_layer in zip(*everyones, strict=True)] == right
        share = max(share, near(sum(parts) / training.case.tp, cross))
        for _, ours, norm_of_all, updated, *_ in of_ranks:
            share = max(share, near(norm_of_all, total), gradient_error(ours, grads, ()))
            share = max(share, update_error(updated, values, before, ()))
        before = values
    return share
