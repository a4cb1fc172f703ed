"""A unit: a module whose weights live from `pre_forward` to `post_forward`, and again from `pre_backward` to
`post_backward`.

    pre_forward    the module is about to run              weights are gathered
    post_forward   it has run                              weights are freed, if reshard_after_forward
    pre_backward   the first gradient of its outputs came  weights are gathered, if they are not there
    post_backward  backward has come to its inputs         gradients are reduced, weights are freed

The events only say where this rank has come to; what to gather and to free then is the program's (program.py). The last
one is a hook on a view of each input, made as the module begins: autograd runs backward in the reverse order, so when
it comes to such a view it is through with the unit. Where no input needs a gradient (token ids), it is the arrival of
the last weight's gradient; and if one of them is not used, the next event of another unit, or `finish`.

Zhao et al. 2023, "PyTorch FSDP", 3 and 4; PyTorch's counterpart: FSDPState, FSDPParamGroup of
torch/distributed/fsdp/_fully_shard.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from collectives.hooks import called
from fsdp.mixed import MixedPrecision, cast
from fsdp.pack import Groups, Pack, State

PLAIN = (int, float, str, bytes, type(None))


class Driver(Protocol):
    """Who is told of the events: each method of the name of an event, with the unit."""

    driven: bool  # from outside: then events mean nothing

    def pre_forward(self, unit: "Unit") -> bool:
        """Returns whether it was the unit's turn; its backward will be told."""

    def post_forward(self, unit: "Unit") -> None:
        """What follows its forward."""

    def pre_backward(self, unit: "Unit", in_turn: bool) -> None:
        """What must be done before its backward."""

    def post_backward(self, unit: "Unit", in_turn: bool) -> None:
        """What follows it."""


