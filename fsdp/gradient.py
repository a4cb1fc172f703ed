"""The gradient of a pack, from autograd to the shards: collected in slots, scattered, added up by replicas.

    full     [P, T]  the gradient of this rank's rows, in slots, as it goes into the reduce_scatter
    partial  [T]     this rank's slot of the sum over the group; with replicas what they have not added yet
    sum      [T]     its slot of the gradient of all rows, while a step adds it up

A unit's gradients are where autograd has made them, and add up there over microbatches, until the unit is left: then
each is copied into its slots, and freed. In mixed precision they are copied at once, since they add up in the shards'
dtype; they travel in that of `reduce`. One reduction is under way at a time; while it is, the unit before computes.
PyTorch's counterpart: foreach_reduce of _fsdp_collectives.py.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm
from collectives.host import Pool
from collectives.memory import Memory
from collectives.watch import about
from fsdp.slots import Slots


class Gradient:
    """The gradient of the parameters in some slots, reduced by `op` over the group and, if there are, the replicas."""

    def __init__(
        self,
        slots: Slots,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        *,
        op: Any,
        dtype: torch.dtype,
        wire: torch.dtype,
        device: torch.device,
    ):
        self.slots, self.group, self.replicas, self.op = slots, group, replicas, op
        self.dtype, self.wire, self.device = dtype, wire, device
        self.unit = ""  # whose gradient it is, for people
        self.full = Memory(0, dtype, device)
        self.places: dict[nn.Parameter, list[Tensor]] = {}  # of each parameter in `full`
        self.partial: Tensor | None = None
        self.sum: Tensor | None = None
        self.arrived: set[nn.Parameter] = set()  # whose gradient is in `full`
        self.used: set[nn.Parameter] = set()  # of whom this rank had a gradient in this step
        self.scattering, self.replicating = None, None  # the handle and the output of what is under way

    @property
    def late(self) -> bool:
        """Whether there are gradients that nobody has begun to reduce."""
        return bool(self.arrived) or any(param.grad is not None for param in self.slots.params)

    @torch.no_grad()
    def collect(self, param: nn.Parameter) -> None:
        """Move the gradient that autograd made into `full`, or add it to what is there; `param.grad` becomes None."""
        if param.grad.layout != torch.strided:
            raise ValueError(f"{self.unit} has a sparse gradient, which has no place in a sum of dense ones")
        self._make_full()
        if param not in self.places:
            raise RuntimeError(f"a weight of {self.unit} was unfrozen after others had gradients: do so between steps")
        for part, place in zip(self.slots.cuts[param].parts(param.grad), self.places[param], strict=True):
            place.add_(part) if param in self.arrived else place.copy_(part)
        param.grad = None
        self.arrived.add(param)
        self.used.add(param)

    def _make_full(self) -> None:
        """Have memory for the gradients, if none has come: for all up to the last parameter that is not frozen."""
        if self.arrived:
            return
        numel = self.group.size() * self.slots.trained()
        if not self.places or len(self.full.tensor) < numel:
            self.full = Memory(numel, self.dtype, self.device)
            self.places = self.slots.places(self.full.tensor)
        self.full.allocate()

    @torch.no_grad()
    def start_scatter(self) -> None:
        """Start to add up the ranks' gradients, zeros for what has not come; each rank receives its slot of the sum."""
        self._make_full()
        for param, places in self.places.items():
            if param.grad is not None:
                self.collect(param)
            elif param not in self.arrived:
                for place in places:
                    place.zero_()
        self.arrived.clear()
        wire = self.full.tensor.to(self.wire)
        slot = torch.empty(len(wire) // self.group.size(), dtype=self.wire, device=self.device)
        with about(self.unit):
            # IDEA: the sum arrives where the optimizer is, and what the optimizer does not need is gone.
            work = comm.reduce_scatter_single(slot, wire, self.op, group=self.group, async_op=True)  # [T]
        self.scattering = work, slot
        if wire is not self.full.tensor:
            self.full.free()

    def finish_scatter(self) -> None:
        """Wait, and add what has come to the step's sum; with replicas, to what they have to add."""
        (work, slot), self.scattering = self.scattering, None
        work.wait()
        self.full.free()
        if self.replicas is None:
            self.sum = added(self.sum, slot.to(self.dtype))
        else:
            self.partial = added(self.partial, slot.to(self.dtype))

    def start_replicate(self) -> None:
        """Start to add up what the replicas have."""
        slot, self.partial = self.partial.to(self.wire), None
        with about(self.unit):
            work = comm.all_reduce(slot, self.op, group=self.replicas, async_op=True, ordered=True)
        self.replicating = work, slot

    def finish_replicate(self) -> None:
        """Wait, and add it to the step's sum."""
        (work, slot), self.replicating = self.replicating, None
        work.wait()
        self.sum = added(self.sum, slot.to(self.dtype))

    def hand_out(self, shards: Sequence[nn.Parameter], used: Set[nn.Parameter], host: Pool | None) -> None:
        """After: the sum is the `grad` of the shards of parameters that any rank used, or added to what was there."""
        if self.sum is None:
            return
        total = self.sum
        if host is not None:
            total = host.empty(len(self.sum), self.dtype)
            host.write(total, self.sum)
        for param, shard, piece in zip(self.slots.params, shards, self.slots.pieces(total), strict=False):
            if param in used:
                shard.grad = piece if shard.grad is None else shard.grad + piece
        self.sum, self.used = None, set()


def added(total: Tensor | None, slot: Tensor) -> Tensor:
    """The sum so far and what has come, which is longer if a weight that was frozen, and lies last, trains by now."""
    if total is not None:
        slot[: len(total)] += total
    return slot


class Reductions:
    """The reductions under way: the scatter of one gradient at most, and what replicas add of the one before."""

    def __init__(self) -> None:
        self.scattering: tuple[Gradient, bool] | None = None  # and whether the replicas go on with it
        self.replicating: Gradient | None = None

    def start(self, gradient: Gradient, *, replicate: bool) -> None:
        """Go on with what is under way, and start the next."""
        self.advance()
        gradient.start_scatter()
        self.scattering = gradient, replicate

    def advance(self) -> None:
        """Wait for what is under way; what the shard group has added, the replicas add next."""
        if self.replicating is not None:
            self.replicating.finish_replicate()
            self.replicating = None
        if self.scattering is not None:
            (gradient, replicate), self.scattering = self.scattering, None
            gradient.finish_scatter()
            if gradient.partial is not None and replicate:
                gradient.start_replicate()
                self.replicating = gradient

    def sends(self, gradient: Gradient) -> bool:
        """Whether this one is being scattered: nothing may be collected in it."""
        return self.scattering is not None and self.scattering[0] is gradient

    def drain(self, gradients: Iterable[Gradient]) -> None:
        """After: nothing is under way, and the replicas have added all there is."""
        self.advance()
        self.advance()
        for gradient in gradients:
            if gradient.partial is not None:
                gradient.start_replicate()
                gradient.finish_replicate()
