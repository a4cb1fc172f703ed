"""What is in flight on the network of tests/ordered.py: entries, and the ends of their messages.

Buffers are where they hurt most. From its posting until its rank has waited, what is sent must not change, and what
receives is garbage into which nobody may write. On a real network both often go well: small messages are copied at
once, and arrive before they are waited for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.threads import Group


class End:
    """One end of a message: a tensor that is sent, or one that receives."""

    def __init__(self, group: Group, sends: bool, tensor: Tensor, peer: int):
        if not 0 <= peer < group.size() or peer == group.rank():
            raise ValueError(f"rank {group.rank()} of {group.size()} has no peer {peer} on {group.group_name}")
        self.sends, self.tensor, self.me, self.peer = sends, tensor.detach(), group.me, group.members[peer]
        self.line = (group.group_name, *((self.me, self.peer) if sends else (self.peer, self.me)))  # group, from, to
        self.size = f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        if not sends:
            self.tensor.fill_(garbage(tensor.dtype))
        self.posted = self.tensor.clone()
        self.arrived: Tensor | None = None

    def __str__(self) -> str:
        return f"send {self.size} to {self.peer}" if self.sends else f"receive {self.size} from {self.peer}"

    def is_untouched(self) -> bool:
        """Whether the memory holds, bit for bit, what it held when posted."""
        now, then = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (self.tensor, self.posted))
        return torch.equal(now, then)


def garbage(dtype: torch.dtype) -> float:
    """What nobody sends."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max // 3


class Entry:
    """What a rank has posted at once: an end of each message."""

    def __init__(self, group: Group, ends: Sequence[End], lanes: str, posted_at: int):
        self.group, self.ends, self.left = group, ends, list(ends)  # left: those that have not passed
        peers = {end.peer if lanes == "pair" else None for end in ends}
        self.lanes = {(group.me, group.group_name, peer) for peer in peers}  # the queues in which it stands
        self.posted_at = self.passed_at = posted_at  # steps
        self.started = self.waited = False

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.left or self.ends))}; {self.group.group_name}]"

    @property
    def done(self) -> bool:
        """Whether all its messages have passed."""
        return not self.left

    def wait(self) -> None:
        """What its handle calls."""
        self.group.network.wait(self)
