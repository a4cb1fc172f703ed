"""What a step of mixtures shows: typed, the same on all ranks, and seen once, in training alone."""

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from expert_parallel import observe
from expert_parallel.observe import Record
from nd_mesh.recompute import recompute
from tests.expert_parallel.cases import Case, distributed, made, near, outcome, part, sequences, true
from tests.expert_parallel.reference import Layer
from tests.recorder import recording

N = -1
LAYER = Layer(capacity=0.75)


def recorded(run):
    """Two layers of 4 and 2 experts; the first sees two calls, rank 1 nothing of the second."""
    first, second, third = Record(4), Record(2), Record(3)
    uniform, sure = torch.full((1, 3, 4), 0.25), torch.tensor([[[1.0, 0, 0, 0]] * 3])
    experts = torch.tensor([[[0, 1], [0, 2], [N, N]]])
    kept = torch.tensor([[[0, 1], [N, 2], [N, N]]])
    first.add(experts, kept, uniform)
    first.add(experts, experts, sure)
    first.loss("balance", torch.tensor(0.5 + run.rank))
    first.loss("z", torch.tensor(2.0))
    first.loss("z", torch.tensor(0.25))
    if run.rank == 0:
        second.add(torch.tensor([[[1]] * 4]), torch.tensor([[[1]] * 4]), torch.full((1, 4, 2), 0.5))
    with recording() as recorder:
        seen = observe([first, second, third], run.device, group=run.world)
    again = observe([first], run.device, group=run.world)
    return seen, again, [(call.op, call.elements) for call in recorder.calls], observe([], run.device, group=run.world)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_typed(pool, ranks):
    """One message for all layers; afterwards everything begins at zero."""
    for (first, second, third), [again], calls, none in pool.run(ranks, recorded):
        assert first.tokens.tolist() == [4 * ranks, 2 * ranks, 2 * ranks, 0] and first.dropped == ranks
        assert first.overflow == 1 / 8 and first.imbalance == 2.0
        assert first.entropy == pytest.approx(math.log(4) / 2, rel=1e-6)  # a token, those of no document left out
        assert first.balance == sum(0.5 + rank for rank in range(ranks)) and first.z == 2.25 * ranks
        assert second.tokens.tolist() == [0, 4] and second.imbalance == 2.0 and second.overflow == 0
        assert second.entropy == pytest.approx(math.log(2), rel=1e-6)
        assert third.tokens.tolist() == [0, 0, 0] == again.tokens.tolist()[:3]
        assert (third.imbalance, third.overflow, third.entropy, again.dropped) == (0, 0, 0, 0)
        assert calls == [("all_reduce", 4 + 2 + 3 + 15)] and none == []


def many(run):
    """Numbers that float32 rounds."""
    record = Record(2)
    record._add({"tokens": torch.tensor([2**24 + 1, 2**40 + run.rank])})
    return observe([record], run.device, group=run.world)[0].tokens.tolist()


def test_large_counts_are_exact(pool):
    assert pool.run(2, many) == [[2**25 + 2, 2**41 + 1]] * 2


@pytest.mark.parametrize(
    ("ranks", "ep", "cp", "microbatches"), [(1, 1, 1, 1), (2, 2, 1, 2), (4, 2, 2, 1), (3, 3, 1, 5)]
)
def test_of_a_layer(pool, ranks, ep, cp, microbatches):
    """Counts, drops, entropy, losses of the whole batch are the reference's, on all ranks the same bits."""
    case = Case(LAYER, ranks, ep, cp, microbatches=microbatches)
    result, *_ = true(case)
    seen = [ours.seen for ours in pool.run(ranks, outcome, case)]
    loads = [result.tokens[e] for e in range(12)]
    for one in seen:
        assert one.tokens.tolist() == loads and one.dropped == len(result.dropped) > 0
        assert one.imbalance == max(loads) / (sum(loads) / 12)
        assert one.overflow == len(result.dropped) / len(result.chosen)
        assert near(one.entropy, result.entropy) <= 1 and 0 < one.entropy < math.log(12)
        assert near(one.balance, result.balance.item()) <= 1 and near(one.z, result.z.item()) <= 1
        assert (one.entropy, one.balance, one.z) == (seen[0].entropy, seen[0].balance, seen[0].z)


# -- once --------------------------------------------------------------------------------------------------------------


