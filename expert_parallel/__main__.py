"""Demo of expert parallelism: a mixture of experts on ep ranks beside one process; then loads with and without balance.

    python -m expert_parallel                                       4 local ranks: ep = 1, 2, 4
    torchrun --standalone --nproc-per-node 3 -m expert_parallel     the ranks of torchrun: ep = 1, 3

ep is every number that divides the ranks and the experts: groups of ep ranks share the experts, and those of different
groups with the same part are its expert-data group. In float64, rows dealt unevenly: the layer's output and gradients
beside one process, in which every expert computes every token, with weight 0 where it was not chosen. Elements of
dispatch and combine, by the ledger: n choices of this rank's tokens leave it, m of others come; the number in the
formula is the share of all choices that leave. The counts, by which a rank knows what will come, are kept apart. Of
memory: the experts, and what autograd keeps of the M rows that a rank's experts compute. Then loads.py.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import one_hot, silu

from collectives import comm, demo
from collectives.demo import Demo
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.saved import saving
from collectives.watch import watching
from expert_parallel import Losses, MoE, Observation, Sequences, loads, observe

B, T, D, F, E, CHOICES = 7, 96, 64, 48, 12, 2
BALANCE, Z = 0.1, 0.01  # coefficients: large enough to be seen beside the gradients of the output
ITEM = 8  # bytes of a float64, and of a count
NOBODY = -1


class Mode(NamedTuple):
    """A layer, by its settings."""

    name: str
    settings: Mapping[str, Any]

    def made(self) -> MoE:
        """The same layer every time."""
        torch.manual_seed(0)
        losses = Losses(balance=BALANCE, z=Z)
        layer = MoE(D, F, E, choices=CHOICES, shared=nn.Linear(D, D), losses=losses, **self.settings).double()
        if layer.router.bias is not None:
            layer.router.bias.copy_(self.bias())
        return layer

    def bias(self) -> Tensor:
        """[E], by which the router chooses."""
        return torch.linspace(-0.2, 0.2, E, dtype=torch.float64) * ("biased" in self.settings)


MODES = (
    Mode("softmax", {}),
    Mode("softmax, capacity 1", {"capacity": 1.0}),
    Mode("sigmoid, bias", {"score": "sigmoid", "biased": True, "scale": 2.5}),
)


class Groups(NamedTuple):
    """Of this rank: those that share the experts with it, and those that have the same ones."""

    ep: dist.ProcessGroup
    expert_data: dist.ProcessGroup


class Seen(NamedTuple):
    """What a layer makes of the batch."""

    out: Tensor  # [B, T, D]
    dx: Tensor
    weights: Mapping[str, Tensor]  # gradients, by name
    kept: Tensor  # [B, T, k] the experts that have computed each token, or NOBODY


def random(seed: int) -> Tensor:
    """The same numbers [B, T, D] every time."""
    return torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def work(run: Runtime, show: Demo) -> None:
    """Every mode on every ep; then the loads."""
    torch.set_num_threads(1)  # nothing here is large
    for mode in MODES:
        expected = alone(mode)
        for ep in (ep for ep in range(1, run.size + 1) if run.size % ep == 0 and E % ep == 0):
            show.part = f"ep = {ep}, {mode.name}"
            follow(run, show, mode, groups(run, ep), expected)
    courses = loads.courses(run, show)
    if run.rank == 0:
        loads.tell(courses, show.figure)


def groups(run: Runtime, ep: int) -> Groups:
    """Neighbours share the experts."""
    sharing = [run.new_group(range(first, first + ep)) for first in range(0, run.size, ep)]
    same = [run.new_group(range(first, run.size, ep)) for first in range(ep)]
    return Groups(sharing[run.rank // ep], same[run.rank % ep])


# -- one process -------------------------------------------------------------------------------------------------------


def alone(mode: Mode) -> Seen:
    """The whole batch, without a line of the layer's code."""
    layer, x = mode.made(), random(1).requires_grad_()
    w = dict(layer.named_parameters())
    logits = x @ w["router.weight"].T  # [B, T, E]
    scores = logits.sigmoid() if "score" in mode.settings else logits.softmax(-1)
    best = (scores.detach() + mode.bias()).topk(CHOICES).indices  # [B, T, k]
    weights = scores.gather(-1, best)
    weights = mode.settings.get("scale", 1.0) * weights / weights.sum(-1, keepdim=True)
    kept = served(best, mode.settings.get("capacity", math.inf))
    y = x @ w["shared.weight"].T + w["shared.bias"]
    for e in range(E):
        h = silu(x @ w["experts.gate"][e].T) * (x @ w["experts.up"][e].T)
        y = y + (weights * (kept == e)).sum(-1, keepdim=True) * (h @ w["experts.down"][e].T)
    shares = scores / scores.sum(-1, keepdim=True)
    chosen = one_hot(best, E).sum((1, 2)) * E / (CHOICES * T)  # [B, E], 1 where even
    balance, z = (chosen * shares.mean(1)).sum(1).mean(), logits.logsumexp(-1).square().mean()
    ((y * random(2)).sum() + BALANCE * balance + Z * z).backward()
    return Seen(y.detach(), x.grad, {name: each.grad for name, each in w.items()}, kept)


def served(best: Tensor, factor: float) -> Tensor:
    """First come, first served, in each row: NOBODY in place of an expert that is full."""
    kept = best.clone()
    for row in kept:
        served: Counter[int] = Counter()
        for token in row:
            for choice, expert in enumerate(token.tolist()):
                if served[expert] >= factor * CHOICES * T / E:
                    token[choice] = NOBODY
                served[expert] += 1
    return kept


