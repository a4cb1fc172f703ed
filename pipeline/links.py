"""Links: what crosses the boundaries of stages: several tensors of any shape and dtype, each direction on its group.

A message is a list of tensors, sent at once. Its description (shape, dtype, whether a gradient comes back) goes ahead
of it in the first step of its kind only. Afterwards both ends know it, so that memory can wait for the message while
the rank computes, and nothing but the tensors travels: B·T·D elements a microbatch and direction. A gradient is
described by the activation that it belongs to.

PyTorch's counterpart: _batch_p2p and _RecvInfo of torch/distributed/pipelining, whose shapes are those of the first
microbatch for ever.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import p2p
from collectives.watch import about
from pipeline.plan import Plan
from pipeline.program import Channel, Message, message_to, one_a_direction


class Kind(NamedTuple):
    """What there is to know of a tensor in order to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool  # whether its gradient is wanted


Kinds = tuple[Kind, ...]  # of the tensors of a message
Links = Mapping[Channel, dist.ProcessGroup]


def connect(plan: Plan, pipelines: Sequence[Sequence[int]], new_group: Callable) -> Links:
    """The groups of this rank's channels. Collective over the world: all ranks call it alike.

    pipelines: of each pipeline of the job the global ranks, by place. new_group(ranks, label): as Runtime.new_group.
    """
    links = {}
    for ranks in pipelines:
        for channel, ends in sorted(channels(plan).items()):
            # IDEA: a group for each direction of a boundary: on it one rank sends only, and the other receives only.
            group = new_group(sorted(ranks[end] for end in ends), "pipeline {} {}".format(*channel))
            if group is not None:
                links[channel] = group
    return links


def channels(plan: Plan) -> dict[Channel, tuple[int, int]]:
    """The channels of a plan, each with the two places between which it lies."""
    messages = [message_to(plan, action) for actions in plan.actions for action in actions]
    return {one_a_direction(each): (each.source_rank, each.target_rank) for each in messages if each is not None}


def described(tensors: Sequence[Tensor]) -> Kinds:
    """What a receiver must know of these."""
    return tuple(Kind(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)


def gradients_of(kinds: Kinds) -> Kinds:
    """What is known of the gradients that come back for tensors of these kinds."""
    return tuple(Kind(kind.shape, kind.dtype, False) for kind in kinds if kind.grad)


class Outgoing:
    """A message on its way, behind its description if that is `told`. Its tensors must stay until `settle` returns."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, told: Kinds | None):
        peer, text = 1 - group.rank(), () if told is None else _encoded(told, device)
        with about("description"):
            self.works = [p2p.isend(part, peer, group=group) for part in text]
        self.works.append(p2p.exchange([(tensor, peer) for tensor in tensors], [], group=group))

    def settle(self) -> None:
        """Return when the peer has it."""
        for work in self.works:
            work.wait()


class Incoming:
    """A message that is awaited. `kinds` None if its description comes first: then nothing can wait for it in advance,
    since what stands before it on the group must be received before.
    """

    def __init__(self, kinds: Kinds | None, group: dist.ProcessGroup, device: torch.device):
        self.kinds, self.group, self.device, self.peer = kinds, group, device, 1 - group.rank()
        if kinds is not None:
            self._receive()

    def _receive(self) -> None:
        self.tensors = [torch.empty(kind.shape, dtype=kind.dtype, device=self.device) for kind in self.kinds]
        self.work = p2p.exchange([], [(tensor, self.peer) for tensor in self.tensors], group=self.group)

    def wait(self) -> list[Tensor]:
        """The tensors, when they are here."""
        if self.kinds is None:
            length = torch.empty(1, dtype=torch.int64, device=self.device)
            with about("description"):
                p2p.recv(length, self.peer, group=self.group)
                text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
                p2p.recv(text, self.peer, group=self.group)
            self.kinds = _decoded(text)
            self._receive()
        self.work.wait()
        return self.tensors


def _encoded(kinds: Kinds, device: torch.device) -> tuple[Tensor, Tensor]:
    """A length, and a text of that length, as tensors."""
    text = json.dumps([(kind.shape, str(kind.dtype).removeprefix("torch."), kind.grad) for kind in kinds]).encode()
    return torch.tensor([len(text)], device=device), torch.tensor(list(text), dtype=torch.uint8, device=device)


def _decoded(text: Tensor) -> Kinds:
    return tuple(
        Kind(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in json.loads(bytes(text.tolist()))
    )


def of_message(message: Message, links: Links) -> dist.ProcessGroup:
    """The group on which a message travels."""
    return links[one_a_direction(message)]
