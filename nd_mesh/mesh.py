"""The mesh: which rank stands where, and the groups along each axis.

Axes from outer to inner: pp, dp, fsdp, cp, tp. Neighbouring ranks differ in tp first, so the axis that communicates
most lies on the fastest links. ep is folded out of dp · fsdp · cp: the same ranks, seen as (expert_data, ep).

Everything that says which ranks belong together is arithmetic on plain numbers, testable without ranks. It is shown as
text (`Grid.listing`), in manifest.json and as a picture (picture.py); placement.py says which groups leave a node.
`Mesh` adds the process groups, which all ranks make in one and the same order. Lecture A, "Process Group을 명시적으로
그린다" (its example groups of rank 0 do not fit its example mesh: with DP 8, TP 4, PP 2, CP 2 in the order above, rank
0's dp group is 0, 8, 16, … 56). PyTorch's counterpart: DeviceMesh.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from einops import rearrange

from collectives.runtime import Runtime
from nd_mesh.config import MeshConfig

AXES = ("pp", "dp", "fsdp", "cp", "tp")  # outer to inner

# Each group holds the ranks that differ in these axes only.
GROUPS = {
    **{axis: (axis,) for axis in AXES},
    "batch": ("dp", "fsdp"),  # each has rows of its own
    "shard": ("fsdp", "cp"),  # fsdp cuts weights over cp too, whose ranks hold the same otherwise
    "data": ("dp", "fsdp", "cp"),  # each has tokens of its own: gradients and token counts are sums over it
    "row": ("cp", "tp"),  # with sequence parallelism each has a part of one row
    "tokens": ("pp", "dp", "fsdp", "cp"),  # the whole model and all tokens of a step, once
}

# The expert view: dp · fsdp · cp as (expert_data, ep), and expert_data as (expert_replicas, expert_shard).
EXPERT_AXES = ("pp", "expert_replicas", "expert_shard", "ep", "tp")  # outer to inner
EXPERT_GROUPS = {
    "ep": ("ep",),  # each has other experts
    "ep_tp": ("ep", "tp"),  # the same, where tp has tokens of its own and is folded into ep
    "expert_data": ("expert_replicas", "expert_shard"),  # the same experts: their gradients are sums over it
    "expert_shard": ("expert_shard",),  # fsdp cuts them over it, within dp where ep divides fsdp · cp
    "expert_replicas": ("expert_replicas",),
}


@dataclass(frozen=True)
class Grid:
    """The arithmetic of a mesh of given sizes. Ranks and coordinates are counted from 0."""

    sizes: MeshConfig

    def size(self) -> int:
        """The number of ranks."""
        return math.prod(getattr(self.sizes, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands, by axis; ep and expert_data are read off its place in dp · fsdp · cp."""
        where = {}
        rest = rank
        for axis in reversed(AXES):
            rest, where[axis] = divmod(rest, getattr(self.sizes, axis))
        data = (where["dp"] * self.sizes.fsdp + where["fsdp"]) * self.sizes.cp + where["cp"]
        where["expert_data"], where["ep"] = divmod(data, self.sizes.ep)
        return where

    def _expert_sizes(self) -> dict[str, int]:
        """Those of the axes of the expert view."""
        sizes = self.sizes
        within, data = sizes.fsdp * sizes.cp, sizes.dp * sizes.fsdp * sizes.cp
        shards = (within if within % sizes.ep == 0 else data) // sizes.ep
        replicas = data // (shards * sizes.ep)
        return dict(zip(EXPERT_AXES, (sizes.pp, replicas, shards, sizes.ep, sizes.tp), strict=True))

    def _table(self, name: str) -> np.ndarray:
        """[groups, ranks] of that name."""
        sizes = self._expert_sizes() if name in EXPERT_GROUPS else {axis: getattr(self.sizes, axis) for axis in AXES}
        free = (GROUPS | EXPERT_GROUPS)[name]
        fixed = (axis for axis in sizes if axis not in free)
        pattern = f"({' '.join(sizes)}) -> ({' '.join(fixed)}) ({' '.join(free)})"
        return rearrange(np.arange(self.size()), pattern, **sizes)

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """All groups of that name (one of GROUPS or EXPERT_GROUPS), each with its ranks in ascending order, sorted by
        their first rank.
        """
        return [tuple(members) for members in self._table(name).tolist()]

    def group_of(self, rank: int, name: str) -> tuple[int, ...]:
        """That of one rank."""
        table = self._table(name)
        return tuple(table[(table == rank).any(1)][0].tolist())

    def views(self) -> dict[str, dict[str, list[tuple[int, ...]]]]:
        """Every group of every name: the dense view, and where experts are shared the expert view."""
        shown = {"dense": GROUPS, **({"expert": EXPERT_GROUPS} if self.sizes.ep > 1 else {})}
        return {view: {name: self.groups(name) for name in names} for view, names in shown.items()}

    def rank_map(self, whole: int = 16) -> str:
        """One line a rank with its coordinates on the axes that are cut; of more than `whole` ranks the first three and
        the last.
        """
        cut = [axis for axis in (*AXES, "ep") if getattr(self.sizes, axis) > 1]
        lines = []
        for rank in range(self.size()):
            where = self.coordinates(rank)
            lines.append(f"rank {rank:>3}  " + "  ".join(f"{axis} {where[axis]}" for axis in cut))
        return "\n".join(line.rstrip() for line in _shortened(lines, whole))

    def listing(self, names: Iterable[str]) -> list[str]:
        """The groups of these names that have more than one rank, a line for names with the same groups.

            fsdp, data  (0 2) (1 3) (4 6) (5 7)

        On more than 32 ranks the first three and the last: of groups, and of the ranks in each.
        """
        alike = defaultdict(list)
        for name in names:
            alike[tuple(self.groups(name))].append(name)
        labels = {", ".join(names): groups for groups, names in alike.items() if len(groups[0]) > 1}
        width = max(map(len, labels), default=0)
        whole = 32 if self.size() <= 32 else 4
        return [
            f"{label:<{width}}  {' '.join(_shortened([group_text(group, whole) for group in groups], whole))}"
            for label, groups in labels.items()
        ]


def group_text(group: Sequence[int], whole: int = 4) -> str:
    """`(0 1)`; of more than `whole` ranks the first three and the last, `(0 1 2 … 7)`."""
    return f"({' '.join(_shortened([str(rank) for rank in group], whole))})"


def _shortened(items: list[str], whole: int) -> list[str]:
    return items if len(items) <= whole else [*items[:3], "…", items[-1]]


class Mesh:
    """This rank's place and groups. Made collectively: every rank makes every group, its own or not, in one order."""

    def __init__(self, sizes: MeshConfig, run: Runtime):
        self.grid, self.run = Grid(sizes), run
        self.coordinates = self.grid.coordinates(run.rank)
        self._groups: dict[str, dist.ProcessGroup] = {}
        for name in (*GROUPS, *EXPERT_GROUPS):
            for members in self.grid.groups(name):
                group = run.new_group(members)
                if group is not None:
                    self._groups[name] = group

    def group(self, name: str) -> dist.ProcessGroup:
        """This rank's group of that name: an axis, one of GROUPS or of EXPERT_GROUPS."""
        return self._groups[name]

    def rank(self, name: str) -> int:
        """This rank's number in that group."""
        return dist.get_rank(self.group(name))

    def size(self, name: str) -> int:
        """The number of ranks in that group."""
        return dist.get_world_size(self.group(name))
