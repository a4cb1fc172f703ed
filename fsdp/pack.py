"""A pack: the parameters of a unit that travel together, one dtype and device; nearly always all of them.

    shard    [S]     this rank's slot: its pieces of all parameters, in a row; what the optimizer updates
    packed   [P, S]  all slots, as they arrive from the all_gather
    weights  [n]     the parameters, each whole: copied out of the slots, and what the module computes with

Pieces of several parameters lie side by side (slots.py), so one collective carries a unit, and every shard is a tensor
of its own, with a shape. A pack of a single rank has no slots to copy: its shard is its weights. Gradients have slots
of their own (gradient.py). PyTorch's counterpart: FSDPParam, and _fsdp_collectives.py.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm, layout
from collectives.host import Pool
from collectives.layout import Box, Held
from collectives.memory import Memory
from collectives.watch import about
from fsdp.cut import Cut
from fsdp.gradient import Gradient
from fsdp.mixed import MixedPrecision
from fsdp.slots import Slots, copy, row

ALIGN = 64  # bytes: where a parameter begins in memory decides how a matrix product adds


Groups = tuple[dist.ProcessGroup, ...]  # one after the other they reach all ranks that share a parameter


class State(Enum):
    """What a pack has memory for."""

    SHARDED = "the shard"
    GATHERING = "the shard, and the slots of all ranks, which are arriving"
    WHOLE = "the shard, and the weights"


class Pack:
    """Parameters by name, and their `shards`: of each this rank's piece, with its declaration.

    Before: any values on each rank. After: those of rank 0 of the group, in shards, the parameters without memory;
    parameters on the meta device get shards of zeros on `device`. replicas: the group of ranks with the same shards.
    """

    def __init__(
        self,
        unit: str,
        named: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        *,
        op: Any,
        mixed: MixedPrecision,
        host: Pool | None,
        shard_dim: Callable[[str, Tensor], int],
        device: torch.device | None,
    ):
        named = dict(sorted(named.items(), key=lambda item: not item[1].requires_grad))  # stable: frozen ones last
        self.group, self.replicas, self.op, self.host = group, replicas, op, host
        self.groups: Groups = (group,) if replicas is None else (replicas, group)
        self.params, first = list(named.values()), next(iter(named.values()))
        self.device = (device or torch.device("cpu")) if first.is_meta else first.device
        self.dtype = first.dtype  # of shards and sums
        self.param_dtype = mixed.param if mixed.param and first.is_floating_point() else self.dtype
        self.alone = group.size() == 1 and self.param_dtype == self.dtype and host is None
        align = ALIGN // self.dtype.itemsize if self.alone else 1
        self.slots = Slots({param: shard_dim(name, param) for name, param in named.items()}, group, align=align)
        self._make_shards(named)
        if self.alone:
            for param, piece in zip(self.params, self.slots.pieces(self.shard), strict=True):
                layout.point(param, piece.view(param.shape))
        else:
            self._make_weights()
            self._hide()
        self.state, self.gathering = State.WHOLE if self.alone else State.SHARDED, None
        kinds = {"dtype": self.dtype, "wire": mixed.reduce or self.dtype, "device": self.device}
        self.gradient = Gradient(self.slots, group, replicas, op=op, **kinds)
        self.named(unit)

    def named(self, unit: str) -> None:
        """Take the name of the unit, for people."""
        self.unit = self.gradient.unit = unit

    # -- build ---------------------------------------------------------------------------------------------------------

    def _make_weights(self) -> None:
        """The places in weights and slots between which a gather copies."""
        starts, numel = row([p.numel() for p in self.params], ALIGN // self.param_dtype.itemsize)
        self.packed = Memory(self.group.size() * self.slots.length, self.param_dtype, self.device)
        self.weights = Memory(numel, self.param_dtype, self.device)
        views = [self.weights.tensor[start : start + p.numel()] for p, start in zip(self.params, starts, strict=True)]
        self.views = {p: view.view(p.shape) for p, view in zip(self.params, views, strict=True)}
        self._parts = [part for p, cut in self.slots.cuts.items() for part in cut.parts(self.views[p])]
        self._places = [place for places in self.slots.places(self.packed.tensor).values() for place in places]
        self.packed.free()
        self.weights.free()
        value = math.nan if self.param_dtype.is_floating_point else 0
        self.nothing = torch.full((), value, dtype=self.param_dtype, device=self.device)
        self.hidden = {param: self.nothing.expand(param.shape) for param in self.params}

    def _make_shards(self, named: Mapping[str, nn.Parameter]) -> None:
        self.shard = self._values()
        self.shards = [self._declared(name, param, self.slots.cuts[param]) for name, param in named.items()]
        if self.host is not None:
            on_device, self.shard = self.shard, self.host.empty(self.slots.length, self.dtype)
            self.host.write(self.shard, on_device)
        for shard, piece in zip(self.shards, self.slots.pieces(self.shard), strict=True):
            layout.point(shard, piece)

    def _values(self) -> Tensor:
        """This rank's slot of the weights of the group's rank 0; zeros for parameters on the meta device."""
        mine = torch.zeros(self.slots.length, dtype=self.dtype, device=self.device)
        if self.params[0].is_meta or not self.slots.length:
            return mine
        slots = None
        if self.group.rank() == 0:
            slots = torch.zeros(self.group.size() * self.slots.length, dtype=self.dtype, device=self.device)
            for param, places in self.slots.places(slots).items():
                copy(places, self.slots.cuts[param].parts(param.detach()))
        comm.scatter(mine.view(torch.uint8), None if slots is None else slots.view(torch.uint8), 0, group=self.group)
        if self.replicas is not None:
            comm.broadcast(mine.view(torch.uint8), 0, group=self.replicas)
        return mine

    def _declared(self, name: str, param: nn.Parameter, cut: Cut) -> nn.Parameter:
        """A shard without memory that knows which boxes of the parameter it is; the sums over our ranks are done."""
        rank = self.group.rank()
        held = getattr(param, "held", None) or Held(name, (Box.whole(param.shape),), None, param.dim() > 1)
        shard = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        shard.held = held
        mine = cut.range(rank)
        if param.dim():
            layout.cut(shard, cut.dim, mine.start, len(mine))
        ours = {*_ranks(self.group), *_ranks(self.replicas)} - {dist.get_rank()}
        copies, copy = (self.replicas.size(), self.replicas.rank()) if self.replicas is not None else (1, 0)
        shard.held = replace(
            shard.held,
            boxes=shard.held.boxes if cut.local(rank).numel() else (),
            sums={label: group for label, group in held.sums.items() if not ours & {*_ranks(group)}},
            copies=copies,
            copy=copy,
        )
        return shard

    # -- weights -------------------------------------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Start to gather the slots of all ranks; finish_unshard follows, or reshard."""
        if self.state is not State.SHARDED or self.alone:
            return
        slot = self._on_device().to(self.param_dtype)
        with about(self.unit):
            work = comm.all_gather_single(self.packed.allocate(), slot, group=self.group, async_op=True)  # [P, S]
        self.gathering, self.state = (work, slot), State.GATHERING

    @torch.no_grad()
    def finish_unshard(self) -> None:
        """After: the weights are whole, in the memory that autograd's graph has in mind."""
        self.start_unshard()
        if self.state is State.GATHERING:
            self._check_hidden()
            self._wait_for_slots()
            self.weights.allocate()
            # IDEA: parameter by parameter out of the slots: one collective, and yet each has a piece with a shape.
            if self._parts:
                torch._foreach_copy_(self._parts, self._places)  # [n]
            self.packed.free()
            for param, view in self.views.items():
                param.data = view
        self.state = State.WHOLE

    def reshard(self) -> None:
        """After: only the shard has memory; the parameters read as not a number."""
        if self.alone or self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self._wait_for_slots()
        self.packed.free()
        self.weights.free()
        self._hide()
        self.state = State.SHARDED

    def _wait_for_slots(self) -> None:
        (work, _), self.gathering = self.gathering, None
        work.wait()

    def _check_hidden(self) -> None:
        if any(param.data_ptr() != nothing.data_ptr() for param, nothing in self.hidden.items()):
            raise RuntimeError(
                f"weights of {self.unit} were given other memory while they were in shards, as by .to(): do that "
                "before fully_shard"
            )

    def _hide(self) -> None:
        for param, nothing in self.hidden.items():
            layout.point(param, nothing)

    @torch.no_grad()
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Every parameter whole, in the shards' dtype, gathered for once."""
        slots = torch.empty(self.group.size() * self.slots.length, dtype=self.dtype, device=self.device)
        comm.all_gather_single(slots, self._on_device(), group=self.group)
        wholes = {param: torch.empty(param.shape, dtype=self.dtype, device=self.device) for param in self.params}
        for param, places in self.slots.places(slots).items():
            copy(self.slots.cuts[param].parts(wholes[param]), places)
        return wholes

    @torch.no_grad()
    def take_masters(self, wholes: Mapping[nn.Parameter, Tensor]) -> None:
        """Take this rank's pieces of whole parameters."""
        for param, shard in zip(self.params, self.shards, strict=True):
            self._write(shard, self.slots.piece(param, wholes[param]).to(shard.dtype))

    def _on_device(self) -> Tensor:
        return self.shard if self.host is None else self.host.stage(self.shard)

    @torch.no_grad()
    def take_weights(self, params: Iterable[nn.Parameter]) -> None:
        """After somebody wrote these weights, which are whole: so are the shards. A master that rounds to its weight
        stays as it is.
        """
        if self.alone:
            return
        shards = dict(zip(self.params, self.shards, strict=True))
        for param in params:
            shard = shards[param]
            written, kept = self.slots.piece(param, param), shard.detach().to(self.device)
            values = torch.where(kept.to(written.dtype) == written, kept, written.to(kept.dtype))
            self._write(shard, values)

    def _write(self, shard: nn.Parameter, values: Tensor) -> None:
        shard.copy_(values) if self.host is None else self.host.write(shard.detach(), values)

    @property
    def trains(self) -> bool:
        """Whether any parameter is not frozen."""
        return any(param.requires_grad for param in self.params)

    def hand_out(self, used: Set[nn.Parameter]) -> None:
        """After: the shards of parameters that any rank used have the step's gradient."""
        self.gradient.hand_out(self.shards, used, self.host)


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group) if group is not None else []
