"""Faults planted in a module's source: its functions run the changed code, wherever they have been imported to."""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType


@contextlib.contextmanager
def planted(file: str, original: str, fault: str) -> Iterator[None]:
    """Inside, pipeline/FILE.py does what it would with `fault` in the place of `original`, which is in it once."""
    module = importlib.import_module(f"pipeline.{file}")
    source = Path(module.__file__).read_text()
    assert source.count(original) == 1, f"{module.__name__} has {source.count(original)} times {original!r}"
    changed = {"__name__": module.__name__}
    exec(compile(source.replace(original, fault), module.__file__, "exec"), changed)
    functions, theirs = dict(_functions(vars(module), module)), dict(_functions(changed, module))
    before = {name: function.__code__ for name, function in functions.items()}
    try:
        for name, function in functions.items():
            if theirs[name].__code__ != before[name]:
                function.__code__ = theirs[name].__code__
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = before[name]


def _functions(names: dict, module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Functions, methods and properties that are written in the module."""
    for name, value in names.items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield from ((f"{name}.{inner}", each) for inner, each in _functions(vars(value), module))
        elif isinstance(value, property):
            yield name, value.fget
        elif inspect.isfunction(value) and value.__module__ == module.__name__:
            yield name, value
