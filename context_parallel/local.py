"""Attention of one process, by places: what is left to compute where a rank has all tokens. Nothing is sent."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from context_parallel import block
from context_parallel.online import Backward, Forward
from context_parallel.places import Places


def local_attention(q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
    """q [B, H, T, K], k and v [B, KV, T, K] -> [B, H, T, K], of q's dtype. places: those of one rank, which has all."""
    places.check(q, k, v, 1)
    return _Local.apply(q, k, v, places)


class _Local(torch.autograd.Function):
    """forward: one block; backward: one block."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        result = Forward(q, places, 0)
        # IDEA: one rank has all tokens, so one block is all there is to see.
        result.see(0, torch.stack([k, v]))
        ctx.save_for_backward(q, k, v, result.out, result.lse)
        ctx.places = places
        return result.out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        result = Backward(dout, q, (out, lse), ctx.places, 0)
        kv = torch.stack([k, v])
        dkv = torch.zeros(kv.shape, dtype=block.precision(kv), device=kv.device)
        result.see(0, kv, dkv)
        return result.dq.to(q.dtype), *dkv.to(k.dtype), None
