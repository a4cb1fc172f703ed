"""The decoder as a function of a dict of weights, dense and without a single shortcut.

Weights are named as in the model under test and have F.linear's shape [out, in]. Without `head.weight` the two ends
are tied. B rows, T slots, D width, H heads, K head size, F hidden, V vocabulary.
"""

import math

import torch

from tests.reference import rng
from tests.reference.data import IGNORED
from tests.reference.ffn import dense, mixture


def forward(weights, ids, docs, positions, **settings):
    """Logits [B, T, V] of the rows `ids`; the settings are those of `routed_forward`."""
    return routed_forward(weights, ids, docs, positions, **settings)[0]


def routed_forward(
    weights,
    ids,
    docs,
    positions,
    *,
    heads,
    kv_heads,
    dropout=0.0,
    seed=0,
    step=0,
    numbers=None,
    base=10000,
    experts=None,
    biases=None,
    padding=None,
):
    """Logits [B, T, V], and of each layer that is a mixture, by its number, the Routing.

    Dropout needs the seed, the step and the samples' numbers [B]. experts: the settings of the mixtures (ffn.py).
    biases: their routers', by name. padding: the number in `docs` of what is no document.
    """

    def drop(x, name):
        if dropout == 0:
            return x
        _, T, width = x.shape
        rows = numbers[:, None] * T + torch.arange(T)  # [B, T]
        kept = rng.keep(rng.key(seed, "dropout", name, step), rows.numpy(), width, dropout)  # [B, T, D]
        return x * torch.from_numpy(kept) * rng.scale(dropout)

    routings = {}
    x = drop(weights["embed.weight"][ids], "embed")  # [B, T, D]
    for i in range(layer_count(weights)):
        w = {part: weights[f"blocks.{i}.{part}.weight"] for part in PARTS}

        h = rmsnorm(x, w["attend_norm"])
        q = split_heads(h @ w["q"].T, heads)  # [B, H, T, K]
        k = split_heads(h @ w["k"].T, kv_heads)  # [B, Hkv, T, K]
        v = split_heads(h @ w["v"].T, kv_heads)
        a = attention(rotate(q, positions, base), rotate(k, positions, base), v, docs)  # [B, T, H·K]
        x = x + drop(a @ w["o"].T, f"blocks.{i}.attend")

        h = rmsnorm(x, w["ffn_norm"])
        ffn = part_of(weights, f"blocks.{i}.ffn.")
        if "router.weight" in ffn:
            routed = torch.ones_like(docs, dtype=torch.bool) if padding is None else docs != padding
            bias = (biases or {}).get(f"blocks.{i}.ffn.router.bias")
            h, routings[i] = mixture(h, ffn, bias, routed, experts)
        else:
            h = dense(h, ffn["gate.weight"], ffn["up.weight"], ffn["down.weight"])
        x = x + drop(h, f"blocks.{i}.ffn")  # [B, T, D]

    head = weights.get("head.weight", weights["embed.weight"])
    return rmsnorm(x, weights["norm.weight"]) @ head.T, routings


PARTS = ["attend_norm", "q", "k", "v", "o", "ffn_norm"]


def part_of(weights, prefix):
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def layer_count(weights):
    return sum(name.endswith("attend_norm.weight") for name in weights)


def rmsnorm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def split_heads(x, heads):
    """[B, T, heads·K] -> [B, heads, T, K]."""
    B, T, width = x.shape
    return x.reshape(B, T, heads, width // heads).transpose(1, 2)


def rotate(x, positions, base=10000):
    """RoPE: dims c and c + K/2 of each head are turned together, by position · base^(-2c/K)."""
    K = x.shape[-1]
    c = torch.arange(K // 2, dtype=torch.float64)
    angle = positions[:, None, :, None] * base ** (-2 * c / K)  # [B, 1, T, K/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., : K // 2], x[..., K // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(q, k, v, docs):
    """Each query sees the keys of its own document up to its own slot: [B, H, T, K] -> [B, T, H·K]."""
    B, H, T, K = q.shape
    shared_by = H // k.shape[1]  # query head h uses KV head h // shared_by
    k = k.repeat_interleave(shared_by, dim=1)
    v = v.repeat_interleave(shared_by, dim=1)

    slot = torch.arange(T)
    visible = (docs[:, :, None] == docs[:, None, :]) & (slot[:, None] >= slot[None, :])  # [B, T, T]
    scores = q @ k.transpose(-1, -2) / math.sqrt(K)  # [B, H, T, T]
    probabilities = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)
    return (probabilities @ v).transpose(1, 2).reshape(B, T, H * K)


def loss_sum(logits, labels):
    """The cross-entropy in nats, summed over the slots that have a label."""
    valid = labels != IGNORED
    logits, labels = logits[valid], labels[valid]  # [valid, V], [valid]
    return (logits.logsumexp(-1) - logits[torch.arange(len(labels)), labels]).sum()
