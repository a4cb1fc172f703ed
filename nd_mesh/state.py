"""The state of a run, saved by boxes and resumed on any mesh: parameters, the optimizer, the step, the data cursor.

A rank writes its share of every box it holds, into one file; copies of a box share it row by row, so no element is
written twice and all write alike. A rank that resumes reads, for each box it now holds, the intersections with the
boxes that were saved. Neither side knows a strategy: `p.held` says it all, and an optimizer's tensors of a parameter's
shape lie where the parameter lies. Random state there is none: every draw is a function of seed, step and place.

Cost: each rank writes its share of (parameters + optimizer state) / ranks that hold them, and reads what it holds.
PyTorch's counterpart: torch.distributed.checkpoint. Left out, and left to a folder of its own: saving beside the next
steps, checksums, deletion of old checkpoints, storage that ranks do not share.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from collectives import comm
from collectives.layout import Box, Held
from collectives.runtime import Runtime
from nd_mesh import durable, saved
from nd_mesh.agreement import attempt
from nd_mesh.config import Config, ConfigError
from nd_mesh.data import deal
from nd_mesh.pieces import Pieces, dtype_name, key

VALUES = "parameter"  # the kind of tensor that is the parameter itself; the others are the optimizer's own names

Params = Sequence[nn.Parameter]


# -- save --------------------------------------------------------------------------------------------------------------


def save(folder: Path, params: Params, optimizer: torch.optim.Optimizer, about: dict[str, Any], run: Runtime) -> Path:
    """Write the checkpoint of `about["step"]` into `folder`; returns its path. Collective; between two steps.

    params: declared, all that this rank holds, `layout.check`ed. about: what state.json says besides, used on rank 0.
    Raises Stopped on every rank, naming rank, file and reason, when a write fails on any; earlier checkpoints stay.
    """
    final = folder / f"step-{about['step']:06d}"
    saved.commit(
        final, lambda into: _write(into, params, optimizer, run), lambda by_rank: about | _merged(by_rank), run
    )
    return final


def _write(folder: Path, params: Params, optimizer: torch.optim.Optimizer, run: Runtime) -> dict[str, Any]:
    """Write this rank's file; returns the index of its tensors, and the optimizer's scalars."""
    path = folder / f"rank-{run.rank}.safetensors"
    tensors: dict[str, Tensor] = {}
    index: dict[str, dict[str, dict]] = defaultdict(dict)
    scalars = {}
    for param in _holding(params):
        name = param.held.name
        shaped, scalars[name] = _states(param, optimizer)
        for kind, tensor in shaped.items():
            shares = {key(name, kind, box.offset): (box, values) for box, values in _shares(param.held, tensor)}
            tensors |= {piece: values for piece, (_, values) in shares.items()}
            pieces = [{"file": path.name, "offset": box.offset, "local": box.local} for box, _ in shares.values()]
            described = {"shape": param.held.boxes[0].shape, "dtype": dtype_name(tensor.dtype)}
            index[name][kind] = {**described, "pieces": pieces}
    with durable.naming(path):
        save_file(tensors, path)
    durable.sync(path)
    return {"files": {path.name: path.stat().st_size}, "tensors": dict(index), "scalars": scalars}


def _holding(params: Params) -> list[nn.Parameter]:
    """Those of which this rank holds anything; of a range that is cut up, a rank's share may be empty."""
    return [param for param in params if param.held.boxes]


