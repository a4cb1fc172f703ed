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
        return [param for handle in self.handles for param in handle.parameters()]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._all("no_sync"):
            yield

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        with self._all("deferring"):
            yield

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        with self._all("whole"):
            yield

    @contextlib.contextmanager
    def _all(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(getattr(handle, name)())
            yield

    def finish(self) -> None:
        for handle in self.handles:
            handle.finish()

    def padding(self) -> str:
        return ", ".join(filter(None, (handle.padding() for handle in self.handles)))

    def after_step(self) -> None:
        for handle in self.handles:
            handle.after_step()

    def after_load(self) -> None:
        for handle in self.handles:
            handle.after_load()

    def unshard(self, module: nn.Module) -> None:
        for handle in self.handles:
            handle.unshard(module)

    def reshard(self, module: nn.Module) -> None:
        for handle in self.handles:
            handle.reshard(module)

    def reduce(self, module: nn.Module) -> None:
        for handle in self.handles:
            handle.reduce(module)
