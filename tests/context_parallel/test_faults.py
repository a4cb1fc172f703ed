"""Faults that parity must see: each changes one line's worth on every rank, and the judge, who looks at every rank by
itself, says what is off.
"""

import functools
import math
from unittest import mock

import pytest
import torch

from collectives import comm
from context_parallel import block, gather, online, ring, ring_ulysses, ulysses
from context_parallel.places import Block, Places
from tests.context_parallel.cases import Case, outcome, rounded_otherwise, worst


def replaced(where, name, new):
    return lambda: mock.patch.object(where, name, new)


def without_that(*collective):
    """gather.py's collectives, with others in their place."""
    return lambda: mock.patch.object(gather, "comm", mock.Mock(wraps=comm, **dict(collective)))


# -- what travels ------------------------------------------------------------------------------------------------------


def stays_here(x, group):
    """Nothing is sent: what comes is one's own."""
    return mock.Mock(), x.clone()


def one_step_the_other_way(x, group):
    """From the next rank, to the one before."""
    size, rank, coming = group.size(), group.rank(), torch.empty_like(x)
    return ring.p2p.exchange([(x, (rank - 1) % size)], [(coming, (rank + 1) % size)], group=group), coming


def one_hop_too_many(homeward):
    """The gradients pass their owner by."""
    own = true_arrived(homeward)
    work, coming = ring.pass_on(own.contiguous(), homeward.group)
    work.wait()
    return coming


true_arrived = ring.Homeward.arrived


def own_terms_only(homeward, terms):
    """Nobody's are added to them."""
    true_add(homeward, terms if homeward.work is None else terms.zero_())


true_add = ring.Homeward.add


def own_everywhere(output, input, *, group):
    output.copy_(input.expand_as(output))


def own_terms(output, input, *, group, ordered):
    output.copy_(input.view(group.size(), *output.shape)[group.rank()])


def mean_of_terms(output, input, *, group, ordered):
    comm.reduce_scatter_single(output, input / group.size(), group=group, ordered=ordered)


def nothing_exchanged(x, split_dim, cat_dim, *, group):
    """Of one's own tokens as many as there should be of everyone's."""
    return torch.cat([x.tensor_split(group.size(), split_dim)[group.rank()]] * group.size(), cat_dim)


# -- softmax in parts --------------------------------------------------------------------------------------------------


def latest_only(out, lse, new, its):
    """What was seen before is dropped where something new is seen."""
    out.copy_(torch.where(its[..., None] > -math.inf, new, out))
    lse.copy_(torch.logaddexp(lse, its))


def plain_sum(out, lse, new, its):
    """Each as if it were the whole softmax."""
    out.add_(new)
    lse.copy_(torch.logaddexp(lse, its))


def not_rescaled(out, lse, new, its):
    """What was there keeps its weight."""
    total = torch.logaddexp(lse, its)
    out.add_(new * (its - total.masked_fill(total == -math.inf, 0.0)).exp()[..., None])
    lse.copy_(total)


def zero_for_nothing(q, k, v, mask, causal):
    """The lse of a row that sees nothing is what the kernel says."""
    return block._fused(q, k, v, 0.0, causal, attn_mask=block._additive(mask, q.dtype))


def its_own_softmax(dout, inputs, result, mask=None, causal=False):
    """The gradient as if these keys were all."""
    return true_backward(dout, inputs, block.forward(*inputs, mask, causal), mask, causal)


true_backward = block.backward


def scaled(*kernels):
    """These kernels take scores as they are, not times K^-½."""
    others = {name: functools.partial(getattr(block, name), scale=1.0) for name in kernels}
    return lambda: mock.patch.multiple(block, **others)


def last_dq(result, owner, kv, dkv):
    """What was added up is lost."""
    if result.places.blocks(result.rank, owner):
        result.dq.zero_()
    true_see(result, owner, kv, dkv)


true_see = online.Backward.see

# -- low precision -----------------------------------------------------------------------------------------------------


