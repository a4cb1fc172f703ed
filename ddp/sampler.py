"""Which samples a data-parallel rank reads in each epoch: a pure function of (seed, epoch), nothing stored.

Entry j of an epoch is sample permutation(j) under the key of (seed, epoch), computed for the entries that are asked
for. Of what is left of the epoch the ranks take turns: rank r of P reads every P-th entry, from the r-th on. So P ranks
together read the order of one rank, a batch of B on each is the same global batch of P·B, and a run may go on with
another number of ranks. Where the length does not divide, the tail is dropped or padded, on every rank alike (ranks
with different numbers of batches wait for each other for ever), and which entries that concerns can be asked.

Nothing is sent; a permuted entry costs a dozen hashes. PyTorch's counterpart: DistributedSampler, which draws and keeps
the whole permutation, repeats samples without telling which, and gives every epoch the same order unless set_epoch is
called. Lecture A, "Distributed Sampler의 함정" (docs/notation.md). Left out: weights, and data without a length.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collectives import rng

LAST_POSITION = 2**63 - 1  # a checkpoint keeps it as an int64


@dataclass(frozen=True)
class Sampler:
    """The rest of one epoch, for one rank: `DataLoader(data, batch_size=batch, sampler=sampler.at_epoch(epoch))`.

    Raises ValueError for what makes no epoch: an empty data set, less samples than one batch on every rank while the
    tail is dropped, arguments out of range.
    """

    length: int  # samples of the data set
    rank: int
    size: int  # ranks that read it
    seed: int = 0
    shuffle: bool = True
    tail: str = "drop"  # "drop": what does not fill a batch on every rank is not read; "pad": filled up with repeats
    batch: int = 1  # samples of a rank that must not be cut short: every rank gets a multiple of it
    position: int = (
        0  # epoch · length + entries of this epoch that all ranks together have read: all the state there is
    )

    def __post_init__(self) -> None:
        for name in ("length", "rank", "size", "seed", "batch", "position"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name}={getattr(self, name)!r} must be an integer")
        if self.length < 1:
            raise ValueError(f"a data set of {self.length} samples has nothing to read")
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} must be one of 0 … size-1, with size={self.size} at least 1")
        if self.batch < 1:
            raise ValueError(f"batch={self.batch} must be at least 1")
        if self.tail not in ("drop", "pad"):
            raise ValueError(f'tail={self.tail!r} must be "drop" or "pad"')
        if self.tail == "drop" and self.length < self.size * self.batch:
            raise ValueError(
                f"{self.length} samples do not fill a batch of {self.batch} on {self.size} ranks, and all would be "
                f'dropped; use fewer ranks, a smaller batch, or tail="pad"'
            )
        if not 0 <= self.position <= LAST_POSITION:
            raise ValueError(f"position={self.position} must be from 0 to {LAST_POSITION}")

    def at(self, position: int) -> "Sampler":
        """The rest of the epoch from this position on, as `after` told it; on any number of ranks."""
        return replace(self, position=position)

    def at_epoch(self, epoch: int) -> "Sampler":
        """The whole of epoch 0, 1, 2 …"""
        if type(epoch) is not int or not 0 <= epoch <= LAST_POSITION // self.length:
            raise ValueError(f"epoch={epoch!r} must be an integer from 0 to {LAST_POSITION // self.length}")
        return self.at(epoch * self.length)

    def after(self, taken: int) -> int:
        """The position when every rank has taken this many samples from here on; after the last, the next epoch's.

        Count the samples of the steps that were made: a loader that reads ahead has asked for more.
        """
        if not 0 <= taken <= len(self):
            raise ValueError(f"taken={taken} must be from 0 to the {len(self)} samples that are left of this epoch")
        end = (self.position // self.length + 1) * self.length  # beyond it is padding, not the next epoch
        return min(self.position + taken * self.size, end) if taken < len(self) else end

    def __len__(self) -> int:
        """Samples that are left of this epoch for each rank, the same on all of them."""
        left = self.length - self.position % self.length
        unit = self.size * self.batch
        return self.batch * (left // unit if self.tail == "drop" else math.ceil(left / unit))

    def __iter__(self) -> Iterator[int]:
        """This rank's samples, in order."""
        return iter(self.samples().tolist())

    def samples(self) -> Tensor:
        """This rank's samples, int64 [len]."""
        return self._order(self._entries())

    def padding(self) -> Tensor:
        """Which of this rank's samples only fill up the last batch, bool [len]: others have read them. An evaluation
        leaves them out of its sums and its count.
        """
        return self._entries() >= self.length

    def dropped(self) -> Tensor:
        """The samples that no rank reads in this epoch, int64, the same on every rank."""
        end = self.position % self.length + self.size * len(self)
        return self._order(torch.arange(min(end, self.length), self.length))

    def _entries(self) -> Tensor:
        """The places of this rank's samples in the order of the epoch; those from `length` on are padding."""
        first = self.position % self.length + self.rank
        return first + self.size * torch.arange(len(self))

    def _order(self, entries: Tensor) -> Tensor:
        entries = entries % self.length  # padding starts again from the front
        if not self.shuffle:
            return entries
        # IDEA: the order of an epoch is a function of (seed, epoch), so no rank has to be told, and none can forget it.
        return rng.permutation(rng.key(self.seed, "sampler", self.position // self.length), entries, self.length)
