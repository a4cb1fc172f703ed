"""The vocabulary-parallel embedding: each rank has the rows of some tokens, and looks up those.

    ids [T] → rows that this rank has, zero for the others [T, D] {+tp} → all_reduce, or reduce_scatter of the tokens

Exactly one rank has a token's row, so the sum adds zeros to it. Elements sent, of n: 2n(P-1)/P forward, none backward;
with sequence parallelism n(P-1)/P in each. Memory: the table 1/tp. A vocabulary that does not divide is cut unevenly
(cut.nearly_even), not padded.

Shoeybi et al. 2019, §3. Megatron-LM's counterpart: VocabParallelEmbedding, which pads the table.
"""

from torch import Tensor, nn

from collectives import layout
from collectives.lookup import lookup
from tensor_parallel.cut import nearly_even
from tensor_parallel.linear import declare
from tensor_parallel.region import Region


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of an embedding, made from a whole one, whose weight it cuts in place and keeps. Its output
    leaves a region.

    Raises ValueError for an embedding with max_norm, padding_idx, scale_grad_by_freq or sparse gradients, which look at
    the whole table or batch.
    """

    def __init__(self, embedding: nn.Embedding, region: Region):
        super().__init__()
        check_settings(embedding)
        declare(embedding)
        self.weight, self.region = embedding.weight, region
        self.vocab = self.weight.held.boxes[0].shape[0]
        self.rows = nearly_even(self.vocab, region.group.size(), what="tokens of a vocabulary")[region.group.rank()]
        layout.cut_pieces(self.weight, 0, [self.rows])  # [V/tp, D]

    def forward(self, ids: Tensor) -> Tensor:
        """ids [..., T], the same on every rank → what `Region.leave` gives. Raises IndexError as torch's does."""
        check_range(ids, self.vocab, "token")
        if len(self.rows) == self.vocab:
            return lookup(ids, self.weight)
        elsewhere = (ids < self.rows.start) | (ids >= self.rows.stop)
        # IDEA: a row that another rank has is looked up as zeros, so that the sum over the ranks is the row.
        found = lookup((ids - self.rows.start).masked_fill(elsewhere, 0), self.weight)
        return self.region.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0))

    def extra_repr(self) -> str:
        """For `print`."""
        return f"tokens {self.rows.start} … {self.rows.stop - 1} of {self.vocab}"


def check_settings(embedding: nn.Embedding) -> None:
    """Raise ValueError for those that look at the whole table or batch."""
    for setting in ("max_norm", "padding_idx", "scale_grad_by_freq", "sparse"):
        if (value := getattr(embedding, setting)) is not None and value is not False:  # 0 is a token
            raise ValueError(f"an embedding with {setting} cannot be cut by its vocabulary; make it without")


def check_range(ids: Tensor, vocab: int, what: str) -> None:
    """Raise IndexError on every rank for numbers that no rank has a row for; on the CPU, where looking is cheap."""
    if ids.device.type == "cpu" and ids.numel():
        least, largest = (int(bound) for bound in ids.aminmax())
        if least < 0 or largest >= vocab:
            wrong = least if least < 0 else largest
            raise IndexError(f"{what} {wrong} is not in a vocabulary of {vocab}, which counts from 0")
