"""Small state as text: what a scheduler, a loss scaler, a generator or a cursor keeps, in JSON and back, exactly.

    encode({"step": 3, "seen": {7: torch.tensor([1.5])}})

JSON has text, numbers, lists and tables with text for keys. What it lacks is written as a table with one key that
begins with "$": tuples, sets, bytes, tensors, arrays, tables with other keys, complex numbers. Nothing is executed when
it is read, which is what a pickle does. Floats come back to the bit: their shortest text is theirs alone. Not for
weights: a tensor here is text, and every rank that loads reads it whole.
"""

import base64
import math
from collections.abc import Mapping
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
    if type(value) is float:
        return {"$float": str(value)}
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        local = value.detach().cpu().contiguous()
        return {"$tensor": [dtype_name(value.dtype), list(value.shape), _text(raw(local))]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return {"$array": [value.dtype.str, list(value.shape), _text(np.ascontiguousarray(value).tobytes())]}
    if isinstance(value, bytes):
        return {"$bytes": _text(value)}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real), encode(value.imag)]}
    if type(value) in (tuple, set, frozenset):
        items = value if type(value) is tuple else sorted(value, key=repr)
        return {f"${type(value).__name__}": [encode(item, f"{where}[{i}]") for i, item in enumerate(items)]}
    if isinstance(value, Mapping):  # an OrderedDict, a defaultdict, a Counter come back as a dict
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"$dict": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
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
        return _MAKE[tag](value[tag])
    return {key: decode(item) for key, item in value.items()}


def _text(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


def _tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    data = bytearray(base64.b64decode(text))
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    if data:
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
    return tensor


def _array(dtype: str, shape: list[int], text: str) -> np.ndarray | np.generic:
    array = np.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).reshape(shape)
    return array if shape else array[()]


_MAKE = {
    "$float": float,
    "$tensor": lambda value: _tensor(*value),
    "$array": lambda value: _array(*value),
    "$bytes": base64.b64decode,
    "$complex": lambda value: complex(*map(decode, value)),
    "$tuple": lambda value: tuple(map(decode, value)),
    "$set": lambda value: set(map(decode, value)),
    "$frozenset": lambda value: frozenset(map(decode, value)),
    "$dict": lambda value: {decode(key): decode(item) for key, item in value},
}
