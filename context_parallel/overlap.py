"""Overlap, seen: a ring on slowed links, step by step; beside it the same ring without balance, and an all_gather.

    python -m context_parallel.overlap                       4 local ranks
    python -m context_parallel.overlap --figure ring.png     as a picture too; needs matplotlib

A block's keys and values take 40 ms on the links (collectives/slow.py), and computing with them takes as long, as on a
device of each rank's own: what is left of that time it sleeps. A ring that hides its transfers takes P times 40 ms
forward, one that does not nearly twice that. Times are shown and not judged. Lecture A, "Sequence Parallel과 Context
Parallel을 구분한다": "KV communication byte와 compute overlap을 측정해야 합니다".
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from collectives import comm, demo, timeline
from collectives.demo import Demo
from collectives.runtime import Runtime
from collectives.slow import Slow
from collectives.timeline import Span, Timeline
from collectives.watch import watching
from context_parallel.gather import all_gather_attention
from context_parallel.order import slots
from context_parallel.places import Places
from context_parallel.ring import ring_attention

T, H, KV, K = 1024, 4, 2, 32  # one document, in float32
BLOCK = 0.04  # seconds of a block in zigzag, forward, and of its keys and values on the link
BACKWARD = 2.5  # times forward: five products of matrices for two
RUNS = 3  # of which the shortest is shown
FIGURE = "forward and backward of a ring on slowed links"


class Paced(Timeline):
    """A timeline in which a block takes the time of its pairs of query and key."""

    def __init__(self, places: Places, rank: int):
        super().__init__()
        self.places, self.rank = places, rank
        self.seconds = BLOCK * len(places.slots) / (places.slots.numel() ** 2 / 2 / len(places.slots))  # a pair

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """The block is a span; until its time is over this rank sleeps."""
        half, owner = name.split()
        pairs = sum(block.pairs for block in self.places.blocks(self.rank, int(owner)))
        end = time.monotonic() + pairs * self.seconds * (BACKWARD if half == "backward" else 1)
        with super().span(lane, name):
            yield
            time.sleep(max(0.0, end - time.monotonic()))


class Steps(NamedTuple):
    """A forward and a backward: the lanes of each rank, and when its backward began."""

    name: str
    ranks: list[list[Span]]
    halves: list[float]

    @property
    def seconds(self) -> float:
        """From the first start of any rank to the last end of any."""
        spans = [span for lanes in self.ranks for span in lanes]
        return max(span.stop for span in spans) - min(span.start for span in spans)

    def longest(self, lane: str, half: int) -> float:
        """Seconds of "waits", or on the "link", in forward (0) or backward (1), of the rank with most."""
        return max(timeline.busy(self._half(rank, half), lane) for rank in range(len(self.ranks)))

    def _half(self, rank: int, half: int) -> list[Span]:
        spans = [span for span in self.ranks[rank] if (span.start >= self.halves[rank]) == bool(half)]
        # IDEA: what is on the link while a block is computed costs nothing; what counts is how long a rank waits.
        sent = [span for span in spans if span.lane not in ("compute", "waits")]
        return [*spans, *(Span("link", span.name, span.start, span.stop) for span in sent)]

    def __str__(self) -> str:
        """A line of the table."""
        numbers = [self.longest(lane, half) for half in (0, 1) for lane in ("link", "waits")]
        return f"{self.name:22} {' '.join(f'{1e3 * each:9.0f}' for each in numbers)}"


HEADER = f"""
{"ms":22} {"forward":^19} {"backward":^19}
{"of the rank with most":22} {"link":>9} {"waits":>9} {"link":>9} {"waits":>9}"""


def work(run: Runtime, show: Demo) -> None:
    """All of it."""
    steps = overlap(run)
    if run.rank == 0:
        tell(steps, show.figure)


def tell(steps: Sequence[Steps], figure: Path | None) -> None:
    """Charts, the table, the picture: of the balanced ring rank 0, of the other its first and its last rank."""
    if not steps:
        print("\none rank sends nothing that could be hidden")
        return
    zigzag, contiguous, _ = steps
    charts = {f"{zigzag.name}, rank 0": zigzag.ranks[0]}
    charts |= {f"{contiguous.name}, rank {rank}": contiguous.ranks[rank] for rank in (0, len(contiguous.ranks) - 1)}
    for name, lanes in charts.items():
        print(f"\n{name}\n{timeline.text(lanes, width=120)}")
    print(HEADER, *steps, sep="\n")
    if figure:
        panels = [from_zero(lanes) for lanes in charts.values()]
        timeline.draw(figure, *panels, names=list(charts), title=FIGURE.capitalize())


def from_zero(lanes: Sequence[Span]) -> list[Span]:
    """The same, counted from the first start."""
    first = min(span.start for span in lanes)
    return [span._replace(start=span.start - first, stop=span.stop - first) for span in lanes]


Attention = Callable[[Tensor, Tensor, Tensor, Timeline], Tensor]


def overlap(run: Runtime) -> list[Steps]:
    """The ring in zigzag, then with neighbours, then an all_gather, all on the same links. Nothing for one rank."""
    if run.size == 1:
        return []
    documents = torch.zeros(1, T, dtype=torch.int64)
    zigzag, contiguous = (Places.of(documents, slots(order, T, run.size)) for order in ("zigzag", "contiguous"))

    def ring(places: Places) -> Attention:
        return lambda q, k, v, lanes: ring_attention(q, k, v, places, group=run.world, timeline=lanes)

    def all_gather(q: Tensor, k: Tensor, v: Tensor, lanes: Timeline) -> Tensor:
        return all_gather_attention(q, k, v, zigzag, group=run.world)

    return [
        record(run, "ring, zigzag", ring(zigzag), zigzag),
        record(run, "ring, contiguous", ring(contiguous), contiguous),
        record(run, "all_gather, zigzag", all_gather, zigzag),
    ]


def record(run: Runtime, name: str, attention: Attention, places: Places) -> Steps:
    """The shortest of some runs. Collective."""
    tokens, found = places.slots.shape[1], []
    link = Slow(0.0, BLOCK / (4 * 2 * KV * K * tokens))
    for _ in range(RUNS):
        q, k, v = (torch.randn(1, heads, tokens, K, requires_grad=True) for heads in (H, KV, KV))
        lanes = Paced(places, run.rank)
        comm.barrier(group=run.world)
        with watching(link, lanes):
            out = attention(q, k, v, lanes)
            half = time.monotonic()
            out.backward(torch.ones_like(out))
        ranks, halves = zip(*comm.all_gather_object((lanes.spans, half), group=run.world), strict=True)
        found.append(Steps(name, list(ranks), list(halves)))
    return min(found, key=lambda steps: steps.seconds)


if __name__ == "__main__":
    sys.exit(demo.main(work, figure=FIGURE))
