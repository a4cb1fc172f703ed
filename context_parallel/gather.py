"""All-gather attention: every rank gathers all keys and values, and attends with the queries of its own tokens.

One all_gather in place of the ring's P-1 steps: fewer messages, nothing hidden behind computing, and memory for the
keys and values of the whole row, which with few KV heads are small beside the queries. What of them nobody sees is
skipped as in the ring. Backward: every rank has terms of all dk, dv; a reduce_scatter adds them up.

Elements that a rank sends, b = B·T/P·D_kv: forward 2(P-1)b; backward 2(P-1)b, in the precision of accumulators, and
2(P-1)b more if k, v are gathered again (save_gathered=False). Saved for backward: q, k, v, out, lse of T/P tokens, with
save_gathered k, v of all. Dubey et al. 2024 (Llama 3), §3.3.2. Left out: gathering head by head to overlap.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives import comm
from context_parallel import block
from context_parallel.online import Backward, Forward
from context_parallel.places import Places


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, places: Places, *, group: dist.ProcessGroup, save_gathered: bool = False
) -> Tensor:
    """Attention over the tokens of all ranks of the group; each holds its own tokens, and gets the output of them.

    q [B, H, T/P, K], k and v [B, KV, T/P, K] -> [B, H, T/P, K], of q's dtype. places: those of all ranks, the same on
    each. save_gathered keeps all keys and values for backward. Raises ValueError, before any message, for shapes that
    do not fit the places. Collective, and so is its backward.
    """
    places.check(q, k, v, group.size())
    return _Gathered.apply(q, k, v, places, group, save_gathered)


class _Gathered(torch.autograd.Function):
    """forward: all_gather of k, v; backward: reduce_scatter of dk, dv, because every rank has terms of all."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        places, group, save_gathered = others
        result, everyones = Forward(q, places, group.rank()), _gather(k, v, group)
        for owner, kv in enumerate(everyones):
            result.see(owner, kv)
        ctx.save_for_backward(q, *([everyones] if save_gathered else [k, v]), result.out, result.lse)
        ctx.places, ctx.group = places, group
        return result.out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        (q, *saved, out, lse), group = ctx.saved_tensors, ctx.group
        everyones = saved[0] if len(saved) == 1 else _gather(*saved, group)
        result = Backward(dout, q, (out, lse), ctx.places, group.rank())
        terms = torch.zeros(everyones.shape, dtype=block.precision(q), device=q.device)
        for owner, (kv, dkv) in enumerate(zip(everyones, terms, strict=True)):
            result.see(owner, kv, dkv)
        # IDEA: of the keys that were gathered every rank has terms of the gradient, and each owner wants their sum.
        comm.reduce_scatter_single(own := torch.empty_like(terms[0]), terms, group=group, ordered=True)
        dk, dv = own.to(everyones.dtype)
        return result.dq.to(q.dtype), dk, dv, None, None, None


def _gather(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[P, 2, B, KV, T/P, K], by rank."""
    own = torch.stack([k, v])
    comm.all_gather_single(everyones := own.new_empty(group.size(), *own.shape), own, group=group)
    return everyones
