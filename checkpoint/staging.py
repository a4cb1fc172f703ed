"""A copy in host memory of what is to be written, so that training may go on and change the original.

Two slots, used in turn: one is written from while the next is filled, and there is no third, so the memory is bounded
by twice what this rank writes. On a GPU they are pinned. The copy is one also where the original is in host memory
already: a view would be saved as it is later (Mohan et al. 2021, "CheckFreq", snapshot and persist).
"""

import torch
from torch import Tensor

from checkpoint.shard import Values
from collectives.host import Pool

ALIGNMENT = 64  # bytes: the widest load of a processor

SLOTS = 2


class Staging:
    """The slots of a rank. Whoever stages knows that the last but one is written."""

    def __init__(self) -> None:
        self._slots: list[Tensor | None] = [None] * SLOTS
        self._next = 0

    def copy(self, values: Values) -> Values:
        """The same boxes with values of their own, complete when this returns."""
        tensors = [tensor for boxes in values.values() for _, tensor in boxes]
        slot = self._slot(sum(_room(tensor) for tensor in tensors))
        copies, at = {}, 0
        for name, boxes in values.items():
            copies[name] = []
            for box, tensor in boxes:
                flat = slot[at : at + tensor.nbytes].view(tensor.dtype)
                # IDEA: a copy, also of what is in host memory: training changes the original in place.
                copies[name].append((box, flat.view(tensor.shape).copy_(tensor, non_blocking=True)))
                at += _room(tensor)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copies

    def _slot(self, nbytes: int) -> Tensor:
        """The slot whose turn it is, at least so large."""
        self._next = (self._next + 1) % SLOTS
        slot = self._slots[self._next]
        if slot is None or slot.numel() < nbytes:
            self._slots[self._next] = None  # the old one first
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            slot = self._slots[self._next] = Pool(device).empty(nbytes, torch.uint8)
        return slot


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
