"""Whether an optimizer may step shards: only if each element is updated from its own gradient and state.

Sharding cuts tensors wherever a rank's share ends. AdamW does not notice: element i of the update is a function of
element i of everything. LAMB scales by the norm of the whole tensor, Adafactor keeps row and column sums, Muon
multiplies matrices: on a shard they compute something else, without an error, and training is merely worse.

So the optimizer is tried, instead of its name being looked up: the same class with the same settings steps a small
matrix whole and, flat, in pieces, each piece on its own; the two must agree to rounding in float64.

Rajbhandari et al. 2019, "ZeRO", 5.1, assumes it unsaid; DeepSpeed has a list of names (zero_allow_untested_optimizer),
PyTorch's ZeroRedundancyOptimizer gives whole tensors to ranks instead. Left out: what happens only after more steps
than are tried, and optimizers that could say which sums over a tensor they need.
"""

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

SHAPE = (4, 6)  # of the matrix that is tried: its rows and columns are no multiples of a piece
PIECE = 5
SCALES = (1.0, 1e-5, 1e5, 1.0, 1e-2)  # of each step's gradient: a clipped norm is sometimes above, sometimes below
LR = 0.01  # one of zero, as at the start of a warm-up, would hide any difference
TOLERANCE = 1e-12  # of the element: rounding moves it by 1e-16 a step


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError, with the reason, if the optimizer's update of an element depends on other elements, or cannot
    be tried. The optimizer itself, its parameters and the random numbers stay as they are.

    Every group's settings are tried, at another learning rate. The class is built anew from its defaults and groups, so
    its constructor must take (params, **defaults), as torch's do.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = params[0].device if params else torch.device("cpu")
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        try:
            reason = _difference(optimizer, device)
        except Exception as error:
            reason = f"it could not be tried on a small tensor, whole and in pieces ({type(error).__name__}: {error})"
    if reason:
        raise ValueError(
            f"{type(optimizer).__name__} cannot step shards: {reason}. A shard is any part of a tensor, so each "
            f"element must be updated from its own gradient and state, as by AdamW, SGD and Adagrad; with ddp/ tensors "
            f"are whole"
        )


def _difference(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """Why the optimizer is none for shards; empty if it is."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = (_spread(generator).to(device) for _ in range(1 + len(SCALES)))
    count = len(optimizer.param_groups)
    wholes = [nn.Parameter(start.clone()) for _ in range(count)]
    pieces = [[nn.Parameter(piece) for piece in start.flatten().clone().split(PIECE)] for _ in range(count)]
    whole = _built_like(optimizer, [[param] for param in wholes])
    cut = _built_like(optimizer, pieces)
    largest = start.abs()  # so far: an element that is nearly zero now carries the rounding of what it was
    for scale, grad in zip(SCALES, grads, strict=True):
        for param in wholes:
            param.grad = grad * scale
        whole.step()
        for group in cut.param_groups:
            _step_each(cut, group, (grad * scale).flatten().split(PIECE))
        for param, parts in zip(wholes, pieces, strict=True):
            together = torch.cat(list(parts)).view(SHAPE)
            largest = torch.maximum(largest, param.abs())
            if not torch.allclose(together / largest, param / largest, rtol=0, atol=TOLERANCE, equal_nan=True):
                return "its update of an element depends on other elements, or on more than gradient and state"
    return _odd_state(cut)


def _spread(generator: torch.Generator) -> Tensor:
    """Random signs, and sizes over six decades, so that any sum over elements is that of a few."""
    sign = torch.randn(SHAPE, generator=generator, dtype=torch.float64).sign()
    return sign * 10 ** (6 * torch.rand(SHAPE, generator=generator, dtype=torch.float64) - 3)


def _built_like(optimizer: torch.optim.Optimizer, params: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """A new one of the same class and settings, with a group of these parameters for each group."""
    takes = inspect.signature(type(optimizer).__init__).parameters
    defaults = {name: _setting(name, value) for name, value in optimizer.defaults.items() if name in takes}
    groups = []
    for group, own in zip(optimizer.param_groups, params, strict=True):
        settings = {name: _setting(name, value) for name, value in group.items() if name != "params"}
        groups.append({**settings, "params": own})
    return type(optimizer)(groups, **defaults)


def _setting(name: str, value: Any) -> Any:
    if name == "lr" and value is not None:
        return torch.full_like(value, LR) if isinstance(value, Tensor) else LR
    return copy.deepcopy(value)


def _step_each(optimizer: torch.optim.Optimizer, group: dict[str, Any], grads: tuple[Tensor, ...]) -> None:
    """Step the group's parameters one after the other, as if there were no others."""
    seen = dict(group)
    for param, grad in zip(group["params"], grads, strict=True):
        param.grad = grad
        alone = {**seen, "params": [param]}
        # IDEA: a piece that steps by itself ends as it would within the whole, or the optimizer is not elementwise.
        step_alone(optimizer, [alone], state := defaultdict(dict, {param: optimizer.state[param]}))
        optimizer.state[param] = state[param]
        keep_settings(group, alone)


def _odd_state(optimizer: torch.optim.Optimizer) -> str:
    for param, kinds in optimizer.state.items():
        for kind, value in kinds.items():
            number = value.dim() == 0 if isinstance(value, Tensor) else not isinstance(value, list | tuple | dict)
            if not number and not is_elementwise(value, param):
                return f"its state {kind!r} is neither a number nor a tensor of the shape of the parameter"
    return ""


def step_alone(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: defaultdict) -> None:
    """Let an optimizer step other parameters than its own, in place: those of `groups`, whose state is in `state`."""
    own = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = groups, state
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, optimizer.state = own


def keep_settings(group: dict[str, Any], stepped: dict[str, Any]) -> None:
    """Take over what the optimizer has changed in a stand-in's settings, such as a count of steps."""
    group.update({name: value for name, value in stepped.items() if name != "params"})


def is_elementwise(value: Any, param: Tensor) -> bool:
    """Whether this entry of a flat parameter's state has an element for each of its elements."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == param.shape
