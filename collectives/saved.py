"""What autograd keeps for backward: the storages behind the tensors that a forward saves, each counted once.

A view keeps all of its storage, and a tensor that two operations save is kept once, so storages are what counts; an
input or an output is among them where an operation saves it. Not seen is what a function puts aside by itself, and what
hooks further in keep instead (recomputation). PyTorch's counterpart: saved_tensors_hooks, on which this stands.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Saved:
    """Of the tensors that were saved under `saving`, those that autograd still keeps."""

    def __init__(self) -> None:
        self._kept: list[weakref.ref[Tensor]] = []

    def tensors(self) -> list[Tensor]:
        """Each as often as it was saved, in the order of saving."""
        return [tensor for kept in self._kept if (tensor := kept()) is not None]

    def nbytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes of their storages, but for those in which these tensors (parameters) lie."""
        known = {tensor.untyped_storage().data_ptr() for tensor in without}
        storages = [tensor.untyped_storage() for tensor in self.tensors()]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for place, size in sizes.items() if place not in known)

    def _keep(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # a result that its own operation saves would keep that operation, and so itself, alive
        self._kept.append(weakref.ref(kept))
        return kept


@contextlib.contextmanager
def saving() -> Iterator[Saved]:
    """Watch what autograd saves on this thread inside of the block. It can be asked later what is still kept."""
    saved = Saved()
    with saved_tensors_hooks(saved._keep, lambda kept: kept):
        yield saved
