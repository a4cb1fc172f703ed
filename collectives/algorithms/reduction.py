"""What it means to reduce: sum, mean, minimum, maximum, product, of any dtype.

float16 and bfloat16 are added, and multiplied, in float32 and rounded once at the end: 256 + 1 + 1 is 258, where
bfloat16 has no 257. A partial result that travels is float32 as well, so a step of a ring, a tree or a halving sends
twice the bytes of 16-bit numbers; what is sent before it is added to anything (naive, direct, pairwise) is not. A mean
is a sum, divided at the end; of integers it is refused. Whether the minimum of 0 and -0 is the one or the other, and
which of several NaNs remains, depends on the place in the buffer: torch's vector instructions choose otherwise than its
scalar ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
BLOCK = 1 << 16  # numbers that are added at a time, so that the sum so far stays in the cache


COMBINE = MappingProxyType(
    {
        SUM: torch.add,
        AVG: torch.add,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.PRODUCT: torch.mul,
    }
)


def check_mean(tensor: Tensor, op: Any) -> None:
    """Raises ValueError for a mean of integers."""
    if op == AVG and not tensor.is_floating_point():
        raise ValueError(f"a mean of {tensor.dtype} tensors is refused: sum them and divide as you mean it")


@dataclass(frozen=True)
class Reduction:
    """`op` of one tensor from each of `count` ranks, part by part:

    total = reduction.partial(mine)                       as wide as a partial result: float32 for 16 bits
    total = reduction.add(total, arrived, out=arrived)    for each that comes, into reduction.room(mine)
    reduction.finish(total, output)                       divided if it is a mean, and rounded
    """

    op: Any
    count: int
    dtype: torch.dtype  # of the tensors

    @classmethod
    def of(cls, op: Any, tensor: Tensor, group: dist.ProcessGroup) -> "Reduction":
        """The reduction over a group of tensors like this one."""
        check_mean(tensor, op)
        if op not in COMBINE:
            raise ValueError(f"{op} is none of the reductions here: SUM, AVG, MIN, MAX, PRODUCT")
        return cls(op, group.size(), tensor.dtype)

    @property
    def low(self) -> bool:
        """Whether partial results are wider than the tensors."""
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of partial results."""
        return torch.float32 if self.low else self.dtype

    def partial(self, tensor: Tensor) -> Tensor:
        """A partial result of one tensor: itself, or a wider copy."""
        return tensor.to(self.wide)

    def room(self, tensor: Tensor) -> Tensor:
        """Uninitialised memory for a partial result of tensors like this one."""
        return torch.empty_like(tensor, dtype=self.wide)

    def add(self, first: Tensor, second: Tensor, out: Tensor) -> Tensor:
        """`op` of two partial results, or of one and a tensor; `out`, a partial result, may be either of the two."""
        return COMBINE[self.op](first, second, out=out)

    def finish(self, total: Tensor, output: Tensor) -> None:
        """output = the result of all: divided if it is a mean, and rounded."""
        if self.op == AVG:
            total = torch.div(total, self.count, out=total if self.low else output)
        if total.data_ptr() != output.data_ptr() or self.low:
            output.copy_(total)

    def in_order(self, parts: Sequence[Tensor], output: Tensor, scratch: Tensor) -> None:
        """output = parts[0] op parts[1] op …, of one tensor from each rank.

        `output` may be one of the parts: nothing is written into it before the last step. `scratch` is the first or
        second part, free to be overwritten when the first step has read it.
        """
        for blocks in zip(*(tensor.split(BLOCK) for tensor in (output, scratch, *parts)), strict=True):
            self._in_order(*blocks)

    def _in_order(self, output: Tensor, scratch: Tensor, first: Tensor, *others: Tensor) -> None:
        total = self.partial(first)
        for i, part in enumerate(others, start=1):
            # IDEA: every element is summed in rank order, wherever it lies, so packing and bucket size change no bit.
            there = output if i == len(others) else scratch
            total = self.add(total, part, out=total if self.low else there)  # 16 bits are no room for a partial result
        self.finish(total, output)
