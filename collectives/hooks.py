"""Hooks that do not keep alive what they call.

A strategy's hooks sit on modules and parameters, which outlive it, and Python's garbage collector does not see the
cycle through autograd. So a hook refers to its handle weakly, and does nothing once the handle is gone.
"""

import functools
import inspect
import weakref
from collections.abc import Callable

import torch


def called(method: Callable, *first: object) -> Callable:
    """A hook that calls the method of a handle for as long as the handle lives: with `first`, and as many of the hook's
    own arguments as it takes.
    """
    weak, count = weakref.WeakMethod(method), _arguments(method.__func__) - len(first)

    def hook(*args: object) -> object:
        alive = weak()
        return None if alive is None else alive(*first, *args[:count])

    return hook


@functools.cache
def _arguments(function: Callable) -> int:
    """Of a method, beside `self`. Hooks are made in every forward, and to look into a signature is slow."""
    return len(inspect.signature(function).parameters) - 1


def in_backward() -> bool:
    """Whether this thread is inside of a backward: a forward that runs now is one that is run again."""
    return torch._C._current_graph_task_id() != -1
