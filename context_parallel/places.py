"""Places: where the tokens of every rank stand in their rows, and so which keys a query sees.

The whole mask of attention follows from a few numbers a token, so that no algorithm needs to know an order: documents
are runs of a row, so what a query sees is an interval of slots, from the first of its document to its own, or to the
last of it. For the queries of one rank and the keys of another, `blocks` says what must be computed: nothing, or the
part that is not wholly masked, and in there all, a triangle, or what a mask shows.

The numbers are the same on all ranks and nothing of them is sent: whoever reads a row knows its documents, and the
slots follow from the order.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from context_parallel.order import cut

ALL = slice(None)
LEAST = 64  # queries of a block that is not cut further: a kernel's call has its price
NOWHERE = -1  # the document of padding: sees nothing, and nothing sees it


class Block(NamedTuple):
    """The part of some queries × some keys in which anything is visible: in all of it, or below the diagonal, or else
    where a mask says so.
    """

    queries: slice
    keys: slice
    kind: str  # "full", "causal" or "masked"

    @property
    def pairs(self) -> int:
        """Scores to be computed, a row and head."""
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return queries * (queries + 1) // 2 if self.kind == "causal" else queries * keys


@dataclass(frozen=True)
class Places:
    """The slot of each token, by rank, and the slots that it sees."""

    slots: Tensor  # [P, T/P] index in the row, ascending in each rank's
    first: Tensor  # [P, B, T/P] the first slot that the token sees
    last: Tensor  # [P, B, T/P] the last one, before the first if there is none
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # once, for all layers

    @classmethod
    def of(cls, documents: Tensor, slots: Tensor, *, causal: bool = True) -> "Places":
        """From the documents [B, T] of whole rows, by number, NOWHERE for padding, and the slots [P, T/P] of an order.

        On the device of the documents. Raises ValueError for a document that another one interrupts, and for more
        tokens than slots.
        """
        slots, length = slots.to(documents.device), documents.shape[1]
        if slots.numel() < length:
            raise ValueError(
                f"{slots.numel()} slots are too few for rows of {length} tokens: make slots(order, {length}, P)"
            )
        first, last = _runs(documents)
        if causal:
            last = torch.arange(length, device=documents.device).expand_as(documents)
        last = last.masked_fill(documents < 0, -1)  # an interval that ends before it begins
        ends = [[cut(end, mine, fill=fill) for mine in slots] for end, fill in ((first, 0), (last, -1))]
        return cls(slots, *map(torch.stack, ends))

    def check(self, q: Tensor, k: Tensor, v: Tensor, ranks: int) -> None:
        """Raise ValueError unless q [B, H, T/P, K], k and v [B, KV, T/P, K] are those of a rank of so many."""
        parts, rows, tokens = self.first.shape
        if parts != ranks:
            raise ValueError(f"places of {parts} ranks in a group of {ranks}; make them with slots(order, T, {ranks})")
        shapes = [tuple(x.shape) for x in (q, k, v)]
        if {(len(x), x[0], *x[2:]) for x in shapes} != {(4, rows, tokens, q.shape[-1])} or shapes[1] != shapes[2]:
            given, room = "q {}, k {}, v {}".format(*shapes), f"{rows} rows of {tokens} tokens a rank"
            wanted = "give q as [B, H, T/P, K], k and v as [B, KV, T/P, K]"
            raise ValueError(f"{given} do not fit places of {room}: {wanted}")
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads")
        if len({q.dtype, k.dtype, v.dtype}) > 1:
            dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
            raise ValueError(f"q, k, v are {dtypes}; give all the same dtype")
        if len({x.device for x in (q, k, v, self.slots)}) > 1:
            devices = ", ".join(str(x.device) for x in (q, k, v))
            raise ValueError(f"q, k, v are on {devices}, places on {self.slots.device}: make them of documents there")

    def seen(self, mine: int, theirs: int) -> tuple[Tensor, Tensor]:
        """[B, T/P] twice: of the keys of rank `theirs`, the first that each query of rank `mine` sees, and the one
        behind the last; the same number twice if it sees none.
        """
        if (mine, theirs) not in self._known:
            keys = self.slots[theirs]
            # IDEA: slots ascend, and what a query sees is an interval of slots: so it is one of a rank's keys.
            start = torch.searchsorted(keys, self.first[mine])
            stop = torch.searchsorted(keys, self.last[mine], right=True)
            self._known[mine, theirs] = start, stop.maximum(start)
        return self._known[mine, theirs]

    def visible(self, mine: int, theirs: int, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """[B, queries, keys] bool: that query of rank `mine` may look at that key of rank `theirs`."""
        start, stop = (end[:, queries, None] for end in self.seen(mine, theirs))
        key = torch.arange(self.slots.shape[1], device=start.device)[keys]
        return (start <= key) & (key < stop)

    def blocks(self, mine: int, theirs: int) -> list[Block]:
        """What rank `mine` computes with the keys of rank `theirs`: blocks of different queries, perhaps none."""
        if (known := ("blocks", mine, theirs)) not in self._known:
            start, stop = (end.cpu() for end in self.seen(mine, theirs))
            self._known[known] = _blocks(start, stop, range(start.shape[1]))
        return self._known[known]

    def mask(self, mine: int, theirs: int, block: Block) -> Tensor | None:
        """[B, 1, queries, keys] bool: what is visible in the block; None if its kind says it."""
        return self.visible(mine, theirs, block.queries, block.keys)[:, None] if block.kind == "masked" else None

    def pairs(self, mine: int) -> int:
        """Scores that rank `mine` computes of its T/P × T, a row and head; a forward takes 4K FLOPs for each."""
        return sum(block.pairs for theirs in range(len(self.slots)) for block in self.blocks(mine, theirs))

    def order(self, size: int, group: int) -> tuple[Tensor, Tensor]:
        """[size·T/P] twice: what sorts the tokens of the `group`-th `size` neighbours by their slots, and what puts
        them back.
        """
        if (known := ("order", size, group)) not in self._known:
            there = self.slots.view(-1, size * self.slots.shape[1])[group].argsort()
            self._known[known] = there, there.argsort()
        return self._known[known]

    def grouped(self, size: int) -> "Places":
        """Those of ranks that are `size` neighbours of these each, their tokens together in the order of the slots."""
        if (known := ("grouped", size)) not in self._known:
            slots, order = self.slots.view(-1, size * self.slots.shape[1]).sort(1)
            ends = [end.unflatten(0, (-1, size)).transpose(1, 2).flatten(2) for end in (self.first, self.last)]
            first, last = (end.gather(2, order[:, None].expand_as(end)) for end in ends)  # [P/size, B, size·T/P]
            self._known[known] = Places(slots, first, last)
        return self._known[known]


def _runs(documents: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T] twice: the first and the last slot of each token's document."""
    slot = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    change = documents[:, 1:] != documents[:, :-1]
    begins = torch.nn.functional.pad(change, (1, 0), value=True)
    ends = torch.nn.functional.pad(change, (0, 1), value=True)
    begun = torch.where(begins & (documents >= 0), documents, NOWHERE - 1 - slot).sort(1).values
    if bool((begun[:, 1:] == begun[:, :-1]).any()):
        raise ValueError("a document is interrupted by another one: lay the tokens of each end to end")
    first = torch.where(begins, slot, 0).cummax(1).values
    last = torch.where(ends, slot, documents.shape[1]).flip(1).cummin(1).values.flip(1)
    return first, last


