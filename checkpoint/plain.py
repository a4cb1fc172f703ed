"""Small state as text: what a scheduler, a loss scaler, a generator or a cursor keeps, in JSON and back, exactly.

    encode({"step": 3, "seen": {7: torch.tensor([1.5])}})

JSON has text, numbers, lists and tables with text for keys. What it lacks is written as a table with one key that
begins with "$": tuples, sets, bytes, tensors, arrays, tables with other keys, complex numbers. Nothing is executed when
it is read, which is what a pickle does. Floats come back to the bit: their shortest text is theirs alone. Not for
weights: a tensor here is text, and every rank that loads reads it whole.
"""

import base64
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from checkpoint.dtypes import DTYPES, dtype_name, raw


def encode(value: Any, where: str = "state") -> Any:
    """A value for `json.dumps`, from which `decode` makes an equal one; a tensor on the CPU, whatever its device was.

    Raises ValueError naming the place of what is neither plain nor a tensor nor an array.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):  # an OrderedDict, a defaultdict, a Counter come back as a dict
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"$dict": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    # IDEA: what JSON lacks is a table with one key that no table of ours has.
    for tag, (types, write, _) in _KINDS.items():
        if isinstance(value, types):
            return {tag: write(value, where)}
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        "give its state_dict(), or plain values, tensors and arrays"
    )


def decode(value: Any) -> Any:
    """What was encoded."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))).startswith("$"):
        return _KINDS[tag][2](value[tag])
    return {key: decode(item) for key, item in value.items()}


def _text(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


def _from_tensor(value: torch.Tensor, where: str) -> list:
    if value.dtype not in DTYPES.values():
        raise ValueError(f"{where} is a tensor of {value.dtype}, which a checkpoint cannot hold")
    return [dtype_name(value.dtype), list(value.shape), _text(raw(value.detach().cpu().contiguous()))]


def _to_tensor(told: list) -> torch.Tensor:
    dtype, shape, text = told
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    if data := bytearray(base64.b64decode(text)):
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
    return tensor


def _from_array(value: np.ndarray | np.generic, where: str) -> list:
    if value.dtype.kind not in "biufc":
        raise ValueError(f"{where} is an array of {value.dtype}, which a checkpoint cannot hold: give numbers")
    shape = list(value.shape) if isinstance(value, np.ndarray) else None
    return [value.dtype.str, shape, _text(np.ascontiguousarray(value).tobytes())]


def _to_array(told: list) -> np.ndarray | np.generic:
    dtype, shape, text = told
    array = np.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)
    return array[0] if shape is None else array.reshape(shape)


def _items(values: Iterable, where: str) -> list:
    return [encode(item, f"{where}[{i}]") for i, item in enumerate(values)]


_KINDS = MappingProxyType(  # tag: which values, how one is written, how it is read
    {
        "$tensor": (torch.Tensor, _from_tensor, _to_tensor),
        "$array": (np.ndarray | np.generic, _from_array, _to_array),
        "$float": (float, lambda value, where: str(value), float),  # what is not finite
        "$complex": (
            complex,
            lambda value, where: _items((value.real, value.imag), where),
            lambda told: complex(*decode(told)),
        ),
        "$bytes": (bytes, lambda value, where: _text(value), base64.b64decode),
        "$tuple": (tuple, _items, lambda told: tuple(decode(told))),
        "$set": (set, lambda value, where: _items(sorted(value, key=repr), where), lambda told: set(decode(told))),
        "$dict": (dict, None, lambda told: {decode(key): decode(item) for key, item in told}),
    }
)