def _states(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that is to be saved of a parameter: tensors of its shape by kind, itself among them; scalars by kind."""
    found = {kind: value for kind, value in optimizer.state.get(param, {}).items() if value is not None}
    shaped = {kind: value for kind, value in found.items() if value.dim()}
    scalars = {
        kind: {"value": value.item(), "dtype": dtype_name(value.dtype)}
        for kind, value in found.items()
        if kind not in shaped
    }
    return {VALUES: param.detach(), **shaped}, scalars


def _shares(held: Held, local: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """What this copy writes of a local tensor: of each of its boxes a range of rows, and the values there."""
    for box, values in _boxes(held, local):
        if not box.local:
            if held.copy == 0:
                yield box, values
        elif rows := deal(range(box.local[0]), held.copies, held.copy):
            share = box.cut(0, rows.start, len(rows))
            if share.numel:
                yield share, values[share.slices(box)]


def _boxes(held: Held, local: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Each box that a local tensor consists of, with its part of the storage in the box's shape."""
    parts = local.contiguous().view(-1).split([box.numel for box in held.boxes])
    for box, part in zip(held.boxes, parts, strict=True):
        yield box, part.view(box.local)


def _merged(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The index of the whole checkpoint from those of the ranks: the pieces of a tensor together, a scalar once."""
    tensors: dict[str, dict[str, dict]] = defaultdict(dict)
    scalars: dict[str, dict] = {}
    files: dict[str, int] = {}
    for part in by_rank:
        files |= part["files"]
        scalars |= part["scalars"]
        for name, kinds in part["tensors"].items():
            for kind, entry in kinds.items():
                known = tensors[name].setdefault(kind, {**entry, "pieces": []})
                known["pieces"] += entry["pieces"]
    return {"files": files, "tensors": dict(tensors), "scalars": scalars}


# -- resume ------------------------------------------------------------------------------------------------------------

FIXED = ("data.context", "train.batch", "train.seed", "train.optimizer", "train.dtype")  # and all of [model]


def resume(
    path: Path, params: Params, optimizer: torch.optim.Optimizer, about: dict[str, Any], run: Runtime
) -> saved.Checkpoint:
    """Give parameters and optimizer the values of a checkpoint, whatever mesh wrote it; returns which it is.

    path: a checkpoint, or a run's folder: its latest complete one. Rank 0 decides. about: as in `save`. Collective.
    Raises Stopped on every rank, in one line and before anything is changed: for a path without a complete checkpoint,
    for a run that is another run, and with every difference in names, shapes, dtypes and coverage.
    """
    [checkpoint, *_] = attempt(lambda: _choose(path, about) if run.rank == 0 else None, run)
    held = {param.held.name for param in params}
    everywhere = set().union(*comm.all_gather_object(held, group=run.world))
    values: dict[nn.Parameter, dict[str, Tensor]] = {}
    attempt(lambda: values.update(_read(checkpoint, params, everywhere)), run)
    for param, kinds in values.items():
        with torch.no_grad():
            param.copy_(kinds.pop(VALUES))
        scalars = checkpoint.state["scalars"].get(param.held.name, {})
        state = {kind: _scalar(entry, param.device) for kind, entry in scalars.items()} | kinds
        if state:  # a parameter that was never updated has none: the optimizer makes it at its first step
            optimizer.state[param] = state
    return checkpoint


def _choose(path: Path, about: dict[str, Any]) -> saved.Checkpoint:
    """The checkpoint, if it is of this run: the same function of the same data, whatever the mesh."""
    checkpoint = saved.choose(path)
    if lacks := [entry for entry in ("step", "data", "config", "tensors", "scalars") if entry not in checkpoint.state]:
        raise ConfigError(f"the checkpoint {checkpoint.path} is not one of ours: state.json lacks {', '.join(lacks)}")
    defaults = asdict(Config())  # what a setting was that is newer than the checkpoint
    before = {table: {**defaults.get(table, {}), **settings} for table, settings in checkpoint.state["config"].items()}
    now = about["config"]
    names = (*(f"model.{key}" for key in now["model"]), *FIXED)
    pairs = {
        name: [side[table][entry] for side in (before, now)] for name in names for table, entry in [name.split(".")]
    }
    pairs["the data's hash"] = [checkpoint.state["data"], about["data"]]
    different = [f"{name} was {old}, is {new}" for name, (old, new) in pairs.items() if old != new]
    if different:
        raise ConfigError(f"the checkpoint {checkpoint.path} is of another run: {'; '.join(different)}")
    return checkpoint


def _scalar(entry: dict[str, Any], device: torch.device) -> Tensor:
    return torch.tensor(entry["value"], dtype=getattr(torch, entry["dtype"]), device=device)


def _read(checkpoint: saved.Checkpoint, params: Params, everywhere: set[str]) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Of each parameter the local tensors by kind, in new memory. Raises ConfigError with all differences."""
    index = checkpoint.state["tensors"]
    wrong = [f"{name} is unknown here" for name in index if name not in everywhere]
    values: dict[nn.Parameter, dict[str, Tensor]] = {}
    with Pieces(checkpoint) as pieces:
        wrong += pieces.differences()
        for param in _holding(params):
            misfit = _misfit(param, index, checkpoint.state["scalars"])
            wrong += misfit
            values[param] = {}
            for kind, entry in {} if misfit else index[param.held.name].items():
                local = torch.empty(param.shape, dtype=getattr(torch, entry["dtype"]), device=param.device)
                for box, part in _boxes(param.held, local):
                    wrong += pieces.fill(part, box, param.held.name, kind)
                values[param][kind] = local
    if wrong:
        raise ConfigError(f"the checkpoint {checkpoint.path} does not fit this run: {'; '.join(dict.fromkeys(wrong))}")
    return values


def _misfit(param: nn.Parameter, index: dict[str, dict], scalars: dict[str, dict]) -> list[str]:
    """Why this parameter cannot take what the index has under its name."""
    name, shape, dtype = param.held.name, list(param.held.boxes[0].shape), dtype_name(param.dtype)
    found = index.get(name, {})
    if VALUES not in found:
        return [f"{name} is missing"]
    wrong = [
        f"{name} ({kind}) has shape {entry['shape']}, here {shape}"
        for kind, entry in found.items()
        if entry["shape"] != shape
    ]
    if found[VALUES]["dtype"] != dtype:
        wrong.append(f"{name} is {found[VALUES]['dtype']}, here {dtype}")
    states = {other: {*index[other], *scalars.get(other, ())} for other in index}
    lacks = sorted(set().union(*states.values()) - states[name])
    if lacks and len(states[name]) > 1:  # a parameter's optimizer state is whole, or absent
        wrong.append(f"{name} has no {', '.join(lacks)}, others have")
    return wrong
