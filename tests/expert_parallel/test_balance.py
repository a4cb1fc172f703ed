"""The losses on the router, and the bias that follows the load."""

from dataclasses import replace

import pytest
import torch

from collectives import comm
from expert_parallel import Losses, MoE, Sequences, follow_load
from expert_parallel.balance import batch_balance, sequence_balance, with_loss, z_loss
from expert_parallel.sequences import chosen
from tests.expert_parallel import reference
from tests.expert_parallel.cases import HOLES, Case, distributed, made, near, outcome, part, sequences, true
from tests.expert_parallel.reference import Layer

BIAS = tuple(0.4 * (-1) ** e for e in range(12))
EVEN = torch.full((2, 4, 4), 0.25, dtype=torch.float64)
ROUTED = torch.ones(2, 4, dtype=torch.bool)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [1, 2, 4])
def test_where_all_is_even_the_loss_is_one(choices):
    counts = torch.full((2, 4), choices)
    assert sequence_balance(EVEN, ROUTED, counts, choices).tolist() == [1.0, 1.0]
    value, tokens = batch_balance(EVEN, ROUTED, 2 * counts[0], choices, group=None)
    assert (float(value), float(tokens)) == (1.0, 8.0)


def test_where_one_expert_has_everything_it_is_their_number():
    shares = torch.eye(4, dtype=torch.float64)[0].expand(2, 4, 4)
    assert sequence_balance(shares, ROUTED, torch.tensor([[4, 0, 0, 0]] * 2), 1).tolist() == [4.0, 4.0]


def test_typed_values():
    """One row of two tokens and a hole, three experts, k = 1: f = 3/2 · (1, 1, 0), P = (0.6, 0.3, 0.1)."""
    shares = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [9.0, 9.0, 9.0]]], dtype=torch.float64)
    routed, counts = torch.tensor([[True, True, False]]), torch.tensor([[1, 1, 0]])
    assert sequence_balance(shares, routed, counts, 1).item() == pytest.approx(1.35, rel=1e-15)
    value, tokens = batch_balance(shares, routed, counts[0], 1, group=None)
    assert (value.item(), tokens.item()) == (pytest.approx(1.35, rel=1e-15), 2)


def test_rows_without_a_token_have_no_loss_and_no_gradient():
    shares = EVEN.clone().requires_grad_()
    routed = ROUTED & torch.tensor([[True], [False]])
    rows = sequence_balance(shares, routed, torch.tensor([[4, 0, 0, 0], [0, 0, 0, 0]]), 1)
    rows.sum().backward()
    assert rows[1].item() == 0 and not shares.grad[1].any() and shares.grad[0].any()
    value, tokens = batch_balance(EVEN, ROUTED & False, torch.zeros(4, dtype=torch.int64), 1, group=None)
    assert (value.item(), tokens.item()) == (0, 0)


def test_z():
    """Typed: the log of a sum of e⁰ twice is log 2; a hole does not count."""
    logits = torch.tensor([[[0.0, 0.0], [3.0, 3.0], [50.0, 60.0]]], dtype=torch.float64)
    log2 = 0.6931471805599453
    expected = log2**2 + (3 + log2) ** 2
    assert z_loss(logits, torch.tensor([[True, True, False]])).item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_of_a_row_add_up(parts):
    """Counts are those of the whole row, shares each part's own."""
    numbers = torch.Generator().manual_seed(parts)
    shares = torch.rand(3, 12, 5, generator=numbers, dtype=torch.float64)
    experts = torch.stack([torch.randperm(5, generator=numbers)[:2] for _ in range(36)]).view(3, 12, 2)
    routed = torch.rand(3, 12, generator=numbers) < 0.7
    counts = chosen(experts.where(routed[..., None], -1), 5).sum(1)
    whole = sequence_balance(shares, routed, counts, 2)
    cuts = [torch.arange(12)[i::parts] for i in range(parts)]
    assert near(sum(sequence_balance(shares[:, c], routed[:, c], counts, 2) for c in cuts), whole) <= 1
    for b in range(3):
        tokens = [shares[b, t] for t in range(12) if routed[b, t]]
        by_loop = reference.balance(Layer(experts=5), tokens, counts[b].tolist())
        assert near(whole[b], by_loop) <= 1


# -- how it enters -----------------------------------------------------------------------------------------------------


def test_it_enters_with_a_gradient_of_one():
    x, w = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    y = with_loss(x * 2, (w * 5).sum())
    assert y.tolist() == [2, 2, 2]
    (y * 7).sum().backward()
    assert x.grad.tolist() == [14] * 3 and w.grad.tolist() == [5] * 2


