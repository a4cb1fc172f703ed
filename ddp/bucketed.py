"""Data parallelism, step two of three: gradients lie in flat buckets; after backward, one all-reduce a bucket.

The arithmetic is the naive one's, element for element, and so are the bytes: 2n(P-1)/P sent a rank for n bytes of
gradients. But there are n / cap collectives instead of one a parameter, all under way at once, and the results need no
copying back, because gradients are views of the buckets. What is still missing: nothing of it runs beside backward
(overlapped.py). Memory: the buckets, n; until `finish` has copied them also the gradients that autograd made, unless
they are the views of the step before (`zero_grad(set_to_none=False)`).

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
from ddp.replicas import Replica, replicate

CAP = 4 << 20  # bytes of a bucket
IN_BUCKET, OUTSIDE = 1, 2  # where a rank has a gradient of a parameter: when its bucket started, besides it


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
        """Deal these parameters into buckets, the same on every rank."""
        self.buckets = [Bucket(members) for members in deal(list(params), self.cap)]
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.views}

    def start_buckets(self) -> None:
        """Start every bucket that has not been started, in their order, which is every rank's."""
        for bucket in self.buckets:
            if bucket.work is None:
                # IDEA: one collective carries the gradients of many parameters, which are views of one buffer.
                bucket.start(self.op, group=self.group, wire=self.wire)

    def finish(self) -> None:
        """Reduce what has not been reduced yet, and wait for all of it."""
        self.start_buckets()
        agreement = self.start_agreement([self._where(param) for param in self.params])
        for bucket in self.buckets:  # so that the second halves of all of them are under way at once
            bucket.work.advance()
        agreed = {param: where for param, where in zip(self.params, agreement(), strict=True) if where}
        outside = {}
        for param, where in agreed.items():
            if where & OUTSIDE:
                outside[param], param.grad = param.grad, None
        for bucket in self.buckets:
            bucket.finish(used=agreed.keys())
        for param, grad in outside.items():
            self._add(param, grad)
        if any(param not in self.bucket_of for param in outside):  # frozen before: from now on in buckets
            self.place(param for param in self.params if param in self.bucket_of or param in outside)
        self.equalize_buffers()

    def _where(self, param: nn.Parameter) -> int:
        """Where this rank has a gradient of `param`, now that every bucket has been started."""
        bucket = self.bucket_of.get(param)
        inside = bucket is not None and param in bucket.used
        return IN_BUCKET * inside + OUTSIDE * (param.grad is not None)

    def _add(self, param: nn.Parameter, grad: Tensor | None) -> None:
        """Reduce a gradient that missed its bucket on some rank, and add it: one that came after the bucket had
        started, or that of a parameter which has no bucket, since it was frozen.
        """
        grad = torch.zeros_like(param) if grad is None else grad
        comm.all_reduce(grad, self.op, group=self.group, ordered=True)
        param.grad = grad if param.grad is None else param.grad.add_(grad)


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
    return version(*replicate(module, group, params=params, device=device, **settings), group, **settings)
