"""Slots: where the pieces of several parameters lie, when one buffer carries them.

    slots [P, S]     rank 0  │ norm.weight │ up.weight                 │ up.bias │
                     rank 1  │ norm.weight │ up.weight            ▒▒▒▒ │ up.bias │        ▒ padding

Each rank has a row, its slot, in which its pieces lie side by side; a parameter begins at the same place in all of
them. So one all_gather brings all slots to all ranks, one reduce_scatter a sum of slots to their owners, and a
parameter is a strided view of the whole, which a copy or two makes dense (cut.py). What trains comes first, frozen
parameters last: the gradient's slots [P, T] are as long as they must be.

Pure arithmetic and views. PyTorch's counterpart: the split sizes of foreach_all_gather in _fsdp_collectives.py.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from fsdp.cut import Cut


class Slots:
    """The places of some parameters in the slots of a group, each parameter cut along its dimension of `dims`.

    align: each begins at a multiple of so many elements.
    """

    def __init__(self, dims: Mapping[nn.Parameter, int], group: dist.ProcessGroup, *, align: int = 1):
        self.params, self.rank, self.size = list(dims), group.rank(), group.size()
        self.cuts = {param: Cut(param.shape, dim, self.size) for param, dim in dims.items()}
        self.starts, self.length = row([cut.longest for cut in self.cuts.values()], align)

    def trained(self) -> int:
        """The length of a slot up to the last parameter that is not frozen."""
        ends = zip(self.starts, self.cuts.items(), strict=True)
        return max((start + cut.longest for start, (param, cut) in ends if param.requires_grad), default=0)

    def pieces(self, slot: Tensor) -> Iterator[Tensor]:
        """Of each parameter that lies in this rank's slot, maybe the first part of one, its piece, in its shape."""
        for cut, start in zip(self.cuts.values(), self.starts, strict=True):
            if start + cut.longest <= len(slot):
                shape = cut.local(self.rank)
                yield slot[start : start + shape.numel()].view(shape)

    def piece(self, param: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor of the parameter's shape."""
        cut = self.cuts[param]
        mine = cut.range(self.rank)
        return (whole if whole.dim() else whole.view(1)).narrow(cut.dim, mine.start, len(mine))

    def places(self, slots: Tensor) -> dict[nn.Parameter, list[Tensor]]:
        """Of each parameter that lies in these slots its places, in the order of `Cut.parts`."""
        rows = slots.view(self.size, -1)  # [P, S], or [P, T]
        places = {}
        for (param, cut), start in zip(self.cuts.items(), self.starts, strict=True):
            if (end := start + cut.longest) <= rows.shape[1]:
                # IDEA: a parameter begins at the same place in every slot, so all its pieces are one strided view.
                places[param] = cut.places(rows[:, start:end])
        return places


def row(sizes: Sequence[int], align: int) -> tuple[list[int], int]:
    """(where each of some tensors starts in a row, each at a multiple of `align`; the length of the row)."""
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // align) * align)
        end = starts[-1] + size
    return starts, end


def copy(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy parts to places, or back."""
    for target, value in zip(into, source, strict=True):
        target.copy_(value)