def test_it_enters_once_however_often_the_output_is_used():
    w = torch.ones(2, requires_grad=True)
    y = with_loss(torch.ones(3, requires_grad=True) * 2, (w * 5).sum())
    (y.sum() + (y * y).sum()).backward()
    assert w.grad.tolist() == [5] * 2


def router_gradient(layer, seed=0, *, training=True):
    """Of the losses alone: the output has a gradient of zeros."""
    case = replace(Case(layer), seed=seed)
    moe = made(layer).train(training)
    moe.load_state_dict(case.weights(), strict=False)
    x = case.tensors()[0].requires_grad_()
    (moe(x) * 0).sum().backward()
    return moe.router.weight.grad


@pytest.mark.parametrize("layer", [Layer(score="sigmoid", bias=BIAS), Layer(choices=1), Layer(over="batch")])
@pytest.mark.parametrize("name", ["balance", "z"])
def test_t91_the_gradient_is_linear_in_the_coefficient(layer, name):
    none, one, two = (
        router_gradient(replace(layer, **{"balance": 0.0, "z": 0.0, name: coefficient}))
        for coefficient in (0, 0.01, 0.02)
    )
    assert not none.any() and float(one.abs().max()) > 1e-5
    assert near(two, 2 * one, float(two.abs().max())) <= 1


def test_there_is_none_in_evaluation():
    assert not router_gradient(Layer(), training=False).any()


def test_a_loss_of_low_coefficient_still_records_its_value():
    """Without its coefficient; and one of zero is not computed."""
    layer = Layer(balance=1e-9, z=0.0)
    moe = made(layer)
    moe(torch.randn(2, 5, 6, dtype=torch.float64))
    assert moe.record.sums["balance"] > 0.5 and "z" not in moe.record.sums


# -- of the whole batch, whatever the ranks ----------------------------------------------------------------------------

MESHES = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (3, 3, 1), (4, 2, 1), (4, 4, 2), (4, 4, 1)]


def losses_alone(run, case):
    """The router's gradient summed over all ranks, where the output has a gradient of zeros."""
    moe = distributed(run, case)
    x, mine = case.tensors()[0], case.mine(run.rank)
    for rows in case.rows(run.rank):
        (moe(part(x, rows, mine, 0.0), sequences(case, run.rank, rows)) * 0).sum().backward()
    comm.all_reduce(moe.router.weight.grad, group=run.world)
    return moe.router.weight.grad


def expected_alone(layer):
    """By autograd through the reference."""
    case = Case(layer)
    named = {name: value.requires_grad_() for name, value in case.weights().items()}
    result = reference.apply(layer, named, case.tensors()[0], case.routed())
    return torch.autograd.grad(reference.loss(layer, result), named["router.weight"])[0]


@pytest.mark.parametrize("over", ["sequence", "batch"])
@pytest.mark.parametrize(("ranks", "ep", "cp"), MESHES)
def test_t92_the_gradient_does_not_depend_on_the_ranks(pool, ranks, ep, cp, over):
    layer = Layer(score="sigmoid", bias=BIAS, over=over)
    right = expected_alone(layer)
    assert float(right.abs().max()) > 1e-2
    for grad in pool.run(ranks, losses_alone, Case(layer, ranks, ep, cp)):
        assert near(grad, right, float(right.abs().max())) <= 1


@pytest.mark.parametrize("name", ["balance", "z"])
def test_t92_each_loss_by_itself(pool, name):
    layer = replace(Layer(), **{"balance": 0.0, "z": 0.0, name: 0.5})
    right = expected_alone(layer)
    for grad in pool.run(4, losses_alone, Case(layer, 4, 2)):
        assert near(grad, right, float(right.abs().max())) <= 1


@pytest.mark.parametrize("microbatches", [2, 5])
def test_by_sequence_it_does_not_depend_on_microbatches(pool, microbatches):
    right = expected_alone(Layer())
    for grad in pool.run(2, losses_alone, Case(Layer(), 2, 2, microbatches=microbatches)):
        assert near(grad, right, float(right.abs().max())) <= 1


def test_by_batch_it_does(pool):
    """That is why its statistics belong to its definition."""
    layer = Layer(over="batch")
    right = expected_alone(layer)
    for grad in pool.run(2, losses_alone, Case(layer, 2, 2, microbatches=2)):
        assert near(grad, right, float(right.abs().max())) > 1e9


