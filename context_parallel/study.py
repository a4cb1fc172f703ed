"""When to use which: of each method's messages, what the attention itself does not hide, from collectives/cost.py.

    python -m context_parallel.study      no ranks needed

Forward and backward of one layer's causal attention over one row, bfloat16, dk and dv on their way in float32. FLOPs:
4·K·H·T²/2 forward, 2.5 times as many backward, at RATE, which is assumed: half of an H100's dense 989e12. All ranks
have equal work, and so has every step of a ring (zigzag). Of a collective the cheapest algorithm of cost.py counts.

What nothing hides is all of all_gather's and Ulysses' messages, and of a ring's step what is longer than computing one
block. Left out: launches, the merging of blocks, kernels that slow down while messages take part of the processor.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from collectives import cost
from collectives.cost import LINKS, Round, Topology
from context_parallel.ulysses import sharing

RATE = 0.5 * 989e12  # FLOP/s
HALF, SINGLE = 2, 4  # bytes of an element of q, k, v, out; of dk, dv that are added up
NODE = 8  # ranks

DGX = Topology(LINKS["NVLink 4 (H100)"], LINKS["InfiniBand NDR"], per_node=NODE)
ONE_A_NODE = replace(DGX, per_node=1)


@dataclass(frozen=True)
class Task:
    """Attention of a row of `length` tokens, cut over ranks that stand in nodes as the topology says."""

    heads: int
    kv_heads: int
    length: int
    ranks: int
    topology: Topology
    head: int = 128

    @property
    def forward(self) -> float:
        """Seconds of computing on each rank, forward."""
        return 4 * self.head * self.heads * self.length**2 / 2 / RATE / self.ranks

    @property
    def backward(self) -> float:
        """Seconds of computing on each rank, backward."""
        return 2.5 * self.forward

    @property
    def kv(self) -> float:
        """Elements of a rank's keys and values."""
        return 2 * self.kv_heads * self.head * self.length / self.ranks

    def hop(self, nbytes: float) -> float:
        """Seconds until every rank has so many bytes from the one before it."""
        everyone = np.arange(self.ranks)
        return Round(everyone, (everyone + 1) % self.ranks, nbytes).seconds(self.topology)

    def collective(self, name: str, nbytes: float) -> float:
        """Seconds of the cheapest algorithm. nbytes: as in cost.of."""
        ways = [algorithm for each, algorithm in cost.ALGORITHMS if each == name]
        return min(cost.of(name, way, nbytes, self.ranks, self.topology).seconds for way in ways)


def ring(task: Task) -> float:
    """Seconds in which a rank waits: ring.py."""
    if task.ranks == 1:
        return 0.0
    kv, dkv, steps = task.hop(HALF * task.kv), task.hop(SINGLE * task.kv), task.ranks
    # IDEA: a block takes (T/P)² of computing and T/P of bytes: with enough tokens on a rank a step hides its messages.
    forward = (steps - 1) * max(0.0, kv - task.forward / steps)
    under_way = [kv, *[kv + dkv] * (steps - 2), dkv]  # while a block is computed; then dk, dv come home
    return forward + sum(max(0.0, each - task.backward / steps) for each in under_way) + dkv


def all_gather(task: Task) -> float:
    """Seconds in which a rank waits: gather.py, k and v gathered again for backward."""
    gathered = task.collective("all_gather", HALF * task.kv * task.ranks)
    return 2 * gathered + task.collective("reduce_scatter", SINGLE * task.kv * task.ranks)


def ulysses(task: Task) -> float:
    """Seconds in which a rank waits: ulysses.py. No number where its heads cannot be shared."""
    if task.ranks not in sharing(task.heads, task.kv_heads):
        return math.nan
    tokens = task.head * task.length / task.ranks
    each = (HALF * tokens * heads for heads in (task.heads, copied(task), copied(task), task.heads))  # q, k, v, out
    return 2 * sum(task.collective("all_to_all", nbytes) for nbytes in each)  # backward: their gradients


def copied(task: Task) -> int:
    """KV heads, as they are sent to so many ranks."""
    return max(task.kv_heads, task.ranks)


def ring_ulysses(task: Task) -> float:
    """Seconds in which a rank waits: ring_ulysses.py, heads exchanged in a node. No number if that is all, or none."""
    neighbours = task.topology.per_node
    rings, rest = divmod(task.ranks, neighbours)
    if rest or neighbours == 1 or rings == 1:
        return math.nan
    node = replace(task, length=task.length // rings, ranks=neighbours)
    share = {"heads": task.heads // neighbours, "kv_heads": copied(node) // neighbours}
    return ulysses(node) + ring(replace(task, ranks=rings, topology=replace(task.topology, per_node=1), **share))


METHODS = MappingProxyType(
    {"ring": ring, "all_gather": all_gather, "ulysses": ulysses, "ring × ulysses": ring_ulysses},
)
LAYERS = MappingProxyType({"Llama 3 8B": (32, 8), "Llama 3 70B": (64, 8)})  # heads, KV heads
LENGTHS = (8 << 10, 32 << 10, 128 << 10, 1 << 20)
PLACED = MappingProxyType(  # the ranks of cp, and by how much tensor parallelism has cut the heads
    {
        "inside a node": (DGX, (2, 8), 1),
        "whole nodes": (DGX, (16, 64), 1),
        "tp = 8 in each node": (ONE_A_NODE, (2, 8, 64), NODE),
    }
)


def enough(task: Task) -> float:
    """Tokens on a rank from which on a ring's steps hide their messages, latency aside: backward needs more of them."""
    link = task.topology.between if task.ranks > task.topology.per_node else task.topology.inside
    return 2 * (HALF + SINGLE) / (2 * 2.5) * task.kv_heads / task.heads * RATE / link.bandwidth


def table(layer: str) -> Iterator[str]:
    """The lines of a layer."""
    names = "".join(f"{name:>16}" for name in METHODS)
    yield f"{layer}\n{'T':>9}{'cp':>5}{'T/cp':>8}{'attention':>12}{names}{'all k, v':>12}"
    for where, (topology, cps, tp) in PLACED.items():
        heads = {name: max(1, count // tp) for name, count in zip(("heads", "kv_heads"), LAYERS[layer], strict=True)}
        tasks = [Task(**heads, length=length, ranks=cp, topology=topology) for cp in cps for length in LENGTHS]
        yield f"  {where}: a ring hides its messages from T/cp = {enough(tasks[-1]):,.0f}"
        yield from map(line, tasks)


def line(task: Task) -> str:
    """Milliseconds of computing, by method the waiting in % of it, and the MB of keys and values that are gathered."""
    computing = task.forward + task.backward
    waits = [way(task) / computing for way in METHODS.values()]
    least = min(wait for wait in waits if not math.isnan(wait))
    cells = ("–" if math.isnan(wait) else f"{wait:.1%}{'*' if wait == least else ' '}" for wait in waits)
    numbers = f"{task.length:9}{task.ranks:5}{task.length // task.ranks:8}{1e3 * computing:9.2f} ms"
    return numbers + "".join(f"{cell:>16}" for cell in cells) + f"{HALF * task.kv * task.ranks / 1e6:9,.0f} MB"


if __name__ == "__main__":
    print(__doc__, *("\n".join(table(layer)) for layer in LAYERS), sep="\n")
