"""Parameters of every dtype and odd shapes, cut in every way, with numbers by index: what any rank of any mesh must
hold after a load needs no other rank.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint import Checkpoints, State, find, restore, training
from collectives import layout, rng
from collectives.layout import Box, Constant, Held
from collectives.runtime import Runtime

TENSORS = {
    "matrix": ((7, 5), torch.float32),
    "wide": ((1, 9), torch.bfloat16),
    "tall": ((13, 1), torch.float64),
    "cube": ((3, 4, 2), torch.complex64),
    "vector": ((11,), torch.int64),
    "mask": ((5, 3), torch.bool),
    "small floats": ((4, 6), torch.float8_e4m3fn),
    "other small floats": ((2, 3, 3), torch.float8_e5m2),
    "number": ((), torch.float64),
    "flag": ((), torch.bool),
    "few": ((2,), torch.float32),
    "one": ((1, 1, 1), torch.int16),
    "none": ((0, 3), torch.float32),
}
KINDS = ("parameter", "exp_avg", "exp_avg_sq")


def share(length: int, part: int, parts: int) -> tuple[int, int]:
    """(start, length), uneven: the last part takes what is left."""
    each = length // parts
    return part * each, each if part < parts - 1 else length - part * each


def rows(shape: tuple[int, ...], rank: int, size: int) -> list[Box]:
    return [Box.whole(shape).cut(0, *share(shape[0], rank, size))]


def columns(shape: tuple[int, ...], rank: int, size: int) -> list[Box]:
    return [Box.whole(shape).cut(len(shape) - 1, *share(shape[-1], rank, size))]


def flat(shape: tuple[int, ...], rank: int, size: int) -> list[Box]:
    start, length = share(math.prod(shape), rank, size)
    return layout.flat_range(shape, start, start + length)


def copies(shape: tuple[int, ...], rank: int, size: int) -> list[Box]:
    return [Box.whole(shape)]


def pairs(shape: tuple[int, ...], rank: int, size: int) -> list[Box]:
    """Rows over half of the ranks, which the other half has as well: hybrid."""
    shards = max(1, size // 2)
    return rows(shape, rank % shards, shards)


CUTS = {cut.__name__: cut for cut in (rows, columns, flat, copies, pairs)}
SIZES = (1, 2, 3, 4, 8)


def boxes(shape: tuple[int, ...], cut: str, rank: int, size: int) -> list[Box]:
    """What a rank holds of a tensor; a number cannot be cut, and a flat range of no elements is no box."""
    if not shape or (cut == "flat" and not math.prod(shape)):
        return [Box.whole(shape)]
    return [box for box in CUTS[cut](shape, rank, size) if box.numel or not math.prod(shape)]


def params(run: Runtime, cut: str, names: Sequence[str] = tuple(TENSORS)) -> list[nn.Parameter]:
    """Parameters of zeros of which this rank holds the boxes of that cut."""
    found = []
    for name in names:
        shape, dtype = TENSORS[name]
        held = boxes(shape, cut, run.rank, run.size)
        local = held[0].local if len(held) == 1 else (sum(box.numel for box in held),)
        param = nn.Parameter(torch.zeros(local, dtype=dtype), requires_grad=False)
        param.held = Held(name, tuple(held), Constant(0.0), decay=False)
        found.append(param)
    return found


def numbers(kind: str, name: str, held: Sequence[Box]) -> Tensor:
    """Random bits for every element, that tell tensor, kind and place; among them NaN, -0.0 and infinities."""
    dtype = TENSORS[name][1]
    index = torch.cat([torch.empty(0, dtype=torch.int64), *(box.index().flatten() for box in held)])
    bits = rng.bits(rng.key(0, kind, name), index)
    if dtype == torch.bool:
        return (bits & 1).bool()
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return bits.to(width).view(dtype)


def count(name: str) -> float:
    """The step counter of a tensor, unlike any other's."""
    return 3.0 + list(TENSORS).index(name)


def bits(tensor: Tensor) -> Tensor:
    """What lies in memory: NaN is equal to itself, -0.0 is not 0.0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def filled(run: Runtime, cut: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Parameters and AdamW's state of them, all of `numbers`."""
    found = params(run, cut)
    optimizer = torch.optim.AdamW(found)
    for param in found:
        name, held = param.held.name, param.held.boxes
        param.data.copy_(numbers("parameter", name, held).view(param.shape))
        moments = {kind: numbers(kind, name, held).view(param.shape) for kind in KINDS[1:]}
        optimizer.state[param] = {"step": torch.tensor(count(name)), **moments}
    return found, optimizer


def write(run: Runtime, cut: str, path: Path, step: int = 5) -> Path:
    with Checkpoints(path, run.world) as checkpoints:
        return checkpoints.save(step, State(training(*filled(run, cut))))


def read(run: Runtime, cut: str, path: Path) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Parameters and AdamW's state as this mesh finds them in a checkpoint."""
    found = params(run, cut)
    optimizer = torch.optim.AdamW(found)
    restore(find(path, group=run.world), found, optimizer)
    return found, optimizer


def check(found: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Every bit of values and moments, and the counters."""
    for param in found:
        name, held = param.held.name, param.held.boxes
        kept = {"parameter": param, **optimizer.state[param]}
        assert kept.keys() == {*KINDS, "step"}, (name, kept.keys())
        assert kept["step"].dtype == torch.float32 and kept["step"] == count(name), name
        for kind in KINDS:
            tensor = kept[kind]
            assert tensor.dtype == param.dtype and tensor.shape == param.shape, (name, kind, tensor.shape)
            assert torch.equal(bits(tensor), bits(numbers(kind, name, held))), (name, kind)
