"""Plain modules that tensor parallelism cuts, without a line of it: a block with every kind of layer, and a model with
a vocabulary; and their plans.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from collectives import layout
from tensor_parallel import Column, Heads, KeyValue, Row, Stream, Vocabulary
from tests.reference import rng

HEAD, HIDDEN = 4, 36  # 36 divides by 1, 2, 3 and 4
SEED = 7


@dataclass(frozen=True)
class Shape:
    """vocab: 0 for a block by itself, else it lies between an embedding and a head. fused: queries, keys and values are
    one matrix, gate and up another. gathered: gate and up are whole on every rank, and so is what down takes.
    """

    heads: int = 4
    kv_heads: int = 2
    bias: bool = True
    fused: bool = False
    qk_norm: bool = False
    router: bool = False
    gathered: bool = False
    vocab: int = 0
    tied: bool = False

    @property
    def width(self):
        return self.heads * HEAD


class Attention(nn.Module):
    """How many heads there are its matrices say."""

    def __init__(self, shape):
        super().__init__()
        width, kv, bias = shape.width, shape.kv_heads * HEAD, shape.bias
        self.queries_a_key = shape.heads // shape.kv_heads
        if shape.fused:
            self.qkv = nn.Linear(width, width + 2 * kv, bias=bias)
        else:
            self.q = nn.Linear(width, width, bias=bias)
            self.k, self.v = (nn.Linear(width, kv, bias=bias) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD) if shape.qk_norm else nn.Identity() for _ in range(2))
        self.o = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        q, k, v = (rearrange(part, "b t (h k) -> b h t k", k=HEAD) for part in self.parts(x))
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
        k, v = (part.repeat_interleave(q.size(1) // k.size(1), 1) for part in (self.k_norm(k), v))
        scores = (self.q_norm(q) @ k.mT / HEAD**0.5).masked_fill(~mask, float("-inf"))
        return self.o(rearrange(scores.softmax(-1) @ v, "b h t k -> b t (h k)"))

    def parts(self, x):
        if hasattr(self, "q"):
            return self.q(x), self.k(x), self.v(x)
        qkv = self.qkv(x)
        rows = qkv.size(-1) // (self.queries_a_key + 2)
        return qkv.split([self.queries_a_key * rows, rows, rows], -1)


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        if shape.fused:
            self.gate_up = nn.Linear(shape.width, 2 * HIDDEN, bias=shape.bias)
        else:
            self.gate, self.up = (nn.Linear(shape.width, HIDDEN, bias=shape.bias) for _ in range(2))
        self.down = nn.Linear(HIDDEN, shape.width, bias=shape.bias)

    def forward(self, x):
        gate, up = (self.gate(x), self.up(x)) if hasattr(self, "gate") else self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """[B, T, D] → [B, T, D]."""

    def __init__(self, shape):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(shape.width, bias=shape.bias), Attention(shape)
        self.norm2, self.mlp = nn.RMSNorm(shape.width), Mlp(shape)
        self.router = nn.Linear(shape.width, shape.width) if shape.router else None

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        z = self.mlp(y)
        return x + (z if self.router is None else z * self.router(y).sigmoid())


class Model(nn.Module):
    """ids [B, T], labels [B, T] → the loss of each token [B, T]."""

    def __init__(self, shape):
        super().__init__()
        self.embed, self.block = nn.Embedding(shape.vocab, shape.width), Block(shape)
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocab, bias=shape.bias)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.cross_entropy = token_losses  # the seam: whoever cuts the head has logits that are cut

    def forward(self, ids, labels):
        return self.cross_entropy(self.head(self.norm(self.block(self.embed(ids)))), labels)


def token_losses(logits, labels):
    return F.cross_entropy(logits.transpose(1, -1), labels, reduction="none")


def made(shape, device="cpu"):
    """The module, its values not those of `values` yet."""
    with torch.device(device):
        return (Model if shape.vocab else Block)(shape).double()


def init(name):
    """No bias begins at zero, no norm at one."""
    return layout.Normal(1.0 if "norm" in name else 0.5 if "bias" in name or "embed" in name else 0.3)


def values(shape):
    """Every parameter's, drawn for the whole tensors by the reference's own arithmetic."""
    drawn = {}
    for name, param in made(shape, "meta").named_parameters():
        numbers = rng.normal(rng.key(SEED, name), np.arange(param.numel())) * init(name).std
        drawn[name] = torch.from_numpy(numbers).view(param.shape)
    return drawn


def plain(shape):
    """The whole module with its values."""
    module = made(shape)
    with torch.no_grad():
        for name, value in values(shape).items():
            module.get_parameter(name).copy_(value)
    return module


def plan(shape, kv_group=None):
    """A role for each of its modules."""
    attention, mlp = {"qkv": Column((shape.heads, shape.kv_heads, shape.kv_heads))}, {}
    if not shape.fused:
        keys = KeyValue(shape.kv_heads, shape.heads, kv_group)
        attention = {"q": Column((shape.heads,)), "k": keys, "v": keys}
    if shape.fused:
        mlp = {"gate_up": Column((HIDDEN, HIDDEN), gather_output=shape.gathered)}
    else:
        mlp = {name: Column(gather_output=shape.gathered) for name in ("gate", "up")}
    roles = {"norm1": Stream(), "norm2": Stream()} | ({"router": Stream()} if shape.router else {})
    roles |= {f"attention.{name}": role for name, role in attention.items()} | {"attention.o": Row()}
    roles |= {f"attention.{name}": Heads() for name in ("q_norm", "k_norm") if shape.qk_norm}
    roles |= {f"mlp.{name}": role for name, role in mlp.items()} | {"mlp.down": Row(input_is_cut=not shape.gathered)}
    if not shape.vocab:
        return roles
    roles = {f"block.{name}": role for name, role in roles.items()}
    return roles | {"embed": Vocabulary(), "norm": Stream(), "head": Vocabulary()}


def zero_directions(shape):
    """Parameters whose exact gradient is zero: a bias of keys moves all scores of a query alike."""
    separate = shape.bias and not shape.fused and not shape.qk_norm
    return {"block.attention.k.bias" if shape.vocab else "attention.k.bias"} if separate else set()
