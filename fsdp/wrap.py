"""fully_shard: a module becomes a unit of fully sharded data parallelism, with whatever units are inside of it.

    for block in model.blocks:
        fully_shard(block, group)          from the inside out
    handle = fully_shard(model, group)     what is left: embedding, last norm, head

A unit's weights are there while it computes and nowhere else. So a rank has shards, 1/P of everything, and the weights
of few units; it sends n(P-1)/P bytes to gather in forward, the same in backward, and to reduce: 3k n(P-1)/P a step
of k microbatches, 2k where weights are kept from forward to backward, 2k + 1 under `no_sync`. Over s ranks that shard
and r replicas of them: 3(s-1)/s + (2/s)(r-1)/r times n for k = 1.

Zhao et al. 2023, "PyTorch FSDP"; Rajbhandari et al. 2019, "ZeRO", 5.3; lectures A, "FSDP: Module 실행 수명에 맞춘
Sharding", and B, "ZeRO-3 (FSDP)". PyTorch's counterpart: torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm
from collectives.host import Pool
from collectives.replicas import compared
from fsdp.mixed import MixedPrecision
from fsdp.pack import Pack
from fsdp.sharded import FullySharded
from fsdp.unit import Unit


def rows(name: str, tensor: Tensor) -> int:
    """Cut along dim 0, whatever the parameter."""
    return 0


def fully_shard(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    replicate_group: dist.ProcessGroup | None = None,
    reshard_after_forward: bool | None = None,
    mixed_precision: MixedPrecision | None = None,
    prefetch: int = 1,
    offload: Pool | None = None,
    shard_dim: Callable[[str, Tensor], int] = rows,
    average: bool = True,
    device: torch.device | None = None,
) -> FullySharded:
    """Make `module` a unit: all its parameters that no unit inside of it has. Apply it from the inside out.

    Before: every rank has the module, with any values. After: rank r of `group` has the r-th piece of each parameter,
    of the values of rank 0, and the module's weights are there while it runs. Keep the handle of the outermost module.

    replicate_group: ranks with the same piece in other groups; with a group of one rank nothing is sharded.
    reshard_after_forward: False keeps the weights from forward to backward (shard grad-op); None frees them, but for
    the outermost module. prefetch: units gathered in advance, of the outermost. offload: shards and gradients lie in
    this pool. shard_dim(name, parameter): the dimension to cut. average: divide gradients by the number of ranks.
    device: of parameters that are on the meta device; they get shards of zeros: give those values, call `after_load`.
    Raises ValueError on every rank for settings or models that differ, parameters tied across units, modules that are
    units already.
    """
    mixed = mixed_precision or MixedPrecision()
    replicas = replicate_group if replicate_group is not None and replicate_group.size() > 1 else None
    named = _own(module)
    dims = {name: shard_dim(name, param) for name, param in named.items()}
    settings = {
        **{"reshard_after_forward": reshard_after_forward, "mixed_precision": mixed, "prefetch": prefetch},
        **{"average": average, "offload": type(offload).__name__, "replicas": replicas.size() if replicas else 1},
        **{"shard_dim": {name: dim for name, dim in dims.items() if dim}},
    }
    for members in (group, replicas):
        if members is not None:
            compared(module, members, params=list(named.values()), buffers=True, **settings)
    _check(module, named, dims, prefetch)
    op = comm.AVG if average else comm.SUM
    made = {"op": op, "mixed": mixed, "host": offload, "shard_dim": lambda name, _: dims[name], "device": device}
    groups = (group,) if replicas is None else (replicas, group)
    title = type(module).__name__
    packs = [Pack(title, members, group, replicas, **made) for members in _by_kind(named)]
    for name, param in named.items():
        param.unit = f"{name} of {title}"  # for whoever comes upon it in another module
    module.fully_sharded = Unit(title, module, packs, groups, reshard=reshard_after_forward, mixed=mixed)
    # IDEA: the units around which weights come and go are modules, as they run, and not layers in a list.
    units, parents = _units(module)
    if others := [unit.name for unit in units for pack in unit.packs if pack.op != op]:
        raise ValueError(f"average={average}, but not so in unit {others[0]}: give all units of a module the same")
    return FullySharded(module, units, parents, group, replicas, average=average, prefetch=prefetch)


def _unit(module: nn.Module) -> Unit | None:
    """The unit that a module is; a copy of one is none."""
    unit = module.__dict__.get("fully_sharded")
    return unit if unit is not None and unit.module() is module else None


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module, by name, that no unit inside of it has."""
    if _unit(module) is not None:
        raise ValueError(f"{type(module).__name__} is a unit already: apply fully_shard once, from the inside out")
    holders: dict[nn.Parameter, list[tuple[str, Unit | None]]] = {}
    for name, param, unit in _walk(module, "", None, set()):
        holders.setdefault(param, []).append((name, unit))
    named = {}
    for param, places in holders.items():
        name, unit = places[0]
        if others := [other for other, its_unit in places if its_unit is not unit]:
            raise ValueError(
                f"{name} and {others[0]} are one parameter in two units: leave both to the unit around them"
            )
        if unit is None and hasattr(param, "unit"):
            raise ValueError(
                f"{name} of {type(module).__name__} is {param.unit} already, which is a unit not inside of it: leave a "
                "parameter that two units share to the one around both, and apply fully_shard from the inside out"
            )
        if unit is None:
            named[name] = param
    return named


def _walk(
    module: nn.Module, prefix: str, unit: Unit | None, seen: set[tuple[nn.Module, Unit | None]]
) -> Iterator[tuple[str, nn.Parameter, Unit | None]]:
    """(name, parameter, the innermost unit around it) of every place where a module has a parameter."""
    unit = _unit(module) or unit
    if (module, unit) in seen:
        return
    seen.add((module, unit))
    for name, param in module._parameters.items():
        if param is not None:
            yield prefix + name, param, unit
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", unit, seen)


def _units(root: nn.Module) -> tuple[list[Unit], list[int | None]]:
    """All units of a module, outer ones before inner ones, and of each the number of the one around it."""
    units: list[Unit] = []
    parents: list[int | None] = []
    inside: list[tuple[nn.Module, int | None]] = [(root, None)]  # still to be looked at, and the unit around
    while inside:
        module, parent = inside.pop()
        unit = _unit(module)
        if unit in units:
            continue
        if unit is not None:
            units.append(unit)
            parents.append(parent)
            parent = len(units) - 1
        inside += [(child, parent) for child in reversed(list(module.children()))]
    names = {part: name for name, part in root.named_modules()}
    for unit in units:
        unit.named(names[unit.module()] or type(root).__name__)
    return units, parents


def _by_kind(named: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Parameters of one dtype and device together: they travel in one buffer."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, param in named.items():
        kinds.setdefault((param.dtype, param.device), {})[name] = param
    return list(kinds.values())


def _check(module: nn.Module, named: dict[str, nn.Parameter], dims: dict[str, int], prefetch: int) -> None:
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch}: gather 0 or more units in advance")
    for name, param in named.items():
        if not 0 <= dims[name] < max(1, param.dim()):
            raise ValueError(f"shard_dim={dims[name]} is no dimension of {name}, which has {param.dim()}: count from 0")
        boxes = getattr(getattr(param, "held", None), "boxes", ())
        if len(boxes) > 1 and dims[name]:
            raise ValueError(f"{name} is {len(boxes)} boxes in a row: cut it along dim 0")