# -- beside it ---------------------------------------------------------------------------------------------------------


def follow(run: Runtime, show: Demo, mode: Mode, groups: Groups, expected: Seen) -> None:
    """Forward and backward of this rank's rows."""
    layer, rows = mode.made(), torch.arange(B).tensor_split(run.size)[run.rank]
    layer.distribute(*groups)
    x, dout = random(1)[rows].requires_grad_(), random(2)[rows]
    whole = replace(Sequences.whole(x), rows=torch.tensor(B), tokens=torch.tensor(B * T))  # of the global batch
    kept = watch(layer.experts)
    comm.barrier(group=run.world)
    before = demo.bytes_written()
    with watching(ledger := Ledger()):
        out = layer(x, whole)
        out.backward(dout)
    sent = demo.bytes_since(before)
    for name, weight in layer.named_parameters():  # each rank saw its own tokens, experts those of their ep group
        comm.all_reduce(weight.grad, group=groups.expert_data if is_expert(name) else run.world)
    show.parity("output", error(out.detach(), expected.out, rows), 1e-12)
    show.parity("gradient of the input", error(x.grad, expected.dx, rows), 1e-12)
    judge(show, layer, groups.ep, expected)
    choices(show, observe([layer.record], run.device, group=run.world), expected)
    moves = travels(run, groups.ep, expected.kept)
    traffic(run, show, ledger, moves.clone().fill_diagonal_(0), sent)
    memory(show, layer, groups.ep)
    show.claim("bytes kept of rows", "8M(D + 4F)", ITEM * int(moves[:, run.rank].sum()) * (D + 4 * F), kept[0])


def watch(experts: nn.Module) -> list[int]:
    """In which their next forward puts the bytes that autograd keeps of it until backward, weights left out."""
    kept, forward = [], experts.forward

    def watched(*args: Any) -> Tensor:
        with saving() as saved:
            out = forward(*args)
        kept.append(saved.nbytes(without=experts.parameters()))
        return out

    experts.forward = watched
    return kept


def is_expert(name: str) -> bool:
    """Whether a weight is cut over ep."""
    return name.startswith("experts.")


def error(ours: Tensor, whole: Tensor, mine: Tensor | slice) -> float:
    """The largest, as a share of the whole tensor's largest entry; infinite where one is not a number."""
    wrong = (ours - whole[mine]).abs()
    largest = float(wrong.max() / whole.abs().max()) if wrong.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def judge(show: Demo, layer: MoE, ep: dist.ProcessGroup, expected: Seen) -> None:
    """The gradients of router, experts and shared expert."""
    worst: dict[str, float] = {}
    count, first = E // ep.size(), ep.rank() * E // ep.size()
    for name, weight in layer.named_parameters():
        mine, part = slice(first, first + count) if is_expert(name) else slice(None), name.partition(".")[0]
        worst[part] = max(worst.get(part, 0.0), error(weight.grad, expected.weights[name], mine))
    for part, each in worst.items():
        show.parity(f"gradients, {part}", each, 1e-12)


def choices(show: Demo, layers: Sequence[Observation], expected: Seen) -> None:
    """What the layer has seen of the whole batch."""
    [seen] = layers
    show.claim("choices", "BTk", B * T * CHOICES, int(seen.tokens.sum()))
    show.claim("dropped", "as one process", int((expected.kept == NOBODY).sum()), seen.dropped)


def travels(run: Runtime, ep: dist.ProcessGroup, kept: Tensor) -> Tensor:
    """[P, P]: how many choices of rank i's tokens are computed by rank j."""
    size = ep.size()
    moves = torch.zeros(run.size, run.size, dtype=torch.int64)
    for rank, rows in enumerate(kept.tensor_split(run.size)):
        experts = rows[rows != NOBODY]
        to = rank // size * size + experts // (E // size)
        moves[rank] += torch.bincount(to, minlength=run.size)
    return moves


def traffic(run: Runtime, show: Demo, ledger: Ledger, moves: Tensor, sent: int | None) -> None:
    """Dispatch and combine, of this rank and of all; then the counts; bytes on sockets."""
    book = {row.op: row for row in ledger.rows()}
    rows, counts = book.get("all_to_all_single"), book.get("all_gather_single")
    elements = rows.algorithm / ITEM if rows else 0.0
    group = len(counts.ranks) if counts else 1
    mine = 2 * D * int(moves[run.rank].sum() + moves[:, run.rank].sum())
    share = int(moves.sum()) / (B * T * CHOICES)
    everyones = sum(comm.all_gather_object(elements, group=run.world))
    show.claim("elements sent", "2(n + m)D", mine, elements)
    show.claim("… by all ranks", f"4·B·T·k·D·{share:.4f}", 4 * D * int(moves.sum()), everyones)
    show.claim("bytes of counts", "8E(ep-1)", ITEM * E * (group - 1), counts.algorithm if counts else 0.0)
    calls = sum(row.calls for row in book.values())
    expected = ITEM * (mine + E * (group - 1))
    show.traffic("bytes on sockets", "8·elements + counts", expected, sent, calls=calls)


def memory(show: Demo, layer: MoE, ep: dist.ProcessGroup) -> None:
    """Of experts, on this rank."""
    tensors = [each for weight in layer.experts.parameters() for each in (weight, weight.grad)]
    held = sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
    show.claim("bytes of experts, gradients", "2·8·3DFE/ep", 2 * ITEM * 3 * D * F * E / ep.size(), held)


if __name__ == "__main__":
    sys.exit(demo.main(work, figure=loads.FIGURE))
