"""Stage 2: gradients are cut as well. A bucket is reduced as soon as backward has filled it, and its full gradient is
freed; what stays is the range that this rank owns.

A step: during backward a reduce_scatter a bucket; the update; an all_gather a bucket. The bytes of stage 1, and beside
backward. Memory a parameter: 2 + (2 + K)/P bytes; for a moment the bucket that fills, with the gradient that is about
to be moved there, and the one under way with what arrives for it; from the second microbatch on a new sum beside the
old. To keep no full gradient, every microbatch is reduced: k of them send (k+1)n(P-1)/P.

Buckets start in one fixed order on all ranks, whatever a rank's backward reaches first or never. One that is complete
early waits for those before it; the end of a microbatch starts what is left. Rajbhandari et al. 2019, "ZeRO", 5.2;
lectures A, "ZeRO-2", and B, "ZeRO-2: Gradient도 분할". PyTorch's counterpart: fully_shard(reshard_after_forward=False).
Left out: keeping the full gradient under accumulation, which stage 1 does.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from collectives import comm
from collectives.host import Pool
from zero.bucket import Bucket
from zero.mixed import Mixed
from zero.sharded import CAP, dealt, treated
from zero.stage1 import ZeRO1


class ZeRO2(ZeRO1):
    """The handle that `wrap` returns. All ranks have equally many microbatches under `no_sync`, some of them empty.
    Weights are gathered as in stage 1.
    """

    def __init__(self, *args: Any, overlap: bool, **more: Any):
        self.overlap = overlap
        self.started = 0  # buckets whose reduction has started in this microbatch
        self.defers = False
        super().__init__(*args, **more)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of a microbatch that is not the last: at its end every rank has started every bucket."""
        with super().no_sync():
            try:
                yield
            finally:  # also after an error, so that all ranks have started equally many
                self.end_of_backward()

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """As in every stage: whole gradients are kept over a pipeline's step, instead of a reduction a microbatch."""
        self.defers = True
        try:
            with super().no_sync():
                yield
        finally:
            self.defers = False

    def end_of_backward(self) -> None:
        """Start the buckets that are left: those of which this rank used less than any did in the two steps before."""
        for bucket in self._order()[self.started :]:
            self.start(bucket)
        self.started = 0

    def _order(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.trained]

    def _on_gradient(self, param: nn.Parameter) -> None:
        """Autograd has added to `p.grad`. One for a bucket that has started goes with the next microbatch."""
        super()._on_gradient(param)
        order = self._order()
        # IDEA: a bucket that is full is reduced at once, and its full gradient is gone before the next one is full.
        while not self.defers and self.started < len(order) and order[self.started].complete:
            self.start(order[self.started])
            self.started += 1

    def start(self, bucket: Bucket) -> None:
        """Start to bring each rank the sum of its range of a bucket."""
        full = bucket.pack()  # [n] {+dp}
        own = torch.empty_like(bucket.shard, dtype=full.dtype)
        self.wait()
        work = comm.reduce_scatter_single(own, full, self.op, group=self.group, async_op=True, ordered=True)  # [n/dp]
        bucket.free()  # from now on it is the work's: the next microbatch may fill another one meanwhile
        self.under_way = work, bucket, own
        if not self.overlap:
            self.wait()


def wrap(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    params: Sequence[nn.Parameter] | None = None,
    average: bool = True,
    device: torch.device | None = None,
    cap: int = CAP,
    mixed: Mixed | None = None,
    host: Pool | None = None,
    overlap: bool = True,
) -> ZeRO2:
    """Make `module` data parallel over `group`, as stage1.wrap does, with gradients that live as shards.

    overlap: False waits for each reduction where it starts; no bit depends on it.
    """
    named, buffered = treated(module, group, params, cap, stage=2, average=average, mixed=mixed, host=host)
    made = {"parts": group.size(), "device": device, "mixed": mixed, "host": host}
    buckets = [Bucket(members, group, **made) for members in dealt(named, cap)]
    return ZeRO2(module, list(named.values()), buffered, buckets, group, average=average, overlap=overlap)
