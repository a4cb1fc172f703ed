"""A bucket: the weights, the gradients and the masters of some parameters, each in flat memory that a partition cuts.

    weights   [n]    in the working dtype; the module's parameters are views of it. Stage 3 frees it between layers.
    shard     [n/P]  this rank's range of the weights
    masters   [n/P]  what the optimizer updates: the shard itself, or its float32 original (mixed.py, offload.py)
    full      [n]    the gradient of this rank's rows; a stage decides how long it lives
    sum       [n/P]  this rank's range of the gradient of all rows, while a step adds it up

A step: `collect` each gradient that autograd makes; `pack`, and reduce what it returns; `add` the result; `hand_out`
the sums to the shards. PyTorch's counterpart: FlatParameter of FSDP1. Left out: gradients that autograd writes into the
bucket by itself.
"""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm, layout
from collectives.host import Pool
from collectives.layout import Box, Held
from zero.mixed import Mixed
from zero.partition import Partition

ALIGN = 64  # bytes: where a parameter begins in memory decides how a matrix product adds


class Bucket:
    """Parameters of one dtype and device, all frozen or none, and their `shards`: of each what this rank owns, a tensor
    of one dimension, maybe empty, with its declaration.

    named: the parameters; on the meta device they get memory on `device` and zeros. parts: the ranks that own a range;
    1: every rank owns all. sharded: the weights are freed (`unshard` gathers them).
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        parts: int,
        sharded: bool = False,
        device: torch.device | None = None,
        mixed: Mixed | None = None,
        host: Pool | None = None,
    ):
        self.params, self.group, self.mixed, self.host = list(named.values()), group, mixed, host
        dtype = self.params[0].dtype if mixed is None else mixed.weights
        self.partition = Partition([param.numel() for param in self.params], parts, align=ALIGN // dtype.itemsize)
        part = group.rank() % parts
        self.own, self.within = self.partition.range(part), self.partition.within(part)
        values = self._values(device)
        self.weights = values if mixed is None else values.to(mixed.weights)
        self.shard = self.weights[self.own].clone() if sharded else self.weights[self.own]
        self.weight_views = self._views(self.weights)
        for param, view in self.weight_views.items():
            layout.point(param, view)
        owned = zip(named.items(), self.partition.owned(part), strict=True)
        self.shards = [self._declared(name, param, piece) for (name, param), piece in owned]
        self.masters = self.shard
        self._point_shards()
        self.trained, self.failure = False, ""
        if self.params[0].requires_grad:
            try:
                self.train(values[self.own])
            except OSError as error:  # a full disk, which other ranks may not have: the handle tells them
                self.failure = str(error)
        self.whole = True
        if sharded:
            self.reshard()
        self.full: Tensor | None = None
        self.grad_views: dict[nn.Parameter, Tensor] = {}
        self.sum: Tensor | None = None
        self.begun = False  # whether `sum` is of the step under way, and not of the one before
        self.arrived: set[nn.Parameter] = set()  # whose gradient is in `full`
        self.used: set[nn.Parameter] = set()  # of whom this rank had a gradient in this step
        self.before: set[nn.Parameter] = set()  # of whom any rank had one in the step before
        self.expected = set(self.params)  # of whom any rank had one in the two steps before

    def _values(self, device: torch.device | None) -> Tensor:
        """The row of weights that the group's rank 0 has, in its own dtype; zeros for parameters on the meta device."""
        first = self.params[0]
        where = (device or torch.device("cpu")) if first.is_meta else first.device
        row = torch.zeros(self.partition.padded, dtype=first.dtype, device=where)
        if not first.is_meta and len(row):
            for param, view in self._views(row).items():
                view.copy_(param.detach())
            comm.broadcast(row.view(torch.uint8), 0, group=self.group)
        return row

    def _views(self, row: Tensor) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part of a row, in its shape."""
        starts = zip(self.params, self.partition.starts, strict=True)
        return {param: row[start : start + param.numel()].view(param.shape) for param, start in starts}

    def _declared(self, name: str, param: nn.Parameter, piece: range) -> nn.Parameter:
        """An empty shard that knows which boxes of the parameter it is: the sum over our group is done by then."""
        held = getattr(param, "held", None) or Held(name, (Box.whole(param.shape),), None, param.dim() > 1)
        boxes = tuple(layout.flat_cut(held.boxes, piece.start, piece.stop))
        sums = {label: group for label, group in held.sums.items() if group is not self.group}
        size = self.group.size()
        copies, copy = (size, self.group.rank()) if self.partition.parts == 1 else (1, 0)
        shard = nn.Parameter(self.shard[:0], requires_grad=param.requires_grad)
        shard.held = replace(held, boxes=boxes, sums=sums, copies=copies, copy=copy)
        return shard

    def train(self, values: Tensor | None = None) -> None:
        """Make the masters, of these values or the weights': from now on there are gradients."""
        self.trained = True
        source = self.shard if values is None else values
        dtype = source.dtype if self.mixed is None else torch.float32
        if self.host is not None:
            self.masters = self.host.empty(len(source), dtype)
            self.host.write(self.masters, source.to(dtype))
        elif self.mixed is not None:
            self.masters = source.to(dtype, copy=True)
        self._point_shards()

    def _point_shards(self) -> None:
        for shard, where in zip(self.shards, self.within, strict=True):
            layout.point(shard, self.masters[where])
            shard.grad_dtype = None  # any: bfloat16 for a master in float32

    # -- weights -------------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """After: the weights of all ranks' shards are there, in the memory that autograd's graph has in mind."""
        if not self.whole:
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            comm.all_gather_single(self.weights, self.shard, group=self.group)
            for param, view in self.weight_views.items():
                param.data = view
            self.whole = True

    def reshard(self) -> None:
        """After: the weights have no memory, and the parameters read as not a number: memory that is gone would be read
        at address 0.
        """
        # IDEA: memory comes and goes under tensors that stay: parameters, and what autograd saved, are whole again.
        self.weights.untyped_storage().resize_(0)
        value = math.nan if self.weights.is_floating_point() else 0
        nothing = torch.full((), value, dtype=self.weights.dtype, device=self.weights.device)
        for param in self.params:
            param.data = nothing.expand(param.shape)
        self.whole = False

    def take_masters(self) -> None:
        """After an update: the shard is the masters, rounded."""
        if self.masters is not self.shard:
            self.shard.copy_(self.masters if self.host is None else self.host.stage(self.masters))

    @torch.no_grad()
    def take_weights(self, params: Iterable[nn.Parameter]) -> None:
        """After somebody wrote these weights, which are whole: the shard is what they are, and so are the masters. A
        master that rounds to its weight stays as it is.
        """
        places = dict(zip(self.params, self.within, strict=True))
        for where in map(places.__getitem__, params):
            shard, masters = self.shard[where], self.masters[where]
            shard.copy_(self.weights[self.own][where])
            if self.masters is not self.shard:
                on_device = masters.to(shard.device)
                masters.copy_(torch.where(on_device.to(shard.dtype) == shard, on_device, shard))

    # -- gradients -----------------------------------------------------------------------------------------------------

    def collect(self, param: nn.Parameter) -> None:
        """Move the gradient that autograd made into `full`, or add it to what is there; `param.grad` becomes None."""
        if param.grad.layout != torch.strided:
            raise ValueError(f"a parameter of shape {list(param.shape)} has a sparse gradient: sparse=False")
        self._begin()
        view = self._grad_views()[param]
        with torch.no_grad():  # backward(create_graph=True) runs hooks with gradients on
            view.add_(param.grad) if param in self.arrived else view.copy_(param.grad)
        param.grad = None
        self.arrived.add(param)
        self.used.add(param)

    @property
    def complete(self) -> bool:
        """Whether all gradients have come that will come, if this step is like the two before."""
        return self.expected <= self.arrived

    def pack(self) -> Tensor:
        """`full`, ready to be reduced: with what nobody has collected yet, and zeros for what did not come. Padding is
        what it is: its sums belong to no shard.
        """
        self._begin()
        for param, view in self._grad_views().items():
            if param.grad is not None:
                self.collect(param)
            elif param not in self.arrived:
                view.zero_()
        self.arrived.clear()
        return self.full

    def free(self) -> None:
        """Let go of the full gradient."""
        self.full, self.grad_views = None, {}

    def add(self, reduced: Tensor) -> None:
        """Add this rank's range of a gradient of all rows to the step's sum."""
        self.sum = reduced if self.sum is None else reduced.add_(self.sum)

    def hand_out(self, used: Set[nn.Parameter]) -> None:
        """After: `grad` of the shards is the sum, for parameters that any rank used; the others' stays what it was."""
        if not self.begun:
            return
        total = self.sum.to(self.masters.device)  # where masters are offloaded from a GPU, a gradient goes with them
        for param, shard, where in zip(self.params, self.shards, self.within, strict=True):
            if param in used or shard.grad is not None:
                shard.grad = total[where]
        self.sum, self.begun = None, False
        before, self.before = self.before, {param for param in self.params if param in used}
        self.used, self.expected = set(), before | self.before

    def _begin(self) -> None:
        """The first gradient of a step: it is added to those that the caller has not zeroed."""
        if self.begun:
            return
        self.begun = True
        if any(shard.grad is not None for shard in self.shards):
            dtype = next(shard.grad.dtype for shard in self.shards if shard.grad is not None)
            self.sum = torch.zeros(self.partition.length, dtype=dtype, device=self.weights.device)
            for shard, where in zip(self.shards, self.within, strict=True):
                if shard.grad is not None:
                    self.sum[where] = shard.grad

    def _grad_views(self) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part of `full`, which is allocated where it is not there."""
        if self.full is None:
            dtype = self.mixed.gradients if self.mixed else self.weights.dtype
            self.full = torch.empty(self.partition.padded, dtype=dtype, device=self.weights.device)
            self.grad_views = self._views(self.full)
        return self.grad_views
