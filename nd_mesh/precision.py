"""Precision: in which dtype a run computes, in which it remembers, and the scale of a loss whose gradient is float16.

    train.dtype   weights, activations   masters, moments, gradients' sums   loss scale
    float64       float64                float64                             1
    float32       float32                float32                             1
    bfloat16      bfloat16               float32                             1
    float16       float16                float32                             train.loss_scale, then what fits

Whatever the row, the loss, the softmax in it and the router are in float32 at least, the gradient norm in float64.
float16 counts from 2^-24 to 65504: a gradient below it is zero. So the loss is multiplied by a power of two, which
moves exponents and rounds nothing, and the gradients' float32 sums are divided by it. What is then too large becomes
inf, the ranks see it in the norm, leave the step out together, and halve the scale.

Micikevicius et al. 2018, "Mixed Precision Training", 3.1 to 3.3. PyTorch's counterpart: torch.amp.GradScaler, whose
ranks each look at what they have. Left out: a scale for each layer, float8.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from nd_mesh.config import TrainConfig

LARGEST_SCALE = 2.0**30  # in float32 a loss of 2^97 nats would still be finite


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run."""

    weights: torch.dtype  # in which the model computes
    masters: torch.dtype  # which the optimizer updates, and in which gradients are added up and travel

    @classmethod
    def of(cls, dtype: str) -> "Precision":
        """Those of train.dtype."""
        weights = getattr(torch, dtype)
        return cls(weights, torch.promote_types(weights, torch.float32))

    @property
    def mixed(self) -> bool:
        """Whether the weights are the masters rounded, and not the masters themselves."""
        return self.weights != self.masters

    def __str__(self) -> str:
        name, masters = (str(dtype).removeprefix("torch.") for dtype in (self.weights, self.masters))
        return f"{name} with masters in {masters}" if self.mixed else name


class Scaler:
    """The factor of the loss, a power of two from 1 to `most`: halved after a step whose gradient is not finite,
    doubled after `steps` good ones in a row. It moves with what all ranks see alike, so it is the same on every rank.
    """

    def __init__(self, scale: float, steps: int, most: float = LARGEST_SCALE):
        self.scale, self.steps, self.most = scale, steps, most
        self.good = 0  # steps since it moved last

    @classmethod
    def of(cls, train: TrainConfig) -> "Scaler":
        """Of float16's losses; all others have float32's exponents, and 1."""
        half = train.dtype == "float16"
        return cls(train.loss_scale, train.scale_steps) if half else cls(1.0, train.scale_steps, most=1.0)

    @property
    def lowest(self) -> bool:
        """Whether a gradient that is not finite is no longer the scale's fault."""
        return self.scale == 1.0

    def update(self, finite: bool) -> None:
        """After a step."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            # IDEA: the scale is as large as the gradients allow, which nobody knows: grow until it is too large.
            self.scale = max(1.0, self.scale / 2)
        elif self.good == self.steps:
            self.scale, self.good = min(self.most, self.scale * 2), 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"scale": self.scale, "good": self.good}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from such a state."""
        self.scale, self.good = state["scale"], int(state["good"])


@torch.no_grad()
def unscale(params: Iterable[nn.Parameter], scale: float) -> None:
    """Before: gradients of the loss times `scale`, reduced. After: of the loss; exactly, by a power of two."""
    grads = [param.grad for param in params if param.grad is not None]
    if grads and scale != 1:
        torch._foreach_mul_(grads, 1 / scale)


def supported(device: torch.device) -> str:
    """What the hardware has for 16 bits, for a person. Whatever it has not is computed all the same, in float32 and
    rounded, and slower.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has = {"float16": major >= 7, "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False)}
        name = f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}"
    else:
        kinds = {"float16": "_is_mkldnn_fp16_supported", "bfloat16": "_is_mkldnn_bf16_supported"}
        known = torch.backends.mkldnn.is_available()  # the library that knows
        has = {kind: known and getattr(torch.ops.mkldnn, asked)() for kind, asked in kinds.items()}
        name = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    return f"{name}: products in " + ", ".join(f"{kind} {'native' if it else 'emulated'}" for kind, it in has.items())
