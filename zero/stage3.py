"""Stage 3: weights are cut as well. A layer's weights are gathered before its forward, and again before its backward,
and freed after each; in between a rank has its shard.

    forward    gather 0, free 0, gather 1, free 1, …
    backward   … gather 1, reduce 1, free 1, gather 0, reduce 0, free 0

A step: an all_gather a layer in forward, an all_gather and a reduce_scatter a layer in backward, and nothing after the
update: 3n(P-1)/P bytes for each microbatch. Memory a parameter: (2 + 2 + K)/P bytes; for a moment one layer's weights,
and what stage 2 has for a moment, of layers.

Rajbhandari et al. 2019, "ZeRO", 5.3 and 7.2.2; lectures A, "ZeRO-3", and B, "ZeRO-3 (FSDP)". DeepSpeed's counterpart:
runtime/zero/stage3.py. Left out, and left to fsdp/: gathering the next layer in advance, layers that run twice or in
another order, layers in layers.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from collectives.hooks import called, in_backward
from collectives.host import Pool
from zero.bucket import Bucket
from zero.layers import named_layers, owned
from zero.mixed import Mixed
from zero.program import Program
from zero.sharded import CAP, dealt, treated
from zero.stage1 import gather
from zero.stage2 import ZeRO2

PLAIN = (int, float, str, bytes, type(None))
LAYER = 1 << 62  # bytes of a bucket that holds all of a layer


class Layer:
    """A module whose weights are gathered and freed together."""

    def __init__(self, name: str, module: nn.Module, buckets: Sequence[Bucket]):
        self.name, self.module, self.buckets = name, module, buckets


class ZeRO3(ZeRO2):
    """The handle that `wrap` returns. All ranks run equally many forwards; a rank without rows runs an empty one. Each
    forward with gradients has one backward at most, or the same number of them on all ranks.

    Hooks tell the program where this rank has come to; the program calls `_enter` and `_leave` (program.py). Weights
    in no layer (`kept`) are whole, and are reduced and gathered as in stage 2.
    """

    def __init__(self, module: nn.Module, *args: Any, layers: Sequence[Layer], kept: Sequence[Bucket], **more: Any):
        super().__init__(module, *args, **more)
        self.layers, self.kept = list(layers), list(kept)
        self.cut = [bucket for layer in layers for bucket in layer.buckets]
        self.program = Program(len(layers), called(self._enter), called(self._leave))
        self.module = weakref.ref(module)
        self.driven = False  # whether `unshard` and `reduce` are called from outside, and hooks keep still
        for part in module.modules():
            part.register_state_dict_pre_hook(called(self._check_whole))
            part.register_load_state_dict_pre_hook(called(self._check_whole))
            part.register_state_dict_post_hook(called(self._on_state_dict))
        module.register_forward_pre_hook(called(self._before_model), prepend=True)
        for i, layer in enumerate(layers):  # before other hooks, which may read weights
            layer.module.register_forward_pre_hook(called(self._before_forward, i), prepend=True)
            layer.module.register_forward_hook(called(self._after_forward, i))

    def _enter(self, i: int) -> None:
        for bucket in self.layers[i].buckets:
            # IDEA: weights are whole only while their layer runs.
            bucket.unshard()  # [n]

    def _leave(self, i: int, backward: bool) -> None:
        for bucket in self.layers[i].buckets:
            if bucket.whole:
                if backward and bucket.trained:
                    self.start(bucket)  # the gradient becomes [n/dp]
                bucket.reshard()  # [n/dp]

    def _before_model(self, module: nn.Module) -> None:
        """A forward begins; not one of a copy of the module, which has our hooks as well."""
        if not self.driven and module is self.module():
            self.program.begin(torch.is_grad_enabled())

    def _before_forward(self, i: int, module: nn.Module) -> None:
        """Layer i is about to run."""
        layer = self.layers[i]
        if module is not layer.module:
            return
        if in_backward():
            raise RuntimeError(f"{layer.name} runs inside of a backward, as in recomputation: do that inside the layer")
        if self.driven and not all(bucket.whole for bucket in layer.buckets):
            raise RuntimeError(f"{layer.name} runs in shards: call `unshard` before, since it is called from outside")
        if not self.driven and (later := self.program.forward(i, torch.is_grad_enabled())) is not None:
            raise ValueError(
                f"stage 3 gathers each layer once a forward, in one order, but {self.layers[i].name} runs after "
                f"{self.layers[later].name}: leave it out of `layers`, then it stays whole"
            )

    def _after_forward(self, i: int, module: nn.Module, args: Any, output: Any) -> None:
        """Layer i has run. Its backward begins with the first of its outputs whose gradient is there."""
        layer = self.layers[i]
        if module is not layer.module:
            return
        leaves = tree_leaves(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        own = {bucket.weights.data_ptr() for bucket in layer.buckets}
        if any(tensor.untyped_storage().data_ptr() in own for tensor in tensors):
            raise ValueError(f"{layer.name} returns its weights, which are freed now: leave it out of `layers`")
        if self.driven:
            return
        if leaves and not tensors and not all(isinstance(leaf, PLAIN) for leaf in leaves):
            raise ValueError(f"{layer.name} returns a {type(leaves[0]).__name__}, whose tensors stage 3 does not find")
        outputs = [tensor for tensor in tensors if tensor.requires_grad]
        if outputs:
            register_multi_grad_hook(outputs, called(self._before_backward, i), mode="any")
        self.program.leave()

    def _before_backward(self, i: int) -> None:
        """The backward of layer i is about to run."""
        if not self.driven:
            self.program.backward(i)

    def _on_gradient(self, param: nn.Parameter) -> None:
        """Autograd has added to `p.grad`; it is reduced when the program leaves the layer, not before."""
        if not self.bucket_of[param].whole:
            raise RuntimeError(
                "a weight was read when its layer did not run, as not a number: leave it out of `layers`"
            )
        super(ZeRO2, self)._on_gradient(param)

    def end_of_backward(self) -> None:
        """Complete the program, with backwards that this rank has not had, and reduce what is in no layer."""
        self.program.complete_all()
        for bucket in self.kept:
            if bucket.trained:
                self.start(bucket)

    def after_step(self) -> None:
        """After the optimizer: shards are the masters, rounded; weights that stay whole are gathered."""
        self._shard_again()
        gather([bucket for bucket in self.kept if bucket.trained])

    def after_load(self) -> None:
        """After the shards were given values: the same, for frozen weights too."""
        self._shard_again()
        gather(self.kept)

    def _shard_again(self) -> None:
        for bucket in self.cut:
            bucket.take_masters()
            if bucket.whole:  # somebody has gathered the weights of before
                bucket.reshard()

    # -- from outside --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """As in every stage. What was driven from outside is driven by hooks again, and in shards."""
        super().finish()
        self.driven = False
        for bucket in self.cut:
            if bucket.whole:
                bucket.reshard()

    def unshard(self, module: nn.Module) -> None:
        """Gather the weights of the layers in `module`. From here on until `finish` hooks gather and reduce nothing:
        whoever calls this for a pipeline's parts of a step also calls `reshard` and `reduce`, alike on all ranks.
        """
        self.program.complete()
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
        """Around reading or writing the module's weights by hand, as in every stage. Views of them die at its end, a
        state dict is a copy.
        """
        self.program.complete()
        gathered = [bucket for bucket in self.cut if not bucket.whole]
        for bucket in gathered:
            bucket.unshard()
        driven, self.driven = self.driven, True  # a forward inside gathers and frees nothing
        try:
            with super().whole():
                yield
        finally:
            self.driven = driven
            for bucket in gathered:
                bucket.reshard()

    def _check_whole(self, module: nn.Module) -> None:
        """A state dict of a part of the module is about to be made, or loaded."""
        own = [self.bucket_of[param] for param in module.parameters(recurse=False) if param in self.bucket_of]
        if not all(bucket.whole for bucket in own):
            raise RuntimeError(
                "the weights are in shards: read and load them inside `with handle.whole():`, on all ranks"
            )

    def _on_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """A state dict of a part of the module was made: it outlives the weights that it shows."""
        cut = set(self.cut)
        for name, param in module.named_parameters(recurse=False):
            if self.bucket_of.get(param) in cut and prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name].clone()


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
    chosen = named_layers(module, layers)
    told = {"threshold": threshold, "layers": [name for name, _ in chosen]}
    named, buffered = treated(module, group, params, cap, stage=3, average=average, mixed=mixed, host=host, **told)
    inside, rest = owned(module, named, chosen, threshold)
    made = {"parts": group.size(), "device": device, "mixed": mixed, "host": host}
    built = [
        Layer(name, layer, [Bucket(members, group, sharded=True, **made) for members in dealt(params, LAYER)])
        for (name, layer), params in zip(chosen, inside, strict=True)
        if params
    ]
    kept = [Bucket(members, group, **made) for members in dealt(rest, cap)]
    buckets = [bucket for layer in built for bucket in layer.buckets] + kept
    settings = {"average": average, "overlap": overlap, "layers": built, "kept": kept}
    return ZeRO3(module, list(named.values()), buffered, buckets, group, **settings)
