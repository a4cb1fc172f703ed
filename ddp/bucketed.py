"""Data parallelism, step two of three: gradients lie in flat buckets; after backward, one all-reduce a bucket.

The arithmetic is the naive one's, element for element, and so are the bytes: 2n(P-1)/P sent a rank for n bytes of
gradients. But there are n / cap collectives instead of one a parameter, all under way at once, and the results need no
copying back, because gradients are views of the buckets. What is still missing: nothing of it runs beside backward
(overlapped.py). Memory: the buckets, n; on more than two ranks what arrives, n(P-1)/P; until `finish` has copied them
also the gradients that autograd made, unless they are the views of the step before (`zero_grad(set_to_none=False)`).

Lecture B, "Naive DDP", and series 05 (docs/notation.md); Li et al. 2020, "PyTorch Distributed", 3.2.2. PyTorch's
counterpart: Megatron-LM's distributed optimizer without overlap; DDP always overlaps.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm
from collectives.flat import Bucket, deal
from collectives.replicas import Replica, replicate

CAP = 25 << 20  # bytes of a bucket, as in PyTorch
WIRES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class BucketedDDP(Replica):
    """The handle that `wrap` returns."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        buffered: nn.Module | None,
        group: dist.ProcessGroup,
        *,
        average: bool,
        cap: int,
        wire: torch.dtype | None,
    ):
        super().__init__(params, buffered, group, average=average)
        self.cap, self.wire = cap, wire
        self.place(param for param in self.params if param.requires_grad)

    def place(self, params: Iterable[nn.Parameter]) -> None:
        """Deal these parameters into buckets, the same on every rank. The last one takes two notes a parameter along:
        whether this rank has a gradient of it, and whether one that is in no bucket.
        """
        *early, last = deal(list(params), self.cap) or [[]]
        device = self.params[0].device if self.params else None
        self.early = [Bucket(members) for members in early]
        self.last = Bucket(last, notes=2 * len(self.params), device=device)
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.views}

    @property
    def buckets(self) -> list[Bucket]:
        """All of them, in the order in which every rank starts them."""
        return [*self.early, self.last]

    def start(self, bucket: Bucket) -> None:
        """Start a bucket's reduction, after all those before it."""
        # IDEA: one collective carries the gradients of many parameters, which are views of one buffer.
        bucket.start(self.op, group=self.group, wire=self.wire)

    def finish(self) -> None:
        """Reduce what has not been reduced yet, and wait for all of it."""
        for bucket in self.early:
            if bucket.work is None:
                self.start(bucket)
        self._take_notes()
        self.start(self.last)
        for bucket in self.buckets:  # so that the second halves of all of them are under way at once
            bucket.work.advance()
        for bucket in self.buckets:
            bucket.wait()
        used, outside = self._read_notes()
        late = {param: param.grad for param in self.params if param in outside}  # a set's order is each rank's own
        for bucket in self.buckets:
            bucket.hand_out(used)
        for param, grad in late.items():
            self._add(param, grad)
        if outside - self.bucket_of.keys():  # frozen before: from now on in buckets
            self.place(param for param in self.params if param in self.bucket_of or param in outside)
        self.equalize_buffers()

    def _take_notes(self) -> None:
        """What no rank may decide alone, for the others: before the last bucket starts, after all others have."""
        used = {param for bucket in self.early for param in bucket.used}
        here = {param for param in self.params if param.grad is not None}
        inside, outside = used | (here & self.last.views.keys()), here - self.last.views.keys()
        notes = [param in inside for param in self.params] + [param in outside for param in self.params]
        self.last.notes.copy_(torch.tensor(notes))

    def _read_notes(self) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
        """The parameters of which any rank has a gradient, and those of which any has one that is in no bucket."""
        inside, outside = (
            {param for param, noted in zip(self.params, noted_by_any, strict=True) if noted}
            for noted_by_any in self.last.notes.view(2, -1).tolist()
        )
        return inside | outside, outside

    def _add(self, param: nn.Parameter, grad: Tensor | None) -> None:
        """Reduce a gradient that missed its bucket on some rank, and add it: one that came after the bucket had
        started, or that of a parameter which has no bucket, since it was frozen.
        """
        grad = torch.zeros_like(param, dtype=param.grad_dtype) if grad is None else grad
        sent = grad if self.wire is None else grad.to(self.wire)
        comm.all_reduce(sent, self.op, group=self.group, ordered=True)
        param.grad = self.bucket_of[param].views[param].add_(sent) if param in self.bucket_of else sent.to(grad.dtype)


def wrap(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    params: Sequence[nn.Parameter] | None = None,
    average: bool = True,
    device: torch.device | None = None,
    cap: int = CAP,
    wire: torch.dtype | None = None,
) -> BucketedDDP:
    """Make `module` data parallel over `group`, as naive.wrap does, with buckets of at most `cap` bytes.

    wire: the dtype in which gradients travel, torch.bfloat16 for half the bytes; the sum is made in float32 and rounded
    once. A parameter that is frozen now gets its place in a bucket after the first step in which some rank has a
    gradient of it.
    """
    return build(BucketedDDP, module, group, params, device, average=average, cap=cap, wire=wire)


def build(
    version: type[BucketedDDP],
    module: nn.Module,
    group: dist.ProcessGroup,
    params: Sequence[nn.Parameter] | None,
    device: torch.device | None,
    **settings: Any,
) -> Any:
    """What wrap does, for this handle and the ones made from it."""
    if settings["cap"] < 1:
        raise ValueError(f"a bucket of cap={settings['cap']} bytes holds nothing: give it at least 1")
    if settings["wire"] not in (None, *WIRES):
        raise ValueError(f"wire={settings['wire']} cannot carry sums of gradients: use one of {WIRES}, or None")
    return version(*replicate(module, group, params=params, device=device, **settings), group, **settings)
