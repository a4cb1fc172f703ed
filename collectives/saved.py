"""What autograd keeps for backward: the storages behind the tensors that a forward saves, each counted once.

    with saving() as saved:
        y = block(x)
    saved.nbytes(block.parameters())

A view keeps all of its storage, and a tensor that two operations save is kept once, so storages are what counts; input
and output are among them where an operation saves them. What a hook further in keeps in their stead (recomputation) is
not seen, nor what a function puts aside by itself. PyTorch's counterpart: saved_tensors_hooks, which this stands on.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Saved:
    """Of the tensors that were saved under `saving`, those that autograd still keeps."""

    def __init__(self) -> None:
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()

    def tensors(self) -> list[Tensor]:
        """Each as often as it was saved, in no order."""
        return [place.tensor for place in self._places]

    def nbytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes of their storages; not of those that these tensors (parameters) lie in."""
        known = {tensor.untyped_storage().data_ptr() for tensor in without}
        storages = (tensor.untyped_storage() for tensor in self.tensors())
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for place, size in sizes.items() if place not in known)

    def _pack(self, tensor: Tensor) -> "_Place":
        self._places.add(place := _Place(tensor.detach()))
        return place


class _Place:
    """What autograd holds in place of a tensor: it goes when autograd lets go."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


@contextlib.contextmanager
def saving() -> Iterator[Saved]:
    """Watch what autograd saves on this thread inside the block; what it keeps of that can be asked later too."""
    saved = Saved()
    with saved_tensors_hooks(saved._pack, lambda place: place.tensor):
        yield saved
