"""The vocabulary-parallel cross-entropy: the loss of logits that stay cut.

    loss = log Σ exp(x) - x[label] = log Σ exp(x - max) - (x[label] - max)

Of a token's V logits a rank needs three numbers that it cannot make alone: the largest, the sum of exponentials, the
label's. So three scalars a token travel, in an all_reduce of maxima and one of sums, where a gather would send
V(P-1)/P. Backward is local: softmax - one_hot, each rank its part. Memory: the softmax, V/tp a token.

Shoeybi et al. 2019, §3. Megatron-LM's counterpart: vocab_parallel_cross_entropy; PyTorch's: loss_parallel. Left out:
label smoothing, weights of classes, labels that are probabilities.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives import comm
from tensor_parallel.cut import nearly_even
from tensor_parallel.embedding import check_range

NONE = -1  # in place of the label of a token that has none


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab: int, *, group: dist.ProcessGroup, ignore_index: int = -100
) -> Tensor:
    """Each token's loss in nats, [..., T], the same bits on every rank; exactly zero, as its gradient, where the label
    is ignore_index.

    logits: this rank's [..., T, V/tp], cut as `nearly_even` cuts `vocab`; labels: all tokens', [..., T], the same on
    every rank. float16 and bfloat16 are computed in float32. Raises ValueError for other shapes, IndexError for a label
    that is not in the vocabulary.
    """
    if group is None:
        raise ValueError("this rank is no member of the group; let only members call it")
    rows = nearly_even(vocab, group.size(), what="tokens of a vocabulary")[group.rank()]
    if logits.shape != (*labels.shape, len(rows)):
        need = f"{list(labels.shape)} labels and {len(rows)} of {vocab} logits for each"
        raise ValueError(f"logits {list(logits.shape)}: rank {group.rank()} of tp={group.size()} has {need}")
    ignored = labels == ignore_index
    check_range(labels.masked_fill(ignored, 0), vocab, "label")
    labelled = labels.long().masked_fill(ignored, NONE).reshape(-1)
    return _CrossEntropy.apply(logits.reshape(-1, len(rows)), labelled, rows, group).view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """forward: three scalars a token are reduced. backward: nothing, each rank has what its logits need."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: range, group: dist.ProcessGroup) -> Tensor:
        ignored, mine = labels == NONE, (labels >= rows.start) & (labels < rows.stop)  # [N]
        local = (labels - rows.start).masked_fill(~mine, 0).unsqueeze(1)
        x = logits.float() if logits.dtype.itemsize < 4 else logits  # [N, V/tp]
        largest = x.amax(1)
        comm.all_reduce(largest, comm.MAX, group=group)
        exp = (x - largest.unsqueeze(1)).exp_()
        sums = torch.stack([exp.sum(1), (x.gather(1, local).squeeze(1) - largest).masked_fill(~mine, 0)])
        # IDEA: what the ranks must know of each other's logits is a maximum and two sums a token.
        comm.all_reduce(sums, group=group)
        total, of_label = sums
        ctx.save_for_backward(exp.div_(total.unsqueeze(1)), local, mine, ignored)
        ctx.dtype = logits.dtype
        return (total.log() - of_label).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, mine, ignored = ctx.saved_tensors
        dloss = dloss.masked_fill(ignored, 0).unsqueeze(1)
        dlogits = (softmax * dloss).masked_fill_(ignored.unsqueeze(1), 0)  # what is padded may be NaN
        dlogits.scatter_add_(1, local, -dloss * mine.unsqueeze(1))
        return dlogits.to(ctx.dtype), None, None, None
