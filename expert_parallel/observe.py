"""What a mixture shows in each step: tokens an expert, imbalance, overflow, the entropy of its router, its losses.

A layer records in forwards in training mode: not in evaluation, and not in a forward that recomputation runs again. The
records of all layers and ranks are added up once a step, in one message.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import comm
from collectives.hooks import in_backward
from expert_parallel.sequences import NOBODY, chosen

_SUMS = ("dropped", "routed", "entropy", "balance", "z")


@dataclass(frozen=True)
class Observation:
    """One layer in one step, over the whole global batch."""

    tokens: Tensor  # [E] choices that fell on each expert, dropped ones too
    dropped: int  # choices for which there was no room
    entropy: float  # of the router's shares, nats a token; at most log E
    balance: float  # the loss, without its coefficient
    z: float  # likewise

    @property
    def imbalance(self) -> float:
        """The load of the busiest expert over the mean, dropped choices among it. With an expert a rank, and none
        dropped, experts compute so much longer than they must.
        """
        return (self.tokens.max() / self.tokens.double().mean().clamp(min=1e-300)).item()

    @property
    def overflow(self) -> float:
        """The share of choices that were dropped."""
        return self.dropped / max(1, int(self.tokens.sum()))


class Record:
    """What a layer has seen since it was last asked, as sums over calls."""

    def __init__(self, experts: int):
        self.experts = experts
        self.sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, experts: Tensor, kept: Tensor, shares: Tensor) -> None:
        """Choices [.., k] that were made, those that were kept (NOBODY for the others), the router's shares [.., E]."""
        routed = experts[..., 0] != NOBODY
        entropy = torch.special.entr(shares).sum(-1) * routed
        sums = {"dropped": (experts != kept).sum(), "routed": routed.sum(), "entropy": entropy.sum()}
        self._add({"tokens": chosen(experts, self.experts).flatten(0, -2).sum(0), **sums})

    def loss(self, name: str, value: Tensor) -> None:
        """A part of the loss "balance" or "z"."""
        self._add({name: value.detach()})

    def _add(self, sums: dict[str, Tensor]) -> None:
        if in_backward():
            return
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def take(self, device: torch.device) -> Tensor:
        """The sums [E + 5], float64, which holds counts exactly; the next begin at zero."""
        sums, self.sums = self.sums, {}
        nothing = {"tokens": torch.zeros(self.experts), **dict.fromkeys(_SUMS, torch.zeros(1))}
        return torch.cat([value.to(device).double().flatten() for value in (nothing | sums).values()])


def observe(records: Sequence[Record], device: torch.device, *, group: dist.ProcessGroup) -> list[Observation]:
    """Before: each rank of `group` has recorded its part of a step, in layers that all of them have. After: every rank
    has the whole of it, a layer each. Layers may differ in their number of experts.
    """
    taken = [record.take(device) for record in records]
    if not taken:
        return []
    # IDEA: all that is observed is a sum over tokens, so one message has it of all layers and ranks.
    sums = torch.cat(taken)
    comm.all_reduce(sums, group=group, ordered=True)
    sums = sums.cpu()  # once
    return [_observation(part) for part in sums.split([len(each) for each in taken])]


def _observation(sums: Tensor) -> Observation:
    tokens, (dropped, routed, entropy, balance, z) = sums[:-5].long(), sums[-5:].tolist()
    return Observation(tokens, int(dropped), entropy / max(1, routed), balance, z)