class Unit:
    """A module and the packs of its parameters, those of units inside of it left out."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        packs: Sequence[Pack],
        groups: Groups,
        *,
        reshard: bool | None,
        mixed: MixedPrecision,
    ):
        self.name, self.packs, self.groups = name, list(packs), groups
        self.reshard_after_forward, self.mixed = reshard, mixed
        self.module = weakref.ref(module)
        # where the module and its parts have these parameters; the parts themselves would be a cycle
        places = [
            (part._parameters, name, param) for part in module.modules() for name, param in part._parameters.items()
        ]
        own = {param for pack in packs for param in pack.params}
        self.places = [place for place in places if place[2] in own]
        self.keeps = False  # weights, from forward to backward
        self.driver: Callable[[], Driver | None] = lambda: None
        self.in_turn = False  # whether the program knows of the forward that was last
        self.running, self.marks = False, []  # of a forward under way the views that mark where backward ends
        self.anchored = False  # whether the end of its backward shows at its inputs
        self.missing: set[nn.Parameter] = set()  # whose gradient is still to come in this backward
        module.register_forward_pre_hook(called(self.pre_forward), prepend=True, with_kwargs=True)
        module.register_forward_hook(called(self.post_forward))
        module.register_forward_hook(called(self.ran), always_call=True)

    def __reduce__(self) -> tuple[type, tuple]:
        """Of a copy of the module, or one in a file, this is None: that is a plain module."""
        return type(None), ()

    def named(self, name: str) -> None:
        """Take the name that the unit has in a larger module."""
        self.name = name
        for pack in self.packs:
            pack.named(name)

    # -- events --------------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The module is about to run. Returns its inputs, cast, and with the end of backward marked."""
        if module is not self.module():  # a copy, which has our hooks as well
            return None
        driver = self._driver()
        if any(own.get(name) is not param for own, name, param in self.places):
            raise RuntimeError(
                f"a parameter of {self.name} was replaced after fully_shard: write into those that are there"
            )
        if driver.driven and not self.whole:
            raise RuntimeError(f"{self.name} runs in shards: call `unshard` before, since it is driven from outside")
        if self.running:
            raise RuntimeError(f"{self.name} runs inside of itself: leave it to the unit around it")
        self.running = True
        self.in_turn = not driver.driven and driver.pre_forward(self)
        args, kwargs = tuple(map(self._prepared, args)), {name: self._prepared(value) for name, value in kwargs.items()}
        self.anchored = self.anchored or bool(self.marks)
        return args, kwargs

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The module has run. Returns its output, cast, and with the begin of backward marked."""
        if module is not self.module():
            return None
        driver = self._driver()
        if self.mixed.output is not None:
            output = tree_map(lambda value: cast(value, self.mixed.output), output)
        leaves = tree_leaves(output)
        if any(leaf is mark for leaf in leaves for mark in self.marks):
            # an input that is returned as it is would end the backward before it begins
            output = tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf), output)
            leaves = tree_leaves(output)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._check(leaves, outputs)
        if outputs and torch.is_grad_enabled():
            # IDEA: a hook on what goes in and one on what comes out tell when a module's backward begins and ends.
            register_multi_grad_hook(outputs, partial(self.pre_backward, self.in_turn), mode="any")
        if not driver.driven:
            driver.post_forward(self)
        return output

    def ran(self, module: nn.Module) -> None:
        """The module has run, or has raised an error."""
        if module is self.module():
            self.running = False
            self.marks.clear()

    def pre_backward(self, in_turn: bool, *grads: Any) -> None:
        """The backward of the module is about to begin. It must not find the weights freed: it would read address 0."""
        driver = self._driver()
        if torch.is_grad_enabled() and not all(pack.alone for pack in self.packs):
            raise RuntimeError(
                f"backward(create_graph=True) through {self.name}: gradients of gradients find no weights"
            )
        if not driver.driven:
            driver.pre_backward(self, in_turn)
        elif not self.whole:
            raise RuntimeError(f"the backward of {self.name} begins in shards: call `unshard` before")

    def post_backward(self, in_turn: bool) -> None:
        """The backward of the module has ended."""
        if (driver := self.driver()) is not None and not driver.driven:
            driver.post_backward(self, in_turn)

    def arrives(self, param: nn.Parameter) -> None:
        """The gradient of a weight has come. With the last one of all backward ends, if inputs do not show its end."""
        self.missing.discard(param)
        if not self.missing and not self.anchored:
            self.post_backward(True)

    def expect(self) -> None:
        """A backward begins, in which every weight has a gradient: a frozen one may be read after those of others."""
        self.missing = {param for pack in self.packs for param in pack.params}

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether the weights are there."""
        return all(pack.state is State.WHOLE for pack in self.packs)

    @property
    def trained(self) -> list[Pack]:
        """Those packs that have gradients."""
        return [pack for pack in self.packs if pack.trains]

    def start_unshard(self) -> None:
        """Start to gather the weights."""
        for pack in self.packs:
            pack.start_unshard()

    def unshard(self) -> None:
        """After: the weights are whole."""
        self.start_unshard()
        for pack in self.packs:
            pack.finish_unshard()

    def reshard(self) -> None:
        """After: only shards have memory."""
        for pack in self.packs:
            pack.reshard()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _driver(self) -> Driver:
        if (driver := self.driver()) is None:
            raise RuntimeError(
                f"the handle of {self.name} is gone: keep what fully_shard returns for the outermost module"
            )
        return driver

    def _prepared(self, value: Any) -> Any:
        """An input, cast; of a tensor that needs a gradient a view, which is a node of its own: backward comes to it
        when it has been through all of the unit. A list or a dict stays the caller's, who may look into it afterwards.
        """
        if isinstance(value, Tensor):
            value = cast(value, self.mixed.param)
            if value.requires_grad and torch.is_grad_enabled():
                value = value.view_as(value)
                value.register_hook(called(self.post_backward, self.in_turn))
                self.marks.append(value)
            return value
        if type(value) is tuple:
            return tuple(map(self._prepared, value))
        if any(cast(leaf, self.mixed.param) is not leaf for leaf in tree_leaves(value)):
            return tree_map(lambda leaf: cast(leaf, self.mixed.param), value)
        return value

    def _check(self, leaves: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """Raises ValueError for what would be read after the weights are freed."""
        own = {pack.weights.tensor.data_ptr() for pack in self.packs if not pack.alone}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not self.keeps and any(tensor.untyped_storage().data_ptr() in own for tensor in tensors):
            raise ValueError(f"{self.name} returns its weights, which are freed now: use reshard_after_forward=False")
        others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]
        if others and not outputs and torch.is_grad_enabled():
            raise ValueError(
                f"{self.name} returns a {type(others[0]).__name__}, in which no tensor is found: return tensors"
            )
