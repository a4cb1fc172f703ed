"""Faults that parity must see: each changes one line's worth on every rank, and the judge, who looks at every rank by
itself, says what is off.
"""

import contextlib
import importlib
from unittest import mock

import pytest
import torch

from collectives import comm, layout, rng
from collectives.differentiable import all_reduce_all_reduce, split_all_gather
from collectives.p2p import Handle
from tensor_parallel import cross_entropy, cut, embedding, entrance, linear, plan, region
from tests.tensor_parallel.models import Shape, zero_directions
from tests.tensor_parallel.training import MODES, Recipe, plain, trained, worst

MODEL = Shape(vocab=37)
ONCE = Recipe(steps=1)
carried_out = importlib.import_module("tensor_parallel.parallelize")  # the name in the package is the function


def replaced(where, name, new):
    return lambda: mock.patch.object(where, name, new)


# -- where a region ends -----------------------------------------------------------------------------------------------


def own_term(y, *, group):
    """No sum."""
    return y.clone()


def mean(y, *, group):
    return true_sum(y, group=group) / group.size()


true_sum = region.all_reduce_identity


def own_tokens(y, dim, *, group):
    """A slice of what should have been summed."""
    return split_all_gather(y, dim, group=group)


def bias_before_the_sum(row, y):
    return row.region.leave(linear.F.linear(y, row.weight, row.bias))


def own_features_of_a_copy(y, dim, *, group):
    """The first rank's, on all ranks."""
    return y.tensor_split(group.size(), dim)[0]


# -- where it begins ---------------------------------------------------------------------------------------------------


def dx_stays_partial(ctx, dwhole):
    return dwhole, None, None


def dx_is_this_ranks_term(ctx, dwhole):
    """Of its own tokens."""
    return dwhole.tensor_split(ctx.flight.group.size(), -2)[ctx.flight.group.rank()], None, None


def ranks_before_rows(whole):
    """Right of one row only."""
    pieces, *rows, tokens, width = whole.shape
    return whole.reshape(*rows, pieces * tokens, width)


def no_second_gather():
    """What a rank gathers again is its own piece, once for each rank."""
    true, gathering = entrance._start_gather, entrance._gathered

    def start_gather(x, group):
        whole = x.new_empty(group.size(), *x.shape).copy_(x)
        return whole, Handle([])

    def gathered(x, of):
        with mock.patch.object(entrance, "_start_gather", true):
            return gathering(x, of)

    return mock.patch.multiple(entrance, _start_gather=start_gather, _gathered=gathered)


def one_reader_only():
    """dW of the first column alone; the others take zeros for x."""
    true = entrance._InFlight.wait_input

    def wait_input(flight):
        whole = true(flight)
        first, flight.had_one = not hasattr(flight, "had_one"), True
        return whole if first else torch.zeros_like(whole)

    return mock.patch.object(entrance._InFlight, "wait_input", wait_input)


# -- who holds what ----------------------------------------------------------------------------------------------------


def contiguous_pieces(role, part, ranks):
    """A fused matrix cut as if it were one."""
    return 0, [cut.even(part.out_features, ranks)]


def keys_in_turn():
    """0 1 0 1 for 0 0 1 1, and whoever shares them."""

    def shared(rows, ranks, *, units, heads):
        row = cut.even(rows, units)
        return [row[rank % units] for rank in range(ranks)]

    def sharers(ranks, kv_heads):
        return [tuple(ranks[first::kv_heads]) for first in range(kv_heads)]

    return mock.patch.multiple(cut, shared=shared, sharers=sharers)


def no_sum_of(*kinds):
    """These roles' gradients are taken for whole."""
    true = carried_out._Work.apply

    def apply(work, each):
        true(work, each)
        if isinstance(each.role, kinds):
            for param in work.module.get_submodule(each.name).parameters():
                param.held.sums.clear()

    return lambda: mock.patch.object(carried_out._Work, "apply", apply)


def a_sum_too_many():
    """Of norms and the router, also where each rank has the whole gradient."""
    true = carried_out._Work.apply

    def apply(work, each):
        true(work, each)
        if isinstance(each.role, plan.Stream):
            carried_out.add_sum(each.part, "tp", work.group)

    return mock.patch.object(carried_out._Work, "apply", apply)


def no_copies_counted():
    true = layout.check

    def check(params, group):
        params = list(params)
        true(params, group)
        for param in params:
            param.held.copies = 1

    return mock.patch.object(layout, "check", check)


def values_of_the_first_box():
    """Each rank fills its part as if it were the first."""
    true = rng._fill_normal

    def fill(local, box, key, std):
        true(local, layout.Box(box.shape, (0,) * len(box.shape), box.local), key, std)

    return mock.patch.object(rng, "_fill_normal", fill)


# -- vocabulary --------------------------------------------------------------------------------------------------------


def without(op):
    """Each rank has its own maxima, or its own sums."""
    true = comm.all_reduce

    def all_reduce(tensor, how=comm.SUM, **more):
        if how == op and (op == comm.MAX or tensor.dim() == 2):
            return None
        return true(tensor, how, **more)

    @contextlib.contextmanager
    def change():
        with mock.patch.object(cross_entropy, "comm", mock.Mock(wraps=comm, all_reduce=all_reduce, MAX=comm.MAX)):
            yield

    return change


