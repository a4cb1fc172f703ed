"""Attention of some queries over some keys, with the log-sum-exp of the scores, so that several can be merged.

Forward returns what softmax over these keys alone gives, and lse = log Σ exp(score). Backward takes the output and the
lse of *all* keys: exp(score - lse) are then the final probabilities, and dq, dk, dv this block's terms of the gradient,
which add up (Dao 2023, §3.1). Keys and values come once a KV head and serve H/KV query heads.

On a CPU it is torch's fused kernel, which keeps no [T, T] matrix; elsewhere `explicit`, which does. Half precision is
computed and returned in float32: rounded results of blocks would not add up to a rounded result. A query that sees no
key gives 0 and lse -inf; a block has at least one query and one key. PyTorch's counterpart:
F.scaled_dot_product_attention, which keeps the lse to itself.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Mask = Tensor | None  # [B, 1, queries, keys] bool, True: visible; None: all is


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """q [B, H, queries, K], k and v [B, KV, keys, K] -> out like q, and lse [B, H, queries], in `precision(q)`.

    causal: the i-th query sees the keys up to the i-th, of as many.
    """
    q, k, v = (_dense(x.to(precision(x))) for x in (q, k, v))
    with _as_they_are(q.device):
        return (fused if q.device.type == "cpu" else explicit)(q, k, v, mask, causal)


def backward(
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    mask: Mask = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's terms of dq, dk, dv for inputs q, k, v, given the result, out and lse, over *all* keys."""
    dout, q, k, v, out = (_dense(x.to(precision(x))) for x in (dout, *inputs, result[0]))
    lse = result[1].masked_fill(result[1] == -math.inf, 0.0)  # who sees nothing has no score: exp(-inf - 0) is 0
    way = fused_backward if q.device.type == "cpu" else explicit_backward
    with _as_they_are(q.device):
        return way(dout, (q, k, v), (out, lse), mask, causal)


def precision(x: Tensor) -> torch.dtype:
    """The dtype in which results of x are accumulated: its own, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _as_they_are(device: torch.device) -> AbstractContextManager[None]:
    """Autocast would multiply in half precision what is in float32 on purpose."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _dense(x: Tensor) -> Tensor:
    """The fused kernel reads heads of other strides as if their last one were 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool) -> tuple[Tensor, Tensor]:
    """By torch's kernel for CPUs."""
    out, lse = _fused(q, k, v, 0.0, causal, attn_mask=_additive(mask, q.dtype))
    if mask is not None:
        lse = lse.masked_fill(~mask.any(-1), -math.inf)  # the kernel says 0 there
    return out, lse


def fused_backward(
    dout: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], mask: Mask, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """By torch's kernel for CPUs."""
    return _fused_backward(dout, *inputs, *result, 0.0, causal, attn_mask=_additive(mask, dout.dtype))


def explicit(q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool) -> tuple[Tensor, Tensor]:
    """By its definition."""
    scores = _scores(q, k, mask, causal)  # [B, KV, H/KV, queries, keys]
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return (p @ v[:, :, None]).flatten(1, 2), lse.flatten(1, 2)


def explicit_backward(
    dout: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], mask: Mask, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """By its definition: of probabilities p, dscore = p · (dout·v - dout·out)."""
    q, k, v = inputs
    scores = _scores(q, k, mask, causal)
    q, dout, out, lse = (x.unflatten(1, (k.shape[1], -1)) for x in (q, dout, *result))  # [B, KV, H/KV, queries, ..]
    # IDEA: with the lse of all keys a block's probabilities are the final ones, whatever the other blocks are.
    p = (scores - lse[..., None]).exp()
    dscores = p * (dout @ v[:, :, None].mT - (dout * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk, dv = (dscores.mT @ q).sum(2), (p.mT @ dout).sum(2)  # over the heads that share them
    return (dscores @ k[:, :, None]).flatten(1, 2), dk, dv


def _scores(q: Tensor, k: Tensor, mask: Mask, causal: bool) -> Tensor:
    scores = q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].mT * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()[None, None]
    return scores if mask is None else scores.masked_fill(~mask[:, :, None], -math.inf)


def _additive(mask: Mask, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)
