"""Attention as its definition says it, in one process: what every method is compared with. It shares no code."""

import math

import torch


def attention(q, k, v, documents, causal=True):
    """q [B, H, T, K], k and v [B, KV, T, K], documents [B, T] (negative: none) -> [B, H, T, K]."""
    _, H, T, K = q.shape
    k, v = (x.repeat_interleave(H // k.shape[1], dim=1) for x in (k, v))
    visible = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]
    if causal:
        visible = visible & (torch.arange(T)[:, None] >= torch.arange(T))
    scores = (q @ k.mT / math.sqrt(K)).masked_fill(~visible[:, None], -math.inf)
    sees = visible.any(-1)[:, None, :, None]
    scores = torch.where(sees, scores, torch.zeros(()))  # softmax of nothing is no number, nor is its gradient
    return torch.where(sees, scores.softmax(-1) @ v, torch.zeros((), dtype=q.dtype))


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def documents(T, B, lengths):
    """Rows of documents of these lengths, each row turned by one more; the last document is as long as is needed."""
    rows = []
    for b in range(B):
        turned = lengths[b % max(1, len(lengths)) :] + lengths[: b % max(1, len(lengths))]
        row = [number for number, length in enumerate(turned) for _ in range(length)]
        rows.append((row + [len(turned)] * T)[:T])
    return torch.tensor(rows)
