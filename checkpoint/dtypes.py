"""The element types a file of safetensors knows, by its names for them, and a tensor's bytes as they lie in memory."""

import torch
from torch import Tensor

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`F32` for torch.float32."""
    return _NAMES[dtype]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # of one element any stride counts as contiguous
    # IDEA: bytes are bytes: no element type, bfloat16 and float8 included, needs code of its own.
    return memoryview(flat.view(torch.uint8).numpy())
