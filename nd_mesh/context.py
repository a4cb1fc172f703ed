"""Rows cut along the sequence: which tokens a rank of cp has, and the attention that reaches the others.

Every rank of cp reads the same rows and keeps its part of them, ids, labels, positions and documents by one function
(context_parallel/order.py). What the model then sees is a shorter row, whose tokens know their place; only the
attention core is another. A row that does not divide by the ranks of cp, or its part by those of tp that cut the
residual stream, is padded at its end: such tokens see nothing, are seen by none and have no label.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm
from context_parallel import (
    NOWHERE,
    Places,
    all_gather_attention,
    cut,
    join,
    ring_attention,
    ring_ulysses_attention,
    slots,
    ulysses_attention,
)
from nd_mesh.config import ParallelConfig
from nd_mesh.data import Batch
from nd_mesh.mesh import Mesh
from nd_mesh.model import IGNORE, Where


class Rows:
    """This rank's part of rows of any length."""

    def __init__(self, parallel: ParallelConfig, mesh: Mesh):
        self.order, self.group = parallel.order, mesh.group("cp")
        self.multiple = mesh.size("tp") if parallel.sequence else 1

    def slots(self, length: int) -> Tensor:
        """[cp, T/cp] those of each rank of cp."""
        return slots(self.order, length, self.group.size(), multiple=self.multiple)

    def cut(self, batch: Batch) -> Batch:
        """Of whole rows what this rank keeps."""
        row, length = batch.where, batch.ids.shape[1]
        if self.group.size() == 1 and length % self.multiple == 0:
            return batch
        everyones = self.slots(length).to(batch.ids.device)
        mine = everyones[self.group.rank()]
        where = replace(
            row,
            **{"slots": mine, "stream": mine, "positions": cut(row.positions, mine)},
            **{"documents": cut(row.documents, mine, fill=NOWHERE), "places": Places.of(row.documents, everyones)},
            sequences=row.sequences.cut(everyones, self.group.rank()),
        )
        return Batch(cut(batch.ids, mine), cut(batch.labels, mine, fill=IGNORE), where)

    def join(self, part: Tensor, length: int) -> Tensor:
        """[B, T/cp, ..] -> [B, T, ..], T = length, on every rank of cp."""
        pieces = [torch.empty_like(part) for _ in range(self.group.size())]
        comm.all_gather(pieces, part, group=self.group)
        return join(pieces, self.slots(length), length)


class Attend(nn.Module):
    """The attention core of a model whose rows are cut: `attention`, of this rank's queries over the keys of all."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor, Places], Tensor]):
        super().__init__()
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
        return self.attention(q, k, v, where.places)  # [B, H, T/cp, K]


def attention(parallel: ParallelConfig, mesh: Mesh) -> Callable[[Tensor, Tensor, Tensor, Places], Tensor]:
    """The method that the configuration names, on this rank's groups. Collective over the world: it makes groups."""
    if parallel.attention == "ring_ulysses":
        ring, ulysses = _two_groups(mesh, parallel.ulysses)
        return partial(ring_ulysses_attention, ring_group=ring, ulysses_group=ulysses)
    methods = {
        "ring": ring_attention,
        "all_gather": partial(all_gather_attention, save_gathered=parallel.save_gathered),
        "ulysses": ulysses_attention,
    }
    return partial(methods[parallel.attention], group=mesh.group("cp"))


def _two_groups(mesh: Mesh, neighbours: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The ring, and the neighbours that exchange heads: cp as a square, its rows the neighbours."""
    rings, rows = [], []
    for ranks in mesh.grid.groups("cp"):
        rings += [mesh.run.new_group(ranks[u::neighbours]) for u in range(neighbours)]
        rows += [mesh.run.new_group(ranks[r : r + neighbours]) for r in range(0, len(ranks), neighbours)]
    [ring], [row] = filter(None, rings), filter(None, rows)
    return ring, row
