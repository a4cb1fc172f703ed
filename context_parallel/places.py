"""Places: where the tokens of every rank stand in their rows, and so which keys a query sees.

The whole mask of attention is a function of two small tables, so that no algorithm needs to know an order: a query sees
a key of the same document that stands at no later slot. For the queries of one rank and the keys of another, `block`
says what must be computed: nothing, the part of it that is not wholly masked, and in there all, a triangle, or a mask.

The tables are the same on all ranks and nothing of them is sent: ids and documents of a row are known to whoever reads
it, and the slots follow from the order.
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
    where the mask says so.
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
    """The slot and the document of each token, by rank."""

    slots: Tensor  # [P, T/P] index in the row, ascending in each rank's
    documents: Tensor  # [P, B, T/P] number of the document; NOWHERE: of none
    causal: bool = True
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # found once, for all layers

    @classmethod
    def of(cls, documents: Tensor, slots: Tensor, *, causal: bool = True) -> "Places":
        """From the documents [B, T] of whole rows and the slots [P, T/P] of an order."""
        slots = slots.to(documents.device)
        return cls(slots, torch.stack([cut(documents, mine, fill=NOWHERE) for mine in slots]), causal)

    def check(self, q: Tensor, k: Tensor, v: Tensor, ranks: int) -> None:
        """Raise ValueError unless these can be queries, keys and values of one of so many ranks, whose places these
        are.
        """
        parts, rows, length = self.documents.shape
        if parts != ranks:
            raise ValueError(f"the places are those of {parts} ranks, but {ranks} attend: cut rows in as many parts")
        fits = k.shape == v.shape and k.shape[::2] == q.shape[::2] == (rows, length) and k.shape[3] == q.shape[3]
        if not fits or q.shape[1] % k.shape[1]:
            shapes = ", ".join(f"{name} {[*x.shape]}" for name, x in (("q", q), ("k", k), ("v", v)))
            raise ValueError(f"{shapes}: need [{rows}, H, {length}, K], and a KV that divides H in place of it twice")

    def visible(self, mine: int, theirs: int, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """[B, queries, keys] bool: that query of rank `mine` may look at that key of rank `theirs`."""
        query, key = self.documents[mine][:, queries, None], self.documents[theirs][:, None, keys]
        seen = (query == key) & (query != NOWHERE)
        return seen & (self.slots[mine][queries, None] >= self.slots[theirs][keys]) if self.causal else seen

    def blocks(self, mine: int, theirs: int) -> list[Block]:
        """What rank `mine` computes with the keys of rank `theirs`: blocks of different queries, perhaps none."""
        if (mine, theirs) not in self._known:
            everything = slice(0, self.slots.shape[1])
            self._known[mine, theirs] = _blocks(self.visible(mine, theirs), everything, everything)
        return self._known[mine, theirs]

    def mask(self, mine: int, theirs: int, block: Block) -> Tensor | None:
        """[B, 1, queries, keys] bool: what is visible in the block; None if its kind says it."""
        return self.visible(mine, theirs, block.queries, block.keys)[:, None] if block.kind == "masked" else None

    def pairs(self, mine: int) -> int:
        """Scores that rank `mine` computes of its T/P × T, a row and head; a forward takes 4K FLOPs for each."""
        return sum(block.pairs for theirs in range(len(self.slots)) for block in self.blocks(mine, theirs))

    def grouped(self, size: int) -> "Places":
        """Those of ranks that are `size` neighbours of these each, their tokens together in the order of the slots."""
        if size not in self._known:
            slots, order = self.slots.view(-1, size * self.slots.shape[1]).sort(1)
            documents = self.documents.unflatten(0, (-1, size)).transpose(1, 2).flatten(2)  # [P/size, B, size·T/P]
            documents = documents.gather(2, order[:, None].expand_as(documents))
            self._known[size] = Places(slots, documents, self.causal)
        return self._known[size]


def _blocks(visible: Tensor, queries: slice, keys: slice) -> list[Block]:
    """Of these queries and keys: one block, or those of two halves of the queries, if a mask leaves so little that it
    pays.
    """
    anywhere = visible[:, queries, keys].any(0)
    rows, columns = _hull(anywhere.any(1), queries.start), _hull(anywhere.any(0), keys.start)
    if rows is None or columns is None:
        return []
    whole = Block(rows, columns, _kind(visible[:, rows, columns]))
    middle = (rows.start + rows.stop) // 2
    if whole.kind != "masked" or middle - rows.start < LEAST:
        return [whole]
    parts = slice(rows.start, middle), slice(middle, rows.stop)
    halves = [block for part in parts for block in _blocks(visible, part, columns)]
    return halves if sum(half.pairs for half in halves) < whole.pairs * 7 / 8 else [whole]


def _hull(marked: Tensor, start: int) -> slice | None:
    """From the first to the last that is marked, counted from start."""
    where = marked.nonzero()
    return slice(start + int(where[0]), start + int(where[-1]) + 1) if len(where) else None


def _kind(visible: Tensor) -> str:
    if visible.all():
        return "full"
    square, index = visible.shape[1] == visible.shape[2], torch.arange(visible.shape[1], device=visible.device)
    triangle = square and torch.equal(visible, (index[:, None] >= index).expand_as(visible))
    return "causal" if triangle else "masked"
