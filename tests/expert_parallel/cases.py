"""A layer of one case on ranks, and how far it is from the reference. Every rank is judged by itself, against its part
of the whole tensors. What it holds at slots of padding is not zero, so whoever looks there shows.
"""

import contextlib
import functools
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from collectives import layout
from collectives.partials import sum_partials
from context_parallel import slots
from expert_parallel import Losses, MoE, Sequences, cut_hidden, observe
from expert_parallel.observe import Record
from tests.expert_parallel import reference
from tests.expert_parallel.reference import Layer
from tests.training import furthest

PADDING = 7.0
PLAIN = Layer()
SHARES = {  # the rows of the batch on each rank that has rows of its own
    **{1: (5,), 2: (4, 1), 3: (3, 0, 2), 4: (1, 3, 0, 1)},
    **{6: (1, 0, 2, 0, 1, 1), 8: (1, 0, 0, 2, 0, 1, 1, 0)},
}
HOLES = ((0, 2), (0, 3), (3, 6), *((2, slot) for slot in range(7)))  # (row, slot) of no document; row 2 has no token


@dataclass(frozen=True)
class Case:
    """ranks: of which each tp see the same tokens and share each expert; of those that see others each ep share the
    experts, and each cp the rows. microbatches: into which each rank divides its rows, as evenly as that goes.
    """

    layer: Layer = PLAIN
    ranks: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    order: str = "zigzag"
    T: int = 7
    holes: tuple = HOLES
    microbatches: int = 1
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def shares(self):
        return SHARES[self.ranks // self.tp // self.cp]

    def routed(self):
        """[B][T] whether a slot holds a token."""
        return [[(b, t) not in self.holes for t in range(self.T)] for b in range(sum(self.shares))]

    def tensors(self):
        """x and the gradient of the output, whole."""
        numbers = torch.Generator().manual_seed(self.seed)
        size = sum(self.shares), self.T, self.layer.width
        return [torch.randn(size, generator=numbers, dtype=torch.float64).to(self.dtype) for _ in range(2)]

    def weights(self):
        return {name: value.to(self.dtype) for name, value in reference.weights(self.layer, self.seed).items()}

    def slots(self):
        """[cp, T/cp] of each rank that has a part of the same rows."""
        return slots(self.order, self.T, self.cp)

    def mine(self, rank):
        """[T/cp] the slots of a rank."""
        return self.slots()[rank // self.tp % self.cp]

    def rows(self, rank):
        """Of each microbatch the numbers of this rank's rows."""
        mine = torch.arange(sum(self.shares)).split(self.shares)[rank // self.tp // self.cp]
        return mine.tensor_split(self.microbatches)


def part(whole, rows, mine, fill):
    """Of [B, T, ..] these rows and slots."""
    longer = whole.new_full((whole.shape[0], max(0, int(mine.max()) + 1 - whole.shape[1]), *whole.shape[2:]), fill)
    return torch.cat([whole, longer], 1)[rows][:, mine]


def sequences(case, rank, rows):
    """Where a rank's tokens of these rows stand."""
    routed = torch.tensor(case.routed())
    mine = case.mine(rank)
    counts = torch.tensor([int(routed.any(1).sum()), int(routed.sum())])
    return Sequences(part(routed, rows, mine, False), routed[rows].any(1), case.T, *counts, case.slots())


# -- on ranks ----------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """The expert of every token."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Seen(Record):
    """What a layer records, and of each call what was chosen, before and after some were dropped."""

    def __init__(self, experts):
        super().__init__(experts)
        self.calls = []

    def add(self, experts, kept, shares):
        self.calls.append((experts, kept))
        super().add(experts, kept, shares)


def made(layer, **more):
    """The layer, on one rank."""
    moe = MoE(
        *(layer.width, layer.hidden, layer.experts),
        choices=layer.choices,
        capacity=layer.capacity,
        shared=Shared(layer.width, layer.shared) if layer.shared else None,
        losses=Losses(layer.balance, layer.z, layer.over),
        score=layer.score,
        renormalise=layer.renormalise,
        scale=layer.scale,
        biased=layer.bias is not None,
        **more,
    ).double()
    if layer.bias is not None:
        moe.router.bias.copy_(torch.tensor(layer.bias))
    moe.record = Seen(layer.experts)
    return moe


def mine_of(run, *groups):
    """Of these groups, made on all ranks, the one with this rank."""
    return next(group for group in [run.new_group(ranks) for ranks in groups] if group is not None)


@dataclass(frozen=True)
class Groups:
    """Of this rank. data: all that see other tokens."""

    ep: object
    expert_data: object
    row: object
    data: object
    tp: object

    @classmethod
    def of(cls, run, case):
        apart = [range(run.size)[t :: case.tp] for t in range(case.tp)]
        ep, cp, places = case.ep, case.cp, range(run.size // case.tp)
        return cls(
            mine_of(run, *(some[i : i + ep] for some in apart for i in places[::ep])),
            mine_of(run, *(some[i::ep] for some in apart for i in range(ep))),
            mine_of(run, *(some[i : i + cp] for some in apart for i in places[::cp])),
            mine_of(run, *apart),
            mine_of(run, *(range(i, i + case.tp) for i in range(0, run.size, case.tp))),
        )


def share_experts(run, case, model):
    """Declare all parameters of a model, and cut the experts of its layers."""
    groups = Groups.of(run, case)
    layout.declare(model, lambda name: None, lambda name: True)
    for param in model.parameters():
        param.held.sums["data"] = groups.data
    for layer in (layer for layer in model.modules() if isinstance(layer, MoE)):
        layer.distribute(groups.ep, groups.expert_data, groups.row)
        layer.losses = replace(layer.losses, statistics=groups.data)
        if case.tp > 1:
            cut_hidden(layer.experts, groups.tp)
    return groups


def distributed(run, case):
    """The layer of a case, shared by the ranks of a run."""
    moe = made(case.layer).to(case.dtype)
    moe.load_state_dict(case.weights(), strict=False)
    share_experts(run, case, moe)
    return moe


def pairs(choices, rows, mine):
    """(row, slot, expert) of [B, T/P, k] that are somebody's."""
    return {
        (int(rows[b]), int(mine[t]), expert)
        for b, row in enumerate(choices.tolist())
        for t, some in enumerate(row)
        for expert in some
        if expert >= 0
    }


@dataclass(frozen=True)
class Outcome:
    """What one rank has after a step."""

    y: torch.Tensor
    dx: torch.Tensor
    grads: dict  # name → (boxes, gradient)
    chosen: set
    dropped: set
    seen: object  # the Observation


def outcome(run, case, change=contextlib.nullcontext, *, check=True):
    """Of this rank: one step, forward and backward of all microbatches, and the sums of gradients."""
    with change():
        moe, mine = distributed(run, case), case.mine(run.rank)
        x, dout = case.tensors()
        ys, dxs, chosen, kept = [], [], set(), set()
        for rows in case.rows(run.rank):
            mine_x = part(x, rows, mine, PADDING).requires_grad_()
            y = moe(mine_x, sequences(case, run.rank, rows))
            y.backward(part(dout, rows, mine, 0.0))
            ys.append(y.detach())
            dxs.append(mine_x.grad)
            before, after = moe.record.calls[-1]
            chosen |= pairs(before, rows, mine)
            kept |= pairs(after, rows, mine)
        params = list(moe.parameters())
        sum_partials(params, ("data",))
        if check:
            layout.check(params, run.world)
            layout.check_copies([(param.held, param.grad) for param in params], run.world)
        grads = {param.held.name: (param.held.boxes, param.grad) for param in params}
        [seen] = observe([moe.record], run.device, group=Groups.of(run, case).data)
        return Outcome(torch.cat(ys), torch.cat(dxs), grads, chosen, chosen - kept, seen)


# -- and how far they are off ------------------------------------------------------------------------------------------


@functools.cache
def expected(case):
    """(Result, dx, gradients by name) of the reference, in float64."""
    x, dout = (tensor.double() for tensor in case.tensors())
    named = {name: value.double().requires_grad_() for name, value in case.weights().items()}
    result = reference.apply(case.layer, named, x.requires_grad_(), case.routed())
    total = (result.y * dout).sum() + reference.loss(case.layer, result)
    grads = torch.autograd.grad(total, [x, *named.values()])
    return result, grads[0], dict(zip(named, grads[1:], strict=True))


def one_rank(case):
    """The same batch in one process: rows are dealt out otherwise, but they are the same."""
    return replace(case, ranks=1, ep=1, cp=1, tp=1, microbatches=1)


def true(case):
    assert sum(case.shares) == sum(SHARES[1])
    return expected(replace(one_rank(case), order=""))


def worst(case, ranks):
    """The largest error of any rank, as a share of what is allowed; infinite where choices are not the same."""
    result, dx, grads = true(case)
    if not same_choices(case, ranks):
        return math.inf
    largest, share = max(float(grad.abs().max()) for grad in grads.values()), 0.0
    for rank, ours in enumerate(ranks):
        rows, mine = torch.cat(case.rows(rank)), case.mine(rank)
        inside = mine < case.T
        for piece, whole in ((ours.y, result.y.detach()), (ours.dx, dx)):
            share = max(share, near(piece[:, inside], whole[rows][:, mine[inside]], float(whole.abs().max())))
        assert ours.grads.keys() == grads.keys()
        for name, (boxes, grad) in ours.grads.items():
            allowed = float(grads[name].abs().max()) + 0.01 * largest
            share = max(share, near(grad, held_part(boxes, grads[name]), allowed))
        share = max(share, *observed(case, ours.seen, result))
    return share


def observed(case, seen, result):
    """A loss whose coefficient is zero is not computed."""
    yield near(seen.balance, result.balance.item() if case.layer.balance else 0.0)
    yield near(seen.z, result.z.item() if case.layer.z else 0.0)
    yield near(seen.entropy, result.entropy)


def same_choices(case, ranks):
    """Whether all ranks together have chosen and dropped what the reference has, token by token, and say so."""
    result, *_ = true(case)
    experts = range(case.layer.experts)
    return (
        set().union(*(ours.chosen for ours in ranks)) == result.chosen
        and set().union(*(ours.dropped for ours in ranks)) == result.dropped
        and all(ours.seen.tokens.tolist() == [result.tokens[e] for e in experts] for ours in ranks)
        and all(ours.seen.dropped == len(result.dropped) for ours in ranks)
    )


def near(ours, right, size=1.0):
    """Their distance, as a share of what is allowed between numbers of this size."""
    ours, right = torch.as_tensor(ours), torch.as_tensor(right)
    assert ours.shape == right.shape
    return furthest(ours, right) / (1e-12 * size) if right.numel() else 0.0


def held_part(boxes, whole):
    [box] = boxes
    return whole[tuple(slice(start, start + n) for start, n in zip(box.offset, box.local, strict=True))]
