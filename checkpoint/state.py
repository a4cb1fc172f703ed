"""What a run keeps: tensors as boxes, and small state. And the two halves of training in those terms.

    state = State(training(params, optimizer), shared={"step": 20, "scheduler": scheduler.state_dict()},
                  own={"random": random_state.capture()})

Every parameter says by `p.held` which boxes of which global tensor it is; an optimizer's tensors of a parameter's shape
lie where the parameter lies. Their names are KIND/PARAMETER: parameter/head.weight, exp_avg/head.weight.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from checkpoint.shard import Values
from collectives import boxed
from collectives.agreement import together
from collectives.boxed import VALUES
from collectives.layout import Box

if TYPE_CHECKING:
    from checkpoint.checkpoints import Saved


@dataclass
class State:
    """A rank's part of what is saved. The tensors may be views of what the run computes with."""

    tensors: Values
    shared: Mapping[str, Any] = field(default_factory=dict)  # small (plain.py), equal on all ranks
    own: Mapping[str, Any] = field(default_factory=dict)  # small, of this rank: read again by as many ranks only


def training(params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> Values:
    """The parameters of this rank and what the optimizer keeps of them, as views. Between two steps.

    params: declared; a handle's. Raises ValueError for a state that is neither a number nor of its parameter's shape.
    """
    _check_declared(params)
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for param in params:
        for kind, value in {VALUES: param.detach(), **optimizer.state.get(param, {})}.items():
            if value is None:
                continue  # a state that the optimizer has no use for, as the buffer of a momentum of 0
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=_exact(value))
            pieces = list(_pieces(param, kind, tensor))
            if pieces:  # of a range that is cut up, a rank's share may be empty
                found[f"{kind}/{param.held.name}"] = pieces
    return found


def restore(
    saved: "Saved", params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, more: Values | None = None
) -> None:
    """Give parameters and optimizer what they hold of a checkpoint; the handle's `after_load` comes after it.

    more: further tensors that were saved beside them, to be filled. Collective. Raises Stopped on every rank with all
    differences, and then nothing is changed. A parameter for which the checkpoint has no optimizer state has none
    afterwards. The optimizer's settings stay those of this run.
    """
    targets, loaded = together(lambda: _targets(saved, params, more or {}), group=saved.group)
    saved.read({**targets, **(more or {})})
    boxed.adopt(optimizer, loaded)


Kept = dict[nn.Parameter, dict[str, Tensor]]


def _targets(saved: "Saved", params: Sequence[nn.Parameter], more: Values) -> tuple[Values, Kept]:
    """What is to be filled: the parameters as they are, and new tensors for what the optimizer will keep."""
    _check_declared(params)
    kinds: dict[str, list[str]] = defaultdict(list)
    shaped = set()  # kinds that are numbers for no other reason than that a parameter is one
    for name, (_, shape) in saved.tensors.items():
        if name in more:
            continue  # be it called as if it were a parameter's, such as an average of it
        kind, _, param_name = name.partition("/")
        kinds[param_name].append(kind)
        if shape:
            shaped.add(kind)
    targets: dict[str, list[tuple[Box, Tensor]]] = {}
    loaded: Kept = {}
    for param in params:
        loaded[param] = {}
        for kind in {VALUES: None, **dict.fromkeys(kinds[param.held.name])}:
            name = f"{kind}/{param.held.name}"
            tensor = param.detach()
            if kind != VALUES:
                dtype, _ = saved.tensors[name]
                tensor = torch.empty(param.shape if kind in shaped else (), dtype=dtype, device=param.device)
                loaded[param][kind] = tensor
            pieces = list(_pieces(param, kind, tensor))
            if pieces or name in saved.tensors:  # one without elements may lie nowhere
                targets[name] = pieces
    return targets, loaded


def _check_declared(params: Sequence[nn.Parameter]) -> None:
    if undeclared := [tuple(param.shape) for param in params if not hasattr(param, "held")]:
        raise ValueError(
            f"parameters of shapes {undeclared} do not say what they are: call layout.declare on the whole module"
        )


def _exact(value: float) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def _pieces(param: nn.Parameter, kind: str, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a parameter's tensor, with its part in each."""
    # IDEA: what an optimizer keeps in a parameter's shape lies where the parameter lies.
    if tensor.shape == param.shape:
        parts = tensor.view(-1).split([box.numel for box in param.held.boxes]) if param.held.boxes else ()
        for box, part in zip(param.held.boxes, parts, strict=True):
            yield box, part.view(box.local)
    elif tensor.dim() == 0:
        yield Box.whole(()), tensor
    else:
        raise ValueError(
            f"{kind} of {param.held.name} has shape {list(tensor.shape)}, its parameter {list(param.shape)}: such a "
            "state has no boxes; use an elementwise optimizer"
        )
