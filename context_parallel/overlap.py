"""Overlap, seen: a ring on slowed links, step by step; beside it the same ring without balance, and an all_gather.

    python -m context_parallel.overlap                       4 local ranks
    python -m context_parallel.overlap --figure ring.png     as a picture too; needs matplotlib

The links are made so slow (collectives/slow.py) that a block's keys and values take as long as it takes to compute with
them. A ring that hides its transfers then takes P blocks' time forward, one that does not nearly twice that. Times are
shown and not judged. Lecture A, "Sequence Parallel과 Context Parallel을 구분한다": "KV communication byte와 compute
overlap을 측정해야 합니다".
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from collectives import comm, demo, timeline
from collectives.demo import Demo
from collectives.runtime import Runtime
from collectives.slow import Slow
from collectives.timeline import Span, Timeline
from collectives.watch import Watcher, watching
from context_parallel.gather import all_gather_attention
from context_parallel.order import slots
from context_parallel.places import Places
from context_parallel.ring import ring_attention

T, H, KV, K = 4096, 4, 2, 32  # one document, in float32
RUNS = 3  # of which the shortest is shown
FIGURE = "forward and backward of a ring on slowed links"

Attention = Callable[[Tensor, Tensor, Tensor, Timeline], Tensor]


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
        return f"{self.name:22} {' '.join(f'{1e3 * each:9.0f}' for each in (*numbers, self.seconds))}"


HEADER = f"""
{"ms":22} {"forward":^19} {"backward":^19}
{"of the rank with most":22} {"link":>9} {"waits":>9} {"link":>9} {"waits":>9} {"both":>9}"""


def work(run: Runtime, show: Demo) -> None:
    """All of it."""
    steps = overlap(run)
    if run.rank == 0:
        tell(steps, show.figure)


def tell(steps: Sequence[Steps], figure: Path | None) -> None:
    """Charts, the table, the picture: of the balanced ring rank 0, of the other its first and its last rank."""
    if not steps:
        print("one rank sends nothing that could be hidden")
        return
    zigzag, contiguous, _ = steps
    last = len(contiguous.ranks) - 1
    charts = {f"{zigzag.name}, rank 0": zigzag.ranks[0]}
    charts |= {f"{contiguous.name}, rank {rank}": contiguous.ranks[rank] for rank in (0, last)}
    for name, lanes in charts.items():
        print(f"\n{name}\n{timeline.text(lanes, width=120)}")
    print(HEADER, *steps, sep="\n")
    if figure:
        start = {name: min(span.start for span in lanes) for name, lanes in charts.items()}
        panels = [[s._replace(start=s.start - start[n], stop=s.stop - start[n]) for s in charts[n]] for n in charts]
        timeline.draw(figure, *panels, names=list(charts), title=FIGURE.capitalize())


def overlap(run: Runtime) -> list[Steps]:
    """The ring in zigzag, then with neighbours, then an all_gather, all on the same links. Nothing for one rank."""
    if run.size == 1:
        return []
    documents, world = torch.zeros(1, T, dtype=torch.int64), run.world
    zigzag, contiguous = (Places.of(documents, slots(order, T, run.size)) for order in ("zigzag", "contiguous"))
    tokens = zigzag.slots.shape[1]
    for places in (zigzag, contiguous):
        places.pairs(run.rank)  # looks up what is visible, once

    def ring(places: Places) -> Attention:
        return lambda q, k, v, lanes: ring_attention(q, k, v, places, group=world, timeline=lanes)

    def all_gather(q: Tensor, k: Tensor, v: Tensor, lanes: Timeline) -> Tensor:
        return all_gather_attention(q, k, v, zigzag, group=world)

    block = block_seconds(record(run, "links as they are", ring(zigzag), tokens))
    nbytes = 4 * 2 * KV * K * tokens
    if run.rank == 0:
        print(
            f"\nslowed links: {nbytes:,} bytes, a block's keys and values, take {1e3 * block:.0f} ms, as a block does"
        )
    link = Slow(0.0, block / nbytes)
    return [
        record(run, "ring, zigzag", ring(zigzag), tokens, link),
        record(run, "ring, contiguous", ring(contiguous), tokens, link),
        record(run, "all_gather, zigzag", all_gather, tokens, link),
    ]


def block_seconds(steps: Steps) -> float:
    """What a rank takes for a block in forward, the median."""
    spans = [span for lanes in steps.ranks for span in lanes]
    return statistics.median(span.stop - span.start for span in spans if span.name.startswith("forward"))


def record(run: Runtime, name: str, attention: Attention, tokens: int, *watchers: Watcher) -> Steps:
    """The shortest of some runs, each rank with so many tokens. Collective."""
    found = []
    for _ in range(RUNS):
        q, k, v = (torch.randn(1, heads, tokens, K, requires_grad=True) for heads in (H, KV, KV))
        lanes = Timeline()
        comm.barrier(group=run.world)
        with watching(*watchers, lanes):
            out = attention(q, k, v, lanes)
            half = time.monotonic()
            out.backward(torch.ones_like(out))
        ranks, halves = zip(*comm.all_gather_object((lanes.spans, half), group=run.world), strict=True)
        found.append(Steps(name, list(ranks), list(halves)))
    return min(found, key=lambda steps: steps.seconds)


if __name__ == "__main__":
    sys.exit(demo.main(work, figure=FIGURE))
