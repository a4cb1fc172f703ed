"""Mixed precision: weights travel and compute in 16 bits, gradients add up in 32, and the shards are the masters.

An update is often smaller than the last digit of a bfloat16 weight, and would be lost: 1 - 0.0006 rounds to 1. So the
optimizer updates float32 shards, 4/P bytes a parameter, and what is gathered is their rounded copy, which lives as long
as a unit's weights do and travels in half the bytes. A gradient adds up over microbatches in the shards' dtype, and
travels in `reduce`.

Micikevicius et al. 2018, "Mixed Precision Training". PyTorch's counterpart: MixedPrecisionPolicy of fully_shard. Left
out: the loss scale that float16 needs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a unit; None: that of the shards."""

    param: torch.dtype | None = None  # in which weights are gathered and the module computes; its inputs are cast to it
    # IDEA: a sum of many terms needs more digits than its terms: in bfloat16, 256 + 1 is 256.
    reduce: torch.dtype | None = None  # in which gradients travel
    output: torch.dtype | None = None  # of what the module returns

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"mixed precision with {name}={dtype}: use a floating-point dtype, or None")


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A tensor of floating-point numbers in this dtype; whatever else as it is."""
    if dtype is not None and isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
