"""Demo of fully sharded data parallelism: one small model, sharded in every way, beside one process.

    python -m fsdp                                       4 local ranks
    torchrun --standalone --nproc-per-node 2 -m fsdp     the ranks of torchrun

In float64, with AdamW: 13 rows a batch, dealt unevenly to the ranks and to k = 2 microbatches. U units: three blocks,
and the root with what is left. s ranks shard, r ranks have the same shards. n is what the slots of all ranks hold:
padding is in it, and nothing in the model divides evenly. Memory: the most that shards, slots and weights take.
"""

import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from collectives import comm, demo
from collectives.demo import Demo
from collectives.layout import Box
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.watch import watching
from fsdp import fully_shard, simple
from fsdp.sharded import FullySharded
from fsdp.study import Block, most_alive

ROWS, STEPS, MICROBATCHES, VOCAB, WIDTH, HIDDEN, BLOCKS = 13, 3, 2, 211, 97, 331, 3
UNITS = BLOCKS + 1
ITEM = 8  # bytes of a float64


class Model(nn.Module):
    """The next token from one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.Sequential(*(Block(WIDTH, HIDDEN) for _ in range(BLOCKS)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))  # [B] → [B, V]


K = MICROBATCHES
ROOT_AND_TWO = (" + root + 2 units", lambda whole, slots: whole.root + whole.unit + slots.unit)
ALL_AND_ONE = (" + n + 1 unit", lambda whole, slots: whole.n + slots.unit)
NOTHING = ("", lambda whole, slots: 0)
FREED = MappingProxyType({"reshard_after_forward": True})


class Mode(NamedTuple):
    """A way to shard, and what a step comes to: how often each unit is gathered, reduced and added to replicas."""

    name: str
    sent: str  # formulas, of bytes sent and of collectives
    calls: str
    gathers: int
    reductions: int
    replications: int = 0
    kept_roots: int = 0  # gathers that the root does without
    shards: str = "all"  # of the ranks: all, half, or one
    sync: str = ""  # the method of the handle around all microbatches but the last
    alive: tuple[str, Callable[["Sizes", "Sizes"], int]] = ROOT_AND_TWO  # of the weights at the peak, beside the shards
    settings: Mapping[str, Any] = FREED


MODES = (
    Mode("full shard", "3kn(s-1)/s", "3kU + 1", 2 * K, K),
    Mode("no prefetch", "3kn(s-1)/s", "3kU + 1", 2 * K, K, settings=FREED | {"prefetch": 0}),
    Mode("no_sync", "(2k+1)n(s-1)/s", "(2k+1)U + 1", 2 * K, 1, sync="no_sync"),
    Mode("default, root kept", "k(3n - root)(s-1)/s", "3kU - k + 1", 2 * K, K, kept_roots=K, settings={}),
    Mode(
        *("shard grad-op", "2kn(s-1)/s", "2kU + 1", K, K),
        **{"alive": ALL_AND_ONE, "settings": {"reshard_after_forward": False}},
    ),
    Mode("hybrid", "3kn(s-1)/s + 2k(n/s)(r-1)/r", "4kU + 2", 2 * K, K, K, shards="half"),
    Mode(
        *("no_replica_sync", "3kn(s-1)/s + 2(n/s)(r-1)/r", "(3k+1)U + 2", 2 * K, K, 1),
        **{"shards": "half", "sync": "no_replica_sync"},
    ),
    Mode(
        *("no shard", "2kn(r-1)/r", "kU + 1", 0, 0, K),
        **{"shards": "one", "alive": NOTHING},
    ),
)


def work(run: Runtime, show: Demo) -> None:
    """The short version, then every mode."""
    torch.manual_seed(0)
    batches = torch.randint(VOCAB, (STEPS, ROWS, 2))  # the same everywhere
    reference = alone(batches)
    forty_lines(run, show, batches, reference)
    bits = {}
    for mode in MODES:
        if mode.shards != "half" or (run.size >= 4 and run.size % 2 == 0):
            bits[mode.name] = train(run, show, mode, batches, reference)
    show.part = "together"
    show.claim("prefetch 0 and 1", "1, bit for bit", 1, len({bits["full shard"], bits["no prefetch"]}))


# -- beside one process ------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What one process does with whole batches. Tensors by name."""

    initial: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]  # of each step
    last: dict[str, Tensor]


