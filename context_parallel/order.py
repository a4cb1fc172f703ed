"""Orders: which slots of a row each rank holds. One function cuts ids, labels, positions and documents alike.

    T = 16, P = 2     rank 0                     rank 1                     causal work, max / mean
    contiguous        0 1 2 3 4 5 6 7            8 9 10 11 12 13 14 15      2 - 1/P
    zigzag            0 1 2 3 12 13 14 15        4 5 6 7 8 9 10 11          1
    striped           0 2 4 6 8 10 12 14         1 3 5 7 9 11 13 15         1 + (P-1)/(T+1)

A later token sees more keys, so neighbours make the last rank the slowest. Of 2P chunks a zigzag gives rank i the i-th
and the i-th from the end, and any two such pairs see equally many (Dubey et al. 2024, §3.3.2); stripes are Striped
Attention (Brandon et al. 2023). A row that does not divide is padded at its end: slots from T on are padding, `cut`
fills them, `join` drops them. Labels are shifted before the cut: afterwards a token's next one may lie elsewhere.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ORDERS = ("contiguous", "zigzag", "striped")


def slots(order: str, length: int, parts: int, *, multiple: int = 1) -> Tensor:
    """[P, T/P] int64, ascending in each rank's row: the slots that each rank holds of a row of T = length tokens.

    Slots of `length` and more are padding, as few as make all parts equal, and a multiple of `multiple`. Raises
    ValueError for an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; use one of {', '.join(ORDERS)}")
    if length < 1 or parts < 1:
        raise ValueError(f"a row of {length} tokens in {parts} parts: both must be at least 1")
    chunks = 2 * parts if order == "zigzag" and parts > 1 else parts
    step = multiple // math.gcd(multiple, chunks // parts)
    size = -(-length // (chunks * step)) * step
    row = torch.arange(chunks * size)
    if order == "striped":
        return row.view(size, parts).T.contiguous()
    chunked = row.view(chunks, size)
    # IDEA: rank i holds chunk i and the i-th from the end, so every rank sees as many keys.
    return torch.cat([chunked[:parts], chunked.flip(0)[:parts]], 1) if chunks > parts else chunked


def cut(row: Tensor, mine: Tensor, *, dim: int = 1, fill: int = 0) -> Tensor:
    """Of a row [.., T, ..] along dim what stands at the slots `mine` [T/P]; padding slots hold `fill`."""
    length = row.size(dim)
    mine = mine.to(row.device)
    piece = row.index_select(dim, mine.clamp(max=length - 1))
    return piece.masked_fill_((mine >= length).view(-1, *[1] * (row.dim() - 1 - dim % row.dim())), fill)


def join(pieces: Sequence[Tensor], slots: Tensor, length: int, *, dim: int = 1) -> Tensor:
    """The row [.., T, ..] of T = length tokens from the pieces of all ranks, in rank order: the inverse of `cut`."""
    places = slots.flatten().argsort()[:length].to(pieces[0].device)
    return torch.cat(list(pieces), dim).index_select(dim, places)
