"""A lookup in a table of 16 bits, whose gradient is added up in float32.

A token that comes a thousand times in a batch gets the sum of a thousand rows. torch's kernel for CPUs adds in the
table's dtype, where 256 + 1 is 256 (bfloat16) and 2048 + 1 is 2048 (float16); a matrix product, which a lookup is,
adds in float32. PyTorch's counterpart: torch.nn.functional.embedding, which on a GPU adds in float32 too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """ids [...], table [V, D] -> its rows [..., D]. The gradient of the table is rounded once, after the sum."""
    return F.embedding(ids, table) if table.dtype.itemsize >= 4 else _Lookup.apply(ids, table)


class Embedding(nn.Embedding):
    """torch's, of neither padding_idx nor max_norm, by `lookup`."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., D]."""
        return lookup(ids, self.weight)


class _Lookup(torch.autograd.Function):
    """forward: rows. backward: their gradients, added into the rows of a table in float32."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype = len(table), table.dtype
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(dy.float(), ids, ctx.rows, -1, False).to(ctx.dtype)