def output_of_every_block(out, lse, new, its):
    true_merge(out, lse, new, its)
    out.copy_(out.bfloat16())


true_merge = online._merge


def gradient_of_every_block(result, owner, kv, dkv):
    true_see(result, owner, kv, dkv)
    result.dq.copy_(result.dq.bfloat16())


def gradient_at_every_hop(x, group):
    return true_pass_on(x.bfloat16().to(x.dtype), group)


true_pass_on = ring.pass_on


def gradient_before_the_sum(output, input, *, group, ordered):
    comm.reduce_scatter_single(output, input.bfloat16().to(input.dtype), group=group, ordered=ordered)


# -- who sees whom -----------------------------------------------------------------------------------------------------


def only_earlier(of, mine, theirs):
    """Not the token itself."""
    start, stop = true_seen(of, mine, theirs)
    return start, (stop - int(mine == theirs)).maximum(start)


true_seen = Places.seen


def one_document(documents, slots, *, causal=True):
    """Of all tokens of a row."""
    return true_of(torch.zeros_like(documents), slots, causal=causal)


def places_in_another_order(documents, slots, *, causal=True):
    """As if rows had been cut into neighbours: the cut of ids is not that of documents and slots."""
    return true_of(documents, slots.flatten().sort().values.view_as(slots), causal=causal)


true_of = Places.of


def padding_in_the_last_document(documents, slots, *, causal=True):
    longer = documents[:, -1:].expand(-1, slots.numel() - documents.shape[1])
    return true_of(torch.cat([documents, longer], 1), slots, causal=causal)


def of_earlier_ranks(of, mine, theirs):
    """Skipped as if ranks stood in order."""
    return true_blocks(of, mine, theirs) if theirs <= mine else []


def the_whole_square(of, mine, theirs):
    """Without a mask."""
    return [Block(*part[:2], "full") for part in true_blocks(of, mine, theirs)]


def first_block_only(of, mine, theirs):
    """Of those into which a mask was cut."""
    return true_blocks(of, mine, theirs)[:1]


true_blocks = Places.blocks


# -- heads and neighbours ----------------------------------------------------------------------------------------------


def keys_in_turn(x, times, dim):
    """0 1 0 1 for 0 0 1 1."""
    return torch.cat([x] * times, dim)


def as_they_came(q, k, v, order, attention, *, group):
    """Tokens rank after rank, whatever their slots."""
    return true_by_heads(q, k, v, tuple(each.sort().values for each in order), attention, group=group)


true_by_heads = ulysses.by_heads


def documents_as_they_came(of, size):
    """Slots in order, what they see rank after rank."""
    ends = (end.unflatten(0, (-1, size)).transpose(1, 2).flatten(2) for end in (of.first, of.last))
    return Places(true_grouped(of, size).slots, *ends)


true_grouped = Places.grouped

