"""A run's state of a few hundred bytes, each number of which says of which save it is.

It has what a state can have: a tensor cut in rows (a rank may have none), a copy on every rank, a scalar, and small
state, shared and a rank's own.
"""

import torch
from torch import Tensor

from checkpoint.saved import Saved
from checkpoint.state import State
from collectives.layout import Box

SHAPES = {"rows": (5, 3), "copy": (4,), "count": ()}


def whole(step: int, version: int) -> dict[str, Tensor]:
    """Every tensor of the save of a step; version: how often the step was saved before."""
    first = 1000.0 * step + 100.0 * version
    return {
        "rows": first + torch.arange(15.0, dtype=torch.float64).view(5, 3),
        "copy": first + 50 + torch.arange(4.0, dtype=torch.float32),
        "count": torch.tensor(1000 * step + version),
    }


def state(rank: int, size: int, step: int, version: int = 0) -> State:
    """What a rank has of it."""
    full = whole(step, version)
    first, last = 5 * rank // size, 5 * (rank + 1) // size
    return State(
        {
            "rows": [(Box((5, 3), (first, 0), (last - first, 3)), full["rows"][first:last])],
            **{name: [(Box.whole(SHAPES[name]), full[name])] for name in ("copy", "count")},
        },
        shared={"version": version},
        own={"rank": rank},
    )


def empty() -> dict[str, Tensor]:
    """Tensors to read into, with values that no save has."""
    return {name: torch.full_like(value, -1) for name, value in whole(0, 0).items()}


def wanted(tensors: dict[str, Tensor]) -> dict[str, list[tuple[Box, Tensor]]]:
    """They as boxes."""
    return {name: [(Box.whole(SHAPES[name]), tensor)] for name, tensor in tensors.items()}


def read(saved: Saved) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    tensors = empty()
    saved.read(wanted(tensors))
    return tensors


def same(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Whether they are equal bit for bit."""
    return all(torch.equal(tensors[name], others[name]) for name in SHAPES)


def right(saved: Saved) -> bool:
    """Whether a checkpoint has, bit for bit, what the save of its step and version was given."""
    return same(read(saved), whole(saved.step, saved.shared["version"]))
