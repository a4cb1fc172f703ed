"""Stage 3: weights are cut as well. A layer's weights are gathered before its forward, and again before its backward,
and freed after each; in between a rank has its shard.

A step: an all_gather a layer in forward, an all_gather and a reduce_scatter a layer in backward, and nothing after the
update: 3n(P-1)/P bytes for each microbatch. Memory a parameter: (2 + 2 + K)/P bytes, and one layer's weights, with its
gradient and the one under way.

    forward    gather 0, free 0, gather 1, free 1, …
    backward   … gather 1, reduce 1, free 1, gather 0, reduce 0, free 0

That program is the same on every rank, whatever its rows make it skip: hooks only say where a rank has come to, and on
the way there it joins what it has skipped. Small parameters (the persistence threshold), those that lie in no layer and
those that two layers share stay whole, and are reduced and gathered as in stage 2.

Rajbhandari et al. 2019, "ZeRO", 5.3 and 7.2.2; lectures A, "ZeRO-3", and B, "ZeRO-3 (FSDP)". DeepSpeed's counterpart:
runtime/zero/partitioned_param_coordinator.py. Left out, and left to fsdp/: gathering the next layer in advance, layers
that run twice or in another order, layers in layers.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from collectives.host import Pool
from zero.bucket import Bucket
from zero.mixed import Mixed
from zero.sharded import CAP, called, dealt, treated
from zero.stage1 import gather
from zero.stage2 import ZeRO2

WHOLE = 1 << 62  # bytes of a bucket that holds all of a layer


class Layer:
    """A module whose weights are gathered and freed together."""

    def __init__(self, name: str, module: nn.Module, buckets: Sequence[Bucket]):
        self.name, self.module, self.buckets = name, module, buckets


class ZeRO3(ZeRO2):
    """The handle that `wrap` returns. All ranks run equally many forwards; a rank without rows runs an empty one.

    The program's positions: 0 … L-1 are the layers in forward, L … 2L-1 the same in backward, last layer first.
    """

    def __init__(self, module: nn.Module, *args: Any, layers: Sequence[Layer], **more: Any):
        super().__init__(module, *args, **more)
        self.layers, self.count = list(layers), len(layers)
        cut = {bucket for layer in layers for bucket in layer.buckets}
        self.kept = [bucket for bucket in self.buckets if bucket not in cut]  # whose weights are whole all the time
        self.at = -1  # the position that this rank has come to
        self.differentiated = False  # whether the forward under way is one that a backward follows
        self.driven = False  # whether `unshard` and `reduce` are called from outside, and hooks keep still
        module.register_forward_pre_hook(called(self._before_model))
        module.register_state_dict_pre_hook(called(self._check_whole))
        module.register_load_state_dict_pre_hook(called(self._check_whole))
        for i, layer in enumerate(layers):
            layer.module.register_forward_pre_hook(called(self._before_forward, i))
            layer.module.register_forward_hook(called(self._after_forward, i))

    # -- the program ---------------------------------------------------------------------------------------------------

    def _go(self, position: int) -> None:
        """Go on to this position, joining the others in what this rank has skipped."""
        while self.at < position:
            self._leave()
            self.at += 1
            for bucket in self._here():
                # IDEA: all ranks go through one program of collectives, so none waits for one that another skips.
                bucket.unshard()  # [n]

    def _leave(self) -> None:
        """Free the layer at this position, if it is whole; in backward, start to reduce its gradient."""
        for bucket in self._here():
            if bucket.whole:
                if self.at >= self.count and bucket.trained:
                    self.start(bucket)  # [n/dp]
                bucket.reshard()  # [n/dp]

    def _here(self) -> Sequence[Bucket]:
        """The buckets of the layer at this position."""
        if self.at < 0:
            return ()
        return self.layers[self.at if self.at < self.count else 2 * self.count - 1 - self.at].buckets

    def _complete(self) -> None:
        """Go on to the end of the forward or backward under way, and be ready for the next."""
        if self.at >= 0:
            self._go(self.count - 1 if self.at < self.count else 2 * self.count - 1)
            self._leave()
            self.at = -1

    # -- where this rank has come to -----------------------------------------------------------------------------------

    def _before_model(self) -> None:
        """A forward begins."""
        if not self.driven:
            self._complete()
            self.differentiated = torch.is_grad_enabled()

    def _before_forward(self, i: int) -> None:
        """Layer i is about to run."""
        if self.driven:
            return
        if self.at >= self.count:
            self._complete()
        if i <= self.at:
            raise ValueError(
                f"stage 3 gathers each layer once a forward, in one order, but {self.layers[i].name} runs after "
                f"{self.layers[self.at].name}: leave it out of `layers`, then it stays whole"
            )
        self._go(i)

    def _after_forward(self, i: int, module: nn.Module, args: Any, output: Any) -> None:
        """Layer i has run. What autograd computes first of its backward says when that begins."""
        if self.driven:
            return
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if outputs:
            register_multi_grad_hook(outputs, called(self._before_backward, i), mode="any")
        self._leave()

    def _before_backward(self, i: int) -> None:
        """The backward of layer i is about to run. All of the layers after it are through with theirs."""
        position = 2 * self.count - 1 - i
        if self.driven or position == self.at:
            return
        if position < self.at:  # the backward of an earlier forward
            self._complete()
            self.at = self.count - 1
        self._go(position)

    def _on_gradient(self, param: nn.Parameter) -> None:
        """Autograd has added to `p.grad`. Reduced when the program comes to it, not before."""
        if param.grad is not None:
            self.bucket_of[param].collect(param)

    def end_of_backward(self) -> None:
        """Complete the program, its backward too where this rank had none, and reduce what is not in a layer."""
        if 0 <= self.at < self.count and self.differentiated:
            self._go(2 * self.count - 1)
        self._complete()
        for bucket in self.kept:
            if bucket.trained:
                self.start(bucket)

    # -- from outside --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """As in every stage. What was driven from outside is driven by hooks again."""
        super().finish()
        self.driven = False

    def after_step(self) -> None:
        """After the optimizer: shards are the masters, rounded; weights that stay whole are gathered."""
        for bucket in self.buckets:
            bucket.take_masters()
        gather(self.kept)

    def unshard(self, module: nn.Module) -> None:
        """Gather the weights of the layers in `module`. From here on until `finish` hooks gather and reduce nothing:
        whoever calls this for a pipeline's parts of a step also calls `reshard` and `reduce`, alike on all ranks.
        """
        self.driven = True
        for bucket in self._within(module):
            bucket.unshard()

    def reshard(self, module: nn.Module) -> None:
        """Free the weights of the layers in `module`."""
        for bucket in self._within(module):
            bucket.reshard()

    def reduce(self, module: nn.Module) -> None:
        """Reduce the gradients that the layers in `module` have by now."""
        for bucket in self._within(module):
            if bucket.trained:
                self.start(bucket)

    def _within(self, module: nn.Module) -> list[Bucket]:
        inside = set(module.modules())
        return [bucket for layer in self.layers if layer.module in inside for bucket in layer.buckets]

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Around reading or writing the module's weights by hand, as in every stage."""
        cut = [bucket for layer in self.layers for bucket in layer.buckets]
        for bucket in cut:
            bucket.unshard()
        with super().whole():
            yield
        for bucket in cut:
            bucket.reshard()

    def _check_whole(self) -> None:
        if not all(bucket.whole for bucket in self.buckets):
            raise RuntimeError(
                "the weights are in shards: read and load them inside `with handle.whole():`, on all ranks"
            )


