"""Hooks that do not keep alive what they call.

A strategy's hooks sit on modules and parameters, which outlive it, and Python's garbage collector does not see the
cycle through autograd. So a hook refers to its handle weakly, and does nothing once the handle is gone.
"""

import inspect
import weakref
from collections.abc import Callable


def called(method: Callable, *first: object) -> Callable:
    """A hook that calls the method of a handle for as long as the handle lives: with `first`, and as many of the hook's
    own arguments as it takes.
    """
    weak, count = weakref.WeakMethod(method), len(inspect.signature(method).parameters) - len(first)

    def hook(*args: object) -> object:
        alive = weak()
        return None if alive is None else alive(*first, *args[:count])

    return hook