def batch_of_one_rank(run, layer):
    """Statistics of this rank's tokens: the router's gradient, of a layer whose experts are shared."""
    case = Case(layer, run.size, run.size)
    moe = distributed(run, case)
    moe.losses = replace(moe.losses, statistics=None)
    [rows] = case.rows(run.rank)
    x = case.tensors()[0][rows]
    (moe(x, sequences(case, run.rank, rows)) * 0).sum().backward()
    return moe.router.weight.grad


def test_statistics_of_each_rank(pool):
    """Weighted by tokens: rank 0 has four rows, one of them without a token, rank 1 has one."""
    layer = replace(Layer(over="batch"), z=0.0)
    case = Case(layer, 2, 2)
    x, routed = case.tensors()[0], torch.tensor(case.routed())
    for rank, grad in enumerate(pool.run(2, batch_of_one_rank, layer)):
        [rows] = case.rows(rank)
        named = {name: value.requires_grad_() for name, value in case.weights().items()}
        result = reference.apply(layer, named, x[rows], routed[rows].tolist())
        value = layer.balance * result.balance * routed[rows].sum() / routed.sum()
        [right] = torch.autograd.grad(value, named["router.weight"])
        assert near(grad, right, float(right.abs().max())) <= 1


# -- T99: whose counts -------------------------------------------------------------------------------------------------


def test_t99_counts_are_of_the_choices_that_are_made(pool):
    """The bias turns choices: with the counts of the scores alone the loss were another."""
    biased, plain = Layer(score="sigmoid", bias=BIAS), Layer(score="sigmoid")
    [ours, *_] = pool.run(2, outcome, Case(biased, 2, 2))
    result, other = (true(Case(layer))[0] for layer in (biased, plain))
    assert result.chosen != other.chosen
    assert near(ours.seen.balance, result.balance.item()) <= 1
    assert near(ours.seen.balance, other.balance.item()) > 1e9
    assert ours.seen.tokens.tolist() == [result.tokens[e] for e in range(12)]


def test_t99_dropped_choices_count(pool):
    """As DeepSeek-V3's and Switch's do: what the router wanted."""
    layer = Layer(capacity=0.5)
    [ours, *_] = pool.run(2, outcome, Case(layer, 2, 2))
    result = true(Case(layer))[0]
    assert result.dropped and int(ours.seen.tokens.sum()) == len(result.chosen) == 2 * (35 - len(HOLES))
    assert near(ours.seen.balance, result.balance.item()) <= 1


# -- the bias that follows the load ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_follow_load(dtype):
    """Typed: the mean is 3; who has more loses a step, who has less gains one, who has as many stays."""
    bias = torch.tensor([0.5, 0.0, -0.25, 0.0], dtype=dtype)
    kept = bias
    follow_load(bias, torch.tensor([6, 3, 0, 3]), 0.125)
    assert kept.tolist() == [0.375, 0.0, -0.125, 0.0]
    follow_load(bias, torch.tensor([1, 1, 1, 1]), 0.125)
    follow_load(bias, torch.tensor([0, 0, 0, 0]), 0.125)
    assert kept.tolist() == [0.375, 0.0, -0.125, 0.0]
    follow_load(bias.zero_(), torch.tensor([2**24 + 1, 2**24, 2**24, 2**24 - 1]), 0.1)  # float32 has no 2²⁴ + 1
    tenth = torch.tensor(0.1, dtype=dtype).item()
    assert kept.tolist() == [-tenth, 0.0, 0.0, tenth]


def test_a_bias_evens_out_the_load():
    """A router that prefers two experts, and no gradient: after some steps all have their share."""
    torch.manual_seed(0)
    moe = MoE(8, 4, 6, choices=2, losses=Losses(0.0), score="sigmoid", biased=True)
    x = torch.randn(8, 32, 8)
    x[..., 0] = 2.0
    with torch.no_grad():
        moe.router.weight[:2, 0] += 1.0
    imbalance = []
    for _ in range(150):
        moe(x)
        tokens = moe.record.take(x.device)[:6]
        imbalance.append(float(tokens.max() / tokens.mean()))
        follow_load(moe.router.bias, tokens, 0.01)
    assert imbalance[0] > 2 and max(imbalance[-10:]) < 1.2


def test_an_all_reduce_of_nothing_is_not_made():
    """Whole rows, all of the batch: a plain layer needs no group for its losses."""
    moe = MoE(6, 5, 4, losses=Losses(0.1, 0.1, "batch")).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    moe(x, Sequences.whole(x)).sum().backward()
    assert x.grad.any()
