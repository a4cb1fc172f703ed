"""Capacity: an expert takes at most C = ⌈c·k·T/E⌉ tokens of a sequence; a later one has its residual alone.

First come, by slot: of a sequence's tokens that chose an expert it takes the first C. (A token's choices are different
experts, each with a queue of its own; those that are not dropped keep their weights.)
Counted per sequence, so that neither the number of ranks nor of microbatches changes who is dropped; production systems
count per rank, and there it does.

What is won: no expert's load is more than c times its fair share, so buffers can have one size. Lepikhin et al. 2020
(GShard), §2.2; Fedus et al. 2021 (Switch), §2.2; Megatron-LM: --moe-expert-capacity-factor.
"""

import math
from fractions import Fraction

from torch import Tensor

from expert_parallel.sequences import NOBODY


def capacity(factor: float, choices: int, length: int, experts: int) -> int:
    """C of an expert and sequence."""
    return math.ceil(Fraction(str(factor)) * choices * length / experts)  # exactly: as floats 1.1 · 50 is more than 55


def within(experts: Tensor, taken: Tensor, room: int) -> Tensor:
    """Of choices [B, T, k] of whole rows, which `taken` [B, T, E] says as ones, those [B, T, k] that find room."""
    # IDEA: a token's place in an expert's queue is the number of tokens before it that chose the same expert.
    before = taken.cumsum(1) - taken  # [B, T, E]
    place = before.gather(-1, experts.clamp(min=0))
    return (place < room) & (experts != NOBODY)
