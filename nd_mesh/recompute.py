"""Recomputation: a module keeps its inputs alone, and runs forward again when backward first asks for what it saved.

Cost: each module's forward once more, with its collectives, which are counted. Memory: its inputs, and the activations
of one module for a moment. A module's buffers are kept as they were as well: counters and statistics change once. No
RNG state, because draws are by index; no backward inside of another, so backward may come in halves.

Chen et al. 2016; Korthikanti et al. 2022, which sub-modules pay; lecture A, "Activation Checkpointing". PyTorch's
counterpart: torch/utils/checkpoint.py, use_reentrant=False. Left out: a rerun that stops at the last tensor needed
(here it is whole, so that one that differs shows), a backward inside of the forward, autocast on a second device.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from collectives.call import Call
from collectives.watch import Watcher, watching
from nd_mesh.model import GPT


class Recomputed(Watcher):
    """What this rank has run again so far: `reruns` forwards, and in them `collectives`, a count by operation."""

    def __init__(self) -> None:
        self.reruns = 0
        self.collectives: Counter[str] = Counter()

    def begins(self, call: Call) -> None:
        """Count a call of a rerun; a part of another is in that one."""
        if call.outer is None:
            self.collectives[call.op] += 1

    def report(self) -> str:
        """One line for people."""
        calls = ", ".join(f"{count} {op}" for op, count in sorted(self.collectives.items()))
        return f"recomputation: {self.reruns} forwards ran again, and in them {calls or 'no collective'}"


def recompute(modules: Iterable[nn.Module]) -> Recomputed:
    """From now on each of these modules, when called with gradients, keeps its inputs and runs again in backward;
    gradients have the same bits. Returns the count of what runs again.

    It is the module's `forward` that is replaced: hooks on the module do not fire in a rerun, those of its children do.
    Raises ValueError for a module that is given twice, or inside of another one.
    """
    modules = list(modules)
    for i, module in enumerate(modules):
        if any(module in set(other.modules()) for other in modules[:i] + modules[i + 1 :]):
            raise ValueError(f"{_named(i, module)} is given twice or inside of another one: give each part once")
    counts = Recomputed()
    for i, module in enumerate(modules):
        module.forward = _Twice(_named(i, module), module, counts)
    return counts


def chosen(model: GPT, names: Iterable[str]) -> list[nn.Module]:
    """The modules to recompute by the names that a user gives: `block` is each whole block, any other name that
    sub-module of each block, such as `attend` or `ffn`. Raises ValueError for unknown ones, and for `block` and others.
    """
    names, blocks = list(names), list(model.blocks.values())
    if names == ["block"]:
        return blocks
    if "block" in names:
        raise ValueError(f"recompute={names}: a block has all the others inside; give `block` alone, or leave it out")
    for name, block in ((name, block) for name in names for block in blocks):
        if name not in (known := dict(block.named_children())):
            raise ValueError(f"recompute={names}: {name!r} is unknown; use `block`, or some of {', '.join(known)}")
    return [getattr(block, name) for name in names for block in blocks]


class _Twice:
    """Takes the place of a module's `forward`. An object, so that a deep copy of the module runs the copy."""

    def __init__(self, name: str, module: nn.Module, counts: Recomputed):
        self.name, self.module, self.forward, self.counts = name, module, module.forward, counts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        once = _Once(self, args, kwargs)
        with saved_tensors_hooks(once.pack, once.unpack):
            return self.forward(*args, **kwargs)


class _Handle:
    """Stands for a saved tensor, and lives as long as autograd keeps that one."""


class _Once:
    """One forward: what it takes to run it again, and a handle in place of each tensor that autograd saved."""

    def __init__(self, twice: _Twice, args: Any, kwargs: Any):
        self.twice = twice
        self.inputs = tree_map_only(Tensor, _leaf, (args, kwargs))  # with their graph there would be a cycle
        self.versions, self.autocast = _versions(self.inputs), _autocast(self.inputs)
        copies = {buffer: _leaf(buffer.clone()) for buffer in twice.module.buffers()}
        self.buffers = {m: {k: copies.get(b) for k, b in m._buffers.items()} for m in twice.module.modules()}
        self.saved: list[tuple[weakref.ref[_Handle], tuple]] = []
        self.again: weakref.WeakKeyDictionary[_Handle, Tensor] = weakref.WeakKeyDictionary()

    def pack(self, x: Tensor) -> _Handle:
        self.saved.append((weakref.ref(handle := _Handle()), _kind(x)))
        return handle

    def unpack(self, handle: _Handle) -> Tensor:
        if handle not in self.again:
            self._fill(self._run_again())
        return self.again[handle]

    def _run_again(self) -> list[Tensor]:
        """The tensors that autograd saves when forward runs again."""
        if _versions(self.inputs) != self.versions:
            raise RuntimeError(f"{self.twice.name} cannot run again: an input was changed in place; give it a clone")
        saved: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            saved.append(x if x.is_leaf else x.detach())  # a parameter itself: it may be gathered anew between halves
            return saved[-1]

        args, kwargs = self.inputs
        self.twice.counts.reruns += 1
        watched, hooks = watching(self.twice.counts), saved_tensors_hooks(keep, lambda x: x)
        with _stand_in(self.buffers), self.autocast, watched, torch.enable_grad(), hooks:
            self.twice.forward(*args, **kwargs)
        return saved

    def _fill(self, tensors: list[Tensor]) -> None:
        now, before = [_kind(x) for x in tensors], [kind for _, kind in self.saved]
        if now != before:
            what = "tensors of another kind" if len(now) == len(before) else f"{len(now)} tensors, not {len(before)},"
            cause = "its mode, an attribute or an input has changed, or a draw is not by index"
            raise RuntimeError(f"{self.twice.name} saved {what} when it ran again: {cause}")
        # IDEA: the i-th tensor that a rerun saves is the one that the i-th handle stands for.
        for (ref, _), x in zip(self.saved, tensors, strict=True):
            if (handle := ref()) is not None:
                self.again[handle] = x


def _named(i: int, module: nn.Module) -> str:
    return f"recomputed module {i}, a {type(module).__name__},"


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _versions(inputs: Any) -> list[int]:
    return [x._version for x in tree_leaves(inputs) if isinstance(x, Tensor)]


def _kind(x: Tensor) -> tuple:
    return x.shape, x.dtype, x.device


def _autocast(inputs: Any) -> torch.autocast:
    """The autocast of now, on the first device that an input is on, to be entered later."""
    kinds = (x.device.type for x in tree_leaves(inputs) if isinstance(x, Tensor))
    kind = next(filter(torch.amp.is_autocast_available, kinds), "cpu")
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def _stand_in(buffers: dict[nn.Module, dict[str, Tensor | None]]) -> Iterator[None]:
    """Inside, these are the modules' buffers: changed in place or replaced, the modules' own stay as they are."""
    own = {module: module._buffers for module in buffers}
    try:
        for module, stand_ins in buffers.items():
            module._buffers = stand_ins
        yield
    finally:
        for module, originals in own.items():
            module._buffers = originals
