"""The state as boxes: what a rank holds, said so that any number of ranks under any strategy can take it over.

A shard is cut as the strategy and the number of ranks will have it; neither may be in a saved state. So every tensor
is told as boxes of the parameter it belongs to (collectives/layout.py), with the values in each. Whoever loads asks for
its own boxes, and takes what it needs from whatever pieces there are.

Cost: a rank holds its own share; `load` reads the pieces that meet its boxes. DeepSpeed's counterpart: the universal
checkpoint; PyTorch's: torch.distributed.checkpoint of sharded tensors. Left out: files, which are checkpoint/'s.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from collectives.layout import Box

VALUES = "parameter"  # the kind of tensor that is the parameter itself; the others have the optimizer's names


@dataclass
class State:
    """A rank's part, or several ranks': by name and kind, the boxes with the values in each; scalars such as `step`."""

    tensors: dict[str, dict[str, list[tuple[Box, Tensor]]]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def save(params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> State:
    """What this rank holds of the parameters and of the optimizer's state. The values are views: copy what must stay.

    params: a handle's, after `finish` or between two steps.
    """
    state = State()
    for param in params:
        kept = {VALUES: param.detach(), **optimizer.state.get(param, {})}
        shaped = {kind: value for kind, value in kept.items() if isinstance(value, Tensor) and value.dim()}
        name = param.held.name
        state.tensors[name] = {kind: list(_boxes(param, value)) for kind, value in shaped.items()}
        state.scalars[name] = {kind: torch.as_tensor(value) for kind, value in kept.items() if kind not in shaped}
    return state


def merged(states: Sequence[State]) -> State:
    """The state of several ranks, such as all of a run's."""
    together = State()
    for state in states:
        for name, kinds in state.scalars.items():
            together.scalars.setdefault(name, {}).update(kinds)
        for name, kinds in state.tensors.items():
            for kind, pieces in kinds.items():
                together.tensors.setdefault(name, {}).setdefault(kind, []).extend(pieces)
    return together


def load(state: State, params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Give parameters and optimizer what they hold of a whole state. Call the handle's `after_load` afterwards.

    Raises ValueError naming every tensor that is missing, is not of our shape, or is not covered by the pieces; then
    nothing has changed.
    """
    wrong: list[str] = []
    loaded = {param: _kinds_of(param, state, wrong) for param in params}
    if wrong:
        raise ValueError(f"the state does not fit: {'; '.join(wrong)}")
    with torch.no_grad():
        for param, kinds in loaded.items():
            param.copy_(kinds.pop(VALUES))
            kinds.update(state.scalars[param.held.name])
    adopt(optimizer, loaded)


def adopt(optimizer: torch.optim.Optimizer, kept: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
    """Give an optimizer its state by parameter, where there is any. Its settings stay those of this run."""
    order = [param for group in optimizer.param_groups for param in group["params"]]
    state = {i: dict(kept[param]) for i, param in enumerate(order) if kept.get(param)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:  # it casts to the parameter's dtype
        for i, param in enumerate(order):
            cast = optimizer.state.get(param, {})
            cast.update({kind: value for kind, value in state.get(i, {}).items() if cast[kind].dtype != value.dtype})


def _kinds_of(param: nn.Parameter, state: State, wrong: list[str]) -> dict[str, Tensor]:
    """This rank's part of every kind of tensor that the state has of a parameter; what is wrong is added to a list."""
    found = state.tensors.get(param.held.name, {})
    if VALUES not in found:
        wrong.append(f"{param.held.name} is missing")
    kinds = {}
    for kind, pieces in found.items():
        kinds[kind] = torch.empty(param.shape, dtype=pieces[0][1].dtype if pieces else param.dtype, device=param.device)
        if not all(_fill(box, part, pieces) for box, part in _boxes(param, kinds[kind])):
            wrong.append(f"{param.held.name} ({kind}) has no values for {' and '.join(map(str, param.held.boxes))}")
    return kinds


def _boxes(param: nn.Parameter, local: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Each box that a shard, or what the optimizer keeps of it, consists of, with its part in the box's shape."""
    parts = local.view(-1).split([box.numel for box in param.held.boxes]) if param.held.boxes else ()
    for box, part in zip(param.held.boxes, parts, strict=True):
        yield box, part.view(box.local)


def _fill(box: Box, part: Tensor, pieces: Sequence[tuple[Box, Tensor]]) -> bool:
    """Fill a box from the pieces that meet it; whether they cover it. Pieces of one run overlap only as copies."""
    missing = torch.ones(box.local, dtype=torch.bool)
    for other, values in pieces:
        # IDEA: an intersection of two boxes is all that moves, whatever cut either.
        common = box.intersect(other) if other.shape == box.shape else None
        if common is not None:
            part[common.slices(box)] = values[common.slices(other)].to(part)
            missing[common.slices(box)] = False
    return not missing.any()
