"""What a collective costs: steps, bytes that every rank sends, and seconds on a machine described in three lines.

Each algorithm of algorithms/ stands here once more as data, its *rounds*: who sends how much to whom before anybody
waits. One rule turns rounds into seconds (Hockney 1994; Thakur, Rabenseifner, Gropp 2005): α once, for the latency,
then all bytes that a rank sends in the round through its port, one message after the other. What it receives takes as
long, at the same time. A rank has one port into its node and one to the others; the slowest rank ends the round.

    all_reduce by a ring, each of 2(P-1) rounds: n/P bytes to the next rank          α + n/P / bandwidth

Left out: additions, what a message costs the processor, links that ranks share, rounds that overlap. And one flat ring
leaves a node by one of its network cards; NCCL lays a ring through each, and so loses less to hierarchical.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Link:
    """What one rank has to itself, in each direction. `source`: of the figures."""

    latency: float  # α, seconds until a message of no bytes has arrived
    bandwidth: float  # bytes a second
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):  # so that nan is refused as well
            raise ValueError(
                f"a link has a latency ≥ 0 s and a bandwidth > 0 bytes/s, not {self.latency} and {self.bandwidth}"
            )


@dataclass(frozen=True)
class Topology:
    """Nodes of `per_node` ranks each, numbered node by node: two ranks share one iff rank // per_node agrees."""

    inside: Link
    between: Link
    per_node: int

    def __post_init__(self) -> None:
        if self.per_node < 1:
            raise ValueError(f"a node has at least 1 rank, not {self.per_node}")


# Latencies: one step of a ring in NCCL's own model (src/graph/tuning.cc, hwLat, Simple): 3.4 µs by NVLink, 5.7 by PCIe,
# 14 by a network. The kernels at both ends are in it; a network card alone takes about 1 µs. Bandwidths are nominal; on
# NVLink 4 380 of 450 GB/s were measured (NVIDIA/nccl, issue 1264).
LINKS: MappingProxyType[str, Link] = MappingProxyType(
    {
        "NVLink 3 (A100)": Link(
            3.4e-6, 300e9, "12 links of 25 GB/s each way; 600 GB/s in NVIDIA's sheet are both ways"
        ),
        "NVLink 4 (H100)": Link(
            3.4e-6, 450e9, "18 links of 25 GB/s each way; 900 GB/s in NVIDIA's sheet are both ways"
        ),
        "NVLink 5 (B200)": Link(
            3.4e-6, 900e9, "18 links of 50 GB/s each way; 1.8 TB/s in NVIDIA's sheet are both ways"
        ),
        "PCIe 4 x16": Link(5.7e-6, 31.5e9, "16 lanes of 16 GT/s, 128 of 130 bits (PCI-SIG); packet headers left out"),
        "PCIe 5 x16": Link(5.7e-6, 63e9, "16 lanes of 32 GT/s, 128 of 130 bits (PCI-SIG); packet headers left out"),
        "InfiniBand HDR": Link(14e-6, 25e9, "4 lanes of 50 Gb/s (IBTA); a card for each GPU is assumed"),
        "InfiniBand NDR": Link(14e-6, 50e9, "4 lanes of 100 Gb/s (IBTA); a card for each GPU is assumed"),
        "100 Gb Ethernet": Link(14e-6, 12.5e9, "IEEE 802.3; InfiniBand's latency and a card for each GPU are assumed"),
    }
)


@dataclass(frozen=True)
class Round:
    """Messages that are posted together: rank src[i] sends nbytes[i] (or each the same) to rank dst[i]."""

    src: np.ndarray
    dst: np.ndarray
    nbytes: ArrayLike
    times: int = 1  # such rounds, one after the other

    @property
    def each(self) -> np.ndarray:
        """The bytes of every message."""
        return np.broadcast_to(self.nbytes, self.src.shape)

    def seconds(self, topology: Topology) -> float:
        """How long the slowest rank takes for one of them."""
        inside = self.src // topology.per_node == self.dst // topology.per_node
        return max(
            link.latency + np.bincount(end[there], self.each[there]).max() / link.bandwidth
            for link, there in ((topology.inside, inside), (topology.between, ~inside))
            for end in (self.src, self.dst)
            if there.any()
        )


@dataclass(frozen=True)
class Cost:
    """Of one collective."""

    steps: int  # rounds: messages that wait for one another
    sent_by: tuple[float, ...]  # bytes, by rank
    seconds: float

    @property
    def sent(self) -> float:
        """Bytes of the rank that sends most."""
        return max(self.sent_by)


