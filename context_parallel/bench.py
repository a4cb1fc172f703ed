"""Causal attention of one row that is cut over all ranks, forward and backward, beside one process: time, bytes, peak.

    python -m context_parallel.bench                        2 and 4 ranks
    python -m context_parallel.bench --ranks 2 --repeat 5   five whole runs, and the median of their ratios

One row of 2,048 and of 4,096 tokens, 8 heads of 64 and 4 KV heads, float32. "One process" has a P-th of the same work,
and nothing to send: on each rank F.scaled_dot_product_attention(is_causal=True) of a P-th of the heads, with all of the
row. So ours / its time is the price of cutting the row.

Packed documents, 16 of uneven lengths in a row: beside that call with one dense mask, and beside a call for each
document, which computes no score that nobody needs.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from collectives import comparison
from collectives.runtime import Runtime
from collectives.turns import Case
from context_parallel import (
    Places,
    all_gather_attention,
    cut,
    ring_attention,
    ring_ulysses_attention,
    slots,
    ulysses_attention,
)

LENGTHS, DOCUMENTS = (2048, 4096), 16
HEADS, KV_HEADS, HEAD = 8, 4, 64
NEIGHBOURS = 2  # that exchange heads in ring × ulysses

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
ALONE = partial(F.scaled_dot_product_attention, enable_gqa=True)


class Method(NamedTuple):
    """One of ours: the attention that it makes of places, and the order of tokens that it wants."""

    attention: Callable[[Runtime, Places], Attention]
    order: str = "zigzag"
    ranks: Sequence[int] = (2, 4)


def ring(run: Runtime, places: Places) -> Attention:
    """ring.py."""
    return partial(ring_attention, places=places, group=run.world)


def gathered(run: Runtime, places: Places, **settings: bool) -> Attention:
    """gather.py."""
    return partial(all_gather_attention, places=places, group=run.world, **settings)


def ulysses(run: Runtime, places: Places) -> Attention:
    """ulysses.py."""
    return partial(ulysses_attention, places=places, group=run.world)


def both(run: Runtime, places: Places) -> Attention:
    """ring_ulysses.py."""
    rings = [run.new_group(range(u, run.size, NEIGHBOURS)) for u in range(NEIGHBOURS)]
    rows = [run.new_group(range(r, r + NEIGHBOURS)) for r in range(0, run.size, NEIGHBOURS)]
    [ring_group], [ulysses_group] = filter(None, rings), filter(None, rows)
    return partial(ring_ulysses_attention, places=places, ring_group=ring_group, ulysses_group=ulysses_group)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "ring": Method(ring),
        "ring, contiguous": Method(ring, "contiguous"),
        "all_gather, save_gathered=False": Method(gathered),
        "all_gather, save_gathered=True": Method(partial(gathered, save_gathered=True)),
        "ulysses": Method(ulysses, "contiguous"),
        "ring × ulysses": Method(both, ranks=(4,)),
    }
)


class Part(NamedTuple):
    """What a rank has of the row, and its attention. A call is forward and backward."""

    attention: Attention
    qkv: Sequence[Tensor]
    dout: Tensor

    def __call__(self) -> tuple[Tensor, ...]:
        """The output, dq, dk, dv."""
        out = self.attention(*self.qkv)
        return out.detach(), *torch.autograd.grad(out, self.qkv, self.dout)


def part(attention: Attention, tensors: Sequence[Tensor]) -> Part:
    """Of its part of q, k, v and dout."""
    *qkv, dout = (x.contiguous() for x in tensors)
    return Part(attention, [x.requires_grad_() for x in qkv], dout)


def row(run: Runtime, length: int) -> list[Tensor]:
    """q, k, v, dout of the whole row, [1, H or KV, T, K] each, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, each, length, HEAD, generator=generator).to(run.device) for each in heads]


def ours(run: Runtime, method: Method, lengths: Sequence[int]) -> Part:
    """A rank's tokens, all heads of them. lengths: of the documents in the row."""
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None].to(run.device)  # [1, T]
    everyones = slots(method.order, sum(lengths), run.size)
    attention = method.attention(run, Places.of(documents, everyones))
    return part(attention, [cut(x, everyones[run.rank], dim=2) for x in row(run, sum(lengths))])


def one_process(run: Runtime, attention: Attention, length: int) -> Part:
    """A rank's heads, all tokens of them."""
    return part(attention, [x.chunk(run.size, 1)[run.rank] for x in row(run, length)])


def whole_row(run: Runtime, name: str, length: int) -> Case:
    """A row that is one document."""
    theirs = one_process(run, partial(ALONE, is_causal=True), length)
    return Case(f"T = {length}: {name}", {name: ours(run, METHODS[name], [length]), "one process": theirs})


def packed(run: Runtime, name: str, length: int) -> Case:
    """A row of documents."""
    lengths = uneven(length)
    dense = torch.block_diag(*(torch.ones(n, n, dtype=torch.bool).tril() for n in lengths)).to(run.device)
    needed = sum(n * (n + 1) for n in lengths) / (length * (length + 1))
    calls = {
        name: ours(run, METHODS[name], lengths),
        "one process, dense mask": one_process(run, partial(ALONE, attn_mask=dense), length),
        "one process, document by document": one_process(run, partial(one_by_one, lengths), length),
    }
    return Case(f"T = {length}, {DOCUMENTS} documents, {needed:.0%} of the causal scores: {name}", calls)


def uneven(length: int) -> list[int]:
    """Lengths of the documents in a row, uneven and always the same."""
    inner = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[: DOCUMENTS - 1] + 1
    ends = [0, *sorted(inner.tolist()), length]
    return [end - start for start, end in pairwise(ends)]


def one_by_one(lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each document by itself."""
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat([ALONE(*each, is_causal=True) for each in parts], 2)


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    there = [name for name, method in METHODS.items() if run.size in method.ranks]
    whole = [whole_row(run, name, length) for length in LENGTHS for name in there]
    return [*whole, *(packed(run, name, LENGTHS[-1]) for name in ("ring", "ulysses"))]


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(2, 4)))
