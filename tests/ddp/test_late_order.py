"""Several gradients that come late are reduced in one order on all ranks, whatever lies where in a rank's memory."""

import functools

import pytest
import torch
from torch import nn

from ddp import bucketed, overlapped
from tests.ddp.versions import each_version

MANY = 12


def unfrozen_together(run, wrap):
    """Gradients of parameters that were frozen in wrap; the ranks made them in opposite orders."""
    params = [None] * MANY
    for i in range(MANY) if run.rank % 2 else reversed(range(MANY)):
        params[i] = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model = nn.ParameterList(params)
    for param in params[1:]:
        param.requires_grad_(False)
    handle = wrap(model, run.world, average=False)
    model.requires_grad_(True)
    sum((param * i).sum() for i, param in enumerate(params)).backward()
    handle.finish()
    return [param.grad.tolist() for param in params]


@pytest.mark.parametrize("ranks", [2, 3])
@each_version
def test_late_gradients_of_equal_size_are_not_mixed(pool, wrap, ranks):
    """T02: a set of parameters has an order of its own on every rank."""
    assert pool.run(ranks, unfrozen_together, wrap) == [[[ranks * i] * 2 for i in range(MANY)]] * ranks


def newly_used(run, wrap):
    """The middle parameter is used in the second step only, when no bucket waits for it."""
    model = nn.ParameterList(nn.Parameter(torch.ones(50)) for _ in range(3))
    handle = wrap(model, run.world, average=False)
    numbers = torch.randn(50, generator=torch.Generator().manual_seed(run.rank))
    for step in range(2):
        model.zero_grad()
        (model[0] * model[2] * numbers).sum().backward()
        if step:
            (model[1] * numbers).sum().backward()
        handle.finish()
    return model[1].grad


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_a_late_gradient_has_the_bits_that_it_would_have_in_its_bucket(pool, wire):
    expected = pool.run(3, newly_used, functools.partial(bucketed.wrap, cap=1, wire=wire))
    found = pool.run(3, newly_used, functools.partial(overlapped.wrap, cap=1, wire=wire))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