def layers_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a module, by name, and those of its lists, dicts, sequences; a module without any by itself."""
    if not any(True for _ in module.children()):
        yield name, module
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(child):
            yield from layers_of(child, full)
        elif any(True for _ in child.parameters()):
            yield full, child


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
    overlap: bool = True,
    layers: Sequence[nn.Module] | None = None,
    threshold: int = 0,
) -> ZeRO3:
    """Make `module` data parallel over `group`, as stage2.wrap does, with weights that live as shards.

    layers: modules, in the order in which a forward runs them, each once; default `layers_of` the module. threshold:
    parameters of at most this many elements stay whole, in buckets of at most `cap` bytes.
    """
    named, buffered = treated(module, group, params, cap, average=average, mixed=mixed, threshold=threshold)
    chosen = list(layers_of(module)) if layers is None else [(_name(module, layer), layer) for layer in layers]
    owners = {param: [layer for _, layer in chosen if param in set(layer.parameters())] for param in named.values()}
    cut = {p: found[0] for p, found in owners.items() if len(found) == 1 and p.numel() > threshold}
    made = {"parts": group.size(), "device": device, "mixed": mixed, "host": host}
    built = []
    for name, layer in chosen:
        inside = {full: param for full, param in named.items() if cut.get(param) is layer}
        built.append(Layer(name, layer, [Bucket(part, group, sharded=True, **made) for part in dealt(inside, WHOLE)]))
    kept = [Bucket(part, group, **made) for part in dealt({n: p for n, p in named.items() if p not in cut}, cap)]
    buckets = [bucket for layer in built for bucket in layer.buckets] + kept
    more = {"average": average, "overlap": overlap}
    return ZeRO3(module, list(named.values()), buffered, buckets, group, layers=built, **more)


def _name(module: nn.Module, layer: nn.Module) -> str:
    return next((name for name, part in module.named_modules() if part is layer), type(layer).__name__)
