"""Point-to-point: send, receive, and exchange, on which every algorithm written out in this project stands.

With comm.py the only file that calls torch.distributed's operations. The names, the order of the arguments and the
handles are torch.distributed's own; peers are ranks *in the group*. Cost: one message, its bytes.

Right under the stricter backend: on NCCL, sends and receives between two ranks on one group run in the order in which
they were posted, each blocking those behind it, unless they were posted together in one batch. So whatever moves both
ways at once is one `exchange`.

`exchange`, and with it all else here, is seen by whoever watches (watch.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.watch import watched

Message = tuple[Tensor, int]  # a tensor and the peer, a rank in the group


class Handle:
    """An operation in flight. `wait` returns when its buffers hold the result and may be used again.

    works: what to wait for. then: what is left to do on this rank afterwards. keep: buffers that must live until the
    end.
    """

    def __init__(
        self, works: Sequence[Any], then: Callable[[], object] | None = None, keep: Sequence[Tensor | None] = ()
    ):
        self._works, self._then, self._keep = works, then, keep

    def advance(self) -> bool:
        """Wait for the step that is under way, and start the next one. Returns whether there is one; here there is only
        one.
        """
        works, then, self._works, self._then = self._works, self._then, (), None
        for work in works:
            work.wait()
        if then is not None:
            with torch.no_grad():
                then()
        self._keep = ()
        return False

    def wait(self) -> None:
        """Wait for all of it; a second call does nothing."""
        while self.advance():
            pass


@watched
def exchange(sends: Sequence[Message], receives: Sequence[Message], *, group: dist.ProcessGroup) -> Handle:
    """Post all sends and receives as one batch, in any order of peers, without waiting: no ranks can block each other.

    Empty tensors are skipped, on both sides alike. A tensor that is sent must not change, one that receives not be
    read, before `wait`.
    """
    outgoing = [(_readable(tensor.detach(), group), peer) for tensor, peer in sends if tensor.numel()]
    incoming = [(tensor.detach(), peer) for tensor, peer in receives if tensor.numel()]
    landing = [(_writable(tensor, group), peer) for tensor, peer in incoming]
    batch = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in landing]
    batch += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in outgoing]
    works = dist.batch_isend_irecv(batch) if batch else []

    def settle() -> None:
        for (tensor, _), (dense, _) in zip(incoming, landing, strict=True):
            if dense is not tensor:
                tensor.copy_(dense)

    return Handle(works, settle, keep=[tensor for tensor, _ in (*outgoing, *landing)])


def dense_like(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, else uninitialised contiguous memory of its shape, to be copied back."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _readable(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.to(_memory(tensor, group)).contiguous()


def _writable(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    memory = _memory(tensor, group)
    return (
        dense_like(tensor) if tensor.device == memory else torch.empty(tensor.shape, dtype=tensor.dtype, device=memory)
    )


def _memory(tensor: Tensor, group: dist.ProcessGroup) -> torch.device:
    """From where the backend can send: gloo's send and receive know the CPU only."""
    on_cpu = tensor.device.type == "cpu" or dist.get_backend(group) != "gloo"
    return tensor.device if on_cpu else torch.device("cpu")


def isend(tensor: Tensor, dst: int, *, group: dist.ProcessGroup) -> Handle:
    """Start to send to rank `dst` of the group; it ends when the peer receives."""
    return exchange([(tensor, dst)], [], group=group)


def irecv(tensor: Tensor, src: int, *, group: dist.ProcessGroup) -> Handle:
    """Start to receive from rank `src` of the group, into `tensor`, which has the message's shape and dtype."""
    return exchange([], [(tensor, src)], group=group)


def send(tensor: Tensor, dst: int, *, group: dist.ProcessGroup) -> None:
    """Send to rank `dst` of the group and wait until it receives: two ranks that both send first wait for ever; use
    `exchange`.
    """
    isend(tensor, dst, group=group).wait()


def recv(tensor: Tensor, src: int, *, group: dist.ProcessGroup) -> None:
    """Receive from rank `src` of the group into `tensor`."""
    irecv(tensor, src, group=group).wait()
