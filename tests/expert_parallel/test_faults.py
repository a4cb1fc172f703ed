"""Faults that parity must see: each changes one line's worth on every rank, and the judge, who looks at every rank by
itself, says what is off.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from expert_parallel import balance, cut, dispatch, exchange, experts, moe, router, sequences
from expert_parallel.dispatch import Dispatch
from expert_parallel.exchange import Exchange
from tests.expert_parallel.cases import Case, expected, outcome, same_choices, worst
from tests.expert_parallel.reference import Layer


def replaced(where, name, new):
    return lambda: mock.patch.object(where, name, new)


# -- what travels ------------------------------------------------------------------------------------------------------


def stays_here(group_exchange):
    """Nothing is sent: what comes is as many rows of one's own."""
    rows, count = group_exchange.rows, sum(group_exchange.takes)
    return torch.cat([rows, rows.new_zeros(count, rows.shape[1])])[:count] if group_exchange.group else rows


def gradients_stay_here(ctx, dy):
    """The gradients that come back are one's own."""
    true_return(ctx, dy)
    ctx.exchange.work.wait()
    back = ctx.exchange.taken
    return torch.cat([dy, torch.zeros_like(back)])[: len(back)], None


true_return = exchange._Arrive.backward


def nobody_returns(ctx, dx):
    """A gradient of zeros, for the one that came."""
    ctx.exchange.work.wait()
    return torch.zeros_like(dx), None


def mean_over_ranks(ctx, dx):
    """Divided by ep."""
    ctx.exchange.work.wait()
    return dx / ctx.exchange.group.size(), None


def rank_by_rank(rows, blocks):
    """Rows stay in the order of the ranks they came from."""
    return rows


# -- copies, weights and where they return -----------------------------------------------------------------------------


def weights_twice(way, outputs, weights):
    return true_combine(way, outputs, weights.square())


def weights_forgotten(way, outputs, weights):
    return true_combine(way, outputs, torch.ones_like(weights))


def weights_of_the_other_choice(way, outputs, weights):
    return true_combine(way, outputs, weights.flip(1))


def first_choice_only(way, outputs, weights):
    return true_combine(way, outputs, torch.cat([weights[:, :1], 0 * weights[:, 1:]], 1))


def combined_in_the_order_of_experts(way, outputs, weights):
    """Not in that of tokens."""
    way.order = way.order.sort().values
    return true_combine(way, outputs, weights)


def weights_without_gradient(way, outputs, weights):
    return true_combine(way, outputs, weights.detach())


true_combine = Dispatch.combine


