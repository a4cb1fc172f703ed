"""Where experts pay: of a mixture's messages, how long they take beside its computing, from collectives/cost.py.

    python -m expert_parallel.study      no ranks needed

Forward and backward of one layer's experts, bfloat16, 4,096 tokens on each rank, evenly routed. 6·D·F FLOPs a row
forward and twice as many backward, at RATE, which is assumed: half of an H100's dense 989e12. Ways to share E experts:

    ep       tokens travel, a copy for each choice: four all_to_alls of 2nkD bytes
    … once   as DeepEP does: one copy to each node that has a chosen expert, to be handed on by NVLink; at most 4 nodes
    tp       each expert cut over all ranks, which gather all tokens: 2 all_gathers, 2 reduce_scatters of 2nDP bytes
    fsdp     weights travel: gathered twice, and their gradients added in float32

Nothing of it overlaps here: what is below 100 % could be hidden behind the computing, what is above cannot. Of a
collective the cheapest algorithm of cost.py counts. Left out: launches, permutations, how kernels slow down with few
rows; an uneven load, whose max over mean multiplies both the computing and ep's messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from collectives import cost
from collectives.cost import LINKS, Link, Round, Topology

RATE = 0.5 * 989e12  # FLOP/s
HALF, SINGLE = 2, 4  # bytes of an element
TOKENS, NODE, LIMIT = 4096, 8, 4  # tokens a rank, ranks a node, nodes a token may be sent to

DGX = Topology(LINKS["NVLink 4 (H100)"], LINKS["InfiniBand NDR"], per_node=NODE)
ONE_A_NODE = replace(DGX, per_node=1)


@dataclass(frozen=True)
class Task:
    """A layer's experts, on ranks that stand in nodes as the topology says."""

    width: int
    hidden: int
    experts: int
    choices: int
    ranks: int = 1
    topology: Topology = DGX

    @property
    def computing(self) -> float:
        """Seconds on each rank, forward and backward."""
        return 3 * 6 * TOKENS * self.choices * self.width * self.hidden / RATE

    @property
    def weights(self) -> float:
        """Bytes of all experts."""
        return HALF * 3 * self.width * self.hidden * self.experts

    @property
    def tokens(self) -> float:
        """Bytes of a rank's tokens, one copy of each."""
        return HALF * TOKENS * self.width

    def collective(self, name: str, nbytes: float) -> float:
        """Seconds of the cheapest algorithm. nbytes: as in cost.of."""
        ways = [algorithm for each, algorithm in cost.ALGORITHMS if each == name]
        return min(cost.of(name, way, nbytes, self.ranks, self.topology).seconds for way in ways)


def exchange(task: Task) -> float:
    """Seconds of one dispatch, or combine: a copy of a token for each choice."""
    return task.collective("all_to_all", task.choices * task.tokens)


def exchange_once(task: Task) -> float:
    """Seconds, if a token crosses once to each node, to the rank in the same place there, which hands it on."""
    nodes, mates = max(1, task.ranks // task.topology.per_node), min(task.ranks, task.topology.per_node)
    inside = replace(task, ranks=mates).collective("all_to_all", task.choices * task.tokens)
    if nodes == 1:
        return inside
    # IDEA: k choices in N nodes are fewer than k nodes, and a router that is held to few of them sends even less.
    share = min(1 - (1 - 1 / nodes) ** task.choices, LIMIT / nodes)  # of tokens that go to a given node
    ranks = np.arange(task.ranks).reshape(nodes, mates)
    pairs = [(ranks[i], ranks[j]) for i in range(nodes) for j in range(nodes) if i != j]
    src, dst = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return Round(src, dst, share * task.tokens).seconds(task.topology) + inside


def tensor_parallel(task: Task) -> float:
    """Seconds of all messages."""
    everyones = task.tokens * task.ranks
    return 2 * (task.collective("all_gather", everyones) + task.collective("reduce_scatter", everyones))


def fully_sharded(task: Task) -> float:
    """Seconds of all messages."""
    gradients = task.weights * SINGLE / HALF
    return 2 * task.collective("all_gather", task.weights) + task.collective("reduce_scatter", gradients)


WAYS = MappingProxyType(
    {
        "ep": lambda task: 4 * exchange(task),
        "… once": lambda task: 4 * exchange_once(task),
        "tp": tensor_parallel,
        "fsdp": fully_sharded,
    }
)
LAYERS = MappingProxyType(
    {
        "DeepSeek-V3": Task(7168, 2048, 256, 8),
        "Qwen3 30B-A3B": Task(2048, 768, 128, 8),
        "Mixtral 8x7B": Task(4096, 14336, 8, 2),
    }
)
PLACED = MappingProxyType(
    {"in a node": (DGX, (8,)), "in whole nodes": (DGX, (16, 64)), "one in each node": (ONE_A_NODE, (8,))}
)


def enough(link: Link) -> float:
    """The F from which on the computing of a row takes as long as its way there and back, if all of them leave."""
    return RATE * 2 * HALF / (6 * link.bandwidth)


def table(name: str) -> Iterator[str]:
    """The lines of a layer."""
    layer = LAYERS[name]
    yield f"{name}: D {layer.width:,}, F {layer.hidden:,}, E {layer.experts}, k {layer.choices}"
    yield f"{'ranks':>22}{'experts':>9}{'weights':>10}{'computing':>12}{'all_to_all':>12}" + "".join(
        f"{way:>9}" for way in WAYS
    )
    for where, (topology, sizes) in PLACED.items():
        for ranks in sizes:
            if layer.experts % ranks == 0:
                yield line(replace(layer, ranks=ranks, topology=topology), where)


def line(task: Task, where: str) -> str:
    """Of a rank: experts and their weights; ms of computing and of one all_to_all; each way's messages, in %."""
    held = f"{task.experts // task.ranks:9}{task.weights / task.ranks / 1e9:7.2f} GB"
    times = f"{1e3 * task.computing:9.2f} ms{1e3 * exchange(task):9.2f} ms"
    shares = "".join(f"{way(task) / task.computing:9.0%}" for way in WAYS.values())
    return f"{f'{task.ranks} {where}':>22}{held}{times}{shares}"


def main() -> None:
    """Print it."""
    print(__doc__)
    links = (DGX.inside, DGX.between)
    print(
        "an exchange can be hidden from F = {:,.0f} on by NVLink, {:,.0f} by InfiniBand\n".format(*map(enough, links))
    )
    print(*("\n".join(table(name)) + "\n" for name in LAYERS), sep="\n")


if __name__ == "__main__":
    main()
