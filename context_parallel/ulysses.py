"""Ulysses: an all_to_all turns tokens of all heads into all tokens of some heads; after attention another goes back.

Heads do not know of each other, so a rank that has all tokens of H/P heads needs nobody. Elements that a rank sends,
forward and backward each: (2D + 2D_kv)·B·T/P·(P-1)/P; less the more ranks there are, where a ring's stay. With fewer KV
heads than ranks each is sent to all that serve its query heads, D_kv counts the copies, and backward adds up theirs.

At most as many ranks as heads. Saved for backward: q, k, v, out, lse of all T tokens of H/P heads, as much as T/P
tokens of all; but where KV heads are copied, of these P/KV times that. Jacobs et al. 2023 (DeepSpeed-Ulysses).
"""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from collectives.differentiable import all_to_all
from context_parallel.local import local_attention
from context_parallel.places import Places


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, places: Places, *, group: dist.ProcessGroup) -> Tensor:
    """Attention over the tokens of all ranks of the group; each holds its own tokens, and gets the output of them.

    q [B, H, T/P, K], k and v [B, KV, T/P, K] -> [B, H, T/P, K], of q's dtype. places: those of all ranks, the same on
    each. Raises ValueError, before any message, for shapes that do not fit the places, and for heads that the ranks
    cannot share. Collective, and so is its backward.
    """
    places.check(q, k, v, group.size())
    size = group.size()
    whole = partial(local_attention, places=places.grouped(size))
    return by_heads(q, k, v, places.order(size, 0), whole, group=group)


def by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: tuple[Tensor, Tensor],
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """What `attention` gives of this rank's share of the heads, for the tokens of all ranks of the group, which it is
    handed in this order of them [T], rank after rank; with the order is its inverse. Shapes as in ulysses_attention.
    """
    size, (there, back) = group.size(), order
    check_heads(q.shape[1], k.shape[1], size)

    def some_heads(x: Tensor) -> Tensor:
        x = x.repeat_interleave(max(1, size // x.shape[1]), 1)  # KV heads, where there are not enough for all ranks
        # IDEA: from some tokens of all heads to all tokens of some heads.
        return all_to_all(x, 1, 2, group=group).index_select(2, there)  # [B, H/P, T, K]

    out = attention(some_heads(q), some_heads(k), some_heads(v))
    return all_to_all(out.index_select(2, back), 2, 1, group=group)  # [B, H, T/P, K]


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError unless so many ranks can share the heads."""
    if ranks not in (fine := sharing(heads, kv_heads)):
        raise ValueError(f"{ranks} ranks cannot share {heads} heads with {kv_heads} KV heads; use one of {fine}")


def sharing(heads: int, kv_heads: int) -> list[int]:
    """How many ranks can share them: each has as many heads, and those of whole KV heads or a part of one's."""
    some = range(1, heads + 1) if heads % kv_heads == 0 else ()
    return [n for n in some if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
