"""A model whose gradients are numbers to be read: a digit for each rank and microbatch, 1 where it took part, 0 where
it did not, 2 where it was counted twice. Parts can be left out, or run in any order, as each rank is told.
"""

import contextlib

import torch
from torch import nn

from fsdp import fully_shard
from tests.fsdp.versions import groups
from tests.shards import assembled, pieces

NAMES = ("0", "1", "2", "2.left", "2.right", "3")


class Leaf(nn.Module):
    """Adds up all of x times its weight."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))

    def forward(self, x, parts):
        return (self.weight * x).sum()


class Inner(nn.Module):
    """A weight of its own, and two leaves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.left, self.right = Leaf(2, 3), Leaf(1)

    def forward(self, x, parts):
        out = (self.weight * x).sum()
        for part in parts.get("2", ()):
            out = out + getattr(self, part)(x, parts)
        return out


class Root(nn.ModuleList):
    """The sum of the parts that `run` names, in that order: "3 2 2.left 1!" runs part 3, part 2 and in it its left
    leaf, and part 1, of whose output nothing comes. Its own weight is a scalar.
    """

    def __init__(self):
        super().__init__([Leaf(3), Leaf(5, 2), Inner(), Leaf()])
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x, run):
        out, parts = self.weight * x.sum(), {"2": [name[2:] for name in run.split() if name.startswith("2.")]}
        for name in run.split():
            if "." not in name:
                part = self[int(name[0])](x, parts)
                out = out if name.endswith("!") else out + part
        return out


def sharded(run, mode, units=(*NAMES[3:5], *NAMES[:3], NAMES[5])):
    """(the model, its handle)."""
    model, (shard_group, replicas) = Root(), groups(run, mode.shards)
    settings = {"replicate_group": replicas, "reshard_after_forward": mode.reshard, "average": False}
    for path in units:
        fully_shard(model.get_submodule(path), shard_group, **settings)
    return model, fully_shard(model, shard_group, prefetch=mode.prefetch, **settings)


def steps(run, mode, plan, quiet="no_sync", anchored=False):
    """What this rank holds after each step.

    plan: of each step, of each microbatch, of each rank what it runs. quiet: the context of all microbatches but the
    last. anchored: whether inputs need a gradient.
    """
    model, handle = sharded(run, mode)
    done = []
    for microbatches in plan:
        for shard in handle.parameters():
            shard.grad = None
        for micro, runs in enumerate(microbatches):
            x = torch.tensor([10.0 ** (micro * run.size + run.rank)], dtype=torch.float64, requires_grad=anchored)
            last = micro == len(microbatches) - 1
            with contextlib.nullcontext() if last else getattr(handle, quiet, contextlib.nullcontext)():
                model(x, runs[run.rank]).backward()
        handle.finish()
        handle.after_step()
        done.append(pieces(handle))
    return done


def read(ranks):
    """Of each step the digits of each part's gradient, those of the last microbatch and rank first; None where no rank
    has one. All elements of a tensor must have the same.
    """
    for on_ranks in zip(*ranks, strict=True):
        grads, _ = assembled(on_ranks)
        yield {name.removesuffix("weight").strip("."): None if g is None else digits(g) for name, g in grads.items()}


def digits(grad):
    [value] = grad.unique().tolist()
    return f"{value:.0f}"


def expected(plan):
    """The same, by the plan."""
    for microbatches in plan:
        runs = [run.split() for runs in reversed(microbatches) for run in reversed(runs)]
        by_name = {name: "".join(str(int(in_loss(name, run))) for run in runs) for name in ("", *NAMES)}
        yield {name: text.lstrip("0") or None for name, text in by_name.items()}


def in_loss(name, run):
    """Whether a part's output, and that of the one around it, is in the loss."""
    return not name or (name in run and (name[0] in run))