def gradient_of_one_copy(ctx, dcopies):
    """Not the sum over a token's choices."""
    [order] = ctx.saved_tensors
    dx = dcopies.new_zeros(ctx.shape[0], dcopies.size(1))
    return dx.index_copy(0, order // ctx.shape[1], dcopies), None, None


# -- who holds what, and whose sums they are ---------------------------------------------------------------------------


def scaled_gradients(some, group, expert_data, factor):
    true_cut(some, group, expert_data)
    for param in some.parameters():
        param.register_hook(lambda grad: grad * factor)


def experts_times_ep(some, group, expert_data=None):
    """As if tokens of other ranks had not been among them."""
    scaled_gradients(some, group, expert_data, group.size())


def experts_divided_by_ep(some, group, expert_data=None):
    scaled_gradients(some, group, expert_data, 1 / group.size())


def experts_not_summed(some, group, expert_data=None):
    """Over expert-data."""
    true_cut(some, group)


true_cut = cut.cut_experts


def next_expert(some, x, counts):
    """Rows of one expert go through its neighbour."""
    return true_experts(some, x, [*counts[1:], counts[0]])


true_experts = experts.Experts.forward

# -- capacity ----------------------------------------------------------------------------------------------------------


def counted_by_rank(rows, of, group):
    """Queues of this rank's tokens alone: as if the others had not chosen."""
    whole = true_whole(rows, of, group)
    if group is None or group.size() == 1:
        return whole
    alone = torch.full_like(whole, sequences.NOBODY)
    mine = of.slots[group.rank()]
    alone[:, mine] = whole[:, mine]
    return alone


def rank_after_rank(rows, of, group):
    """Pieces as they came, not by slot."""
    return true_whole(rows, of if of.slots is None else replace(of, slots=in_order(of.slots)), group)


def in_order(slots):
    return slots.flatten().sort().values.view_as(slots)


true_whole = moe.whole_rows


def one_more(taken, ones, room):
    return true_within(taken, ones, room + 1)


def all_rows_together(taken, ones, room):
    """One queue an expert for all rows of a microbatch."""
    fits = true_within(taken.flatten(0, 1)[None], ones.flatten(0, 1)[None], room * max(1, taken.shape[0]))
    return fits.view(taken.shape)


def choice_before_slot(taken, ones, room):
    """All first choices come before all second ones."""
    fits, before = torch.zeros_like(taken, dtype=torch.bool), torch.zeros_like(ones[:, 0])  # [B, E]
    for j in range(taken.shape[2]):
        of_choice = sequences.chosen(taken[:, :, j : j + 1], ones.shape[2])
        place = (of_choice.cumsum(1) - of_choice + before[:, None]).gather(-1, taken[:, :, j : j + 1].clamp(min=0))
        fits[:, :, j] = ((place < room) & (taken[:, :, j : j + 1] != sequences.NOBODY))[..., 0]
        before = before + of_choice.sum(1)
    return fits


true_within = moe.within


def of_padded_rows(factor, choices, length, count):
    """Room for padding that only some meshes have."""
    return true_capacity(factor, choices, length + 5, count)


true_capacity = moe.capacity

# -- losses ------------------------------------------------------------------------------------------------------------


def counts_of_the_shares(shares, routed, counts, choices):
    """f of this rank's part of a row, and of other choices than those of dispatch if there is a bias."""
    best = shares.topk(choices).indices.where(routed[..., None], sequences.NOBODY)
    return true_balance(shares, routed, sequences.chosen(best, shares.size(-1)).sum(1), choices)


def holes_as_well(shares, routed, counts, choices):
    """P of all slots."""
    return true_balance(shares, torch.ones_like(routed), counts, choices)


true_balance = moe.sequence_balance


def no_loss(y, loss):
    """What the wrapper returns is not used."""
    return y


def loss_twice(y, loss):
    return balance.with_loss(balance.with_loss(y, loss), loss)


def z_without_the_square(logits, routed):
    return (logits.logsumexp(-1) * routed).sum()


def statistics_of_this_rank(shares, routed, counts, choices, *, group):
    return true_batch(shares, routed, counts, choices, group=None)


true_batch = moe.batch_balance

# -- the router --------------------------------------------------------------------------------------------------------


def weights_with_the_bias(of, x):
    """The bias weighs as well."""
    routing = true_router(of, x)
    return replace(routing, weights=routing.weights + (0 if of.bias is None else of.bias[routing.experts]))


true_router = router.Router.forward


def bf16(of, x):
    return true_router(of, x.bfloat16().to(x.dtype))


BIASED = Layer(score="sigmoid", bias=tuple(0.4 * (-1) ** e for e in range(12)), capacity=0.75, renormalise=False)
BOTH = Case(Layer(choices=3, shared=4, renormalise=False), 4, 2)
FULL, ROWS = Case(Layer(capacity=0.5), 2, 2), Case(Layer(capacity=0.75), 4, 2, 2)
CUT = replace(ROWS, layer=BIASED)
FAULTS = {  # change, case
    "nothing travels": (replaced(Exchange, "wait", stays_here), BOTH),
    "gradients do not travel": (replaced(exchange._Arrive, "backward", staticmethod(gradients_stay_here)), BOTH),
    "no gradient returns": (replaced(exchange._Depart, "backward", staticmethod(nobody_returns)), BOTH),
    "gradients divided by ep on their way": (
        replaced(exchange._Depart, "backward", staticmethod(mean_over_ranks)), BOTH
    ),
    "rows in the order of ranks": (replaced(dispatch, "_reordered", rank_by_rank), BOTH),
    "T96: weights twice": (replaced(Dispatch, "combine", weights_twice), BOTH),
    "T96: weights forgotten": (replaced(Dispatch, "combine", weights_forgotten), BOTH),
    "T96: weights of another choice": (replaced(Dispatch, "combine", weights_of_the_other_choice), BOTH),
    "T96: the first choice alone": (replaced(Dispatch, "combine", first_choice_only), BOTH),
    "T96: combined in the order of experts": (replaced(Dispatch, "combine", combined_in_the_order_of_experts), BOTH),
    "T96: a token's gradient of one choice": (
        replaced(dispatch._Copies, "backward", staticmethod(gradient_of_one_copy)), BOTH
    ),
    "the router learns nothing of the outputs": (replaced(Dispatch, "combine", weights_without_gradient), BOTH),
    "experts' gradients times ep": (replaced(moe, "cut_experts", experts_times_ep), BOTH),
    "experts' gradients divided by ep": (replaced(moe, "cut_experts", experts_divided_by_ep), BOTH),
    "experts' gradients are not summed": (replaced(moe, "cut_experts", experts_not_summed), BOTH),
    "the next expert": (replaced(experts.Experts, "forward", next_expert), BOTH),
    "capacity counted by rank": (replaced(moe, "whole_rows", counted_by_rank), ROWS),
    "capacity rank after rank": (replaced(moe, "whole_rows", rank_after_rank), ROWS),
    "capacity of one more": (replaced(moe, "within", one_more), FULL),
    "capacity of all rows together": (replaced(moe, "within", all_rows_together), FULL),
    "first choices come first": (replaced(moe, "within", choice_before_slot), FULL),
    "capacity of padded rows": (replaced(moe, "capacity", of_padded_rows), ROWS),
    "balance of local counts": (replaced(moe, "sequence_balance", counts_of_the_shares), ROWS),
    "T99: balance of other choices": (replaced(moe, "sequence_balance", counts_of_the_shares), CUT),
    "balance of holes": (replaced(moe, "sequence_balance", holes_as_well), ROWS),
    "T91: a loss that is lost": (replaced(moe, "with_loss", no_loss), BOTH),
    "T92: a loss that enters twice": (replaced(moe, "with_loss", loss_twice), BOTH),
    "z without the square": (replaced(moe, "z_loss", z_without_the_square), BOTH),
    "statistics of one rank": (
        replaced(moe, "batch_balance", statistics_of_this_rank), replace(BOTH, layer=Layer(over="batch"))
    ),
    "a bias that weighs": (replaced(router.Router, "forward", weights_with_the_bias), CUT),
    "a router in bf16": (replaced(router.Router, "forward", bf16), BOTH),
}  # fmt: skip


def faulty(run, name):
    change, case = FAULTS[name]
    return outcome(run, case, change, check=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_sees_a_fault(pool, fault):
    """Far outside of what is allowed, and not by a hair."""
    _, case = FAULTS[fault]
    assert worst(case, pool.run(case.ranks, faulty, fault)) > 1e6


@pytest.mark.parametrize("fault", [name for name in FAULTS if "capacity" in name or "come first" in name])
def test_a_fault_of_capacity_drops_others(pool, fault):
    """It is the drops that show it."""
    _, case = FAULTS[fault]
    assert not same_choices(case, pool.run(case.ranks, faulty, fault))


def test_without_a_fault_there_is_none(pool):
    """The same cases as they are."""
    for case in dict.fromkeys(case for _, case in FAULTS.values()):
        assert worst(case, pool.run(case.ranks, outcome, case)) <= 1
        assert all(float(grad.abs().max()) > 1e-3 for grad in expected(case)[2].values())
