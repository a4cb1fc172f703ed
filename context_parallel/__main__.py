"""Demo of context parallelism: one attention layer over rows of 1,024 to 8,192 tokens, cut by every method.

    python -m context_parallel                                       4 local ranks
    torchrun --standalone --nproc-per-node 2 -m context_parallel     the ranks of torchrun

In float64, beside one process that attends document by document with torch's own attention: rows of four packed
documents in zigzag, D = H·K = 128, H = 4, and KV = 2 heads of keys and values, D_kv = 64. n are the T/P tokens of a
rank, padding among them, b = n·D_kv. Where KV heads are fewer than the ranks that share them each is sent to several,
and D_kv counts the copies. Bytes kept are those that autograd keeps of attention until backward. Of each order: how
evenly the ranks share the pairs of query and key that are computed. On slowed links: what of the transfers is hidden.
"""

import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from collectives import comm, demo
from collectives.demo import Demo
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.saved import saving
from collectives.watch import watching
from context_parallel import (
    Places,
    all_gather_attention,
    cut,
    overlap,
    ring_attention,
    ring_ulysses_attention,
    slots,
    ulysses_attention,
)
from context_parallel.ulysses import sharing

D, H, KV, K = 128, 4, 2, 32
D_KV = KV * K
SIZES, PRIME = (1024, 2048, 4096, 8192), 1021  # tokens of a row; the last divides by nothing
ITEM = 8  # bytes of a float64

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """An attention layer without a line of parallel code: the core is handed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, H * K, bias=False), nn.Linear(H * K, D, bias=False)
        self.k, self.v = (nn.Linear(D, D_KV, bias=False) for _ in range(2))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = (rearrange(linear(x), "b t (h k) -> b h t k", k=K) for linear in (self.q, self.k, self.v))
        return self.o(rearrange(attention(q, k, v), "b h t k -> b t (h k)"))


def made() -> Layer:
    """The same layer every time."""
    torch.manual_seed(0)
    return Layer().double()


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers every time."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def packed(length: int) -> list[int]:
    """Four documents, of lengths that fit no order: half of the row, one token, a quarter, the rest."""
    lengths = [length // 2 + 3, 1, length // 4 - 7]
    return [*lengths, length - sum(lengths)]


def places_of(order: str, lengths: Sequence[int], parts: int) -> Places:
    """Of a row of documents of these lengths."""
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]  # [1, T]
    return Places.of(documents, slots(order, sum(lengths), parts))


def work(run: Runtime, show: Demo) -> None:
    """Every method on every length; every order; a ring on slowed links."""
    if run.rank == 0 and run.size not in sharing(H, KV):
        print(f"left out: ulysses; {run.size} ranks cannot share {H} heads with {KV} KV heads")
    seconds, balances = compare(run, show), balance(run, show)
    steps = overlap.overlap(run)
    if run.rank == 0:
        print(*time_table(seconds), *balances, sep="\n")
        overlap.tell(steps, show.figure)


# -- the methods -------------------------------------------------------------------------------------------------------


class Formula(NamedTuple):
    """As the README writes it, and what it comes to for each of a rank's n tokens."""

    text: str
    each: float


class Method(NamedTuple):
    """A way to attend, and what a rank sends, in elements, and keeps, in bytes."""

    name: str
    attention: Callable[..., Tensor]  # of q, k, v, places
    forward: Formula
    backward: Formula
    kept: Formula
    neighbours: int = 1  # ranks that share the heads


def methods(run: Runtime) -> list[Method]:
    """Those that so many ranks can use."""
    P, world = run.size, run.world
    kept = Formula("8n(2D + 2D_kv + H)", ITEM * (2 * D + 2 * D_KV + H))
    everyones = Formula("8n(2D + 2D_kv·P + H)", ITEM * (2 * D + 2 * D_KV * P + H))
    once, twice = Formula("2(P-1)b", 2 * (P - 1) * D_KV), Formula("4(P-1)b", 4 * (P - 1) * D_KV)
    home = Formula("2(P-1)b + 2Pb", (2 * (P - 1) + 2 * P) * D_KV if P > 1 else 0)
    gathered = partial(all_gather_attention, group=world)
    return [
        Method("ring", partial(ring_attention, group=world), once, home, kept),
        Method("all_gather", gathered, once, twice, kept),
        Method("all_gather, saved", partial(gathered, save_gathered=True), once, once, everyones),
        *([ulysses(run)] if P in sharing(H, KV) else []),
        *([ring_ulysses(run)] if P % 2 == 0 and P > 2 else []),
    ]


