"""Peak and remaining memory against allocations of known size."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives import allocated
from collectives.algorithms import direct

CPU = torch.device("cpu")
KIB = 1024


def block(kib):
    return torch.empty(kib * KIB, dtype=torch.uint8)


def one_after_the_other():
    for kib in (5, 9, 7):
        block(kib)


def together():
    kept = [block(kib) for kib in (5, 9, 7)]
    kept.pop()
    block(3)


@pytest.mark.parametrize(("call", "kib"), [(one_after_the_other, 9), (together, 21), (lambda: None, 0)])
def test_the_peak_of_a_call(call, kib):
    assert allocated.peak_bytes(call, CPU) == kib * KIB


def test_the_peak_counts_from_the_level_at_the_start():
    """What lives before and goes on living is not counted; what one call leaves and the next one frees is."""
    older = block(100)
    held = []

    def replace():
        """Free the block of the call before, then allocate two, and keep one of them: 4 beyond the level of 6."""
        held.clear()
        held.append(block(6))
        block(4)

    assert allocated.peak_bytes(replace, CPU) == 4 * KIB
    assert len(older) == 100 * KIB


def test_the_preparation_is_not_counted():
    kept = []
    assert allocated.peak_bytes(lambda: block(3), CPU, prepare=lambda: kept.append(block(50))) == 3 * KIB


def test_the_garbage_collector_stays_away():
    """It would free what an earlier call has left, and so hide what this one allocates."""
    seen = []
    allocated.peak_bytes(lambda: seen.append(gc.isenabled()), CPU)
    assert seen == [False, False] and gc.isenabled()


def test_a_step_of_training():
    """Gradients are freed and allocated anew in each step: at the peak they live beside nothing of the step before."""
    layer, x = nn.Linear(64, 64, bias=False), torch.randn(2, 64)

    def step():
        layer.zero_grad()
        layer(x).sum().backward()

    nbytes = layer.weight.nbytes  # 16 KiB; activations and their gradients are half a KiB each
    assert allocated.peak_bytes(step, CPU) < 0.2 * nbytes
    assert nbytes < allocated.peak_bytes(lambda: [step(), layer.zero_grad()], CPU) < 1.2 * nbytes


def test_what_a_build_leaves():
    def build():
        block(100)
        loop = [block(50)]
        loop.append(loop)
        return nn.Linear(32, 32, bias=False), nn.Linear(8, 8, bias=False)

    built, nbytes = allocated.built_bytes(build, CPU)
    assert nbytes == sum(layer.weight.nbytes for layer in built)


def test_a_failure_comes_through_and_stderr_comes_back(capfd):
    with pytest.raises(ZeroDivisionError):
        allocated.peak_bytes(lambda: 1 / 0, CPU)
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def exchange_peaks(run):
    whole, piece = torch.zeros(run.size * 4 * KIB), torch.zeros(4 * KIB)
    calls = (
        lambda: direct.reduce_scatter(piece, whole, dist.ReduceOp.SUM, group=run.world),
        lambda: direct.all_gather(whole, piece, group=run.world),
    )
    return [allocated.peak_bytes(call, run.device) for call in calls]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_peak_of_an_exchange(pool, ranks):
    """What arrives is n(P-1)/P of the message: with pieces of 16 KiB, that for each peer."""
    for scatter, gather in pool.run(ranks, exchange_peaks):
        assert scatter == (ranks - 1) * 16 * KIB
        assert gather == 0