def alone(batches: Tensor) -> Reference:
    """The weights, the gradients of each step, and the weights after the last."""
    model, gradients = made(0), []
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = adamw(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        (cross_entropy(model(batch[:, 0]), batch[:, 1], reduction="sum") / ROWS).backward()
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
    return Reference(initial, gradients, {name: param.detach() for name, param in model.named_parameters()})


def made(seed: int) -> Model:
    """A model of this seed."""
    torch.manual_seed(seed)
    return Model().double()


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """eps is large, because Adam divides by the gradient: noise in a tiny one would be a large part of the update."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def backward(run: Runtime, model: Model, batch: Tensor, waits: Callable[[], Any] = contextlib.nullcontext) -> None:
    """The gradient of this rank's rows, in microbatches; a loss is the mean over all rows, and ranks average theirs."""
    for i, part in enumerate(batch.tensor_split(run.size)[run.rank].tensor_split(K), start=1):
        with waits() if i < K else contextlib.nullcontext():
            ids, labels = part.unbind(1)
            (cross_entropy(model(ids), labels, reduction="sum") * run.size / ROWS).backward()


def worst(difference: Tensor, scale: float) -> float:
    """The largest entry as a share of `scale`; infinite where one is not a number: max(0.0, nan) is 0.0."""
    largest = float(difference.abs().max()) / scale if difference.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def judge(show: Demo, gradient_errors: Iterable[float], ours: Mapping[str, Tensor], reference: Reference) -> None:
    """Parity of gradients, and of the weights after the last step."""
    moved = {name: float((reference.last[name] - value).abs().max()) for name, value in reference.initial.items()}
    show.parity("gradients", max(gradient_errors), 1e-12)
    errors = [worst(value - reference.last[name], moved[name]) for name, value in ours.items()]
    show.parity(f"update, {STEPS} steps", max(errors), 1e-10)


# -- forty lines -------------------------------------------------------------------------------------------------------


def forty_lines(run: Runtime, show: Demo, batches: Tensor, reference: Reference) -> None:
    """simple.py: an autograd function a unit."""
    show.part = "simple.py"
    model = made(0)
    whole = {name: param.shape for name, param in model.named_parameters()}
    units = {**{f"blocks.{i}.": block for i, block in enumerate(model.blocks)}, "": model}
    for unit in units.values():
        simple.fully_shard(unit, run.world)
    optimizer, errors = adamw(model.parameters()), []
    for batch, expected in zip(batches, reference.gradients, strict=True):
        optimizer.zero_grad()
        before = demo.bytes_written()
        with watching(book := Ledger()), show.time("forward and backward"):
            backward(run, model, batch)
        sent = demo.bytes_since(before)
        ours = rows_of(run, {name: unit.shard.grad for name, unit in units.items()}, whole)
        errors += [worst(grad - expected[name], float(expected[name].abs().max())) for name, grad in ours.items()]
        optimizer.step()
    judge(show, errors, rows_of(run, {name: unit.shard.detach() for name, unit in units.items()}, whole), reference)
    calls = sum(row.calls for row in book.rows())
    show.claim("collectives a step", "2kU", 2 * K * UNITS if run.size > 1 else calls, calls)
    n = run.size * sum(unit.shard.nbytes for unit in units.values())
    show.traffic("bytes sent a step", "2kn(P-1)/P", 2 * K * n * (run.size - 1) // run.size, sent, calls=calls)


def rows_of(run: Runtime, shards: Mapping[str, Tensor], whole: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The tensors of which these shards of units are made, by name. Collective."""
    found, unseen = {}, dict(whole)
    for unit, shard in shards.items():
        row = torch.cat(comm.all_gather_object(shard, group=run.world))
        for name in [name for name in unseen if name.startswith(unit)]:
            shape = unseen.pop(name)
            found[name], row = row[: shape.numel()].view(shape), row[shape.numel() :]
    return found


# -- every mode --------------------------------------------------------------------------------------------------------


def train(run: Runtime, show: Demo, mode: Mode, batches: Tensor, reference: Reference) -> str:
    """A few steps. Ranks start from weights of their own, which wrap makes rank 0's. Returns a digest of the last."""
    shards = {"all": run.size, "half": run.size // 2, "one": 1}[mode.shards]
    show.part = mode.name
    model = made(run.rank)
    whole, slots = sizes_of(model, 1), sizes_of(model, shards)
    handle = wrap(run, model, shards, mode.settings)
    if run.rank == 0:
        print(f"{mode.name}, s = {shards}, r = {run.size // shards}: {handle.padding()}", flush=True)
    optimizer, errors = handle.optimizer(adamw(handle.parameters())), []
    for batch, expected in zip(batches, reference.gradients, strict=True):
        optimizer.zero_grad()
        before = demo.bytes_written()
        with watching(book := Ledger()), show.time("a step"), most_alive(handle) as levels:
            backward(run, model, batch, getattr(handle, mode.sync) if mode.sync else contextlib.nullcontext)
            handle.finish()
            optimizer.step()
            handle.after_step()
        sent = demo.bytes_since(before)
        errors.append(error_of_shards(handle, expected))
    with handle.whole():
        ours = {name: param.detach().clone() for name, param in model.named_parameters()}
    judge(show, errors, ours, reference)
    calls = sum(row.calls for row in book.rows() if len(row.ranks) > 1)
    show.claim("collectives a step", mode.calls, collectives(mode, run, shards), calls)
    show.traffic("bytes sent a step", mode.sent, traffic(mode, run, shards, slots), sent, calls=calls)
    formula, alive = mode.alive if shards > 1 else NOTHING  # a shard that is all there is
    show.claim("parameters, peak", f"n/s{formula}", slots.n // shards + alive(whole, slots), max(levels))
    return hashlib.sha256(torch.cat([value.flatten() for value in ours.values()]).numpy()).hexdigest()


def wrap(run: Runtime, model: Model, shards: int, settings: Mapping[str, Any]) -> FullySharded:
    """Shard over groups of neighbours, replicate over the others; all ranks make all groups, in one order."""
    ranks = range(run.size)
    sharding = [run.new_group(ranks[first : first + shards]) for first in range(0, run.size, shards)]
    replicas = [run.new_group(ranks[first::shards]) for first in range(shards)]
    group, others = sharding[run.rank // shards], replicas[run.rank % shards]
    settings = {**settings, "replicate_group": others if shards < run.size else None}
    for block in model.blocks:
        fully_shard(block, group, **settings)
    return fully_shard(model, group, **settings)


class Sizes(NamedTuple):
    """Bytes of all units, of the root and of a block."""

    n: int
    root: int
    unit: int


def sizes_of(model: Model, ranks: int) -> Sizes:
    """What the slots of this many ranks hold together; of one rank, what whole weights take."""
    units = [row(block.parameters(), ranks) for block in model.blocks]
    root = row([*model.embed.parameters(), *model.head.parameters()], ranks)
    return Sizes(root + sum(units), root, units[0])


def row(params: Iterable[nn.Parameter], ranks: int) -> int:
    """Of each parameter a rank has as much as the longest piece; whole ones start at multiples of 64 bytes."""
    align, end = 64 if ranks == 1 else 1, 0
    for param in params:
        end = -(-end // align) * align + -(-len(param) // ranks) * param[0].numel() * ITEM
    return ranks * end


def error_of_shards(handle: FullySharded, expected: Mapping[str, Tensor]) -> float:
    """The largest error of this rank's gradients, each as a share of its tensor's largest entry."""
    errors = [0.0]
    for shard in handle.parameters():
        whole = expected[shard.held.name]
        for box in shard.held.boxes:
            errors.append(worst(shard.grad - whole[box.slices(Box.whole(whole.shape))], float(whole.abs().max())))
    return max(errors)


def collectives(mode: Mode, run: Runtime, shards: int) -> int:
    """Of each unit those of the mode; and one small all_reduce a group, which agrees on what was used."""
    if run.size == 1:
        return 0
    of_units = (mode.gathers + mode.reductions + mode.replications) * UNITS - mode.kept_roots
    return of_units + (shards > 1) + (shards < run.size)


def traffic(mode: Mode, run: Runtime, shards: int, slots: Sizes) -> int:
    """Bytes that a rank sends in the shard group, and of its shard among the replicas."""
    replicas = run.size // shards
    passed = (mode.gathers + mode.reductions) * slots.n - mode.kept_roots * slots.root
    added = 2 * mode.replications * slots.n // shards
    return passed * (shards - 1) // shards + added * (replicas - 1) // replicas


if __name__ == "__main__":
    sys.exit(demo.main(work))
