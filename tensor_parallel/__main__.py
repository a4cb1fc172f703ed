"""Demo of tensor parallelism: a small model, cut among P ranks in every mode, beside one process.

    python -m tensor_parallel                                       4 local ranks: P = 1, 2, 4
    torchrun --standalone --nproc-per-node 3 -m tensor_parallel     the ranks of torchrun: P = 1, 3

P is every number that divides the ranks; all groups of P ranks do the same. In float64: three clipped steps of AdamW
with dropout, and of each part of the model the elements that a rank sends, by the ledger; BTD is the layer's input. In
bfloat16: the bytes that autograd keeps of the layer until backward, parameters left out, beside Korthikanti et al.
2022, §4: sbh(34 + 5as/h), whose s, b, h, a are T, B, D, H. A are attention's probabilities, 2HBT²/P, so 2 of the 5: it
has no dropout of its own. N is what the constant leaves out, mean and deviation in the norms: 8BT, with sp 8BT/P.
"""

import contextlib
import hashlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from collectives import comm, demo, layout
from collectives.demo import Demo
from collectives.layout import Box
from collectives.ledger import Ledger
from collectives.norm import clip, grad_norm
from collectives.partials import sum_partials
from collectives.rng import dropout, key
from collectives.runtime import Runtime
from collectives.saved import saving
from collectives.watch import watching
from tensor_parallel import Column, Row, Stream, Vocabulary, parallelize, vocab_parallel_cross_entropy
from tensor_parallel.cut import divisors

B, T, D, H, F, V = 2, 48, 96, 12, 384, 211
BTD, BT, STEPS, LIMIT, IGNORED = B * T * D, B * T, 3, 0.1, -100
ITEM = 8  # bytes of a float64


