"""Every version of data parallelism against one plain process with the whole batch, in float64; against each other bit
for bit; and the faults that must show.
"""

import functools
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import comm
from collectives.p2p import Handle
from ddp import bucketed, naive, overlapped
from tests.ddp.training import judged, same_bits, train
from tests.ddp.versions import BUCKETED, each_version, recording, same


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@each_version
def test_gradients_and_updates_are_those_of_one_process(pool, wrap, ranks, average):
    error, replicas = judged(pool, ranks, wrap, average)
    assert error <= 1
    assert same_bits(replicas)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@each_version
def test_accumulation(pool, wrap, ranks, average):
    """Four microbatches a step; with so few rows some of them are empty."""
    assert judged(pool, ranks, wrap, average, microbatches=4)[0] <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_versions_give_the_same_bits(pool, ranks, dtype):
    """Each element is added in rank order, so buckets, their size and overlap change no bit; gradients and updates."""
    for average, microbatches in ((True, 1), (False, 3)):
        job = functools.partial(train, dtype=dtype)
        expected = pool.run(ranks, job, naive.wrap, average, microbatches)
        for name, wrap in BUCKETED.items():
            for ours, theirs in zip(pool.run(ranks, job, wrap, average, microbatches), expected, strict=True):
                assert_same_steps(ours, theirs, name)


def assert_same_steps(ours, expected, version):
    for mine, other in zip(ours[1], expected[1], strict=True):
        for ours_by_name, theirs_by_name in zip(mine, other, strict=True):  # gradients, values
            assert ours_by_name.keys() == theirs_by_name.keys()
            for name, tensor in theirs_by_name.items():
                assert same(ours_by_name[name], tensor), (version, name)


def reduce_random(run, wrap, average, trains):
    """(this rank's own gradient, the reduced one) of a float32 vector, which trains or is still frozen at wrap."""
    weight = nn.Parameter(torch.ones(1000), requires_grad=trains)
    handle = wrap(nn.ParameterList([weight]), run.world, average=average)
    weight.requires_grad_(True)
    weight.grad = torch.randn(1000, generator=torch.Generator().manual_seed(run.rank))
    own = weight.grad.clone()
    handle.finish()
    return own, weight.grad


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@each_version
def test_every_element_is_added_in_rank_order(pool, wrap, ranks, average, trains):
    """In a bucket and outside."""
    results = pool.run(ranks, reduce_random, wrap, average, trains)
    total = torch.zeros(1000)
    for own, _ in results:
        total += own
    for _, reduced in results:
        assert torch.equal(reduced, total / ranks if average else total)


# -- faults that parity must notice ------------------------------------------------------------------------------------


def without_reduction():
    return mock.patch.object(comm, "all_reduce", lambda *args, **more: Handle([]))


def without_sum():
    """Every gradient stays what it was; the naive version's agreement on what is used is right all the same."""
    true = comm.all_reduce
    return mock.patch.object(
        comm, "all_reduce", lambda x, op, **more: true(x, op, **more) if op == comm.MAX else Handle([])
    )


def mean_for_sum():
    return mock.patch.object(comm, "SUM", comm.AVG)


def sum_for_mean():
    return mock.patch.object(comm, "AVG", comm.SUM)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("change", "average"),
    [
        (without_reduction, False),
        (without_sum, False),
        (without_sum, True),
        (mean_for_sum, False),
        (sum_for_mean, True),
    ],
)
@each_version
def test_parity_sees_a_wrong_reduction(pool, wrap, ranks, change, average):
    assert judged(pool, ranks, wrap, average, change=change)[0] > 1e9


WIDTH = 4
ROWS = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def equal_sizes(run, wrap, deals_in_forward_order):
    """The gradients of four layers of equal size, on this rank's rows; some ranks deal parameters in another order."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).double()
    deal = (lambda params, cap: [[p] for p in params]) if run.rank in deals_in_forward_order else bucketed.deal
    with mock.patch.object(bucketed, "deal", deal):
        handle = wrap(model, run.world, average=False)
    model(ROWS.tensor_split(run.size)[run.rank]).tanh().sum().backward()
    handle.finish()
    return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize(
    "wrap", [BUCKETED["bucketed, 100 bytes"], BUCKETED["overlapped, 1 byte"]], ids=["bucketed", "overlapped"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_parity_sees_a_wrong_order_of_buckets(pool, wrap, ranks):
    """Nothing else would: the sizes agree, so the collectives succeed. All ranks in another order do no harm."""
    expected = pool.run(ranks, equal_sizes, naive.wrap, ())[0]
    cases = {(): True, tuple(range(ranks)): True, (ranks - 1,): False}
    for wrong, right in cases.items():
        for grads in pool.run(ranks, equal_sizes, wrap, wrong):
            assert all(map(torch.equal, grads, expected)) == right, wrong


def counted_too_early(run, cap, miscounted):
    """(gradients, collectives) of a step whose buckets wait for one of their parameters only, on some ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).double()
    handle = overlapped.wrap(model, run.world, average=False, cap=cap)
    if run.rank in miscounted:
        for bucket in handle.buckets:
            bucket.missing = set(list(bucket.views)[:1])
    with recording() as calls:
        model(ROWS.tensor_split(run.size)[run.rank]).tanh().sum().backward()
        handle.finish()
    return [param.grad.clone() for param in model.parameters()], [numel for _, numel in calls]


@pytest.mark.parametrize(("layers", "right", "early"), [(3, "ooo o", "ooo o o o"), (4, "oooo", "oooo")])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_bucket_that_starts_too_early_costs_collectives_and_no_bit(pool, ranks, layers, right, early):
    """What comes after its bucket has started is added in finish: right, but the schedule shows it. The last bucket
    waits for finish, however it counts.
    """
    n = WIDTH * WIDTH
    for miscounted, picture in ((), right), ((ranks - 1,), early):
        expected = [n * len(word) for word in picture.split()]
        expected[right.count(" ")] += 2 * 4  # notes
        grads, calls = zip(*pool.run(ranks, counted_too_early, layers * 8 * n, miscounted), strict=True)
        true = pool.run(ranks, equal_sizes, naive.wrap, ())
        assert all(
            torch.equal(a, b) for mine, other in zip(grads, true, strict=True) for a, b in zip(mine, other, strict=True)
        )
        assert list(calls) == [expected] * ranks