PACKED = {"lengths": (5, 4), "holes": (7,)}
RING, GATHER, ULYSSES, BOTH = (Case(m, **PACKED) for m in ("ring", "all_gather", "ulysses", "ring_ulysses 2"))
LONG = Case("ring", "contiguous", T=300, B=1, lengths=(40,) * 7)
FAULTS = {  # change, ranks, case
    "a ring that sends nothing": (replaced(ring, "pass_on", stays_here), 3, RING),
    "a ring the wrong way": (replaced(ring, "pass_on", one_step_the_other_way), 3, RING),
    "T86: gradients one hop too far": (replaced(ring.Homeward, "arrived", one_hop_too_many), 3, RING),
    "T86: nobody adds to the gradients": (replaced(ring.Homeward, "add", own_terms_only), 3, RING),
    "no all_gather": (without_that(("all_gather_single", own_everywhere)), 2, GATHER),
    "no reduce_scatter": (without_that(("reduce_scatter_single", own_terms)), 2, GATHER),
    "a mean for the sum": (without_that(("reduce_scatter_single", mean_of_terms)), 2, GATHER),
    "no all_to_all": (replaced(ulysses, "all_to_all", nothing_exchanged), 2, ULYSSES),
    "the latest block for the softmax": (replaced(online, "_merge", latest_only), 2, RING),
    "a sum for the softmax": (replaced(online, "_merge", plain_sum), 2, GATHER),
    "what was there keeps its weight": (replaced(online, "_merge", not_rescaled), 2, RING),
    "lse 0 of rows that see nothing": (replaced(block, "fused", zero_for_nothing), 2, RING),
    "the gradient of a block's own softmax": (replaced(block, "backward", its_own_softmax), 2, RING),
    "the gradient from the last block": (replaced(online.Backward, "see", last_dq), 2, RING),
    "no scale": (scaled("_fused", "_fused_backward"), 2, RING),
    "no scale in backward": (scaled("_fused_backward"), 2, ULYSSES),
    "a token does not see itself": (replaced(Places, "seen", only_earlier), 2, RING),
    "documents see each other": (replaced(Places, "of", one_document), 2, ULYSSES),
    "T77: ids in zigzag, documents in order": (replaced(Places, "of", places_in_another_order), 2, RING),
    "T80: padding is seen": (replaced(Places, "of", padding_in_the_last_document), 2, Case("ring", T=14, causal=False)),
    "T80: padding sees": (replaced(Places, "of", padding_in_the_last_document), 2, Case("ulysses", T=14)),
    "blocks of later ranks are skipped": (replaced(Places, "blocks", of_earlier_ranks), 2, RING),
    "a square for a triangle": (replaced(Places, "blocks", the_whole_square), 2, Case("all_gather")),
    "one of many blocks": (replaced(Places, "blocks", first_block_only), 2, LONG),
    "T83: heads of other queries": (replaced(torch.Tensor, "repeat_interleave", keys_in_turn), 4, ULYSSES),
    "tokens of ranks, not of slots": (replaced(ulysses, "by_heads", as_they_came), 2, ULYSSES),
    "tokens of neighbours, not of slots": (replaced(ring_ulysses, "by_heads", as_they_came), 4, BOTH),
    "documents of neighbours, not of slots": (replaced(Places, "grouped", documents_as_they_came), 4, BOTH),
}


HALF = {"T": 64, "H": 8, "K": 16, "dtype": torch.bfloat16}
ROUNDED = {
    "the output of every block": (replaced(online, "_merge", output_of_every_block), 4, Case("ring", **HALF)),
    "dq of every block": (replaced(online.Backward, "see", gradient_of_every_block), 4, Case("all_gather", **HALF)),
    "dk, dv at every hop": (replaced(ring, "pass_on", gradient_at_every_hop), 4, Case("ring", **HALF)),
    "dk, dv before the sum": (
        without_that(("reduce_scatter_single", gradient_before_the_sum)), 4, Case("all_gather", **HALF)
    ),
}  # fmt: skip


def faulty(run, name):
    change, _, case = (FAULTS | ROUNDED)[name]
    with change():
        return outcome(run, case)


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_sees_a_fault(pool, fault):
    """Far outside of what is allowed, and not by a hair."""
    _, ranks, case = FAULTS[fault]
    assert worst(case, pool.run(ranks, faulty, fault)) > 1e6


@pytest.mark.parametrize("fault", ROUNDED)
def test_t75_shows_what_is_rounded_to_bf16_on_the_way(pool, fault):
    _, ranks, case = ROUNDED[fault]
    assert rounded_otherwise(case, pool.run(ranks, faulty, fault)) > 0.1
    assert rounded_otherwise(case, pool.run(ranks, outcome, case)) < 0.01


def test_without_a_fault_there_is_none(pool):
    """The same cases as they are."""
    for ranks, case in dict.fromkeys(fault[1:] for fault in FAULTS.values()):
        assert worst(case, pool.run(ranks, outcome, case)) <= 1
