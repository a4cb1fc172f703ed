"""Memory that comes and goes under tensors that stay.

A view of a tensor, a parameter that points to it, and what autograd has saved of either, know a place in a storage, not
the memory behind it. So memory can be freed between two uses and allocated again, elsewhere, and all of them read what
is there then. Reading in between is reading at address 0: whoever frees must see to it that nobody does.

PyTorch's counterpart: alloc_storage and free_storage of torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

import torch
from torch import Tensor


class Memory:
    """A flat tensor [numel]. It has memory at first, since views can be made only then."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self.tensor = torch.empty(numel, dtype=dtype, device=device)

    def allocate(self) -> Tensor:
        """Have memory, uninitialised where there was none. Returns the tensor."""
        if not self.allocated:  # a resize to the same size would copy
            self.tensor.untyped_storage().resize_(self.tensor.nbytes)
        return self.tensor

    def free(self) -> None:
        """Have none."""
        self.tensor.untyped_storage().resize_(0)

    @property
    def allocated(self) -> bool:
        """Whether there is memory."""
        return self.tensor.untyped_storage().nbytes() > 0 or not len(self.tensor)