class Layer(nn.Module):
    """A transformer's layer, without a line of parallel code: how many heads it has is what its queries say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.o, self.up, self.down = nn.Linear(D, D), nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [B, T, D]; tokens [B, T] are the numbers by which dropout draws."""
        h = self.norm1(x)
        q, k, v = (rearrange(linear(h), "b t (h k) -> b h t k", k=D // H) for linear in (self.q, self.k, self.v))
        future = torch.full((T, T), -math.inf, dtype=x.dtype).triu(1)
        p = (q @ k.mT / math.sqrt(D // H) + future).softmax(-1)
        h = self.o(rearrange(p @ v, "b h t k -> b t (h k)"))
        x = x + dropout(h, key(0, "attention"), tokens, 0.1)
        h = self.down(gelu(self.up(self.norm2(x))))
        return x + dropout(h, key(0, "feed-forward"), tokens, 0.1)


class Model(nn.Module):
    """Embedding, layer, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(V, D), Layer()
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)


PLAN = MappingProxyType(  # of the layer
    {
        **{"norm1": Stream(), "q": Column((H,)), "k": Column((H,)), "v": Column((H,)), "o": Row()},
        **{"norm2": Stream(), "up": Column(), "down": Row()},
    }
)
ENDS = MappingProxyType({"embed": Vocabulary(), "norm": Stream(), "head": Vocabulary()})


class Mode(NamedTuple):
    """A way to cut, and what it comes to: elements sent in BTD(P-1)/P, and bytes kept in BTD, whole and cut by P."""

    name: str
    settings: Mapping[str, bool]
    layer: int  # elements
    head: int
    calls: int  # collectives of a layer
    whole: int  # bytes
    cut: int

    @property
    def cuts_tokens(self) -> bool:
        """Whether a rank has T/P tokens outside of the regions."""
        return "sequence_parallel" in self.settings

    def mine(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """What this rank has of [B, T, ...] outside of the regions."""
        return x.chunk(group.size(), 1)[group.rank()].clone() if self.cuts_tokens else x


MODES = (
    Mode("tp", {}, 8, 2, 4, 10, 24),
    Mode("tp + sp", {"sequence_parallel": True}, 10, 3, 10, 0, 34),
    Mode("tp + sp, gathered", {"sequence_parallel": True, "save_gathered": True}, 8, 2, 8, 4, 30),
)


def work(run: Runtime, show: Demo) -> None:
    """Every mode on every number of ranks."""
    reference = alone()
    for size in divisors(run.size):
        groups = [run.new_group(range(first, first + size)) for first in range(0, run.size, size)]
        group = groups[run.rank // size]
        for mode in MODES:
            show.part = f"P = {size}, {mode.name}"
            train(run, show, mode, group, reference)
            memory(show, mode, group)


# -- a step, by parts --------------------------------------------------------------------------------------------------


class Parts:
    """What each part of a model sends."""

    def __init__(self) -> None:
        self.ledgers: dict[str, Ledger] = defaultdict(Ledger)
        self.sockets: dict[str, list[int | None]] = defaultdict(list)

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count the block for this part."""
        before = demo.bytes_written()
        with watching(self.ledgers[part]):
            yield
        self.sockets[part].append(demo.bytes_since(before))

    def elements(self, part: str) -> float:
        """By the formulas of the collectives."""
        return sum(row.algorithm for row in self.ledgers[part].rows()) / ITEM

    def calls(self, part: str) -> int:
        """The collectives."""
        return sum(row.calls for row in self.ledgers[part].rows() if len(row.ranks) > 1)

    def sent(self, part: str) -> int | None:
        """The bytes on sockets, None where they cannot be counted."""
        return None if None in self.sockets[part] else sum(self.sockets[part])


class Seen(NamedTuple):
    """What a step has made: the tokens' losses, what comes out of the layer, the gradient of what goes in."""

    losses: Tensor
    output: Tensor
    dinput: Tensor


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Ids and labels [B, T] of a step, some labels ignored; the same on every rank."""
    ids, labels = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(step))
    labels[0, : 7 + step] = IGNORED
    return ids, labels


def numbers() -> Tensor:
    """The number of each token of a batch, [B, T]."""
    return torch.arange(BT).view(B, T)


def backward(
    model: Model, step: int, tokens: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor], parts: Parts
) -> Seen:
    """Forward and backward of a batch. Between the parts autograd's graph is cut, so that each is counted alone."""
    ids, labels = batch(step)
    with parts.of("embedding"):
        x = model.embed(ids)
    with parts.of("layer"):
        y = model.layer(layer_in := x.detach().requires_grad_(), tokens)
    with parts.of("head"):
        logits = model.head(model.norm(layer_out := y.detach().requires_grad_()))
    with parts.of("loss"):
        losses = loss_of(logits, labels)
    with parts.of("head"):
        (losses.sum() / (labels != IGNORED).sum()).backward()
    with parts.of("layer"):
        y.backward(layer_out.grad)
    with parts.of("embedding"):
        x.backward(layer_in.grad)
    return Seen(losses.detach(), y.detach(), layer_in.grad)


# -- beside one process ------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What one process does, step by step. Tensors by name."""

    initial: dict[str, Tensor]
    seen: list[Seen]
    gradients: list[dict[str, Tensor]]
    last: dict[str, Tensor]


def alone() -> Reference:
    """A whole model, torch's own cross-entropy."""
    model, seen, gradients = made(), [], []
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        seen.append(backward(model, step, numbers(), whole_loss, Parts()))
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
    return Reference(initial, seen, gradients, {name: param.detach() for name, param in model.named_parameters()})


def made() -> Model:
    """The same model every time."""
    torch.manual_seed(0)
    return Model().double()


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """eps is large, because Adam divides by the gradient: noise in a tiny one would be a large part of the update."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def whole_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss a token."""
    return cross_entropy(logits.mT, labels, reduction="none", ignore_index=IGNORED)


def train(run: Runtime, show: Demo, mode: Mode, group: dist.ProcessGroup, reference: Reference) -> None:
    """A few steps of a model cut in this mode."""
    model, errors = made(), defaultdict(list)
    parallelize(model, {**ENDS, **{f"layer.{name}": role for name, role in PLAN.items()}}, group, **mode.settings)
    params = list(model.parameters())
    layout.check(params, run.world)
    optimizer = adamw(params)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = Parts()
        with show.time("forward and backward"):
            seen = backward(model, step, mode.mine(numbers(), group), loss_in(group), parts)
        with parts.of("sums"):
            sum_partials(params, ["tp"])
        expected = reference.seen[step]
        errors["losses"].append(worst(seen.losses, expected.losses))
        errors["output"].append(worst(seen.output, mode.mine(expected.output, group)))
        errors["input's gradient"].append(worst(seen.dinput, mode.mine(expected.dinput, group)))
        errors["gradients"] += [worst(param.grad, piece(param, reference.gradients[step])) for param in params]
        clip(params, grad_norm(params, group=run.world), LIMIT)
        optimizer.step()
    for name, found in errors.items():
        show.parity(name, max(found), 1e-12)
    moved = {name: (reference.last[name] - value).abs().max() for name, value in reference.initial.items()}
    updates = [worst(param.detach(), piece(param, reference.last), moved[param.held.name]) for param in params]
    show.parity(f"update, {STEPS} steps", max(updates), 1e-10)
    show.claim("copies that differ", "0, bit for bit", 0, differing(params, run.world))
    traffic(show, mode, group.size(), parts)


def loss_in(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss a token, of logits that stay cut."""
    return lambda logits, labels: vocab_parallel_cross_entropy(logits, labels, V, group=group, ignore_index=IGNORED)


def piece(param: nn.Parameter, whole: Mapping[str, Tensor]) -> Tensor:
    """What this rank holds of a tensor; here each is one box."""
    [box] = param.held.boxes
    return whole[param.held.name][box.slices(Box.whole(box.shape))]


def worst(ours: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """The largest error as a share of `scale`, by default the largest entry; infinite where one is not a number:
    max(0.0, nan) is 0.0.
    """
    largest = float((ours - expected).abs().max() / (expected.abs().max() if scale is None else scale))
    return largest if math.isfinite(largest) else math.inf


def differing(params: Iterable[nn.Parameter], world: dist.ProcessGroup) -> int:
    """How many pieces are not the same on all ranks that hold them. Collective."""
    digests = {(p.held.name, p.held.boxes): hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for p in params}
    found = defaultdict(set)
    for table in comm.all_gather_object(digests, group=world):
        for piece, digest in table.items():
            found[piece].add(digest)
    return sum(len(each) > 1 for each in found.values())


# -- what is sent, what is kept ----------------------------------------------------------------------------------------


def traffic(show: Demo, mode: Mode, size: int, parts: Parts) -> None:
    """Elements of every part; of the layer also collectives, and bytes on sockets."""
    sent = BTD * (size - 1) / size
    calls = parts.calls("layer")
    show.claim("elements, layer", f"{mode.layer}BTD(P-1)/P", mode.layer * sent, parts.elements("layer"))
    show.claim("  collectives", str(mode.calls), mode.calls if size > 1 else 0, calls)
    nbytes = mode.layer * ITEM
    show.traffic("  bytes on sockets", f"{nbytes}BTD(P-1)/P", nbytes * sent, parts.sent("layer"), calls=calls)
    show.claim("elements, embed", "2BTD(P-1)/P", 2 * sent, parts.elements("embedding"))
    show.claim("  norm and head", f"{mode.head}BTD(P-1)/P", mode.head * sent, parts.elements("head"))
    show.claim("  loss", "6BT(P-1)/P", 6 * BT * (size - 1) / size, parts.elements("loss"))
    partial = 8 * D + 8 if mode.cuts_tokens else 0  # three norms and two biases, and of each whether it was used
    formula = "2(8D + 8)(P-1)/P" if partial else "0"
    show.claim("  partial sums", formula, 2 * partial * (size - 1) / size, parts.elements("sums"))


def memory(show: Demo, mode: Mode, group: dist.ProcessGroup) -> None:
    """What a rank has of the layer in bfloat16: parameters, and what a forward leaves for backward."""
    torch.manual_seed(0)
    layer, size = Layer().bfloat16(), group.size()
    parallelize(layer, PLAN, group, **mode.settings)
    numel = sum(param.numel() for param in layer.parameters())
    show.claim("parameters, layer", "(4D²+2DF+F)/P + 6D", (4 * D * D + 2 * D * F + F) / size + 6 * D, numel)
    x = mode.mine(torch.randn(B, T, D).bfloat16(), group).requires_grad_()
    with saving() as saved:
        y = layer(x, mode.mine(numbers(), group))
    kept = saved.nbytes(layer.parameters())
    y.backward(torch.ones_like(y))  # before the ranks go on: what it starts is collective
    share = f"({mode.whole} + {mode.cut}/P)BTD" if mode.whole else f"{mode.cut}BTD/P"
    show.claim("bytes kept, layer", f"{share} + A + N", bytes_kept(mode, size), kept)


def bytes_kept(mode: Mode, size: int) -> float:
    """Beside the terms of BTD: A, attention's probabilities; N, of each token mean and deviation in two norms."""
    probabilities = 2 * H * BT * T / size
    moments = 2 * (2 + 2) * BT / (size if mode.cuts_tokens else 1)
    return (mode.whole + mode.cut / size) * BTD + probabilities + moments


if __name__ == "__main__":
    sys.exit(demo.main(work))
