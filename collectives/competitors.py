"""Every collective by all who can do it: our algorithms and the backend's own, on the same message, to be compared.

    for who, call in competitors("all_reduce", 1 << 20, run).items():
        call()                              or call(async_op=True).wait()

Together with p2p.py and comm.py, and the benches, the only place that calls torch.distributed's operations: comm.py
would choose the algorithm by its rule.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from collectives import cost
from collectives.algorithms import direct, doubling, halving, hierarchical, naive, pairwise, pieces, ring, star, tree
from collectives.cost import Cost, Link, Topology
from collectives.runtime import Runtime

Call = Callable[..., Any]  # call(async_op=False)

BACKEND = "the backend"
NODE = 2  # ranks in a node of the hierarchical algorithm, for want of real ones
LONG = 1 << 22  # bytes
MODULES: MappingProxyType[str, ModuleType] = MappingProxyType(
    {
        module.__name__.rpartition(".")[2]: module
        for module in (naive, star, tree, doubling, halving, ring, pairwise, direct, hierarchical)
    }
)

# torch 2.13 renamed these two.
_ALL_GATHER: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_BACKENDS: MappingProxyType[str, Call] = MappingProxyType(
    {
        "all_reduce": dist.all_reduce,
        "reduce_scatter": _REDUCE_SCATTER,
        "all_gather": _ALL_GATHER,
        "all_to_all": dist.all_to_all_single,
        "broadcast": lambda tensor, root, **more: dist.broadcast(tensor, group_src=root, **more),
        "reduce": lambda tensor, root, **more: dist.reduce(tensor, group_dst=root, **more),
        "scatter": lambda output, whole, root, *, group, **more: dist.scatter(
            output, whole if whole is None else list(whole.chunk(group.size())), group=group, group_src=root, **more
        ),
        "gather": lambda whole, piece, root, *, group, **more: dist.gather(
            piece, whole if whole is None else list(whole.chunk(group.size())), group=group, group_dst=root, **more
        ),
        "barrier": dist.barrier,
    }
)
COLLECTIVES = tuple(_BACKENDS)


def competitors(collective: str, n: int, run: Runtime) -> dict[str, Call]:
    """Who can do it on these ranks, the backend last. Collective over the world, if it has nodes.

    n: bytes of the whole message, all pieces together, rounded down to as many float32 numbers for each rank. They are
    zeros, so that sums stay small. The root is rank 0.
    """
    arguments = _arguments(collective, n // 4 // run.size, run)
    return {who: partial(_call(collective, who, run), *arguments) for who in able(collective, run.size, n)}


def able(collective: str, ranks: int, n: int = 0) -> list[str]:
    """The names of all who can do it on so many ranks, the backend last; of long messages without those who send them
    more than twice.
    """
    ours = [who for who, module in MODULES.items() if hasattr(module, collective)]
    two_levels = ranks > NODE and ranks % NODE == 0
    ours = [who for who in ours if who != "hierarchical" or two_levels]
    if n > LONG:
        machine = Topology(Link(0, 1), Link(0, 1), NODE)  # only its bytes are asked for
        ours = [who for who in ours if predicted(collective, who, n, ranks, machine).sent <= 2 * n]
    return [*ours, BACKEND]


def _call(collective: str, who: str, run: Runtime) -> Call:
    if who == BACKEND:
        return partial(_BACKENDS[collective], group=run.world)
    if who == "hierarchical":
        inside, between = _nodes(run)
        return partial(hierarchical.all_reduce, inside=inside, between=between)
    device = {"device": run.device} if collective == "barrier" else {}
    return partial(getattr(MODULES[who], collective), group=run.world, **device)


def predicted(collective: str, who: str, n: int, ranks: int, machine: Topology) -> Cost | None:
    """What cost.py says of one of them; None for the backend, whose algorithm is its own affair."""
    if who == BACKEND:
        return None
    along_the_line = who == "ring" and collective in ("broadcast", "reduce")
    choice = {"chunks": max(1, -(-n // pieces.CHUNK))} if along_the_line else {}
    return cost.of(collective, who, n, ranks, machine, **choice)


def _arguments(collective: str, numbers: int, run: Runtime) -> tuple:
    """Those before the group, which all have in common."""
    piece, whole = (torch.zeros(count, device=run.device) for count in (numbers, numbers * run.size))
    rooted = whole if run.rank == 0 else None
    return {
        "all_reduce": (whole,),
        "reduce_scatter": (piece, whole),
        "all_gather": (whole, piece),
        "all_to_all": (torch.empty_like(whole), whole),
        "broadcast": (whole, 0),
        "reduce": (whole, 0),
        "scatter": (piece, rooted, 0),
        "gather": (rooted, piece, 0),
        "barrier": (),
    }[collective]


def _nodes(run: Runtime) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's node, and the ranks with the same place in all nodes."""
    inside = [range(first, first + NODE) for first in range(0, run.size, NODE)]
    between = [range(place, run.size, NODE) for place in range(NODE)]
    made = [(ranks, run.new_group(list(ranks))) for ranks in (*inside, *between)]  # everyone makes all of them
    first, second = (group for ranks, group in made if run.rank in ranks)
    return first, second
