"""What a layer must know of its tokens beside their values: the rows they are in.

Balance and capacity are counted by sequence, a row of T tokens: so neither depends on which rows share a microbatch or
a rank. A row may be cut over the ranks of a group (context and sequence parallelism), each of which then has some slots
of it, in any order.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import comm

NOBODY = -1  # in place of an expert's number


@dataclass(frozen=True)
class Sequences:
    """Where a rank's tokens [B, T/P] stand. P ranks have a part of each row."""

    routed: Tensor  # [B, T/P] bool: what is no token of any document, as padding, goes to no expert
    counted: Tensor  # [B] bool: rows of which the balance loss is a mean; the same on all ranks that have a part
    length: int  # T of a whole row, without padding that only some meshes need
    rows: Tensor  # () the number of counted rows of the global batch
    tokens: Tensor  # () the number of routed tokens of the global batch
    slots: Tensor | None = None  # [P, T/P] of each rank, where rows are cut: each slot once, padding's too
    loss_scale: float = 1.0  # of the loss that backward begins with, and so of those that join it on its way

    @classmethod
    def of(cls, routed: Tensor, counted: Tensor) -> "Sequences":
        """Whole rows [B, T], and as if they were the global batch: who accumulates, or sums over ranks, replaces `rows`
        and `tokens` by those of all of it.
        """
        return cls(routed, counted, routed.shape[1], counted.sum(), routed.sum())

    @classmethod
    def whole(cls, x: Tensor) -> "Sequences":
        """The same, of rows [B, T, ...] that are full of tokens."""
        routed = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return cls.of(routed, routed.any(1))

    def check(self, x: Tensor, group: dist.ProcessGroup | None) -> None:
        """Raise ValueError unless these are the places of x [B, T/P, D], whose rows are cut over the group."""
        ranks = 1 if group is None else group.size()
        if self.routed.shape != x.shape[:2] or self.counted.shape != x.shape[:1]:
            given = f"routed {list(self.routed.shape)} and counted {list(self.counted.shape)}"
            raise ValueError(f"x of shape {list(x.shape)} and its sequences differ: {given}")
        if ranks > 1 and (self.slots is None or self.slots.shape != (ranks, x.size(1))):
            given = None if self.slots is None else list(self.slots.shape)
            raise ValueError(f"rows are cut over {ranks} ranks: give slots [{ranks}, {x.size(1)}] of all, not {given}")

    def cut(self, slots: Tensor, rank: int) -> "Sequences":
        """The part of rank `rank` of whole rows, whose ranks have these slots [P, T/P]: those beyond the row's end are
        no tokens.
        """
        mine = slots[rank]
        routed = self.routed[:, mine.clamp(max=self.routed.shape[1] - 1)] & (mine < self.routed.shape[1])
        return replace(self, routed=routed, slots=slots)


def whole_rows(experts: Tensor, sequences: Sequences, group: dist.ProcessGroup | None) -> Tensor:
    """The experts [B, T/P, k] that the tokens of this rank chose -> those of the whole row [B, T, k], in the order of
    its slots: k small integers a token, gathered over the ranks that have parts of the row.
    """
    if group is None or group.size() == 1:
        return experts
    # IDEA: what depends on a whole row needs of other ranks' tokens their choices alone.
    small = experts.int()
    pieces = small.new_empty(group.size(), *small.shape)  # [P, B, T/P, k]
    comm.all_gather_single(pieces.flatten(0, 1), small, group=group)
    whole = small.new_full((small.shape[0], sequences.slots.numel(), small.shape[2]), NOBODY)
    whole[:, sequences.slots.flatten()] = pieces.movedim(0, 1).flatten(1, 2)
    return whole.long()  # [B, T, k]


def chosen(experts: Tensor, count: int) -> Tensor:
    """[B, T, k] -> [B, T, E] int64: 1 where a token chose that expert, else 0."""
    one_hot = torch.zeros(*experts.shape[:-1], count + 1, dtype=torch.int64, device=experts.device)
    return one_hot.scatter_(-1, experts.where(experts != NOBODY, count), 1)[..., :count]
