"""Stage 1: the optimizer's state is cut. Each rank updates the range of every bucket that it owns, so it needs masters
and moments of that range only.

A step: after backward, a reduce_scatter a bucket brings each owner the sum of its range; the owner updates it; an
all_gather a bucket brings the new weights to all. That is what an all_reduce does inside, with the update between its
two halves: the traffic is the same 2n(P-1)/P. Memory a parameter: 2 + 2 + K/P bytes. Under accumulation gradients add
up whole, and are reduced once.

Rajbhandari et al. 2019, "ZeRO", 5.1; lectures A, "ZeRO-1", and B, "ZeRO-1: Optimizer States 분할", and series 14.
PyTorch's counterpart: ZeroRedundancyOptimizer, which cuts between parameters and keeps DDP's all_reduce. Left out:
reductions during backward (stage2.py).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from collectives import comm
from collectives.host import Pool
from zero.bucket import Bucket
from zero.mixed import Mixed
from zero.sharded import CAP, Sharded, dealt, treated


class ZeRO1(Sharded):
    """The handle that `wrap` returns."""

    def start(self, bucket: Bucket) -> None:
        """Start to bring each rank the sum of its range of a bucket, in place; the rest of `full` is of no use then."""
        full = bucket.pack()  # [n] {+dp}
        own = full[bucket.own]
        self.wait()
        # IDEA: a gradient is added up where its weight is updated, and nowhere else.
        work = comm.reduce_scatter_single(own, full, self.op, group=self.group, async_op=True, ordered=True)  # [n/dp]
        self.under_way = work, bucket, own

    def after_step(self) -> None:
        """After the optimizer: every rank has the weights that their owners have updated."""
        gather([bucket for bucket in self.buckets if bucket.trained])

    def after_load(self) -> None:
        """After the shards were given values: every rank has the weights, frozen ones too."""
        gather(self.buckets)


def gather(buckets: Sequence[Bucket]) -> None:
    """Bring the weights of each bucket to all ranks, in place, all buckets under way at once."""
    works = []
    for bucket in buckets:
        bucket.take_masters()
        work = comm.all_gather_single(bucket.weights, bucket.shard, group=bucket.group, async_op=True)  # [n]
        works.append(work)
    for work in works:
        work.wait()


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
) -> ZeRO1:
    """Make `module` data parallel over `group`, with one optimizer for all ranks together. Before: a module, with any
    values, on each rank. After: its parameters have the values of the group's rank 0 and are views of buckets of at
    most `cap` bytes; `handle.parameters()` are this rank's shards, what an optimizer is made for.

    params: those to treat, default all of the module's, with its buffers. average: divide by the number of ranks, as
    PyTorch's DDP does (False: the sum, when the loss is already scaled by the whole batch's count). device: where
    parameters on the meta device get memory and zeros; give their shards values and call `after_load`. mixed: the
    working dtype, with float32 masters. host: where masters lie, and what the optimizer keeps (offload.py).

    Raises ValueError on every rank where models or settings differ, and for sparse or complex gradients.
    """
    named, buffered = treated(module, group, params, cap, stage=1, average=average, mixed=mixed, host=host)
    made = {"parts": group.size(), "device": device, "mixed": mixed, "host": host}
    buckets = [Bucket(members, group, **made) for members in dealt(named, cap)]
    return ZeRO1(module, list(named.values()), buffered, buckets, group, average=average)
