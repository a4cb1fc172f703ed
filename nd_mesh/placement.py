"""Which groups of a mesh stay inside a node, which leave it, and what that is expected to cost.

Ranks are numbered node by node, as torchrun does, so an axis that lies further in reaches fewer nodes. The order of the
axes, pp, dp, fsdp, cp, tp, is fixed, because no other keeps more of what is chatty inside:

- tp sends most, several times a layer, and nothing hides it. With neighbours no order has fewer of its groups leave.
- cp is next: its blocks travel while attention computes. Of the orders that keep tp inside none does better for it.
- ep takes no room from cp: folded out of dp · fsdp · cp from the inside it begins with the ranks of cp, seen once more.
- fsdp gathers ahead, dp reduces behind backward, pp sends one activation a boundary. They may leave.

Where a node cannot hold tp, tp leaves it in any order, and the remedy is a smaller one. Seconds are those of
collectives/cost.py on the links named here. Lecture A, "Process Group을 명시적으로 그린다". Megatron-LM has the same
order, from the inside tp, cp, ep, dp, pp (`megatron/core/parallel_state.py`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from collectives.cost import LINKS, Round, Topology, of, rounds
from nd_mesh import formulas, mistakes
from nd_mesh.config import Config, ConfigError, MeshConfig
from nd_mesh.mesh import AXES, EXPERT_GROUPS, GROUPS, Grid, group_text
from nd_mesh.part import Part

INSIDE, BETWEEN = "NVLink 4 (H100)", "InfiniBand NDR"

# As what the bytes of an operation travel: around a ring, once or twice, or to all at once.
_TRAVELS = {"all_reduce": ("all_reduce", "ring"), "all_to_all_single": ("all_to_all", "direct")}
_ONCE_AROUND = ("all_gather", "ring")  # all others, which go to the next rank only

Sent = Mapping[str, float]  # bytes that a rank sends in a step, by operation, as the ledger calls it


def leaving(groups: Sequence[tuple[int, ...]], per_node: int) -> list[tuple[int, ...]]:
    """Those of the groups that have ranks on more than one node; rank r is on node r // per_node."""
    return [group for group in groups if group[0] // per_node != group[-1] // per_node]  # ranks ascend


def seconds(sent: Sent, groups: Sequence[tuple[int, ...]], per_node: int) -> float:
    """Until every rank of the groups, all at work at once, has sent so many bytes to its group.

    As one message an operation: what the latencies of many smaller ones add, and what hides behind computing, is left
    out.
    """
    return sum(_seconds(op, nbytes, groups, per_node) for op, nbytes in sent.items()) if len(groups[0]) > 1 else 0.0


def _seconds(op: str, nbytes: float, groups: Sequence[tuple[int, ...]], per_node: int) -> float:
    size = len(groups[0])
    collective, algorithm = _TRAVELS.get(op, _ONCE_AROUND)
    topology = Topology(LINKS[INSIDE], LINKS[BETWEEN], per_node)
    n = nbytes / of(collective, algorithm, 1.0, size, topology).sent
    ranks = np.array(groups)  # [groups, size]
    played = (
        Round(ranks[:, r.src].ravel(), ranks[:, r.dst].ravel(), np.tile(r.each, len(ranks)), r.times)
        for r in rounds(collective, algorithm, n, size)
    )
    return float(sum(r.times * r.seconds(topology) for r in played))


def estimate(config: Config) -> dict[str, Sent]:
    """What the strategies' formulas say, by axis; the data strategy's by its group: dp, fsdp, or what both and cp make.
    Of a rank whose stage sends most; choices are even over the experts. Left out: numbers, as the loss and the norm.
    """
    stages = [_sent(Part(config, rank)) for rank in Grid(config.mesh).groups("pp")[0]]
    most: dict[str, Sent] = {}
    for name in dict.fromkeys(name for stage in stages for name in stage):
        most[name] = max((stage.get(name, {}) for stage in stages), key=lambda sent: sum(sent.values()))
    return most


# What a strategy communicates on. Where ep is 1 experts are shared over tp with sequences, and tokens counted over the
# parts of a row.
_ON = {
    formulas.pipeline: ("pp",),
    formulas.context: ("cp",),
    formulas.tensor: ("tp",),
    formulas.partial_sums: ("tp", "pp"),
    formulas.experts: ("ep", "tp", "cp", "row"),
    formulas.data: tuple(name for name in (*GROUPS, *EXPERT_GROUPS) if name not in ("pp", "cp", "tp", "ep")),
}


def _sent(part: Part) -> dict[str, Sent]:
    folded = _folded(part.config, part.config.mesh)
    groups = {name: set(part.group("ep_tp" if name == "ep" and folded else name)) for name in (*GROUPS, *EXPERT_GROUPS)}
    found: dict[str, Sent] = defaultdict(Counter)
    for strategy, names in _ON.items():
        for term in strategy(part):
            if term.nbytes:
                name = min(
                    (name for name in names if groups[name] >= {*term.group}), key=lambda name: len(groups[name])
                )
                found[name][term.op] += float(term.nbytes)
    return found


def warnings(config: Config, per_node: int, sent: Mapping[str, Sent]) -> list[str]:
    """A line where the last node is not full, and one for each of tp, cp and ep that leaves a node: how many of its
    groups do, one of them, the seconds a step expected so and inside a node, and the settings that keep it inside.

    sent: by axis; of an axis that is not there no seconds are told.
    """
    world = Grid(config.mesh).size()
    lines = []
    if world > per_node and (rest := world % per_node):
        nodes = world // per_node + 1
        lines.append(f"warning: {world} ranks do not fill {nodes} nodes of {per_node}: the last one has {rest}")
    for axis in ("tp", "cp", "ep"):
        groups = _groups(config, config.mesh, axis)
        if crossing := leaving(groups, per_node):
            lines.append(
                f"warning: {axis} leaves its node in {len(crossing)} of {len(groups)} groups, as in "
                f"{group_text(crossing[0])}: {_cost(axis, groups, per_node, sent)}{_remedy(config, axis, per_node)}"
            )
    return lines


def _cost(axis: str, groups: Sequence[tuple[int, ...]], per_node: int, sent: Mapping[str, Sent]) -> str:
    if axis not in sent:
        return ""
    across, inside = (_time(seconds(sent[axis], groups, ranks)) for ranks in (per_node, groups[-1][-1] + 1))
    return f"expected {across} a step over {BETWEEN}, {inside} over {INSIDE}; "


def _groups(config: Config, sizes: MeshConfig, axis: str) -> list[tuple[int, ...]]:
    return Grid(sizes).groups("ep_tp" if axis == "ep" and _folded(config, sizes) else axis)


def _folded(config: Config, sizes: MeshConfig) -> bool:
    """Whether tokens are dispatched over tp as well: with sequence parallelism. Where ep is 1 that is tp's."""
    return sizes.ep > 1 and config.parallel.sequence


def _remedy(config: Config, axis: str, per_node: int) -> str:
    """The largest degree of the axis that stays inside a node, or else of tp, which lies further in; what becomes free
    goes to dp.
    """
    for changed in dict.fromkeys((axis, "tp")):
        for other in _smaller(config.mesh, changed, 2 if changed == axis else 1):
            if _runs(replace(config, mesh=other)) and not leaving(_groups(config, other, axis), per_node):
                beside = f" with mesh.dp={other.dp}" if other.dp != config.mesh.dp else ""
                return f"mesh.{changed}={getattr(other, changed)}{beside} keeps it inside"
    return "no smaller degree keeps it inside"


def _smaller(sizes: MeshConfig, axis: str, least: int) -> Iterator[MeshConfig]:
    """The same number of ranks with ever smaller degrees of an axis."""
    for degree in range(getattr(sizes, axis) - 1, least - 1, -1):
        rest, wrong = (sizes.dp, 0) if axis == "ep" else divmod(getattr(sizes, axis) * sizes.dp, degree)
        if not wrong:
            yield replace(sizes, **{axis: degree, "dp": rest})


def _runs(config: Config) -> bool:
    try:
        mistakes.check(config, Grid(config.mesh).size())
    except ConfigError:
        return False
    return True


def report(config: Config, per_node: int, sent: Mapping[str, Sent]) -> list[str]:
    """What `python -m nd_mesh mesh` prints: rank map, groups of both views, what leaves a node, and the warnings."""
    grid = Grid(config.mesh)
    nodes = math.ceil(grid.size() / per_node)
    axes = " × ".join(f"{axis} {getattr(config.mesh, axis)}" for axis in AXES)
    lines = [f"{grid.size()} ranks on {nodes} node{'s' if nodes > 1 else ''} of {per_node}, mesh {axes}"]
    lines += [grid.rank_map(whole=64), "dense view", *(f"  {line}" for line in grid.listing(GROUPS))]
    if config.mesh.ep > 1:
        lines += ["expert view", *(f"  {line}" for line in grid.listing(EXPERT_GROUPS))]
    return [*lines, *table(config, per_node, sent), *warnings(config, per_node, sent)]


def table(config: Config, per_node: int, sent: Mapping[str, Sent]) -> list[str]:
    """A line for each axis that is cut, and for each other name of groups that `sent` has: how many groups, of how many
    ranks, how many leave a node; bytes that a rank sends in a step, seconds expected for them, these inside a node.
    """
    grid = Grid(config.mesh)
    lines = [f"{'':<15} {'groups':>10} {'leave a node':>13} {'a rank sends a step':>20} {'expected':>9} {'inside':>8}"]
    for name in dict.fromkeys((*AXES, "ep", *sent)):
        groups = _groups(config, config.mesh, name)
        if len(groups[0]) < 2:
            continue
        line = f"{name:<15} {f'{len(groups)} of {len(groups[0])}':>10} {len(leaving(groups, per_node)):>13}"
        if name in sent:
            across, inside = (_time(seconds(sent[name], groups, ranks)) for ranks in (per_node, grid.size()))
            line += f" {f'{sum(sent[name].values()):,.0f} bytes':>20} {across:>9} {inside:>8}"
        lines.append(line)
    return lines


def _time(seconds: float) -> str:
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"