def ulysses(run: Runtime) -> Method:
    """All ranks share the heads. How tokens are sorted is kept as well, 2T numbers, the same ones for all layers."""
    P, d_kv = run.size, K * max(KV, run.size)
    sent = Formula("n(2D + 2D_kv)(P-1)/P", (2 * D + 2 * d_kv) * (P - 1) / P)
    kept = Formula("8n(2D + 2D_kv + H + 2P)", ITEM * (2 * D + 2 * d_kv + H + 2 * P))
    return Method("ulysses", partial(ulysses_attention, group=run.world), sent, sent, kept, P)


def ring_ulysses(run: Runtime) -> Method:
    """R = P/2 pairs of neighbours; two rings go over them."""
    R, U = run.size // 2, 2
    pairs = [run.new_group(range(first, first + U)) for first in range(0, run.size, U)]
    rings = [run.new_group(range(u, run.size, U)) for u in range(U)]
    groups = {"ring_group": rings[run.rank % U], "ulysses_group": pairs[run.rank // U]}
    heads = (2 * D + 2 * D_KV) * (U - 1) / U
    forward = Formula("n(2D + 2D_kv)(U-1)/U + 2(R-1)b", heads + 2 * (R - 1) * D_KV)
    backward = Formula("  … + 2(R-1)b + 2Rb", heads + (2 * (R - 1) + 2 * R) * D_KV)
    kept = Formula("8n(2D + 2D_kv + H + 2U)", ITEM * (2 * D + 2 * D_KV + H + 2 * U))
    attention = partial(ring_ulysses_attention, **groups)
    return Method(f"ring x ulysses, {R} x {U}", attention, forward, backward, kept, U)


# -- beside one process ------------------------------------------------------------------------------------------------


class Seconds(NamedTuple):
    """Of a forward and a backward: those of the slowest rank on the clock, those of all ranks' processors."""

    clock: float
    processor: float


class Seen(NamedTuple):
    """What a layer makes of a row: the output, the gradients of the input and of the weights."""

    out: Tensor  # [1, T, D]
    dx: Tensor
    weights: list[Tensor]


def compare(run: Runtime, show: Demo) -> dict[str, list[Seconds]]:
    """Every method on every length; how long each took, by method."""
    seconds: dict[str, list[Seconds]] = defaultdict(list)
    show.part = f"T = {PRIME:,}, padded, ring"  # first, since whatever comes first takes longer
    follow(run, show, methods(run)[0], PRIME, alone(run, PRIME)[0])
    for length in SIZES:
        expected, spent = alone(run, length)
        seconds["one process"].append(spent)
        for method in methods(run):
            show.part = f"T = {length:,}, {method.name}"
            seconds[method.name].append(follow(run, show, method, length, expected))
    return seconds


def alone(run: Runtime, length: int) -> tuple[Seen, Seconds]:
    """The whole row on rank 0, by torch's attention, which sees no other document because it is not given one. All
    ranks get what it found.
    """
    layer, x, began = made(), random(1, 1, length, D).requires_grad_(), now()
    out = torch.empty_like(x)
    found = [torch.empty_like(x) for x in (x, *layer.parameters())]
    if run.rank == 0:
        out = layer(x, partial(by_document, lengths=packed(length)))
        out.backward(random(2, 1, length, D))
        found = [each.grad for each in (x, *layer.parameters())]
    spent = since(began)
    for tensor in (out := out.detach(), *found):
        comm.broadcast(tensor, 0, group=run.world)
    return Seen(out, found[0], found[1:]), spent


def now() -> Seconds:
    """The two clocks."""
    return Seconds(time.perf_counter(), time.process_time())


def since(began: Seconds) -> Seconds:
    """What has passed on each."""
    return Seconds(*(after - before for after, before in zip(now(), began, strict=True)))


def by_document(q: Tensor, k: Tensor, v: Tensor, *, lengths: Sequence[int]) -> Tensor:
    """Causal attention within each document."""
    documents = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat([scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True) for each in documents], 2)


def follow(run: Runtime, show: Demo, method: Method, length: int, expected: Seen) -> Seconds:
    """Forward and backward of this rank's part of the row."""
    places = places_of("zigzag", packed(length), run.size)
    mine, layer, kept = places.slots[run.rank], made(), []
    shared = places if method.neighbours == 1 else places.grouped(method.neighbours)
    shared.pairs(run.rank // method.neighbours)  # what is visible is looked up once, for all layers of a model

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with saving() as saved:
            out = method.attention(q, k, v, places)
        kept.append(saved.nbytes())
        return out

    x = cut(random(1, 1, length, D), mine, fill=1).requires_grad_()  # what is in padding must not matter
    dout = cut(random(2, 1, length, D), mine)
    comm.barrier(group=run.world)
    before, began = demo.bytes_written(), now()
    with watching(forward := Ledger()):
        out = layer(x, attention)
    with watching(backward := Ledger()):
        out.backward(dout)
    spent, sent = since(began), demo.bytes_since(before)
    for weight in layer.parameters():  # each rank saw its own tokens
        comm.all_reduce(weight.grad, group=run.world)
    judge(show, Seen(out.detach(), x.grad, [w.grad for w in layer.parameters()]), expected, mine)
    traffic(show, method, len(mine), (forward, backward), sent)
    show.claim("bytes kept", method.kept.text, method.kept.each * len(mine), kept[0])
    if padding := places.slots.numel() - length:
        show.claim("tokens of padding", "-T mod 2P", -length % (2 * run.size if run.size > 1 else 1), padding)
    clocks, processors = zip(*comm.all_gather_object(spent, group=run.world), strict=True)
    return Seconds(max(clocks), sum(processors))


def judge(show: Demo, ours: Seen, expected: Seen, mine: Tensor) -> None:
    """A rank's part, in which padding must be exactly zero, beside that of one process."""
    show.parity("output", worst(ours.out, cut(expected.out, mine), expected.out), 1e-12)
    show.parity("gradient of the input", worst(ours.dx, cut(expected.dx, mine), expected.dx), 1e-12)
    errors = [worst(*each, each[1]) for each in zip(ours.weights, expected.weights, strict=True)]
    show.parity("gradients of weights", max(errors), 1e-12)


def worst(ours: Tensor, expected: Tensor, whole: Tensor) -> float:
    """The largest error as a share of the whole tensor's largest entry; infinite where one is not a number."""
    largest = float((ours - expected).abs().max() / whole.abs().max())
    return largest if math.isfinite(largest) else math.inf


def traffic(show: Demo, method: Method, tokens: int, books: tuple[Ledger, Ledger], sent: int | None) -> None:
    """Elements that this rank sends, by the ledger, each way; bytes on sockets."""
    expected = [formula.each * tokens for formula in (method.forward, method.backward)]
    for name, formula, number, book in zip(("forward", "backward"), method[2:4], expected, books, strict=True):
        elements = sum(row.algorithm for row in book.rows()) / ITEM
        show.claim(f"elements, {name}", formula.text, number, elements)
    calls = sum(row.calls for book in books for row in book.rows())
    show.traffic("bytes on sockets", "8 · elements", ITEM * sum(expected), sent, calls=calls)


def time_table(seconds: Mapping[str, Sequence[Seconds]]) -> list[str]:
    """Lines, for a person."""
    heads = "".join(f"{f'T = {size:,}':>20}" for size in SIZES), len(SIZES) * f"{'clock':>12}{'cpu':>8}"
    lines = [f"\n{'ms, slowest clock and':24}{heads[0]}", f"{'processors of all':24}{heads[1]}"]
    for name, by_length in seconds.items():
        lines.append(f"{name:24}" + "".join(f"{1e3 * s.clock:12.0f}{1e3 * s.processor:8.0f}" for s in by_length))
    return lines


# -- work, by order ----------------------------------------------------------------------------------------------------


def balance(run: Runtime, show: Demo) -> list[str]:
    """Of each order the pairs that each rank computes, counted; of a forward of the ring its processor time. Lines."""
    P = run.size
    T = SIZES[-1] // (2 * P) * 2 * P  # so that all orders divide it
    expected = {
        "contiguous": ("(2T - T/P + 1)/(T + 1)", (2 * T - T / P + 1) / (T + 1)),
        "zigzag": ("1", 1),
        "striped": ("(T + P)/(T + 1)", (T + P) / (T + 1)),
    }
    lines = [f"\n{f'T = {T:,}, max/mean of the ranks':28} {'pairs':>9} {'processor':>9}   pairs visible, computed"]
    for name, lengths in (("one document", [T]), ("packed", packed(T))):
        visible = sum(each * (each + 1) / 2 for each in lengths) / T**2
        show.part = f"T = {T:,}, {name}"
        for order, (formula, number) in expected.items():
            places = places_of(order, lengths, P)
            pairs = comm.all_gather_object(places.pairs(run.rank), group=run.world)
            ratio, processor = max(pairs) / statistics.mean(pairs), processor_time(run, places)
            shares = f"{visible:11.1%} {sum(pairs) / T**2:9.1%}"
            lines.append(f"{f'{order}, {name}':28} {ratio:9.3f} {processor:9.3f}   {shares} of T²")
            if name == "one document":
                show.claim(f"pairs, max/mean, {order}", formula, number, ratio, allowed=1e-12)
    return lines


def processor_time(run: Runtime, places: Places) -> float:
    """Of a forward of the ring, max/mean over the ranks."""
    q, k, v = (random(3, 1, heads, places.slots.shape[1], K, dtype=torch.float32) for heads in (H, KV, KV))
    comm.barrier(group=run.world)
    before = time.process_time()
    ring_attention(q, k, v, places, group=run.world)
    ranks = comm.all_gather_object(time.process_time() - before, group=run.world)
    return max(ranks) / statistics.mean(ranks)


if __name__ == "__main__":
    sys.exit(demo.main(work, figure=overlap.FIGURE))
