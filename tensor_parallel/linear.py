"""Column and row parallel linear layers: W [out, in] cut along its outputs, or along its inputs.

    column   x [.., D]     · W[F/tp, D]ᵀ → y [.., F/tp]        each rank makes its own outputs
    row      y [.., F/tp]  · W[D, F/tp]ᵀ → z [.., D] {+tp}     each rank makes a term of all outputs

What a column makes a row takes as it is: a pair needs no message between the two, only where it begins and ends
(region.py). Memory: weights, gradients and states 1/tp, activations between the two 1/tp.

Shoeybi et al. 2019, §3; lectures A, "Column Parallel", "Row Parallel", and B, "Tensor Parallelism", and series 8 and 9.
PyTorch's counterparts: ColwiseParallel, RowwiseParallel; Megatron-LM's have these names.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives import layout
from collectives.differentiable import all_gather_split, split_all_gather
from tensor_parallel.cut import even
from tensor_parallel.region import Region


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of a linear layer. Made from a whole layer, whose parameters it cuts in place and keeps: one
    with values by slicing, one on the meta device by box alone.

    pieces: for each of several matrices in one (queries, keys, values) the rows of it that each rank holds, default
    one, cut evenly. gather_output: every rank has all outputs, [..., F], for whoever goes on with them alike.

    Raises ValueError where rows do not divide.
    """

    def __init__(
        self,
        linear: nn.Linear,
        region: Region,
        *,
        pieces: Sequence[Sequence[range]] | None = None,
        gather_output: bool = False,
    ):
        super().__init__()
        ranks, rank = region.group.size(), region.group.rank()
        self.pieces = pieces or [even(linear.out_features, ranks, what="output features")]
        if any(len(rows) != ranks for rows in self.pieces):
            raise ValueError(f"pieces of {[len(rows) for rows in self.pieces]} ranks: tp={ranks} wants {ranks} in each")
        declare(linear)
        self.region, self.gather_output, self.inputs = region, gather_output, linear.in_features
        self.weight, self.bias = linear.weight, linear.bias
        for param in (self.weight, *([] if self.bias is None else [self.bias])):
            # IDEA: whole outputs of its own on every rank: rows of W and of b, and nothing to add up.
            layout.cut_pieces(param, 0, [rows[rank] for rows in self.pieces])  # [F/tp, D], [F/tp]
        region.columns.append(self)

    def forward(self, x: Tensor) -> Tensor:
        """What `Region.enter` takes → [..., T, F/tp], or with gather_output [..., T, F]."""
        if x.size(-1) != self.inputs:
            raise ValueError(f"x of shape {list(x.shape)} has not the {self.inputs} input features of {self}")
        y = self.region.enter(x, self).project(self)
        return self.gather(y) if self.gather_output else y

    def gather(self, y: Tensor) -> Tensor:
        """[..., T, F/tp] → [..., T, F], which all ranks go on with alike."""
        group = self.region.group
        if group.size() == 1:
            return y
        sizes = [[len(rows) for rows in piece] for piece in self.pieces]
        parts = zip(y.split([each[group.rank()] for each in sizes], -1), sizes, strict=True)
        return torch.cat([all_gather_split(part, -1, each, group=group) for part, each in parts], -1)  # [..., T, F]

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{tuple(self.weight.shape)} of {tuple(self.weight.held.boxes[0].shape)}"


class RowParallelLinear(nn.Module):
    """A linear layer of this rank's inputs, made as the other; its outputs are summed where the region ends.

    input_is_cut: the input is this rank's features, as a column layer makes them; if not, a copy of all of them, of
    which it takes its own. The bias is added once, after the sum; with sequence parallelism to this rank's tokens, so
    that its gradient is a sum over tp. Raises ValueError where columns do not divide.
    """

    def __init__(self, linear: nn.Linear, region: Region, *, input_is_cut: bool = True):
        super().__init__()
        columns = even(linear.in_features, region.group.size(), what="input features")[region.group.rank()]
        declare(linear)
        self.region, self.input_is_cut = region, input_is_cut
        self.weight, self.bias = linear.weight, linear.bias
        layout.cut_pieces(self.weight, 1, [columns])  # [D, F/tp]
        if self.bias is not None and region.sequence_parallel:
            self.bias.held.sums["tp"] = region.group

    def forward(self, y: Tensor) -> Tensor:
        """[..., T, F/tp] → what `Region.leave` gives."""
        if not self.input_is_cut:
            y = split_all_gather(y, -1, group=self.region.group)  # [..., T, F/tp]
        z = self.region.leave(F.linear(y, self.weight))
        return z if self.bias is None else z + self.bias.to(z.dtype)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{tuple(self.weight.shape)} of {tuple(self.weight.held.boxes[0].shape)}"


def declare(module: nn.Module) -> None:
    """Give a declaration to parameters of a module that have none: then nobody needs one who uses a layer alone."""
    for name, param in module.named_parameters():
        if not hasattr(param, "held"):
            param.held = layout.Held(name, (layout.Box.whole(param.shape),), None, param.dim() > 1)
