"""Expert parallelism: a mixture of experts, whose experts are shared by ranks to which tokens travel.

layer = MoE(width, hidden, experts, choices=2, group=group)
y = layer(x)
"""

from expert_parallel.balance import follow_load
from expert_parallel.cut import cut_experts, cut_hidden
from expert_parallel.experts import Experts
from expert_parallel.moe import Losses, MoE
from expert_parallel.observe import Observation, observe
from expert_parallel.router import Router
from expert_parallel.sequences import Sequences

__all__ = [
    "Experts",
    "Losses",
    "MoE",
    "Observation",
    "Router",
    "Sequences",
    "cut_experts",
    "cut_hidden",
    "follow_load",
    "observe",
]
