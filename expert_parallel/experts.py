"""The experts: feed-forward networks of one shape, stacked, so that each matrix of all of them is one tensor.

Stacked they are cut by one rule, along dim 0, and a checkpoint, a shard or an initial value knows of no list of
modules. An expert without a token has a gradient of zeros, on every rank that holds it: no rank takes another path.

Shazeer 2020 (SwiGLU); PyTorch's counterpart for the loop: torch.nn.functional.grouped_mm.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from collectives.differentiable import all_reduce_identity, identity_all_reduce


class Experts(nn.Module):
    """down(silu(gate(x)) · up(x)), E times: gate and up [E, F, D], down [E, D, F]."""

    def __init__(self, width: int, hidden: int, experts: int):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for matrix in (self.gate, self.up, self.down):
            nn.init.normal_(matrix, std=matrix.size(-1) ** -0.5)
        self.hidden_group: dist.ProcessGroup | None = None  # ranks that each have a part of F

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [M, D], counts[0] of them for the first expert, then counts[1] for the second, … -> [M, D]."""
        if self.hidden_group is not None:
            x = identity_all_reduce(x, group=self.hidden_group)
        matrices = zip(x.split(list(counts)), self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        # IDEA: a loop over experts, each a plain product; `unbind` makes their gradients one tensor again.
        outputs = [
            F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down) for rows, gate, up, down in matrices
        ]
        y = torch.cat(outputs)
        return y if self.hidden_group is None else all_reduce_identity(y, group=self.hidden_group)
