"""How an algorithm is written here: a generator, which yields what it waits for before its next step.

    @stepwise
    def to_the_next(output, input, *, group):
        yield p2p.exchange([(input, after)], [(output, before)], group=group)  # a step is under way
        ...                                                                    # it is over: add, and start another

Called, it runs to its end. With async_op=True it starts its first step and returns a handle: a ring then needs a hand
between its steps, which is `wait`, or `advance` for one step at a time; the direct exchange, a single step, does not.
What a generator holds, its buffers, lives as long as its handle. PyTorch's counterpart: Work, whose steps a thread or
the GPU carries out.

All ranks go through the same steps, idle in some. So those of several calls in flight on one group are posted in the
same order everywhere, if all ranks wait for the calls in the same order. A rank that left out a step would be ahead
with the next call's, and its messages would meet others than theirs.
"""

import functools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives.p2p import Handle

Steps = Generator[Handle, None, Any]  # may return something to the algorithm of which it is a part


class InSteps:
    """A collective in flight, a handle like p2p.Handle."""

    def __init__(self, steps: Steps):
        self._steps, self._work = steps, None
        self._go_on()

    def _go_on(self) -> None:
        with torch.no_grad():
            self._work = next(self._steps, None)

    def advance(self) -> bool:
        """Wait for the step that is under way, and start the next one. Returns whether there is one; if not, it is
        over.
        """
        work, self._work = self._work, None  # one that has raised does not go on
        if work is not None:
            work.wait()
            self._go_on()
        return self._work is not None

    def wait(self) -> None:
        """Go through all that is left; a second call does nothing."""
        while self.advance():
            pass


def stepwise(algorithm: Callable[..., Steps]) -> Callable[..., InSteps | None]:
    """Decorator: the algorithm as a collective, which takes async_op and returns a handle, or None when it is over.

    Raises ValueError, before anything is sent, for tensors that are not contiguous or of different dtypes, and on a
    rank that is no member of the group.
    """

    @functools.wraps(algorithm)
    def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> InSteps | None:
        _check(algorithm.__name__, args, kwargs)
        handle = InSteps(algorithm(*args, **kwargs))
        if async_op:
            return handle
        handle.wait()
        return None

    return collective


def _check(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for which in ("group", "inside", "between"):
        if kwargs.get(which, ...) is None:
            raise ValueError(f"{name}: this rank is no member of the {which}; let only members call it")
    lists = [given if isinstance(given, list | tuple) else [given] for given in (*args, *kwargs.values())]
    tensors = [tensor for given in lists for tensor in given if isinstance(tensor, Tensor)]
    for tensor in tensors:
        if not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"{name}: a tensor {shape} with strides {strides} has gaps; give it contiguous")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{name}: tensors of {tensors[0].dtype} and of {tensor.dtype}; give both the same")


def idle(steps: int = 1) -> Steps:
    """Steps in which others have something to do, and this rank has not."""
    for _ in range(steps):
        yield Handle([])


def interleaved(parts: Sequence[Steps]) -> Steps:
    """Several at once, in turn: all take their first step; then, whenever the one whose turn it is has arrived, its
    next step starts.
    """
    flying = deque((part, work) for part in parts if (work := next(part, None)) is not None)
    while flying:
        part, work = flying.popleft()
        # IDEA: while one chunk is waited for and added, the others are on their way.
        yield work
        if (work := next(part, None)) is not None:
            flying.append((part, work))
