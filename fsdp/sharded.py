"""The handle of a module in units: what its events make happen, and the contract of data parallelism.

    forward    gather 0 │ compute 0, gather 1 │ compute 1, gather 2 │ …
    backward   … gather 1 │ compute 2, gather 0 │ reduce 2, compute 1 │ reduce 1, compute 0 │ reduce 0

While a unit computes, the slots of the next ones arrive (`prefetch` of them), and the gradient of the one before is on
its way. So prefetch + 1 units have memory at once, and one reduction is under way. With replicas a unit's slot goes on
to an all_reduce over them as soon as it has come.

In `finish` the ranks agree, in one small all_reduce, on which parameters any of them used, and whether a gradient came
after its unit was left: such a one is reduced there. PyTorch's counterpart: FSDPState, FSDPParamGroup.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm
from collectives.elementwise import check_elementwise
from collectives.hooks import called, in_backward
from collectives.replicas import Replica
from fsdp.gradient import Reductions
from fsdp.pack import Groups, Pack
from fsdp.program import ROOT, Program, nested
from fsdp.unit import Unit


class FullySharded(Replica):
    """The handle that fully_shard returns, of the units in a module: those of its parts and its own, which is the root.

    All ranks run equally many forwards; a rank without rows runs an empty one. Each forward with gradients has one
    backward, or all ranks leave out the same ones.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        parents: Sequence[int | None],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        *,
        average: bool,
        prefetch: int,
    ):
        self.units, self.module = list(units), weakref.ref(module)
        self.packs = [pack for unit in units for pack in unit.packs]
        self.gradients = [pack.gradient for pack in self.packs]
        self.pack_of = {param: pack for pack in self.packs for param in pack.params}
        self.unit_of = {param: unit for unit in units for pack in unit.packs for param in pack.params}
        names = {param: name for name, param in module.named_parameters()}
        buffered = module if any(True for _ in module.buffers()) else None
        super().__init__([p for p in names if p in self.pack_of], buffered, group, average=average, replicas=replicas)
        for param, shard in self.shard_of.items():
            if not hasattr(param, "held"):
                shard.held.name = names[param]
        self.numbers = {unit: number for number, unit in enumerate(units)}
        self.program = Program(nested(parents), prefetch, called(self._enter), called(self._leave))
        self.agreed_order = False
        self.strayed: set[str] = set()  # units that were gathered when it was not their turn
        self.reduces, self.replicates = True, True  # whether the backward under way is one whose gradients are
        self.driven, self.opened = False, False  # from outside; inside of `whole`
        self.syncing_replicas = True
        self.reductions = Reductions()
        parts = [(part, unit.groups) for unit in self.units for part in unit.module().modules()]  # inner units win
        self.groups_of = weakref.WeakKeyDictionary(parts)
        self.watched: set[nn.Parameter] = set()
        for unit in self.units:
            unit.driver = weakref.ref(self)
            is_root = unit is self.units[0]
            unit.keeps = is_root if unit.reshard_after_forward is None else not unit.reshard_after_forward
        self.parts = weakref.WeakSet(module.modules())
        for part in self.parts:
            part.register_state_dict_pre_hook(called(self._check_whole))
            part.register_load_state_dict_pre_hook(called(self._check_whole))
            part.register_state_dict_post_hook(called(self._on_state_dict))
            part.register_load_state_dict_post_hook(called(self._on_load))
        self._watch()
        self.equalize_buffers()

    # -- events --------------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> bool:
        """A unit is about to run. Returns whether it is its turn."""
        if in_backward():  # it is recomputed, and stays until its own comes
            unit.unshard()
            return False
        in_turn = self.program.before_forward(self.numbers[unit], torch.is_grad_enabled())
        if not in_turn and not unit.whole and self.program.events is not None:
            self.strayed.add(unit.name)
        unit.unshard()
        return in_turn

    def post_forward(self, unit: Unit) -> None:
        """A unit has run."""
        if not in_backward() and not self.program.after_forward(self.numbers[unit]):
            self._free(unit)

    def pre_backward(self, unit: Unit, in_turn: bool) -> None:
        """The backward of a unit is about to begin."""
        if in_turn:
            self.program.before_backward(self.numbers[unit])
        unit.unshard()

    def post_backward(self, unit: Unit, in_turn: bool) -> None:
        """The backward of a unit has ended."""
        if in_turn:
            self.program.after_backward(self.numbers[unit], inside=unit.anchored)
        elif self.numbers[unit] not in self.program.open:
            self._free(unit)

    def _enter(self, number: int, ahead: Sequence[int]) -> None:
        unit = self.units[number]
        if number == ROOT:  # a forward or backward begins
            self.reduces, self.replicates = self.syncing, self.syncing_replicas
        unit.unshard()  # [n]
        unit.expect()
        for other in ahead:
            # IDEA: what comes next is gathered while this one computes.
            self.units[other].start_unshard()

    def _leave(self, number: int, backward: bool, last: bool) -> None:
        unit = self.units[number]
        if not backward:
            self._free(unit)
            return
        if last or not unit.keeps:
            unit.reshard()  # [n/P]; first, so that there is room for what arrives
        if self.reduces and last:
            for pack in unit.trained:
                self.reductions.start(pack.gradient, replicate=self.replicates)  # the gradient becomes [n/P]

    def _free(self, unit: Unit) -> None:
        """Reshard, unless the unit is kept for the backward of what has run."""
        if not unit.keeps:
            unit.reshard()

    def _on_gradient(self, param: nn.Parameter) -> None:
        """Autograd has added to `p.grad`."""
        unit = self.unit_of[param]
        if param.grad is not None and unit.driver() is self:  # and not the handle of a module around ours
            gradient = self.pack_of[param].gradient
            if param.grad.dtype != gradient.dtype:  # else it stays, and adds up where autograd has made it
                if self.reductions.sends(gradient):
                    self.reductions.advance()
                gradient.collect(param)
            if not self.driven:
                unit.arrives(param)

    # -- contract ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_replica_sync(self) -> Iterator[None]:
        """Around the backward of a microbatch that is not the last: it is reduced over the shard group, and the
        replicas add up once, later. Unlike under no_sync no rank keeps whole gradients.
        """
        before, self.syncing_replicas = self.syncing_replicas, False
        try:
            yield
        finally:
            self.syncing_replicas = before

    @property
    def shard_of(self) -> dict[nn.Parameter, nn.Parameter]:
        """The shard of each parameter."""
        return {param: shard for pack in self.packs for param, shard in zip(pack.params, pack.shards, strict=True)}

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates: of each of the module's parameters this rank's piece, with its shape, maybe
        empty. Its `grad` is valid from `finish` on.
        """
        shard_of = self.shard_of
        return [shard_of[param] for param in self.params]

    def finish(self) -> None:
        """Once a step. After: the `grad` of each shard is this rank's piece of the sum (or mean) over the group and the
        replicas, added to what the optimizer did not zero; no parameter of the module has one.

        A parameter that some ranks did not use counts as zero there; if no rank used it, its shard gets no gradient. To
        drop a batch whose backward has begun, `finish`, then zero the gradients: before, `zero_grad` reaches none.
        """
        self._check_closed()
        if self.units[0].driver() is not self:
            raise RuntimeError(f"{self.units[0].name} is a unit of a module around it: use that one's handle")
        self.program.complete_all()
        self.reductions.drain(self.gradients)
        used = self._agree()
        for pack in self.packs:
            pack.hand_out(used)
        self._check_hidden()
        self.equalize_buffers()
        self._agree_on_order()
        self.driven = False
        for unit in self.units:
            unit.anchored = False
            unit.reshard()
        self._watch()

    def optimizer(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """`inner`, made for `parameters()`. Raises ValueError if it is not, or if it does not update each element by
        itself.
        """
        shards = set(self.parameters())
        if any(param not in shards for group in inner.param_groups for param in group["params"]):
            raise ValueError("the optimizer has other parameters than shards: make it for `handle.parameters()`")
        check_elementwise(inner)
        return inner

    def after_step(self) -> None:
        """After the optimizer: weights that are still there are those of before."""
        self._check_closed()
        for unit in self.units:
            unit.reshard()

    def after_load(self) -> None:
        """After the shards were given values: the same."""
        self.after_step()

    def padding(self) -> str:
        """How the parameters are cut, for a person."""
        numel, slots = sum(param.numel() for param in self.params), sum(pack.slots.length for pack in self.packs)
        padding = sum(pack.slots.length * pack.group.size() for pack in self.packs)
        padding -= sum(param.numel() for pack in self.packs for param in pack.params)
        return f"{numel:,} parameters in {len(self.units)} units, {slots:,} a rank, {padding} of padding"

    # -- from outside --------------------------------------------------------------------------------------------------

    def unshard(self, module: nn.Module) -> None:
        """Gather the weights of the units in `module`. From here on until `finish` events gather and reduce nothing:
        whoever calls this for a pipeline's parts of a step also calls `reshard` and `reduce`, alike on all ranks.
        """
        self.program.complete()
        self.driven = True
        for unit in self._within(module):
            unit.unshard()

    def reshard(self, module: nn.Module) -> None:
        """Free the weights of the units in `module`."""
        self._check_closed()
        for unit in self._within(module):
            unit.reshard()

    def reduce(self, module: nn.Module) -> None:
        """Reduce the gradients that the units in `module` have by now."""
        for unit in self._within(module):
            for pack in unit.trained:
                self.reductions.start(pack.gradient, replicate=self.syncing_replicas)

    def _within(self, module: nn.Module) -> list[Unit]:
        inside = set(module.modules())
        return [unit for unit in self.units if unit.module() in inside]

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Around reading or writing the module's weights by hand, on all ranks alike: inside they are whole, and what
        was written is in the shards afterwards. Views of them die at its end; a state dict is a copy. Not around an
        optimizer's step, which it would undo; what frees weights raises RuntimeError inside.
        """
        self.program.complete()
        gathered = [unit for unit in self.units if not unit.whole]
        for unit in gathered:
            unit.unshard()
        before, (self.driven, self.opened) = (self.driven, self.opened), (True, True)  # a forward inside frees nothing
        try:
            yield
            for pack in self.packs:
                pack.take_weights(pack.params)
        finally:
            self.driven, self.opened = before
            for unit in gathered:
                unit.reshard()

    def full_state(self) -> dict[str, Tensor]:
        """Every parameter whole, by name, on every rank: with mixed precision the masters. Collective."""
        names = {param: name for name, param in self.module().named_parameters()}
        wholes = {param: whole for pack in self.packs for param, whole in pack.masters().items()}
        return {names[param]: wholes[param] for param in self.params}

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces of whole parameters; nothing is sent. Buffers are the module's own to load.

        Raises ValueError for a parameter that is missing or has another shape; then nothing has changed.
        """
        self._check_closed()
        named = {name: param for name, param in self.module().named_parameters() if param in self.pack_of}
        wrong = [name for name, param in named.items() if name not in state or state[name].shape != param.shape]
        if wrong:
            raise ValueError(
                f"the state has no {wrong[0]} of shape {list(named[wrong[0]].shape)}: is it of this model?"
            )
        for pack in self.packs:
            pack.take_masters({param: state[name] for name, param in named.items() if self.pack_of[param] is pack})
        self.after_load()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Hook every parameter that is not frozen; a frozen one takes no hook, and may train later."""
        on_gradient = called(self._on_gradient)
        for param in self.params:
            if param.requires_grad and param not in self.watched:
                param.register_post_accumulate_grad_hook(on_gradient)
                self.watched.add(param)

    def _agree(self) -> set[nn.Parameter]:
        """The parameters that any rank used in this step. Reduces what came too late for its unit on any rank."""
        anywhere: set[nn.Parameter] = set()
        for groups, packs in self._by_groups().items():
            params = [param for pack in packs for param in pack.params]
            late = [pack.gradient.late for pack in packs]
            used = [param in self.pack_of[param].gradient.used or param.grad is not None for param in params]
            answers = self.largest([int(answer) for answer in (*used, *late)], groups)
            for pack, came_late in zip(packs, answers[len(used) :], strict=True):
                if came_late:
                    self.reductions.start(pack.gradient, replicate=True)
            anywhere.update(param for param, answer in zip(params, answers, strict=False) if answer)
        self.reductions.drain(self.gradients)
        return anywhere

    def _check_hidden(self) -> None:
        """Raises RuntimeError for weights that were written to while they were not there. Once a step: it looks at
        memory of the device.
        """
        hiding = [pack for pack in self.packs if not pack.alone and pack.param_dtype.is_floating_point]
        if hiding and not torch.stack([pack.nothing.float() for pack in hiding]).isnan().all():
            [written, *_] = [pack.unit for pack in hiding if not pack.nothing.isnan()]
            raise RuntimeError(
                f"weights of {written} were written while they were in shards, and that is lost: write inside `with "
                "handle.whole():`, or before fully_shard"
            )

    def equalize_buffers(self) -> None:
        """Give every buffer the values of rank 0 of the groups of the innermost unit around it, and of its replicas."""
        if self.buffered is None:
            return
        together: dict[Groups, dict[str, Tensor]] = {}
        for name, part in self.buffered.named_modules():
            groups = self.groups_of.get(part, self.units[0].groups)
            own = {f"{name}.{key}": buffer for key, buffer in part.named_buffers(recurse=False)}
            together.setdefault(groups, {}).update(own)
        for groups, named in together.items():
            for group in groups:
                if group.size() > 1:
                    self._equalize(named, group)

    def _by_groups(self) -> dict[Groups, list[Pack]]:
        """Packs by the groups over which they are reduced."""
        together: dict[Groups, list[Pack]] = {}
        for pack in self.packs:
            together.setdefault(pack.groups, []).append(pack)
        return together

    def _agree_on_order(self) -> None:
        """After the first step: follow the order in which units ran, if it was the same on all ranks.

        Raises RuntimeError on every rank if it was not, and a unit was gathered once more or before its turn.
        """
        if self.agreed_order:
            return
        self.agreed_order = True
        everyone = [(self.program.seen, self.strayed)]
        for group in self.groups:
            everyone = [each for several in comm.all_gather_object(everyone, group=group) for each in several]
        if all(order == self.program.seen for order, _ in everyone):
            self.program.adopt(self.program.seen)
        elif strayed := [name for _, names in everyone for name in names]:
            raise RuntimeError(
                f"{strayed[0]} ran more than once, or before its turn, while ranks ran different units: what they "
                "gathered may be mixed up. Run such a unit on all ranks alike, or leave it to the unit around it"
            )

    def _check_closed(self) -> None:
        if self.opened:
            raise RuntimeError("inside of `with handle.whole():` weights stay: call this after it")

    def _check_whole(self, module: nn.Module) -> None:
        """A state dict of a part of the module is about to be made, or loaded."""
        own = [self.unit_of[param] for param in module.parameters(recurse=False) if param in self.unit_of]
        if not all(unit.whole for unit in own):
            raise RuntimeError(
                "the weights are in shards: read and load them inside `with handle.whole():`, on all ranks"
            )

    def _on_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """A state dict of a part of the module was made: it outlives the weights that it shows."""
        for name, param in module.named_parameters(recurse=False):
            if param in self.unit_of and prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name].clone()

    def _on_load(self, module: nn.Module) -> None:
        """A part of the module has loaded a state dict into its own parameters."""
        if module not in self.parts:  # but of a copy, which has our hooks as well
            return
        for param in module.parameters(recurse=False):
            if param not in self.unit_of:
                raise ValueError(
                    "load_state_dict(assign=True) replaces parameters that a handle knows: use assign=False"
                )
            self.pack_of[param].take_weights([param])
