"""A mixture of experts: the router sends each token to a few feed-forward networks, which ranks share.

    x [B, T, D] → router → dispatch → experts → combine → y        and, while tokens travel, the shared expert

A rank has E/ep of the experts and its own tokens; everything else it has whole. So an expert's gradient is complete
over the ranks of `group` when backward ends, and is summed over those that hold the same experts (expert-data), while
the router's, and all dense ones, are summed over all ranks that have tokens.

Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch); DeepSeek-AI 2024 (V3), §2.1.2; lectures A, "Expert Parallel",
and B, "추가 병렬화: EP, CP". Left out: experts that are moved or doubled where the load is, sending only to few nodes,
low-precision rows.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from expert_parallel.balance import batch_balance, sequence_balance, with_loss, z_loss
from expert_parallel.capacity import capacity, within
from expert_parallel.cut import cut_experts
from expert_parallel.dispatch import Dispatch
from expert_parallel.experts import Experts
from expert_parallel.observe import Record
from expert_parallel.router import Router, Routing
from expert_parallel.sequences import NOBODY, Sequences, chosen, whole_rows


@dataclass(frozen=True)
class Losses:
    """The coefficients of the losses on the router, 0 for none, and of what rows the balance is ones.

    over: "sequence", each row; or "batch", all tokens that the ranks of `statistics` have in one call.
    """

    balance: float = 0.01
    z: float = 0.0
    over: Literal["sequence", "batch"] = "sequence"
    statistics: dist.ProcessGroup | None = None  # of "batch"; None: this rank's tokens

    def __post_init__(self) -> None:
        if self.over not in ("sequence", "batch"):
            raise ValueError(f"over={self.over!r} is unknown: use sequence or batch")


class MoE(nn.Module):
    """The layer, as a function of [B, T, D]: a sequence a row. Forward and backward are collective over `group`:
    a rank without rows calls it too.

    group: ranks that share the experts, None or one for a plain layer. sequence_group: ranks that each have a part of
    every row. choices: k. capacity: the factor c, None for dropless. shared: a module through which every token goes as
    well. router: further settings of it.

    A data strategy gets the experts' parameters (held.family is "expert") with the ranks that have the same ones, all
    others with all ranks. The losses' gradient is added in backward, whatever backward began with: with a loss that is
    scaled say so in the sequences.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        choices: int = 2,
        capacity: float | None = None,
        shared: nn.Module | None = None,
        losses: Losses = Losses(),
        group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        **router: Any,
    ):
        super().__init__()
        if capacity is not None and not 0 < capacity < math.inf:
            raise ValueError(f"capacity={capacity} must be positive and finite; None drops no token")
        self.count, self.choices, self.capacity, self.losses = experts, choices, capacity, losses
        self.router = Router(width, experts, choices, **router)
        self.experts = Experts(width, hidden, experts)
        self.shared = shared
        self.record = Record(experts)
        self.group, self.sequence_group = None, sequence_group
        if group is not None:
            self.distribute(group)

    def distribute(
        self,
        group: dist.ProcessGroup,
        expert_data: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Before: every rank of `group` has all experts, with the same values or on the meta device. After: rank r has
        the r-th part of them. expert_data: the ranks of other groups with the same part, over which gradients are sums.
        """
        if len(self.experts.gate) != self.count:
            raise ValueError("the experts are shared already: give the group to MoE or to distribute, once")
        cut_experts(self.experts, group, expert_data)
        self.group, self.sequence_group = group, sequence_group or self.sequence_group

    def forward(self, x: Tensor, sequences: Sequences | None = None) -> Tensor:  # [B, T/P, D]
        """sequences: None takes these rows for whole ones, and for the global batch, of which the losses are means."""
        width = self.router.weight.size(1)
        if x.dim() != 3 or x.size(2) != width:
            raise ValueError(f"x of shape {list(x.shape)} is no rows of tokens: give it as [B, T, {width}]")
        sequences = Sequences.whole(x) if sequences is None else sequences
        sequences.check(x, self.sequence_group)
        routing = self.router(x)
        experts = routing.experts.where(sequences.routed.unsqueeze(-1), NOBODY)  # [B, T/P, k]
        rows = whole_rows(experts, sequences, self.sequence_group)  # [B, T, k]
        ones = chosen(rows, self.count)  # [B, T, E]
        kept = experts if self.capacity is None else experts.where(self._fits(rows, ones, sequences), NOBODY)

        travelling = Dispatch(x.flatten(0, 1), kept.flatten(0, 1), self.count, self.group)
        # IDEA: the shared expert computes while the tokens of the others travel.
        shared = None if self.shared is None else self.shared(x)
        outputs = self.experts(travelling.arrive(), travelling.counts)
        y = travelling.combine(outputs, routing.weights.flatten(0, 1).to(x.dtype)).view_as(x)
        y = y if shared is None else y + shared
        if self.training:
            self.record.add(experts, kept, routing.shares)
            loss = self._loss(routing, sequences, experts, ones.sum(1))
            y = y if loss is None else with_loss(y, loss)
        return y

    def _fits(self, rows: Tensor, ones: Tensor, sequences: Sequences) -> Tensor:
        """Which of this rank's choices [B, T/P, k] find room."""
        fits = within(rows, ones, capacity(self.capacity, self.choices, sequences.length, self.count))
        cut = self.sequence_group is not None and self.sequence_group.size() > 1
        return fits[:, sequences.slots[self.sequence_group.rank()]] if cut else fits

    def _loss(self, routing: Routing, sequences: Sequences, experts: Tensor, counts: Tensor) -> Tensor | None:
        """This rank's part of the losses on the router, None without any; counts [B, E] are of whole rows."""
        losses, shares, routed = self.losses, routing.shares, sequences.routed
        terms = []
        if losses.balance and losses.over == "sequence":
            rows = sequence_balance(shares, routed, counts, self.choices)  # [B] {+sequence}
            terms.append(("balance", losses.balance, (rows * sequences.counted).sum() / sequences.rows.clamp(min=1)))
        elif losses.balance:
            mine = chosen(experts, self.count).sum((0, 1))  # [E]
            value, tokens = batch_balance(shares, routed, mine, self.choices, group=losses.statistics)
            terms.append(("balance", losses.balance, value * tokens / sequences.tokens.clamp(min=1)))
        if losses.z:
            terms.append(("z", losses.z, z_loss(routing.logits, routed) / sequences.tokens.clamp(min=1)))
        for name, _, value in terms:
            self.record.loss(name, value)
        return sum(coefficient * value for _, coefficient, value in terms) * sequences.loss_scale if terms else None
