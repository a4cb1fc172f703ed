"""Mixed precision: the model computes in 16 bits, the optimizer in 32, and the 32 bits exist once, in the shards.

An update is often smaller than the last digit of a bfloat16 weight (8 significant bits: 1 - 0.0006 rounds to 1), and
would be lost. So the optimizer adds to float32 *masters*, and the weights are the masters rounded. On one device that
costs 4 more bytes a parameter; cut by P ranks, 4/P. Bytes a parameter with Adam: 2 for the weights, 2 or 4 for the
gradient, and K = 4 (master) + 4 + 4 (moments), or 4 + 2 + 2 with moments in bfloat16.

Gradients of 16 bits are added in float32 and rounded once, whatever the number of ranks. Rajbhandari et al. 2019,
"ZeRO", 3.1; Micikevicius et al. 2018, "Mixed Precision Training". PyTorch's counterpart: MixedPrecisionPolicy of
fully_shard. Left out: the loss scale that float16 needs; `finite` on the handle says when to lower it.
"""

from dataclasses import dataclass

import torch

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Mixed:
    """The dtypes of a run. Masters are float32."""

    weights: torch.dtype = torch.bfloat16  # in which the module computes
    # IDEA: gradients of many microbatches are added in 32 bits: in bfloat16, 256 + 1 is 256.
    gradients: torch.dtype = torch.float32  # in which they are added up and travel; that of the weights for k = 1
    moments: torch.dtype = torch.float32  # in which the optimizer's state is kept between steps

    def __post_init__(self) -> None:
        if self.weights not in HALVES:
            raise ValueError(f"mixed precision with weights in {self.weights}: use one of {HALVES}, or mixed=None")
        if self.gradients not in (self.weights, torch.float32):
            raise ValueError(f"gradients in {self.gradients}: use float32, or the weights' {self.weights}")
        if self.moments not in (torch.bfloat16, torch.float32):
            raise ValueError(f"moments in {self.moments}: use float32 or bfloat16")
