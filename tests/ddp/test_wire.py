"""Gradients that travel as bfloat16: half the bytes, the sum in float32 in rank order, rounded once."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import comm, demo
from ddp import bucketed, overlapped

BF16 = torch.bfloat16
WIRES = {
    f"{version.__name__}, cap {cap}": functools.partial(version.wrap, cap=cap, wire=BF16)
    for version, cap in ((bucketed, 16), (bucketed, 1 << 20), (overlapped, 1), (overlapped, 1 << 20))
}
each_wire = pytest.mark.parametrize("wrap", list(WIRES.values()), ids=list(WIRES))
FIRST = {2: (256, 2), 3: (256, 1, 1), 4: (256, 1, 1, 2)}  # bf16 additions in this order stay at 256 until the 2
SUM = {2: 258, 3: 258, 4: 260}


def without_order():
    """The sum is the backend's own."""
    true = comm.all_reduce

    def call(*args, ordered=False, **more):
        return true(*args, **more)

    return mock.patch.object(comm, "all_reduce", call)


def reduce_on_the_wire(run, wrap, values, average, change):
    """The gradients, in two steps, of parameters of several dtypes, each of this rank's number."""
    dtypes = (torch.float32, torch.float64, torch.float32, BF16)
    model = nn.ParameterList(nn.Parameter(torch.ones(9, dtype=dtype)) for dtype in dtypes)
    steps = []
    with change():
        handle = wrap(model, run.world, average=average)
        for _ in range(2):
            model.zero_grad()
            sum((param * values[run.rank]).sum() for param in model).backward()
            handle.finish()
            steps.append([(param.grad.dtype, param.grad.tolist()) for param in model])
    assert [param.dtype for param in model] == list(dtypes)
    return steps


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@each_wire
def test_the_sum_is_made_in_float32(pool, wrap, ranks, average):
    """T53: whichever rank has the 256, in each dtype of a parameter, and every rank gets the same."""
    first, expected = FIRST[ranks], SUM[ranks] / (ranks if average else 1)
    for shift in range(ranks):
        values = first[-shift:] + first[:-shift]
        for steps in pool.run(ranks, reduce_on_the_wire, wrap, values, average, contextlib.nullcontext):
            for grads in steps:
                assert [dtype for dtype, _ in grads] == [torch.float32, torch.float64, torch.float32, BF16]
                assert all(numbers == [expected] * 9 for _, numbers in grads)


def test_additions_in_bfloat16_show(pool):
    """The backend's own sum rounds at every addition and stays at 256, somewhere: the fault that is looked for."""
    wrap, found = WIRES["ddp.overlapped, cap 1048576"], set()
    for values in ((256, 1, 1), (1, 256, 1), (1, 1, 256)):
        for grads in pool.run(3, reduce_on_the_wire, wrap, values, False, without_order)[0]:
            found |= {number for _, numbers in grads for number in numbers}
    assert 256 in found


def rounding(run, wrap):
    """(what was sent, what came back) of a float64 vector."""
    weight = nn.Parameter(torch.ones(500, dtype=torch.float64))
    handle = wrap(nn.ParameterList([weight]), run.world, average=False)
    own = torch.randn(500, generator=torch.Generator().manual_seed(run.rank), dtype=torch.float64)
    (weight * own).sum().backward()
    handle.finish()
    return own, weight.grad


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@each_wire
def test_rounded_once_on_the_way_and_once_as_a_sum(pool, wrap, ranks):
    """On one rank too, so that the number of ranks does not change what a gradient is rounded to."""
    results = pool.run(ranks, rounding, wrap)
    total = torch.zeros(500)
    for own, _ in results:
        total += own.to(BF16).float()
    for _, reduced in results:
        assert torch.equal(reduced, total.to(BF16).double())


def sent_in_a_step(run, version, wire):
    """Bytes sent by this rank in a step of 200,000 float32 gradients."""
    model = nn.Sequential(*(nn.Linear(1, 50_000) for _ in range(2)))
    handle = version(model, run.world, wire=wire)
    comm.barrier(group=run.world)
    before = demo.bytes_written()
    (model[0](torch.ones(1, 1)).sum() + model[1](torch.ones(1, 1)).sum()).backward()
    handle.finish()
    return demo.bytes_since(before)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("version", [bucketed.wrap, overlapped.wrap])
def test_half_the_bytes(pool, version, ranks):
    for wire, width in ((None, 4), (BF16, 2)):
        expected = 2 * width * 200_000 * (ranks - 1) / ranks
        for sent in pool.run(ranks, sent_in_a_step, version, wire):
            assert abs(sent - expected) <= 0.01 * expected + 2 * 4096
