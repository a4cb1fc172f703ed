"""The ways to shard that tests run: which modules are units, what is kept after forward, over which ranks."""

import functools
from dataclasses import dataclass

import pytest

from fsdp import fully_shard
from tests.training import train

UNITS = {  # paths in tests.training.Net, from the inside out; the root comes last by itself
    "root": (),
    "blocks": ("embed", "blocks.0", "blocks.1", "head"),
    "two blocks": ("blocks",),
    "nested": ("blocks.0.norm", "blocks.0", "blocks.1.norm", "blocks.1", "blocks", "head"),
    "layer used twice": ("embed", "blocks.0.twice", "blocks.0", "blocks.1.twice", "blocks.1"),
}
drilled = functools.partial(pytest.param, marks=pytest.mark.drill)  # values for which a test is a drill


@dataclass(frozen=True)
class Mode:
    """reshard: after forward. shards: ranks of a shard group, as many as there are by default; more groups than one
    are replicas. last_dim: what has several dimensions is cut along the last.
    """

    reshard: bool | None = None
    units: str = "blocks"
    prefetch: int = 1
    shards: int | None = None
    last_dim: bool = False


MODES = {
    "full": Mode(True),
    "default": Mode(),
    "shard grad-op": Mode(False),
    "nested": Mode(True, "nested"),
    "two blocks": Mode(units="two blocks"),
    "layer used twice": Mode(True, "layer used twice", prefetch=2),
    "root": Mode(units="root"),
    "no shard": Mode(shards=1),
    "last dimension": Mode(True, "nested", last_dim=True),
}
HYBRID = {"hybrid": Mode(True, shards=2), "hybrid, nested, keeping": Mode(False, "nested", shards=2)}


def groups(run, shards):
    """(shard group, replica group) of a rank: rows and columns of the ranks as a grid with `shards` columns."""
    if shards is None:
        return run.world, None
    rows = [list(range(start, start + shards)) for start in range(0, run.size, shards)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    [row], [column] = ([g for g in map(run.new_group, some) if g is not None] for some in (rows, columns))
    return row, column


def wrap(run, mode, model, world, *, average=True):
    """A tests.training.Net in units; the handle."""
    shard_group, replicas = groups(run, mode.shards)
    settings = {"replicate_group": replicas, "reshard_after_forward": mode.reshard, "average": average}
    if mode.last_dim:
        settings["shard_dim"] = lambda name, tensor: max(0, tensor.dim() - 1)
    for path in UNITS[mode.units]:
        fully_shard(model.get_submodule(path), shard_group, **settings)
    return fully_shard(model, shard_group, prefetch=mode.prefetch, **settings)


def trained(run, mode, recipe, **more):
    """tests.training.train under a mode."""
    return train(run, functools.partial(wrap, run, mode), recipe, **more)
