"""What the size of a unit and prefetch do to a step: the granularity of wrapping, and one step as lanes over time.

    python -m fsdp.study                       2 local ranks
    python -m fsdp.study --figure lanes.png    the lanes as a picture too; needs matplotlib

Eight blocks in units of 1, 2, 4 and 8, everything freed after forward. A unit is one message, so small ones pay the
latency often; and it is one lifetime, so large ones take much memory at once, and their first gather and last reduction
have nothing to hide under. Links slowed either way (slow.py) show the two. The machine is shared, so a time is that of
the shortest of some steps, and is not judged; collectives, bytes and the weights alive are. Lectures A and the series,
on wrap granularity and prefetch (docs/notation.md).
"""

import contextlib
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from collectives import allocated, comm, demo, timeline
from collectives.demo import Demo
from collectives.ledger import Ledger
from collectives.memory import Memory
from collectives.runtime import Runtime
from collectives.slow import Slow
from collectives.timeline import Span, Timeline
from collectives.watch import Watcher, watching
from fsdp.sharded import FullySharded
from fsdp.wrap import fully_shard

BLOCKS, VOCAB, WIDTH, HIDDEN, TOKENS, STEPS = 8, 256, 256, 512, 256, 4
SIZES = (1, 2, 4, 8)  # blocks in a unit
LINKS = MappingProxyType({"as it is": None, "+ 20 ms a call": (0.02, 0.0), "at 50 MB/s": (0.0, 2e-8)})
LANES_LINK, LANES_SIZE = (0.002, 1e-8), 2  # for the lanes: 2 ms a call and 100 MB/s; units of two blocks
FREED = MappingProxyType({"reshard_after_forward": True})


