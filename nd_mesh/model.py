"""A GPT in plain PyTorch, without a line of parallel code: RMSNorm, RoPE, grouped-query attention, SwiGLU, mixtures of
experts.

What a mesh may replace are its seams and nothing else: `embed` (the lookup), `block.attend` (the attention core),
`block.ffn`, `model.blocks` (by global layer number, so names survive a split into stages) and `model.loss` (head and
cross-entropy together, so that logits can stay cut). Head counts are read from the shapes of the weights. Everything a
token must know about its place comes in `where`.

Sources: Touvron et al. 2023 (Llama); Su et al. 2021 (RoPE); Ainslie et al. 2023 (GQA); Shazeer 2020 (SwiGLU).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from collectives import rng
from collectives.layout import Constant, Normal
from collectives.lookup import Embedding
from expert_parallel import Losses, MoE
from nd_mesh.config import ModelConfig

IGNORE = -100  # the label of a token that has none: it counts in no loss


@dataclass(frozen=True)
class Where:
    """The place of a microbatch's tokens in the run: what makes masks, rotations and dropout the same on any mesh."""

    step: int
    samples: Tensor  # [B] number of the sample in the run, counted from its first
    slots: Tensor  # [T] index in the packed row: causality
    stream: Tensor  # [T] the same for the residual stream, which sequence parallelism cuts further: dropout
    context: int  # T of the whole row
    positions: Tensor  # [B, T] index within the document: rotation
    documents: Tensor  # [B, T] number of the document: no token sees another's
    places: Any = None  # slots and documents of all parts of the row, where it is cut (nd_mesh/context.py)
    sequences: Any = None  # what a mixture of experts must know of the residual stream (expert_parallel/sequences.py)

    @cached_property
    def tokens(self) -> Tensor:
        """[B, T] a number for each token of the residual stream that no other token of the run has."""
        return self.samples[:, None] * self.context + self.stream

    @cached_property
    def visible(self) -> Tensor:
        """[B, 1, T, T] bool: the query (third) may look at the key (fourth): same document, not later."""
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return (same & (self.slots[:, None] >= self.slots)).unsqueeze(1)


class Dropout(nn.Module):
    """Dropout whose mask is a function of seed, name, step, sample, slot and channel."""

    def __init__(self, p: float, seed: int, name: str):
        super().__init__()
        self.p, self.seed, self.name = p, seed, name

    def forward(self, x: Tensor, where: Where) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return rng.dropout(x, rng.key(self.seed, "dropout", self.name, where.step), where.tokens, self.p)


class Attend(nn.Module):
    """Causal attention within documents, on rotated heads: the core that context parallelism replaces. It has no
    parameters.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, where: Where
    ) -> Tensor:  # [B, H, T, K], [B, KV heads, T, K] twice
        return F.scaled_dot_product_attention(q, k, v, attn_mask=where.visible, enable_gqa=True)


class SwiGLU(nn.Module):
    """The feed-forward network: down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, where: Where | None = None) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(MoE):
    """A mixture of such networks, of which each token has a few, chosen by its place in a row as well."""

    def __init__(self, config: ModelConfig):
        super().__init__(
            *(config.width, config.expert_hidden, config.experts),
            **{"choices": config.choices, "capacity": config.capacity or None},
            shared=SwiGLU(config.width, config.shared_hidden) if config.shared_hidden else None,
            losses=Losses(config.balance, config.z_loss),
            **{"score": config.score, "renormalise": config.renormalise, "scale": config.scale},
            biased=config.bias_rate > 0,
        )

    def forward(self, x: Tensor, where: Where) -> Tensor:
        return super().forward(x, where.sequences)


class Block(nn.Module):
    """A layer: attention, then the feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig, seed: int, layer: int):
        super().__init__()
        name = f"blocks.{layer}"
        self.head_size, self.rope_base = config.width // config.heads, config.rope_base
        self.attend_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.q = nn.Linear(config.width, config.heads * self.head_size, bias=False)
        self.k = nn.Linear(config.width, config.kv_heads * self.head_size, bias=False)
        self.v = nn.Linear(config.width, config.kv_heads * self.head_size, bias=False)
        self.attend = Attend()
        self.o = nn.Linear(config.heads * self.head_size, config.width, bias=False)
        self.attend_drop = Dropout(config.dropout, seed, f"{name}.attend")
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.ffn = Mixture(config) if config.mixture(layer) else SwiGLU(config.width, config.hidden)
        self.ffn_drop = Dropout(config.dropout, seed, f"{name}.ffn")

    def forward(self, x: Tensor, where: Where) -> Tensor:  # [B, T, D]
        h = self.attend_norm(x)
        q, k, v = (
            rearrange(project(h), "b t (h k) -> b h t k", k=self.head_size) for project in (self.q, self.k, self.v)
        )
        q, k = (rotate(heads, where.positions, self.rope_base) for heads in (q, k))
        attended = rearrange(self.attend(q, k, v, where), "b h t k -> b t (h k)")
        x = x + self.attend_drop(self.o(attended), where)
        return x + self.ffn_drop(self.ffn(self.ffn_norm(x), where), where)


class GPT(nn.Module):
    """The decoder. Built on the meta device it costs nothing; a mesh then allocates and initialises what each rank
    keeps.
    """

    def __init__(self, config: ModelConfig, seed: int):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.width)
        self.embed_drop = Dropout(config.dropout, seed, "embed")
        self.blocks = nn.ModuleDict({str(i): Block(config, seed, i) for i in range(config.layers)})
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, where: Where) -> Tensor:
        """ids [B, T] -> hidden [B, T, D], normalised: what `loss` and `logits` take."""
        x = self.embed_drop(self.embed(ids), where)
        for block in self.blocks.values():
            x = block(x, where)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, V]."""
        return self.head(hidden)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The sum of the token losses, in nats, over the labels [B, T] that are not IGNORE; in float32 at least."""
        logits = self.logits(hidden).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def init_rule(self, name: str) -> Normal | Constant:
        """How the parameter of this global name starts: every matrix keeps the size of what it multiplies.

        Projections into the residual stream are smaller by its 2L additions (GPT-2), the head's start near zero (Yang
        et al. 2021); an embedding that is the head's matrix too is smaller than one that is not.
        """
        config = self.config
        if name.endswith("norm.weight"):
            return Constant(1.0)
        if name == "embed.weight":
            return Normal(config.width**-0.5 if config.tied else 1.0)
        if name == "head.weight":
            return Normal(1 / config.width)
        hidden = {"ffn.down.weight": config.hidden, "experts.down": config.expert_hidden}
        hidden["shared.down.weight"] = config.shared_hidden
        inputs = next((size for end, size in hidden.items() if name.endswith(end)), config.width)
        into_stream = name.endswith(("o.weight", *hidden))
        return Normal((inputs * (2 * config.layers if into_stream else 1)) ** -0.5)

    def decay_rule(self, name: str) -> bool:
        """Weight decay acts on matrices only."""
        return not name.endswith("norm.weight")


def rotate(heads: Tensor, positions: Tensor, base: float) -> Tensor:
    """RoPE: turn each pair (c, c + K/2) of heads [B, H, T, K] by positions [B, T] times base^(-2c/K). Angles are
    float64.
    """
    half = heads.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=heads.device) / half)
    angle = (positions.double()[..., None] * frequency).unsqueeze(1)  # [B, 1, T, K/2]
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    a, b = heads.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