def of(collective: str, algorithm: str, n: float, ranks: int, topology: Topology, **choice: int) -> Cost:
    """The cost of a collective by one of our algorithms. The root is rank 0.

        dgx = Topology(LINKS["NVLink 4 (H100)"], LINKS["InfiniBand NDR"], per_node=8)
        of("all_reduce", "ring", 1e9, 16, dgx).seconds           0.0379, and 0.0432 on 128 ranks
        of("all_reduce", "hierarchical", 1e9, 16, dgx).seconds   0.0065, and 0.0090: most bytes stay in the node

    n: bytes of the whole message: the tensor of all_reduce, broadcast, reduce; all pieces together of the others (of an
    all_to_all those of one rank, all that it gives away or keeps); the token of a barrier. P should divide n. Bytes
    count as they travel: partial sums of 16-bit numbers do so in float32, twice as large, by ring, tree, doubling,
    halving and hierarchical; naive, star, direct and pairwise send none.
    choice: `chunks` of the ring's broadcast and reduce. Raises ValueError for others' and for what `rounds` refuses.
    """
    if "chunks" in choice and (collective, algorithm) not in (("broadcast", "ring"), ("reduce", "ring")):
        raise ValueError("only the ring's broadcast and reduce go in chunks here")
    if algorithm == "hierarchical":
        choice = {"per_node": topology.per_node}
    played = list(rounds(collective, algorithm, n, ranks, **choice))
    sent = np.zeros(ranks)
    for r in played:
        sent += r.times * np.bincount(r.src, r.each, ranks)
    seconds = sum(r.times * r.seconds(topology) for r in played)
    return Cost(sum(r.times for r in played), tuple(sent.tolist()), float(seconds))


def rounds(collective: str, algorithm: str, n: float, ranks: int, **choice: int) -> Iterator[Round]:
    """Its rounds, in order; none for one rank.

    choice: `chunks` of the ring's broadcast and reduce, `per_node` of hierarchical. Raises ValueError for what is not
    in ALGORITHMS, less than 0 bytes or one rank, and a node's ranks that do not divide all.
    """
    if (collective, algorithm) not in ALGORITHMS:
        there = [algorithm for name, algorithm in ALGORITHMS if name == collective]
        known = dict.fromkeys(name for name, _ in ALGORITHMS)
        remedy = f"there is {', '.join(there)}" if there else f"the collectives are {', '.join(known)}"
        raise ValueError(f"no {collective} by {algorithm}: {remedy}")
    if ranks < 1 or not n >= 0:
        raise ValueError(f"a collective takes at least 1 rank and 0 bytes, not {ranks} and {n}")
    return ALGORITHMS[collective, algorithm].rounds(ranks, n, **choice) if ranks > 1 else iter(())


# -- the algorithms, n bytes on `size` ranks, at least 2 ---------------------------------------------------------------


def _all_pairs(size: int, nbytes: float) -> Iterator[Round]:
    yield Round(*np.nonzero(~np.eye(size, dtype=bool)), nbytes)


def _pieces_to_all(size: int, n: float) -> Iterator[Round]:
    return _all_pairs(size, n / size)


def _star(size: int, n: float) -> Iterator[Round]:
    leaves = np.arange(1, size)
    yield Round(np.zeros_like(leaves), leaves, n)


def _star_scatter(size: int, n: float) -> Iterator[Round]:
    return _star(size, n / size)


def _ring(size: int, n: float) -> Iterator[Round]:
    ranks = np.arange(size)
    yield Round(ranks, (ranks + 1) % size, n / size, times=size - 1)


def _line(size: int, n: float, chunks: int = 8) -> Iterator[Round]:
    if chunks < 1:
        raise ValueError(f"a message goes down the line in at least 1 chunk, not {chunks}")
    for t in range(size - 2 + chunks):  # in round t rank r hands on chunk t - r
        busy = np.arange(max(0, t - chunks + 1), min(t, size - 2) + 1)
        yield Round(busy, busy + 1, n / chunks)


def _pairwise(size: int, n: float) -> Iterator[Round]:
    ranks = np.arange(size)
    for distance in range(1, size):
        yield Round(ranks, (ranks + distance) % size, n / size)


def _tree(size: int, n: float) -> Iterator[Round]:
    for parents, children, _ in _branches(size):
        yield Round(parents, children, n)


def _tree_scatter(size: int, n: float) -> Iterator[Round]:
    for parents, children, below in _branches(size):
        yield Round(parents, children, below * n / size)


