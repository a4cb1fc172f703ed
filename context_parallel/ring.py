"""Ring attention: keys and values travel around the ranks, each of which attends to every block as it passes.

A rank keeps its queries. In P steps it is handed the keys and values of all ranks, and while it computes with one block
the next is on its way. Backward runs the ring again: with each block travels the gradient of it, to which every rank
adds its terms, and which needs one hop more to come home.

Elements that a rank sends, b = B·T/P·D_kv: forward 2(P-1)b; backward 2(P-1)b for k, v and 2P·b for dk, dv, these in the
precision of accumulators. Blocks that nobody needs travel too. Saved for backward: q, k, v, out, lse of T/P tokens.
Liu, Zaharia, Abbeel 2023; lecture A, "Sequence Parallel과 Context Parallel을 구분한다". PyTorch's counterpart:
torch.distributed.tensor.experimental.context_parallel. Left out: a second ring the other way round.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives import p2p
from collectives.timeline import Timeline
from collectives.watch import about
from context_parallel import block
from context_parallel.online import Backward, Forward
from context_parallel.places import Places


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, places: Places, *, group: dist.ProcessGroup, timeline: Timeline | None = None
) -> Tensor:
    """Attention over the tokens of all ranks of the group; each holds its own tokens, and gets the output of them.

    q [B, H, T/P, K], k and v [B, KV, T/P, K] -> [B, H, T/P, K], of q's dtype. places: those of all ranks, the same on
    each. Scores are scaled by K^-½. timeline: has a span for each block that is computed. Raises ValueError, before any
    message, for shapes that do not fit the places. Collective, and so is its backward.
    """
    places.check(q, k, v, group.size())
    return _Ring.apply(q, k, v, places, group, timeline)


class _Ring(torch.autograd.Function):
    """forward: k, v once around; backward: once around, and dk, dv with them, because every rank has terms of those."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        places, group, timeline = others
        result = Forward(q, places, group.rank())
        for owner, kv in around(torch.stack([k, v]), group):
            with _span(timeline, f"forward {owner}"):
                result.see(owner, kv)
        ctx.save_for_backward(q, k, v, result.out, result.lse)
        ctx.places, ctx.group, ctx.timeline = places, group, timeline
        return result.out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        (q, k, v, out, lse), group = ctx.saved_tensors, ctx.group
        result = Backward(dout, q, (out, lse), ctx.places, group.rank())
        home = Homeward(group)
        for owner, kv in around(torch.stack([k, v]), group):
            terms = torch.zeros(kv.shape, dtype=block.precision(kv), device=kv.device)
            with _span(ctx.timeline, f"backward {owner}"):
                result.see(owner, kv, terms)
            home.add(terms)
        dk, dv = home.arrived()
        return result.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _span(timeline: Timeline | None, name: str) -> AbstractContextManager[None]:
    return timeline.span("compute", name) if timeline else nullcontext()


def around(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields (rank, its tensor) for all ranks, this one first, then the one before it, …: the next is under way while
    one is used.
    """
    rank, size = group.rank(), group.size()
    for step in range(size):
        last = step == size - 1
        if not last:
            with about(f"kv {(rank - step - 1) % size}"):
                # IDEA: the block in hand goes on, and the next one comes, while the one in hand is used.
                work, coming = pass_on(own, group)
        yield (rank - step) % size, own
        if not last:
            work.wait()
            own = coming


def pass_on(x: Tensor, group: dist.ProcessGroup) -> tuple[p2p.Handle, Tensor]:
    """Start to send x to the next rank, and to receive such a tensor from the one before: the handle, and that."""
    rank, size, coming = group.rank(), group.size(), torch.empty_like(x)
    return p2p.exchange([(x, (rank + 1) % size)], [(coming, (rank - 1) % size)], group=group), coming


class Homeward:
    """The gradient of the block in hand travels one step behind it, and collects every rank's terms."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.step = group, 0
        self.work: p2p.Handle | None = None

    def add(self, terms: Tensor) -> None:
        """Add this rank's terms of the block in hand to what the ranks before have added, and send it on."""
        if self.work is not None:
            self.work.wait()
            terms += self.coming
        self.coming = terms
        if self.group.size() > 1:
            owner = (self.group.rank() - self.step - 1) % self.group.size()
            with about(f"dkv {owner}"):
                self.work, self.coming = pass_on(terms, self.group)
        self.step += 1

    def arrived(self) -> Tensor:
        """The whole gradient of this rank's own block, after P steps."""
        if self.work is not None:
            self.work.wait()
        return self.coming
