"""Attention of a cut row by each of our methods beside one process: that all compute the same, and how much."""

import pytest
import torch

from collectives import comm
from context_parallel import Places, bench, join, slots
from tests.bench import ranks

SMALL = 64
WHOLE = [(size, name) for name, method in bench.METHODS.items() for size in method.ranks]
PACKED = [(size, name) for size in (2, 4) for name in ("ring", "ulysses")]


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize("length", bench.LENGTHS)
@pytest.mark.parametrize(("size", "name"), WHOLE)
def test_whole_row(pool, benchmark, size, name, length):
    ranks.record(benchmark, pool, size, bench.whole_row, name, SMALL if benchmark.disabled else length)


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize(("size", "name"), PACKED)
def test_packed(pool, benchmark, size, name):
    ranks.record(benchmark, pool, size, bench.packed, name, SMALL if benchmark.disabled else bench.LENGTHS[-1])


def alone(run, lengths):
    """out, dq, dk, dv of the whole row, document by document, from the definition."""
    *qkv, dout = (x.double() for x in bench.row(run, sum(lengths)))
    q, k, v = (x.requires_grad_() for x in qkv)
    keys, values = (x.repeat_interleave(bench.HEADS // bench.KV_HEADS, 1) for x in (k, v))
    parts = zip(*(x.split(lengths, 2) for x in (q, keys, values)), strict=True)
    out = torch.cat([softmax(*each) for each in parts], 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def softmax(q, k, v):
    future = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype).triu(1)
    return (q @ k.mT / bench.HEAD**0.5 + future).softmax(-1) @ v


def deviations(run, case, lengths):
    """How far every competitor's out, dq, dk, dv are from the whole row's, and from those of another row."""
    made = {who: everyones(run, call, who, lengths) for who, call in case.calls.items()}
    whole, other = alone(run, lengths), alone(run, [1, *lengths[:-1], lengths[-1] - 1])
    return [[furthest(each, expected) for each in made.values()] for expected in (whole, other)]


def everyones(run, call, who, lengths):
    """The whole row's, from the tokens of all ranks if it is one of ours, from their heads otherwise."""
    pieces = zip(*comm.all_gather_object(call(), group=run.world), strict=True)
    if who not in bench.METHODS:
        return [torch.cat(each, 1) for each in pieces]
    everyones = slots(bench.METHODS[who].order, sum(lengths), run.size)
    return [join(each, everyones, sum(lengths), dim=2) for each in pieces]


def furthest(made, expected):
    """Of all four, relative to the largest entry of each."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(made, expected, strict=True))


def of_whole_row(run, name):
    return deviations(run, bench.whole_row(run, name, SMALL), [SMALL])


def of_packed(run, name):
    return deviations(run, bench.packed(run, name, SMALL), bench.uneven(SMALL))


@pytest.mark.parametrize(("size", "name"), WHOLE)
def test_all_compute_the_same(pool, size, name):
    for right, wrong in pool.run(size, of_whole_row, name):
        assert max(right) < 1e-5
        assert min(wrong) > 1e-2


@pytest.mark.parametrize(("size", "name"), PACKED)
def test_all_compute_the_same_of_packed_documents(pool, size, name):
    for right, wrong in pool.run(size, of_packed, name):
        assert max(right) < 1e-5
        assert min(wrong) > 1e-2


@pytest.mark.parametrize("size", [2, 4])
def test_one_process_has_an_equal_share(size):
    """Of a whole causal row, as many scores as a rank of a zigzag."""
    T = bench.LENGTHS[0]
    places = Places.of(torch.zeros(1, T, dtype=torch.int64), slots("zigzag", T, size))
    for rank in range(size):
        assert abs(bench.HEADS * places.pairs(rank) / (bench.HEADS // size * T * (T + 1) / 2) - 1) < 1e-3