class Block(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # [B, D]


class Stack(nn.Module):
    """An embedding, blocks in groups of `size`, a head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        groups = [nn.Sequential(*(Block(WIDTH, HIDDEN) for _ in range(size))) for _ in range(BLOCKS // size)]
        self.units = nn.Sequential(*groups)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.units(self.embed(ids)))  # [B] → [B, V]


class Trained:
    """A stack whose groups are units, and its steps."""

    def __init__(self, run: Runtime, size: int, settings: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self.run, self.model, self.ids = run, Stack(size), torch.arange(TOKENS) % VOCAB
        for unit in self.model.units:
            # IDEA: a unit is a message and a lifetime at once: its size trades latency for memory and overlap.
            fully_shard(unit, run.world, **settings)
        self.handle = fully_shard(self.model, run.world, **settings)
        self.step()  # which settles the order of units

    def step(self) -> None:
        """A step without its update, the gradients of the one before dropped."""
        for shard in self.handle.parameters():
            shard.grad = None
        self.model(self.ids).square().mean().backward()
        self.handle.finish()

    def digest(self) -> str:
        """Of all gradients of this rank."""
        row = torch.cat([shard.grad.flatten() for shard in self.handle.parameters()])
        return hashlib.sha256(row.numpy()).hexdigest()

    def seconds(self, *watchers: Watcher) -> float:
        """Of a step."""
        comm.barrier(group=self.run.world)
        began = time.perf_counter()
        with watching(*watchers):
            self.step()
        return time.perf_counter() - began


def work(run: Runtime, show: Demo) -> None:
    """The table, then the lanes."""
    of_sizes = [Trained(run, size, FREED) for size in SIZES]
    rows = [granularity(show, size, trained) for size, trained in zip(SIZES, of_sizes, strict=True)]
    show.part = "all sizes"
    show.claim("different gradients", "1, bit for bit", 1, len({trained.digest() for trained in of_sizes}))
    seconds = times(of_sizes)
    if run.rank == 0:
        print(table(rows, seconds))
    lanes = shortest(run)
    if run.rank == 0 and run.size > 1:
        for name, spans in lanes.items():
            print(f"\n{name}: {told(spans)}\n{timeline.text(spans, width=120)}")
        if show.figure:
            names = [f"{name}: {told(spans)}" for name, spans in lanes.items()]
            title = f"a step of rank 0 of {run.size}: units of two blocks, slowed links"
            timeline.draw(show.figure, *lanes.values(), names=names, title=title)


# -- granularity -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What a step of units of this many blocks comes to. Bytes of this rank."""

    size: int
    calls: int
    sent: float
    alive: int
    peak: int


def granularity(show: Demo, size: int, trained: Trained) -> Row:
    """Count, and claim what is arithmetic."""
    show.part, run = f"units of {size}", trained.run
    before = demo.bytes_written()
    with watching(book := Ledger()), most_alive(trained.handle) as levels:
        trained.step()
    sent = demo.bytes_since(before)
    calls = sum(row.calls for row in book.rows())
    root, *units = [sum(param.nbytes for pack in unit.packs for param in pack.params) for unit in trained.handle.units]
    n = root + sum(units)
    show.claim("collectives", "3U + 1", 3 * len(trained.handle.units) + 1 if run.size > 1 else calls, calls)
    show.traffic("bytes sent", "3n(P-1)/P", 3 * n * (run.size - 1) // run.size, sent, calls=calls)
    if run.size > 1:
        formula, expected = "n/P + root + 2 units", n // run.size + root + 2 * units[0]
        show.claim("parameters, peak", formula, expected, max(levels))  # every size is a multiple of P and of 64 bytes
    peak = allocated.peak_bytes(trained.step, run.device)
    return Row(size, calls, sum(row.algorithm for row in book.rows()), max(levels), peak)


def times(of_sizes: list[Trained]) -> list[list[float]]:
    """Seconds of the shortest of some steps, for each link of each size. They take turns, because what else runs on the
    machine comes and goes.
    """
    taken = []
    for link in LINKS.values():
        rounds = [[trained.seconds(*([Slow(*link)] if link else [])) for trained in of_sizes] for _ in range(STEPS)]
        taken.append([min(steps) for steps in zip(*rounds, strict=True)])
    return taken


def table(rows: list[Row], seconds: list[list[float]]) -> str:
    """As text."""
    columns = (
        f"{'blocks a unit':>13} {'collectives':>11} {'sent, MB':>8} {'parameters alive':>16} {'peak of a step':>14}"
    )
    links = " ".join(f"{name:>14}" for name in LINKS)
    lines = [
        f"{row.size:13} {row.calls:11} {row.sent / 1e6:8.2f} {row.alive / 1e6:16.2f} {row.peak / 1e6:14.2f}  "
        + " ".join(f"{1e3 * of_size[i]:14.0f}" for of_size in seconds)
        for i, row in enumerate(rows)
    ]
    return "\n".join([f"{columns}  ms a step, on the link", f"{'':68}{links}", *lines])


@contextlib.contextmanager
def most_alive(handle: FullySharded) -> Iterator[list[int]]:
    """Inside, the bytes of this rank's shards, slots and weights are noted at first and whenever memory has come."""
    allocate, levels = Memory.allocate, [nbytes(handle)]

    def noted(memory: Memory) -> Tensor:
        tensor = allocate(memory)
        levels.append(nbytes(handle))
        return tensor

    with mock.patch.object(Memory, "allocate", noted):
        yield levels


def nbytes(handle: FullySharded) -> int:
    """Of the storages behind the parameters, now."""
    tensors = [pack.shard for pack in handle.packs]
    tensors += [memory.tensor for pack in handle.packs if not pack.alone for memory in (pack.packed, pack.weights)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# -- lanes -------------------------------------------------------------------------------------------------------------


def shortest(run: Runtime) -> dict[str, list[Span]]:
    """What this rank does in the shortest of some steps, without prefetch and with it, which take turns."""
    ways, steps = {}, {}
    for prefetch in (0, 1):
        ways[f"prefetch={prefetch}"] = Trained(run, LANES_SIZE, {"prefetch": prefetch}), Timeline()
    for trained, lanes in ways.values():
        for i, unit in enumerate(trained.model.units):
            lanes.follow(f"units.{i}", unit)
    for _ in range(2 * STEPS):
        for name, way in ways.items():
            steps.setdefault(name, []).append(spans_of_a_step(*way))
    return {name: min(of_way, key=lambda spans: max(span.stop for span in spans)) for name, of_way in steps.items()}


def spans_of_a_step(trained: Trained, lanes: Timeline) -> list[Span]:
    """From time 0 on."""
    lanes.spans = []
    trained.seconds(Slow(*LANES_LINK), lanes)
    lanes.close()
    start = min(span.start for span in lanes.spans)
    return [Span(lane, name, began - start, ended - start) for lane, name, began, ended in lanes.spans]


def told(spans: list[Span]) -> str:
    """How much of what is on its way hides under computing."""
    link = [Span("link", "", span.start, span.stop) for span in spans if span.lane not in ("compute", "waits")]
    total, hidden = timeline.busy(link, "link"), timeline.overlap([*spans, *link], "link", "compute")
    end, waits = max(span.stop for span in spans), timeline.busy(spans, "waits")
    end, hidden, total, waits = (round(1e3 * seconds) for seconds in (end, hidden, total, waits))
    return f"{end} ms; {hidden} of {total} ms on the link hide under computing; {waits} ms of waits"


if __name__ == "__main__":
    sys.exit(demo.main(work, ranks=2, figure="a step of rank 0 as lanes over time"))