def whole(moe):
    """As it is."""
    return moe


def by_torch(moe):
    return lambda x, where: checkpoint(moe, x, where, use_reentrant=False)


def by_torch_within_backward(moe):
    return lambda x, where: checkpoint(moe, x, where, use_reentrant=True)


def by_ours(moe):
    recompute([moe])
    return moe


def steps(run, how):
    """(gradients, what was recorded, in evaluation, how many calls)"""
    case = Case(LAYER, run.size, run.size)
    moe = distributed(run, case)
    called, [rows] = how(moe), case.rows(run.rank)
    where = sequences(case, run.rank, rows)
    x, dout = (part(tensor, rows, case.mine(run.rank), 0.0) for tensor in case.tensors())
    with recording() as recorder:
        called(x.requires_grad_(), where).backward(dout)
    sums = copy.deepcopy(moe.record.sums)
    moe.eval()
    moe(x, where).backward(dout)
    with torch.no_grad():
        moe(x, where)
    same = all(torch.equal(value, moe.record.sums[name]) for name, value in sums.items())
    moe.train()
    with torch.no_grad():
        moe(x, where)
    counted = torch.equal(moe.record.sums["tokens"], 2 * sums["tokens"])
    moe.zero_grad()
    called(x, where).backward(dout)
    grads = [param.grad for param in moe.parameters()]
    return grads, sums, same and counted, len(recorder.calls)


@pytest.mark.parametrize("how", [by_torch, by_torch_within_backward, by_ours])
@pytest.mark.parametrize("ranks", [1, 2])
def test_recomputation_records_nothing_and_moves_no_bit(pool, how, ranks):
    """Counts, at first and not again; the gradients' bits. The forward's collectives ran twice."""
    plain, again = (pool.run(ranks, steps, each) for each in (whole, how))
    for (grads, sums, fine, calls), (other_grads, other_sums, other_fine, other_calls) in zip(
        plain, again, strict=True
    ):
        assert fine and other_fine and sums.keys() == other_sums.keys()
        assert all(torch.equal(value, other_sums[name]) for name, value in sums.items())
        assert all(map(torch.equal, grads, other_grads))
        assert other_calls - calls == (0 if ranks == 1 else 3)  # counts, rows there, rows back


def tied(run, how):
    """Router rows of small integers, two the same, so that scores are equal."""
    case = Case(Layer(choices=2, capacity=1.0), run.size, run.size)
    moe = distributed(run, case)
    with torch.no_grad():
        moe.router.weight.copy_(torch.ones(12, 6) * torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 0, -1, 0, 0, 1])[:, None])
    called, [rows] = how(moe), case.rows(run.rank)
    x, dout = (part(tensor, rows, case.mine(run.rank), 0.0).round() for tensor in case.tensors())
    called(x.requires_grad_(), sequences(case, run.rank, rows)).backward(dout)
    everyone = {tuple(pair) for pair in moe.record.calls[0][0].flatten(0, 1).tolist()}
    return everyone, [x.grad, *(param.grad for param in moe.parameters())]


@pytest.mark.parametrize("how", [by_torch, by_ours])
def test_t95_ties_are_broken_the_same_when_computed_again(pool, how):
    """By the lowest number: of a token whose sum is positive, zero, negative."""
    for (everyone, grads), (_, again) in zip(pool.run(2, tied, whole), pool.run(2, tied, how), strict=True):
        assert everyone <= {(0, 2), (0, 1), (8, 1), (N, N)}
        assert all(map(torch.equal, grads, again))


def test_what_is_recorded_keeps_no_graph():
    moe = made(LAYER)
    moe(torch.randn(2, 5, 6, dtype=torch.float64))
    assert moe.record.sums.keys() == {"tokens", "dropped", "routed", "entropy", "balance", "z"}
    assert not any(value.requires_grad for value in moe.record.sums.values())


@pytest.mark.parametrize("sums", [{"routed": 0}, {"routed": 3, "entropy": 6.0}])
def test_entropy_is_a_token_s(pool, sums):
    [seen] = pool.run(1, entropy_of, sums)
    assert seen == (2.0 if sums["routed"] else 0.0)


def entropy_of(run, sums):
    record = Record(2)
    record._add({name: torch.tensor(value) for name, value in sums.items()})
    return observe([record], run.device, group=run.world)[0].entropy
