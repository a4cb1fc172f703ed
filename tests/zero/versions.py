"""The stages that tests run, and what a test sees of a step: collectives, shards, the tensors they are pieces of."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from collectives.call import Call
from collectives.watch import Watcher, watching
from zero import stage0, stage1, stage2, stage3

STAGES = {"stage 0": stage0.wrap, "stage 1": stage1.wrap, "stage 2": stage2.wrap, "stage 3": stage3.wrap}
SMALL = {name: functools.partial(wrap, cap=600) for name, wrap in STAGES.items()}  # several buckets
VERSIONS = {
    **{f"{name}, 600 bytes": wrap for name, wrap in SMALL.items()},
    "stage 1": stage1.wrap,
    "stage 2, 1 byte, waiting": functools.partial(stage2.wrap, cap=1, overlap=False),
    "stage 3, threshold, waiting": functools.partial(stage3.wrap, threshold=20, cap=600, overlap=False),
    "stage 3, no layers": functools.partial(stage3.wrap, layers=()),
}
each_stage = pytest.mark.parametrize("wrap", list(SMALL.values()), ids=list(SMALL))
each_version = pytest.mark.parametrize("wrap", list(VERSIONS.values()), ids=list(VERSIONS))
drilled = functools.partial(pytest.param, marks=pytest.mark.drill)  # values for which a test is a drill
SHORT = {"all_gather_single": "gather", "reduce_scatter_single": "reduce", "all_reduce": "sum"}


class Recorder(Watcher):
    """The collectives, in the order of their launches; a test may add marks of its own."""

    def __init__(self) -> None:
        self.calls: list[Call | str] = []

    def begins(self, call: Call) -> None:
        if call.outer is None:
            self.calls.append(call)

    def told(self, sizes: dict[int, object]) -> str:
        """As text: marks, and the collectives whose number of elements is in `sizes`, by what it stands for there."""
        calls = [call for call in self.calls if isinstance(call, str) or call.elements in sizes]
        words = [
            call if isinstance(call, str) else f"{SHORT.get(call.op, call.op)} {sizes[call.elements]}" for call in calls
        ]
        return ", ".join(words)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Everything that this rank calls meanwhile."""
    recorder = Recorder()
    with watching(recorder):
        yield recorder


def vectors(text, dtype=torch.float64):
    """A layer for each number, with a parameter of this many ones."""
    return Vectors(Vector(int(n), dtype) for n in text.split())


class Vectors(nn.ModuleList):
    """The sum of what some layers make of x, by default all."""

    def forward(self, x, which=None):
        return sum(self[i](x) for i in (range(len(self)) if which is None else which))


class Vector(nn.Module):
    """A layer that adds up all of x times its weight."""

    def __init__(self, n, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


def pieces(handle):
    """What this rank holds: (name and boxes of each parameter, their gradients and values packed)."""
    shards = handle.parameters()
    return [(shard.held.name, shard.held.boxes) for shard in shards], packed([s.grad for s in shards] + shards)


def packed(tensors):
    """Tensors as one row a dtype, because a pipe carries one large tensor faster than many small ones; None stays."""
    kinds = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors]
    rows = defaultdict(list)
    for tensor in tensors:
        if tensor is not None:
            rows[tensor.dtype].append(tensor.detach().flatten())
    return kinds, {dtype: torch.cat(row) for dtype, row in rows.items()}


def unpacked(kinds, rows):
    """The tensors again."""
    sizes = {dtype: [kind[1].numel() for kind in kinds if kind and kind[0] == dtype] for dtype in rows}
    parts = {dtype: iter(row.split(sizes[dtype])) for dtype, row in rows.items()}
    return [None if kind is None else next(parts[kind[0]]).view(kind[1]) for kind in kinds]


def assembled(ranks):
    """(gradients, values) by name of whole tensors, from the pieces of all ranks. Every rank has a gradient of a
    tensor, or none has; elements that two ranks hold have the same bits.
    """
    held, tensors = zip(*((held, unpacked(*packs)) for held, packs in ranks), strict=True)
    grads, values = {}, {}
    for i, of_one_tensor in enumerate(zip(*held, strict=True)):
        [name] = {name for name, _ in of_one_tensor}
        boxes = [boxes for _, boxes in of_one_tensor]
        values[name] = joined(boxes, [mine[len(held[0]) + i] for mine in tensors])
        parts = [mine[i] for mine in tensors]
        assert len({part is None for part in parts}) == 1, f"{name}: a gradient on some ranks only"
        grads[name] = None if parts[0] is None else joined(boxes, parts)
    return grads, values


def joined(boxes, parts):
    """A whole tensor of its parts, each one box after the other."""
    shape = next((box.shape for some in boxes for box in some), (0,))
    whole, filled = torch.empty(shape, dtype=parts[0].dtype), torch.zeros(shape, dtype=torch.bool)
    for some, part in zip(boxes, parts, strict=True):
        assert part.dim() == 1 and part.numel() == sum(box.numel for box in some)
        for box, flat in zip(some, part.split([box.numel for box in some]), strict=True):
            where = tuple(slice(start, start + n) for start, n in zip(box.offset, box.local, strict=True))
            values = flat.view(box.local)
            assert not filled[where].any() or torch.equal(whole[where], values), "two ranks hold different values"
            whole[where] = values
            filled[where] = True
    assert filled.all(), "no rank holds some elements"
    return whole


def snapshot(model):
    """Copies of a module's parameters by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
