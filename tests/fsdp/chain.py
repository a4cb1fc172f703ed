"""Units one after the other, which mark where forward and backward have got to among the collectives."""

import torch
from torch import nn

from fsdp import fully_shard
from tests.fsdp.versions import groups
from tests.recorder import recording
from tests.shards import pieces


class Unit(nn.Module):
    """A vector, and maybe units inside of it that run before it computes."""

    def __init__(self, name, calls, *inner):
        super().__init__()
        self.name, self.calls, self.inner = name, calls, nn.ModuleDict({unit.name[-1]: unit for unit in inner})
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x):
        for unit in self.inner.values():
            x = unit(x)
        self.calls.append(f"forward {self.name}")
        out = self.weight.mean() * x
        out.register_hook(self.mark) if out.requires_grad else None
        return torch.tanh(out)

    def mark(self, dout):
        self.calls.append(f"backward {self.name}")


class Chain(nn.ModuleList):
    """Three units, in any order; the root's own weight comes first."""

    def __init__(self, calls, nested):
        inner = [Unit("1a", calls), Unit("1b", calls)] if nested else []
        super().__init__([Unit("0", calls), Unit("1", calls, *inner), Unit("2", calls)])
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x, order=(0, 1, 2)):
        x = self.weight.mean() * x
        for number in order:
            x = self[number](x)
        return x


def told(run, mode, body, nested=False, steps=2):
    """Of each step what happens, as text, and what this rank holds. body(model, handle, x, marks) is the step up to
    `finish`.
    """
    marks, (shard_group, replicas), done = [], groups(run, mode.shards), []
    model = Chain(marks, nested)
    settings = {"replicate_group": replicas, "reshard_after_forward": mode.reshard, "average": False}
    for unit in [*model[1].inner.values(), *model]:
        fully_shard(unit, shard_group, **settings)
    handle = fully_shard(model, shard_group, prefetch=mode.prefetch, **settings)
    for _ in range(steps):
        for shard in handle.parameters():
            shard.grad = None
        with recording() as recorder:
            recorder.calls = marks
            body(model, handle, torch.tensor([0.1 * (run.rank + 1)], dtype=torch.float64, requires_grad=True), marks)
            marks.append("finish")
            handle.finish()
        done.append((shortened(recorder.told_by_name()), pieces(handle)))
        marks.clear()
    return done


def shortened(text):
    """Without the names that the modules have in one another."""
    return text.replace("1.inner.", "1").replace("Chain", "root")
