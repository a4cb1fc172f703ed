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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from collectives.cost import LINKS, Round, Topology, of, rounds
from nd_mesh import mistakes
from nd_mesh.config import Config, ConfigError, MeshConfig
from nd_mesh.mesh import AXES, EXPERT_GROUPS, GROUPS, Grid, group_text

INSIDE, BETWEEN = "NVLink 4 (H100)", "InfiniBand NDR"

# As what the bytes of an axis travel, to the next rank or to all at once; those of the others in all_reduces.
_TRAVELS = {"pp": ("all_gather", "ring"), "cp": ("all_gather", "ring"), "ep": ("all_to_all", "direct")}


def leaving(groups: Sequence[tuple[int, ...]], per_node: int) -> list[tuple[int, ...]]:
    """Those of the groups that have ranks on more than one node; rank r is on node r // per_node."""
    return [group for group in groups if group[0] // per_node != group[-1] // per_node]  # ranks ascend


def seconds(name: str, sent: float, groups: Sequence[tuple[int, ...]], per_node: int) -> float:
    """Until every rank of the groups, all at work at once, has sent so many bytes to its group of that name.

    As one message: what the latencies of many smaller ones add, and what hides behind computing, is left out.
    """
    if (size := len(groups[0])) == 1:
        return 0.0
    collective, algorithm = _TRAVELS.get(name, ("all_reduce", "ring"))
    topology = Topology(LINKS[INSIDE], LINKS[BETWEEN], per_node)
    n = sent / of(collective, algorithm, 1.0, size, topology).sent
    ranks = np.array(groups)  # [groups, size]
    played = (
        Round(ranks[:, r.src].ravel(), ranks[:, r.dst].ravel(), np.tile(r.each, len(ranks)), r.times)
        for r in rounds(collective, algorithm, n, size)
    )
    return float(sum(r.times * r.seconds(topology) for r in played))


def warnings(config: Config, per_node: int, sent: Mapping[str, float]) -> list[str]:
    """A line where the last node is not full, and one for each of tp, cp and ep that leaves a node: how many of its
    groups do, one of them, the seconds a step expected so and inside a node, and the settings that keep it inside.

    sent: bytes that a rank sends in a step, by axis; of an axis that is not there no seconds are told.
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


def _cost(axis: str, groups: Sequence[tuple[int, ...]], per_node: int, sent: Mapping[str, float]) -> str:
    if axis not in sent:
        return ""
    across, inside = (_time(seconds(axis, sent[axis], groups, ranks)) for ranks in (per_node, groups[-1][-1] + 1))
    return f"expected {across} a step over {BETWEEN}, {inside} over {INSIDE}; "


def _groups(config: Config, sizes: MeshConfig, axis: str) -> list[tuple[int, ...]]:
    """With sequence parallelism tokens are dispatched over tp as well."""
    folded = axis == "ep" and sizes.ep > 1 and config.parallel.sequence
    return Grid(sizes).groups("ep_tp" if folded else axis)


def _remedy(config: Config, axis: str, per_node: int) -> str:
    """The largest degree of the axis that stays inside a node, or else of tp, which lies further in; what becomes free
    goes to dp.
    """
    for changed in dict.fromkeys((axis, "tp")):
        for other in _smaller(config.mesh, changed, 2 if changed == axis else 1):
            if not leaving(_groups(config, other, axis), per_node) and _runs(replace(config, mesh=other)):
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


def report(config: Config, per_node: int, sent: Mapping[str, float]) -> list[str]:
    """What `python -m nd_mesh mesh` prints: rank map, groups of both views, what leaves a node, and the warnings."""
    grid = Grid(config.mesh)
    nodes = math.ceil(grid.size() / per_node)
    axes = " × ".join(f"{axis} {getattr(config.mesh, axis)}" for axis in AXES)
    lines = [f"{grid.size()} ranks on {nodes} node{'s' if nodes > 1 else ''} of {per_node}, mesh {axes}"]
    lines += [grid.rank_map(whole=64), "dense view", *(f"  {line}" for line in grid.listing(GROUPS))]
    if config.mesh.ep > 1:
        lines += ["expert view", *(f"  {line}" for line in grid.listing(EXPERT_GROUPS))]
    return [*lines, *table(config, per_node, sent), *warnings(config, per_node, sent)]


def table(config: Config, per_node: int, sent: Mapping[str, float]) -> list[str]:
    """A line for each axis that is cut, and for each other name of groups that `sent` has: how many groups, of how many
    ranks, how many leave a node; bytes that a rank sends in a step, seconds expected for them, these inside a node.
    """
    grid = Grid(config.mesh)
    lines = [f"{'':<15} {'groups':>10} {'leave a node':>13} {'a rank sends a step':>20} {'expected':>9} {'inside':>8}"]
    for name in dict.fromkeys((*AXES, "ep", *sent)):
        groups = _groups(config, config.mesh, name) if name in GROUPS | EXPERT_GROUPS else [()]
        if len(groups[0]) < 2:
            continue
        line = f"{name:<15} {f'{len(groups)} of {len(groups[0])}':>10} {len(leaving(groups, per_node)):>13}"
        if name in sent:
            across, inside = (_time(seconds(name, sent[name], groups, ranks)) for ranks in (per_node, grid.size()))
            line += f" {f'{sent[name]:,.0f} bytes':>20} {across:>9} {inside:>8}"
        lines.append(line)
    return lines


def _time(seconds: float) -> str:
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"


def estimate(config: Config) -> dict[str, float]:
    """Bytes that a rank sends in a step on pp, cp, tp and ep: what the layers send by README.md's table of costs, for a
    rank amid a pipeline of one stage a rank, its share of layers and rows, and choices even over the experts.
    """
    mesh, model, parallel = config.mesh, config.model, config.parallel
    e = getattr(torch, config.train.dtype).itemsize
    tokens = config.train.batch / (mesh.dp * mesh.fsdp) * config.data.context / mesh.cp
    layers, mixtures = model.layers / mesh.pp, sum(map(model.mixture, range(model.layers))) / mesh.pp
    a = tokens * model.width * e
    b = tokens * max(1, model.kv_heads / mesh.tp) * model.width / model.heads * e
    folded = mesh.tp if parallel.sequence else 1
    experts = mesh.ep * folded
    exchange = mesh.cp if parallel.attention == "ulysses" else parallel.ulysses
    by_method = {
        "ring": (6 * mesh.cp - 4) * b,
        "all_gather": (4 if parallel.save_gathered else 6) * (mesh.cp - 1) * b,
        "ulysses": 4 * (a / mesh.tp + b) * (exchange - 1) / exchange,
    }
    by_method["ring_ulysses"] = by_method["ulysses"] + (6 * mesh.cp / exchange - 4) * b
    sent = {
        "pp": 2 * a / folded,
        "cp": layers * by_method[parallel.attention],
        "tp": layers * (10 if parallel.sequence and not parallel.save_gathered else 8) * a * (mesh.tp - 1) / mesh.tp,
        "ep": mixtures * 4 * (experts - 1) / experts * model.choices * a / folded,
    }
    return {axis: nbytes for axis, nbytes in sent.items() if getattr(mesh, axis) > 1}
