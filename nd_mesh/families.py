"""One handle for parameters whose gradients are summed over different groups: dense ones and experts.

PyTorch's counterpart: none, DDP has one group; Megatron-LM has buffers and expert_parallel_buffers in one DDP.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from collectives.replicas import Replica


class Families(Replica):
    """Handles of the same module, each of some of its parameters, as one. What one is asked all do, in order."""

    def __init__(self, handles: Sequence[Replica]):
        self.handles = list(handles)

    def parameters(self) -> list[nn.Parameter]:
        """Those of all."""
        return [param for handle in self.handles for param in handle.parameters()]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of a microbatch that is not the last."""
        with self._all("no_sync"):
            yield

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Around all microbatches of a step of a pipeline."""
        with self._all("deferring"):
            yield

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside all weights are whole."""
        with self._all("whole"):
            yield

    @contextlib.contextmanager
    def _all(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(getattr(handle, name)())
            yield

    def finish(self) -> None:
        """Once a step: all gradients are reduced."""
        for handle in self.handles:
            handle.finish()

    def padding(self) -> str:
        """How the parameters are cut, for a person."""
        return ", ".join(filter(None, (handle.padding() for handle in self.handles)))

    def after_step(self) -> None:
        """After the optimizer."""
        for handle in self.handles:
            handle.after_step()

    def after_load(self) -> None:
        """After `parameters()` were given values."""
        for handle in self.handles:
            handle.after_load()

    def unshard(self, module: nn.Module) -> None:
        """Gather a module's weights."""
        for handle in self.handles:
            handle.unshard(module)

    def reshard(self, module: nn.Module) -> None:
        """Free them."""
        for handle in self.handles:
            handle.reshard(module)

    def reduce(self, module: nn.Module) -> None:
        """Reduce a module's gradients."""
        for handle in self.handles:
            handle.reduce(module)
