"""Attention block by block: outputs over some of the keys are merged into the output over all, by online softmax.

Results over different keys make one: lse = logaddexp(lse₁, lse₂), out = Σ outᵢ · exp(lseᵢ - lse). Of two the weights
are sigmoid(lse₂ - lse₁) and 1 less it, so scores of any size are safe. What is added up is float32, or float64 for
float64, whatever the inputs are (Milakov and Gimelshein 2018; Dao 2023, §3.1; for a ring Liu et al. 2023, §3).

`Forward` and `Backward` serve every algorithm whose rank has queries of its own and is handed the keys and values of
one rank after another. Blocks in which nothing is visible are skipped; of the others the visible part is computed.
"""

import math

import torch
from torch import Tensor

from context_parallel import block
from context_parallel.places import Places


class Forward:
    """The output of rank `rank`'s queries q [B, H, T/P, K] over all keys seen so far, and its lse [B, H, T/P].

    A query that has seen none has 0 and -inf.
    """

    def __init__(self, q: Tensor, places: Places, rank: int):
        self.q, self.places, self.rank = q, places, rank
        self.out = torch.zeros(q.shape, dtype=block.precision(q), device=q.device)
        self.lse = torch.full(q.shape[:-1], -math.inf, dtype=self.out.dtype, device=q.device)

    def see(self, owner: int, kv: Tensor) -> None:
        """Take in the keys and values [2, B, KV, T/P, K] of rank `owner`."""
        for part in self.places.blocks(self.rank, owner):
            rows, keys, mask = part.queries, part.keys, self.places.mask(self.rank, owner, part)
            new = block.forward(self.q[:, :, rows], *kv[:, :, :, keys], mask, part.kind == "causal")
            _merge(self.out[:, :, rows], self.lse[:, :, rows], *new)


def _merge(out: Tensor, lse: Tensor, new: Tensor, its: Tensor) -> None:
    """Add the result `new`, `its` over further keys to `out`, `lse`, in place."""
    # IDEA: a softmax over some of the keys is worth exp(its lse - the whole lse) of the whole one: a sigmoid of lses.
    share = (its - lse).sigmoid().nan_to_num()  # neither has seen a key: -inf - -inf, and both are 0
    out.lerp_(new, share[..., None])
    lse.copy_(torch.logaddexp(lse, its))


class Backward:
    """The gradient dq [B, H, T/P, K] from all keys seen so far, given that of the output, and the whole out and lse."""

    def __init__(self, dout: Tensor, q: Tensor, result: tuple[Tensor, Tensor], places: Places, rank: int):
        self.dout, self.q, self.result, self.places, self.rank = dout, q, result, places, rank
        self.dq = torch.zeros(q.shape, dtype=block.precision(q), device=q.device)

    def see(self, owner: int, kv: Tensor, dkv: Tensor) -> None:
        """Take in the keys and values [2, B, KV, T/P, K] of rank `owner`, and add this rank's terms of their gradient
        to dkv.
        """
        for part in self.places.blocks(self.rank, owner):
            rows, keys, mask = part.queries, part.keys, self.places.mask(self.rank, owner, part)
            inputs = self.q[:, :, rows], *kv[:, :, :, keys]
            out, lse = (x[:, :, rows] for x in self.result)
            terms = block.backward(self.dout[:, :, rows], inputs, (out, lse), mask, part.kind == "causal")
            for total, term in zip((self.dq[:, :, rows], *dkv[:, :, :, keys]), terms, strict=True):
                total.add_(term)
