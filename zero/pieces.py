"""How a step is cut: flat tensors into pieces, and an optimizer's groups and state with them.

The optimizer is left as it is. It is handed groups whose parameters are the slices, and their state, steps them as if
they were all it had, and gets its own back. Two slices of one tensor must both start from its count of steps, so what
is one number a tensor or a group is as it was before the step for each, and taken over afterwards.

Rajbhandari et al. 2021, "ZeRO-Infinity", steps such pieces; DeepSpeed's sub_group_size is their size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

UNIT = 64  # elements; the vectors of a kernel, unrolled, divide it


def cut_pieces(sizes: Sequence[int], piece: int) -> list[list[tuple[int, int, int]]]:
    """Pieces of at most `piece` elements of flat tensors of these sizes: each a list of (which tensor, start, stop).

    In order, every element once; an empty tensor is in a piece too. Small tensors share a piece, large ones are cut at
    multiples of UNIT, if a piece has as many.
    """
    # IDEA: cut at multiples of a vector, and each element goes through the same instructions as in the whole.
    longest = piece - piece % min(UNIT, piece)
    pieces: list[list[tuple[int, int, int]]] = []
    filled = 0
    for which, size in enumerate(sizes):
        for start in range(0, max(size, 1), longest):
            stop = min(start + longest, size)
            if not pieces or filled + stop - start > piece:
                pieces.append([])
                filled = 0
            pieces[-1].append((which, start, stop))
            filled += stop - start
    return pieces


@dataclass(frozen=True)
class Part:
    """A slice of a shard, and what its step starts from: every part of a shard from the same."""

    shard: nn.Parameter
    start: int
    stop: int
    group: dict[str, Any]
    settings: dict[str, Any]  # the group's, before the step
    state: dict[str, Any]  # the whole shard's, before the step

    def of(self, value: Tensor) -> Tensor:
        """The slice of anything that has an element for each of the shard's."""
        return value.detach()[self.start : self.stop]


def stand_ins(parts: Sequence[Part], params: Sequence[nn.Parameter]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each group of the parts: it, and one like it before the step, whose parameters are those of `params`."""
    groups = {id(part.group): (part.group, {**part.settings, "params": []}) for part in parts}
    for part, param in zip(parts, params, strict=True):
        groups[id(part.group)][1]["params"].append(param)
    return list(groups.values())
