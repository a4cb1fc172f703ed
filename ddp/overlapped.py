"""Data parallelism, step three of three: a bucket's all-reduce starts while backward is still going on.

A hook runs whenever autograd has added up a parameter's gradient. It moves the gradient into its bucket, and when a
bucket is complete its all-reduce starts; backward goes on with the layers below. Buckets start in one fixed order on
all ranks, whatever a rank's backward reaches first or never: one that is complete early waits for those before it, and
`finish` starts what is left. Bytes, collectives and bits are bucketed.py's; the time is that of the longer of the two,
backward or traffic, plus the last bucket. Memory: the buckets, n, one gradient at a time, and on more than two ranks
what arrives, n(P-1)/P.

Lecture A, "DDP의 기본 동작", and series 05 (docs/notation.md); Li et al. 2020, "PyTorch Distributed", 3.2.3. PyTorch's
counterpart: torch/csrc/distributed/c10d/reducer.cpp. Left out: dealing buckets anew by the order in which gradients
arrived.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.bucketed import CAP, BucketedDDP, build


class OverlappedDDP(BucketedDDP):
    """The handle that `wrap` returns. Between backward and `finish` a gradient that is under way is None."""

    def __init__(self, *args: Any, **settings: Any):
        self.watched: set[nn.Parameter] = set()
        super().__init__(*args, **settings)

    def place(self, params: Iterable[nn.Parameter]) -> None:
        """Deal into buckets, and watch what is in them."""
        super().place(params)
        self._watch()

    def finish(self) -> None:
        """Reduce what has not been reduced yet, and wait for all of it."""
        super().finish()
        self._watch()

    def _watch(self) -> None:
        """Hook every parameter that is in a bucket and not frozen: a frozen one takes no hook, and may train later."""
        on_gradient = weakref.WeakMethod(self._on_gradient)  # a handle that is dropped leaves no active hooks behind
        for param in self.bucket_of:
            if param.requires_grad and param not in self.watched:
                param.register_post_accumulate_grad_hook(lambda p: (call := on_gradient()) and call(p))
                self.watched.add(param)

    def _on_gradient(self, param: nn.Parameter) -> None:
        """Autograd has added to `p.grad`. Fires once a backward for a parameter that it reaches, however often used;
        also where a function of the graph gave no gradient for it.
        """
        bucket = self.bucket_of[param]
        if bucket.work is not None:  # a second backward in one step: finish adds this one
            return
        if param.grad is not None:
            bucket.collect(param)
        if self.syncing:
            bucket.missing.discard(param)
            self._start_complete()

    def _start_complete(self) -> None:
        """Start the buckets that are complete, up to the first that is not; the last one is left to `finish`."""
        for bucket in self.early:
            if bucket.missing:
                return
            if bucket.work is None:
                # IDEA: a complete bucket is reduced at once, while backward computes the gradients of earlier layers.
                self.start(bucket)


def wrap(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    params: Sequence[nn.Parameter] | None = None,
    average: bool = True,
    device: torch.device | None = None,
    cap: int = CAP,
    wire: torch.dtype | None = None,
) -> OverlappedDDP:
    """Make `module` data parallel over `group`, as bucketed.wrap does, with reductions that start during backward.

    A step whose backward raised has reductions under way on some ranks: call `finish` on all ranks before going on.
    """
    return build(OverlappedDDP, module, group, params, device, average=average, cap=cap, wire=wire)