def every_rank_adds_a_row(table, ids):
    """Of a token that another rank has, its own first one."""
    elsewhere = (ids < table.rows.start) | (ids >= table.rows.stop)
    return table.region.leave(table.weight[(ids - table.rows.start).masked_fill(elsewhere, 0)])


def no_label(ctx, dloss):
    softmax, *_, ignored = ctx.saved_tensors
    return softmax * dloss.masked_fill(ignored, 0).unsqueeze(1), None, None, None


ROUTER = Shape(router=True, qk_norm=True)
FAULTS = {  # change, ranks, mode, shape, recipe
    "no sum where a region ends": (replaced(region, "all_reduce_identity", own_term), 2, "tp", Shape(), ONCE),
    "a mean for the sum": (replaced(region, "all_reduce_identity", mean), 2, "tp", Shape(), ONCE),
    "T05: the sum's gradient is summed": (
        replaced(region, "all_reduce_identity", all_reduce_all_reduce), 2, "tp", Shape(), ONCE
    ),
    "no sum, tokens of one's own": (replaced(region, "reduce_scatter_all_gather", own_tokens), 2, "sp", Shape(), ONCE),
    "T63: a bias before the sum": (
        replaced(linear.RowParallelLinear, "forward", bias_before_the_sum), 2, "tp", Shape(), ONCE
    ),
    "T63: a bias before the sum, with sequences": (
        replaced(linear.RowParallelLinear, "forward", bias_before_the_sum), 2, "sp", Shape(), ONCE
    ),
    "the first rank's features": (
        replaced(linear, "split_all_gather", own_features_of_a_copy), 2, "tp", Shape(gathered=True), ONCE
    ),
    "dx stays partial": (
        replaced(entrance._StartReduce, "backward", staticmethod(dx_stays_partial)), 2, "tp", Shape(), ONCE
    ),
    "dx of one rank": (
        replaced(entrance._StartReduce, "backward", staticmethod(dx_is_this_ranks_term)), 2, "sp", Shape(), ONCE
    ),
    "ranks before rows": (replaced(entrance, "_in_order", ranks_before_rows), 2, "sp", Shape(), ONCE),
    "no second gather": (no_second_gather, 2, "sp", Shape(), ONCE),
    "dW of one column": (one_reader_only, 2, "sp", Shape(), ONCE),
    "a fused matrix cut as one": (replaced(plan.Column, "cut", contiguous_pieces), 2, "tp", Shape(fused=True), ONCE),
    "T64: keys of other queries": (keys_in_turn, 4, "tp", Shape(), ONCE),
    "T64: no sum of shared keys": (no_sum_of(plan.KeyValue), 4, "tp", Shape(), ONCE),
    "T61: no sum of norms": (no_sum_of(plan.Stream), 2, "sp", Shape(), ONCE),
    "T61: no sum of the router": (no_sum_of(plan.Stream), 2, "sp", ROUTER, ONCE),
    "T61: no sum of row biases": (no_sum_of(plan.Row), 2, "sp", Shape(), ONCE),
    "no sum of norms of heads": (no_sum_of(plan.Heads), 2, "tp", ROUTER, ONCE),
    "a sum too many": (a_sum_too_many, 2, "tp", Shape(), ONCE),
    "copies that are not counted": (no_copies_counted, 2, "tp", Shape(), ONCE),
    "values of another part": (values_of_the_first_box, 2, "tp", Shape(), Recipe(steps=1, meta=True)),
    "T67: a maximum of one's own": (without(comm.MAX), 2, "tp", MODEL, ONCE),
    "T67: sums of one's own": (without(comm.SUM), 2, "tp", MODEL, ONCE),
    "T67: a gradient without the label": (
        replaced(cross_entropy._CrossEntropy, "backward", staticmethod(no_label)), 2, "tp", MODEL, ONCE
    ),
    "a row of every rank": (
        replaced(embedding.VocabParallelEmbedding, "forward", every_rank_adds_a_row), 2, "tp", MODEL, ONCE
    ),
}  # fmt: skip
SELDOM = {"a mean for the sum", "T63: a bias before the sum, with sequences", "T61: no sum of the router"}


def faulty(run, name):
    change, _, mode, shape, recipe = FAULTS[name]
    return trained(run, shape, MODES[mode], recipe, change, copies=False)


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.drill) if name in SELDOM else name for name in FAULTS]
)
def test_parity_sees_a_fault(pool, fault):
    """Far outside of what is allowed, and not by a hair."""
    _, ranks, _, shape, recipe = FAULTS[fault]
    results = pool.run(ranks, faulty, fault)
    assert worst(results, plain(shape, recipe), zero_directions(shape)) > 1e6


def test_without_a_fault_there_is_none(pool):
    """The same runs as they are."""
    for ranks, mode, shape, recipe in dict.fromkeys(case[1:] for case in FAULTS.values()):
        results = pool.run(ranks, trained, shape, MODES[mode], recipe)
        assert worst(results, plain(shape, recipe), zero_directions(shape)) <= 1
