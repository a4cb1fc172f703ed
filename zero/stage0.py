"""Stage 0: nothing is cut. Every rank has all weights, all gradients and all optimizer state: data parallelism, in the
same code as the stages, to be laid beside them.

A step: after backward, one all_reduce a bucket; every rank makes the whole update. Traffic 2n(P-1)/P for n bytes of
gradients. Memory a parameter with 16-bit gradients: 2 + 2 + K bytes.

Lectures A, "DDP의 기본 동작", and B, "Naive DDP"; ddp/ has the strategy itself, in steps. Left out: overlap.
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


class ZeRO0(Sharded):
    """The handle that `wrap` returns."""

    def start(self, bucket: Bucket) -> None:
        """Start to add up the gradients of a bucket, in place."""
        full = bucket.pack()  # [n] {+dp}
        self.wait()
        # IDEA: all ranks get the whole sum, so all of them can make the whole update.
        work = comm.all_reduce(full, self.op, group=self.group, async_op=True, ordered=True)  # [n]
        self.under_way = work, bucket, full

    def after_step(self) -> None:
        """After the optimizer: the weights are the masters, rounded."""
        for bucket in self.buckets:
            bucket.take_masters()

    def after_load(self) -> None:
        """After the shards, which are whole here, were given values: the same."""
        self.after_step()


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
) -> ZeRO0:
    """Make `module` data parallel over `group`, as stage1.wrap does, with nothing cut."""
    named, buffered = treated(module, group, params, cap, stage=0, average=average, mixed=mixed, host=host)
    made = {"parts": 1, "device": device, "mixed": mixed, "host": host}
    buckets = [Bucket(members, group, **made) for members in dealt(named, cap)]
    return ZeRO0(module, list(named.values()), buffered, buckets, group, average=average)
