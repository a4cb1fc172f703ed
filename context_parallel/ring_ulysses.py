"""Ring × Ulysses: an all_to_all among U neighbours gives each the tokens of all U, then a ring goes over P/U ranks.

Ulysses cannot use more ranks than there are heads, a ring of many ranks has many steps. Together they have P = R·U
ranks, R steps, and of the heads only U must be a divisor. The all_to_all belongs on the fast links of a node, the ring
between nodes, where its messages hide behind computing.

Elements that a rank sends, b = B·T/P·D_kv: forward (2D + 2D_kv)·B·T/P·(U-1)/U + 2(R-1)b, backward the same all_to_alls
and 2(R-1)b + 2R·b: each ring message has U times the tokens of 1/U of the heads. Fang and Zhao 2024 (USP).
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor

from context_parallel.places import Places
from context_parallel.ring import ring_attention
from context_parallel.ulysses import by_heads


def ring_ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, places: Places, *, ring_group: dist.ProcessGroup, ulysses_group: dist.ProcessGroup
) -> Tensor:
    """Attention over the tokens of all P = R·U ranks; each holds its own tokens, and gets the output of them.

    q [B, H, T/P, K], k and v [B, KV, T/P, K] -> [B, H, T/P, K], of q's dtype. places: those of all P, of which the one
    that is number u of its ulysses_group and number r of its ring_group is the (r·U + u)-th. Raises ValueError, before
    any message, for shapes that do not fit the places, and for heads that U ranks cannot share. Collective, and so is
    its backward.
    """
    neighbours = ulysses_group.size()
    places.check(q, k, v, ring_group.size() * neighbours)
    order = places.order(neighbours, ring_group.rank())
    # IDEA: after the all_to_all each rank of a ring has the tokens of U ranks, in the order of their slots.
    ring = partial(ring_attention, places=places.grouped(neighbours), group=ring_group)
    return by_heads(q, k, v, order, ring, group=ulysses_group)
