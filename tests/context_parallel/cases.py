"""Attention of one case on ranks, and how far it is from attention in one process.

Every rank is judged by itself, against its part of the whole tensors. What it holds at slots of padding is not zero, so
whoever looks there shows.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch

from context_parallel import (
    Places,
    all_gather_attention,
    ring_attention,
    ring_ulysses_attention,
    slots,
    ulysses_attention,
)
from tests.context_parallel import dense
from tests.training import furthest

METHODS = {  # and "ring_ulysses 2", of 2 neighbours
    "ring": ring_attention,
    "all_gather": all_gather_attention,
    "all_gather, kept": functools.partial(all_gather_attention, save_gathered=True),
    "ulysses": ulysses_attention,
}
PADDING = 7.0
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """Letters as in docs/notation.md. lengths: of documents, the last is as long as is needed. holes: tokens of no
    document, behind which another one begins.
    """

    method: str = "ring"
    order: str = "zigzag"
    causal: bool = True
    T: int = 16
    B: int = 3
    H: int = 4
    KV: int = 2
    K: int = 4
    lengths: tuple = ()
    holes: tuple = ()
    dtype: torch.dtype = torch.float64

    def slots(self, ranks):
        return slots(self.order, self.T, ranks)

    def documents(self):
        return dense.documents(self.T, self.B, self.lengths, [hole for hole in self.holes if hole < self.T])

    def places(self, ranks):
        return Places.of(self.documents(), self.slots(ranks), causal=self.causal)

    def tensors(self):
        """q, k, v and the gradient of the output, whole."""
        heads = (self.H, self.KV, self.KV, self.H)
        return [dense.random(n, self.B, h, self.T, self.K, dtype=self.dtype) for n, h in enumerate(heads)]


def attend(run, method):
    """The method on all ranks of a run: a function of q, k, v and places."""
    if method in METHODS:
        return functools.partial(METHODS[method], group=run.world)
    neighbours = int(method.removeprefix("ring_ulysses "))
    ranks = range(run.size)
    rings = [run.new_group(ranks[u::neighbours]) for u in range(neighbours)]
    rows = [run.new_group(ranks[r : r + neighbours]) for r in range(0, run.size, neighbours)]
    [ring], [row] = filter(None, rings), filter(None, rows)
    return functools.partial(ring_ulysses_attention, ring_group=ring, ulysses_group=row)


def part(whole, mine):
    """Of [B, H, T, K] what stands at these slots."""
    B, H, T, K = whole.shape
    padding = whole.new_full((B, H, max(0, int(mine.max()) + 1 - T), K), PADDING)
    return torch.cat([whole, padding], 2)[:, :, mine]


def outcome(run, case, tensors=None):
    """This rank's (output, dq, dk, dv)."""
    mine = case.slots(run.size)[run.rank]
    q, k, v, dout = (part(x, mine) for x in tensors or case.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(run, case.method)(*inputs, case.places(run.size))
    out.backward(dout)
    return [x.detach() for x in (out, *(x.grad for x in inputs))]


def outcomes(run, cases):
    """Of many."""
    return [outcome(run, case) for case in cases]


@functools.cache
def _expected(case):
    q, k, v, dout = (x.double() for x in case.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = dense.attention(*inputs, case.documents(), case.causal)
    out.backward(dout)
    return [x.detach() for x in (out, *(x.grad for x in inputs))]


def expected(case):
    """(output, dq, dk, dv), whole, of one process."""
    return _expected(replace(case, method="", order=""))


def worst(case, ranks):
    """The largest error of any rank, as a share of what is allowed; infinite if something that must be zero is not."""
    everyones, share = case.slots(len(ranks)), 0.0
    nobody = (case.documents() < 0)[:, None, :, None]
    for whole, pieces in zip(expected(case), zip(*ranks, strict=True), strict=True):
        for mine, piece in zip(everyones, pieces, strict=True):
            inside = mine < case.T
            nothing = nobody[:, :, mine[inside]]
            if piece[:, :, ~inside].any() or piece[:, :, inside].masked_select(nothing).any():
                return math.inf
            share = max(share, near(piece[:, :, inside], whole[:, :, mine[inside]], case.dtype))
    return share


def rounded_otherwise(case, ranks):
    """The largest share, of output, dq, dk and dv, of numbers that are not the true ones, rounded to the dtype."""
    shares = []
    for pieces, true in zip(zip(*ranks, strict=True), expected(case), strict=True):
        right = torch.cat([true[:, :, mine] for mine in case.slots(len(ranks))], 2).to(case.dtype)
        shares.append(float((torch.cat(pieces, 2) != right).double().mean()))
    return max(shares)


def near(ours, true, dtype=torch.float64):
    """Their distance, as a share of what is allowed between numbers of about one and more."""
    if not true.numel():
        assert ours.shape == true.shape
        return 0.0
    return furthest(ours, true) / (LIMITS[dtype] * max(1.0, float(true.abs().max())))
