"""Buckets: the gradients of several parameters side by side in one flat buffer, so that one collective carries them.

A collective has a fixed cost, and a model has hundreds of small parameters. In a bucket each `p.grad` becomes a view of
the buffer: the sum arrives where the optimizer reads it, and nothing is copied back. Parameters are dealt into buckets
in reverse order, since backward reaches the last layer first: the first bucket is complete while most of backward is
still to come.

Memory: the buffers, n bytes for n bytes of gradients; the gradient that autograd made is freed as soon as it has been
copied. Li et al. 2020, "PyTorch Distributed", 3.2.2 and 3.2.3; PyTorch's counterpart: the reducer's buckets with
gradient_as_bucket_view=True. Left out: following the order in which gradients really arrived.
"""

from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm


def deal(params: Sequence[nn.Parameter], cap: int) -> list[list[nn.Parameter]]:
    """Deal parameters into buckets of at most `cap` bytes and of one dtype and device, last parameter first.

    A parameter larger than `cap` has a bucket to itself. The buckets come in the order in which backward completes
    them, if it reaches the parameters in reverse order: by their last member. The same on every rank that has the same
    parameters.
    """
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in reversed(params):
        kind = param.dtype, param.device
        bucket = filling.get(kind)
        if bucket is None or sum(p.nbytes for p in bucket) + param.nbytes > cap:
            bucket = filling[kind] = []
            buckets.append(bucket)
        bucket.append(param)
    place = {param: i for i, param in enumerate(reversed(params))}
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])


class Bucket:
    """The gradients of some parameters of one dtype and device, and their collective: collected, started, waited for,
    handed out, once a step.

    Until the collective starts, the gradient of a parameter that has one is its view of the buffer, or any tensor that
    `start` will copy there. While it runs `p.grad` is None, so that a gradient which comes late finds no buffer that is
    under way. Afterwards it is the view again. notes: numbers that travel along, at the end of the buffer.
    """

    def __init__(self, params: Sequence[nn.Parameter], *, notes: int = 0, device: torch.device | None = None):
        like = params[0] if params else torch.empty(0, device=device)
        ends = torch.tensor([0, *(p.numel() for p in params), notes]).cumsum(0).tolist()
        dtype = like.grad_dtype or like.dtype  # a gradient may be wider than its parameter
        self.buffer = torch.zeros(ends[-1], dtype=dtype, device=like.device)
        self.views = {p: _view(self.buffer, start, p) for p, start in zip(params, ends, strict=False)}
        self.notes = self.buffer[ends[-2] :]
        self.missing = set(params)  # those whose gradient is still expected in this step
        self.used: set[nn.Parameter] = set()  # those that had one when the collective started
        self.sent, self.work = self.buffer, None  # what is under way, and its handle

    def collect(self, param: nn.Parameter) -> None:
        """Move the parameter's gradient into the buffer; `p.grad` becomes its view."""
        view = self.views[param]
        if param.grad is not view:
            with torch.no_grad():  # backward(create_graph=True) runs hooks with gradients on
                view.copy_(param.grad)
            param.grad = view

    def start(self, op: Any, *, group: dist.ProcessGroup, wire: torch.dtype | None = None) -> None:
        """Start to reduce what is there; a parameter without a gradient counts as zero.

        wire: the dtype in which it travels; sums of float16 and bfloat16 are made in float32, in rank order.
        """
        with torch.no_grad():
            for param, view in self.views.items():
                if param.grad is None:
                    view.zero_()
                else:
                    self.collect(param)
                    self.used.add(param)
                    param.grad = None
            self.sent = self.buffer if wire is None else self.buffer.to(wire)
        self.work = comm.all_reduce(self.sent, op, group=group, async_op=True, ordered=True)

    def wait(self) -> None:
        """Wait for the collective. After: the buffer holds the result."""
        self.work.wait()
        if self.sent is not self.buffer:
            self.buffer.copy_(self.sent)
        self.sent, self.work = self.buffer, None

    def hand_out(self, used: Set[nn.Parameter]) -> None:
        """After: `p.grad` is the view, with the result, for each parameter that is `used` on any rank, and None for the
        others. In the next step the bucket is complete when as many have come.
        """
        for param, view in self.views.items():
            param.grad = view if param in used else None
        self.missing, self.used = {param for param in self.views if param in used}, set()


def _view(buffer: Tensor, start: int, param: nn.Parameter) -> Tensor:
    """The part of `buffer` from `start` on, in the parameter's shape and in its order in memory, where it is dense."""
    return buffer.as_strided(param.shape, torch.empty_like(param, device="meta").stride(), start)
