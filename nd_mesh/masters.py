"""Float32 masters for copies: a strategy that keeps every weight on every rank (ddp/), in 16 bits.

    backward    16-bit weights, whose gradients autograd adds up in float32       torch's `grad_dtype`
    finish      the strategy adds them over the ranks, in float32, as ever        the masters' gradients
    after_step  the weights are the masters, rounded

Memory a parameter: 2 for the weight, 4 for the gradient, 4 for the master, and the optimizer's. Sharded strategies have
masters of their own (zero/mixed.py, fsdp/mixed.py), 4/P bytes. Micikevicius et al. 2018, 3.1. PyTorch's counterpart:
none; torch.autocast keeps float32 weights and casts them in every forward.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from collectives import layout
from collectives.replicas import Replica


class Masters(Replica):
    """The handle that `wrap` returns: `inner`, whose parameters are 16-bit, and a master for each of them."""

    def __init__(self, inner: Replica):
        self.inner, self.params = inner, inner.parameters()
        self.masters = [_master(param) for param in self.params]

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates: a float32 master of each parameter, the same on every rank. Its `grad` is valid
        until the next backward.
        """
        return self.masters

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around the backward of a microbatch that is not the last."""
        return self.inner.no_sync()

    def deferring(self) -> contextlib.AbstractContextManager[None]:
        """Around all microbatches of a step of a pipeline."""
        return self.inner.deferring()

    def finish(self) -> None:
        """Once a step. After: `grad` of the masters is the sum over the group, in place of what was there; no parameter
        of the module has one.
        """
        self.inner.finish()
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad, param.grad = param.grad, None

    @torch.no_grad()
    def after_step(self) -> None:
        """After the optimizer: the weights are the masters, rounded."""
        if self.params:  # a pipeline's rank may have none
            torch._foreach_copy_(self.params, self.masters)

    def after_load(self) -> None:
        """After the masters were given values: the same."""
        self.after_step()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Around reading or writing the module's weights by hand. A master that rounds to its weight stays as it is,
        any other becomes the weight.
        """
        with self.inner.whole():
            yield
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                master.copy_(torch.where(master.to(param.dtype) == param, master, param))


def wrap(
    version: Callable[..., Replica],
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    weights: torch.dtype,
    device: torch.device,
    params: Sequence[nn.Parameter] | None = None,
    **settings: object,
) -> Masters:
    """Make `module`, which is on the meta device, data parallel over `group` by `version`, one of ddp/'s `wrap`, in
    `weights`. After: its parameters have memory in that dtype, and no values: give the masters values, the same on
    every rank, and call `after_load`.
    """
    for param in module.parameters() if params is None else params:
        layout.point(param, torch.zeros_like(param, dtype=weights, device=device))
        # IDEA: a gradient is wider than its weight: in bfloat16, 256 + 1 is 256.
        param.grad_dtype = torch.float32
    return Masters(version(module, group, params=params, device=device, **settings))


def _master(param: nn.Parameter) -> nn.Parameter:
    master = nn.Parameter(param.detach().float())
    master.held = param.held
    return master