def _blocks(start: Tensor, stop: Tensor, queries: range) -> list[Block]:
    """Of these queries: one block, or those of its two halves, if a mask leaves so little that it pays."""
    sees = (start < stop)[:, queries.start : queries.stop].any(0).nonzero()
    if not len(sees):
        return []
    rows = slice(queries.start + int(sees[0]), queries.start + int(sees[-1]) + 1)
    whole = _block(start[:, rows], stop[:, rows], rows)
    middle = (rows.start + rows.stop) // 2
    if whole.kind != "masked" or middle - rows.start < LEAST:
        return [whole]
    halves = _blocks(start, stop, range(rows.start, middle)) + _blocks(start, stop, range(middle, rows.stop))
    return halves if sum(half.pairs for half in halves) < whole.pairs * 7 / 8 else [whole]


def _block(start: Tensor, stop: Tensor, rows: slice) -> Block:
    """That of these queries, of which the first and the last see something."""
    sees = start < stop
    begin, end = int(start[sees].min()), int(stop[sees].max())
    keys, length = slice(begin, end), rows.stop - rows.start
    if bool((start == begin).all()):
        if bool((stop == end).all()):
            return Block(rows, keys, "full")
        if length == end - begin and bool((stop == begin + 1 + torch.arange(length)).all()):
            return Block(rows, keys, "causal")
    return Block(rows, keys, "masked")