def _branches(size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(parents, children, how many ranks are in a child's subtree), the farthest children first."""
    for distance in _powers(size)[::-1]:
        parents = np.arange(0, size - distance, 2 * distance)
        yield parents, parents + distance, np.minimum(distance, size - parents - distance)


def _powers(size: int) -> list[int]:
    """1, 2, 4 …, below `size`."""
    return [1 << i for i in range((size - 1).bit_length())]


def _dissemination(size: int, n: float) -> Iterator[Round]:
    ranks = np.arange(size)
    for distance in _powers(size):
        yield Round(ranks, (ranks + distance) % size, n)


def _doubling(size: int, n: float) -> Iterator[Round]:
    seats, first = _seats(size)
    steps = (Round(first[seats], first[seats ^ distance], n) for distance in _powers(len(seats)))
    return _folded(size, steps, before=n, after=n)


def _doubling_all_gather(size: int, n: float) -> Iterator[Round]:
    return _folded(size, _doubled(size, n), before=n / size, after=n - n / size)


def _halving(size: int, n: float) -> Iterator[Round]:
    return _folded(size, _halved(size, n), before=n, after=n / size)


def _halving_all_reduce(size: int, n: float) -> Iterator[Round]:
    return _folded(size, chain(_halved(size, n), _doubled(size, n)), before=n, after=n)


def _doubled(size: int, n: float) -> Iterator[Round]:
    """Who sits in a seat knows the pieces of its ranks, and in the end all."""
    seats, first = _seats(size)
    for distance in _powers(len(seats)):
        start = seats // distance * distance
        known = first[start + distance] - first[start]  # pieces, one for each rank in these seats
        yield Round(first[seats], first[seats ^ distance], known * n / size)


def _seats(size: int) -> tuple[np.ndarray, np.ndarray]:
    """(2^k seats, the first rank in each, and P): the ranks folded, two to each of the first P - 2^k seats."""
    seats = np.arange(1 << (size.bit_length() - 1))
    return seats, np.append(seats + np.minimum(seats, size - len(seats)), size)


def _folded(size: int, steps: Iterable[Round], before: float, after: float) -> Iterator[Round]:
    """The second ranks of seats, guests, give their hosts so many bytes before, and are told so many after."""
    guests = np.arange(1, 2 * (size - len(_seats(size)[0])), 2)
    if len(guests):
        yield Round(guests, guests - 1, before)
    yield from steps
    if len(guests):
        yield Round(guests - 1, guests, after)


def _backwards(played: Callable[..., Iterable[Round]]) -> Callable[..., Iterator[Round]]:
    """The dual: reduce of broadcast, gather of scatter, reduce_scatter of all_gather."""

    def dual(*args: float, **choice: int) -> Iterator[Round]:
        # IDEA: played backwards, every message going the other way, a collective that copies is one that adds.
        return (Round(r.dst, r.src, r.nbytes, r.times) for r in reversed(list(played(*args, **choice))))

    return dual


def _halved(size: int, n: float) -> Iterator[Round]:
    return _backwards(_doubled)(size, n)


def _then(*parts: Callable[..., Iterable[Round]]) -> Callable[..., Iterator[Round]]:
    return lambda size, n: (r for part in parts for r in part(size, n))


def _hierarchical(size: int, n: float, per_node: int) -> Iterator[Round]:
    inside = min(size, per_node)
    if size % inside:
        raise ValueError(f"{inside} ranks a node do not divide {size} ranks: fill every node")
    nodes = np.arange(size).reshape(-1, inside)  # [nodes, inside]; a column: the ranks that hold the same piece
    yield from _in_each(nodes, rounds("reduce_scatter", "ring", n, inside))
    yield from _in_each(nodes.T, rounds("all_reduce", "ring", n / inside, len(nodes)))
    yield from _in_each(nodes, rounds("all_gather", "ring", n, inside))


def _in_each(groups: np.ndarray, played: Iterable[Round]) -> Iterator[Round]:
    """The same in all groups at once, each a row of ranks."""
    for r in played:
        yield Round(groups[:, r.src].ravel(), groups[:, r.dst].ravel(), np.tile(r.each, len(groups)), r.times)


@dataclass(frozen=True)
class Algorithm:
    """Its rounds, and for the reader the two formulas that follow from them.

    n bytes, P = L·N ranks, L in each of N nodes, C chunks. A bare log₂P, and the tree's n/2, are those of a P that is a
    power of two. Another P folds its ranks into 2^k seats, k = ⌊log₂P⌋: two steps more, and up to n bytes in each.
    """

    rounds: Callable[..., Iterator[Round]]
    steps: str
    sent: str  # by the rank that sends most


ALGORITHMS: MappingProxyType[tuple[str, str], Algorithm] = MappingProxyType(
    {
        ("all_reduce", "naive"): Algorithm(_all_pairs, "1", "n(P-1)"),
        ("all_reduce", "star"): Algorithm(_then(_backwards(_star), _star), "2", "n(P-1)"),
        ("all_reduce", "tree"): Algorithm(_then(_backwards(_tree), _tree), "2⌈log₂P⌉", "n⌈log₂P⌉"),
        ("all_reduce", "doubling"): Algorithm(_doubling, "log₂P", "n·log₂P"),
        ("all_reduce", "ring"): Algorithm(_then(_ring, _ring), "2(P-1)", "2n(P-1)/P"),
        ("all_reduce", "direct"): Algorithm(_then(_pieces_to_all, _pieces_to_all), "2", "2n(P-1)/P"),
        ("all_reduce", "halving"): Algorithm(_halving_all_reduce, "2log₂P", "2n(P-1)/P"),
        ("all_reduce", "hierarchical"): Algorithm(_hierarchical, "2(L-1)+2(N-1)", "2n(P-1)/P"),
        ("reduce_scatter", "ring"): Algorithm(_ring, "P-1", "n(P-1)/P"),
        ("reduce_scatter", "halving"): Algorithm(_halving, "log₂P", "n(P-1)/P"),
        ("reduce_scatter", "pairwise"): Algorithm(_pairwise, "P-1", "n(P-1)/P"),
        ("reduce_scatter", "direct"): Algorithm(_pieces_to_all, "1", "n(P-1)/P"),
        ("all_gather", "ring"): Algorithm(_ring, "P-1", "n(P-1)/P"),
        ("all_gather", "doubling"): Algorithm(_doubling_all_gather, "log₂P", "n(P-1)/P"),
        ("all_gather", "direct"): Algorithm(_pieces_to_all, "1", "n(P-1)/P"),
        ("all_to_all", "pairwise"): Algorithm(_pairwise, "P-1", "n(P-1)/P"),
        ("all_to_all", "direct"): Algorithm(_pieces_to_all, "1", "n(P-1)/P"),
        ("broadcast", "star"): Algorithm(_star, "1", "n(P-1)"),
        ("broadcast", "tree"): Algorithm(_tree, "⌈log₂P⌉", "n⌈log₂P⌉"),
        ("broadcast", "ring"): Algorithm(_line, "P-2+C", "n"),
        ("reduce", "star"): Algorithm(_backwards(_star), "1", "n"),
        ("reduce", "tree"): Algorithm(_backwards(_tree), "⌈log₂P⌉", "n"),
        ("reduce", "ring"): Algorithm(_backwards(_line), "P-2+C", "n"),
        ("scatter", "star"): Algorithm(_star_scatter, "1", "n(P-1)/P"),
        ("scatter", "tree"): Algorithm(_tree_scatter, "⌈log₂P⌉", "n(P-1)/P"),
        ("gather", "star"): Algorithm(_backwards(_star_scatter), "1", "n/P"),
        ("gather", "tree"): Algorithm(_backwards(_tree_scatter), "⌈log₂P⌉", "n/2"),
        ("barrier", "star"): Algorithm(_then(_backwards(_star), _star), "2", "n(P-1)"),
        ("barrier", "tree"): Algorithm(_then(_backwards(_tree), _tree), "2⌈log₂P⌉", "n⌈log₂P⌉"),
        ("barrier", "doubling"): Algorithm(_dissemination, "⌈log₂P⌉", "n⌈log₂P⌉"),
    }
)


# -- bandwidth ---------------------------------------------------------------------------------------------------------


# What the slowest port must let through for each byte of the message, however clever the algorithm: doc/PERFORMANCE.md
# of nccl-tests; gather and scatter from its src/gather.cu and src/scatter.cu.
_PORT_SHARE: MappingProxyType[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": lambda size: 2 * (size - 1) / size,
        **dict.fromkeys(
            ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"), lambda size: (size - 1) / size
        ),
        **dict.fromkeys(("broadcast", "reduce"), lambda size: float(size > 1)),
    }
)


def bus_bandwidth(collective: str, n: float, ranks: int, seconds: float) -> float:
    """Bytes a second that a link must have carried, to be held against its bandwidth: nccl-tests' `busbw`.

    n: bytes of the whole message, as in `of`. 2n(P-1)/P / seconds for an all_reduce, whichever algorithm it was.
    """
    if collective not in _PORT_SHARE:
        raise ValueError(f"{collective} has no bus bandwidth; {', '.join(_PORT_SHARE)} have one")
    return n * _PORT_SHARE[collective](ranks) / seconds
