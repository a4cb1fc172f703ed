"""Attention as its definition says it, in one process: what every method is compared with. It shares no code."""

import math

import torch


def attention(q, k, v, documents, causal=True):
    """q [B, H, T, K], k and v [B, KV, T, K], documents [B, T] (negative: none) -> [B, H, T, K]."""
    return masked(q, k, v, visible(documents, causal))


def visible(documents, causal=True):
    """[B, T, T] bool: which query (row) sees which key (column)."""
    seen = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]
    return seen.tril() if causal else seen


def masked(q, k, v, seen):
    """q [B, H, queries, K], k and v [B, KV, keys, K], seen [B, queries, keys] bool -> [B, H, queries, K]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen[:, None], -math.inf)
    sees = seen.any(-1)[:, None, :, None]
    scores = torch.where(sees, scores, torch.zeros((), dtype=q.dtype))  # softmax of nothing is no number, nor is its
    return torch.where(sees, scores.softmax(-1) @ v, torch.zeros((), dtype=q.dtype))  # gradient


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def documents(T, B, lengths, holes=()):
    """Rows of documents of these lengths, each row turned by one more; the last document is as long as is needed. Slots
    of `holes` are of none, and behind each another document begins.
    """
    rows = []
    for b in range(B):
        turned = lengths[b % max(1, len(lengths)) :] + lengths[: b % max(1, len(lengths))]
        row = [number for number, length in enumerate(turned) for _ in range(length)]
        row = (row + [len(turned)] * T)[:T]
        rows.append([-1 if slot in holes else 100 * sum(h < slot for h in holes) + n for slot, n in enumerate(row)])
    return torch.tensor(rows, dtype=torch.int64).view(B, T)
