"""A weight that is frozen for the first microbatch of a step, and trains in the second."""

import contextlib

import pytest
import torch
from torch import nn

from collectives import comm
from fsdp import fully_shard


def two_microbatches(model, rows, first, last=lambda: None):
    with first():
        model(rows[0]).square().sum().backward()
    model[0].weight.requires_grad_(True)
    model(rows[1]).square().sum().backward()
    last()


def built():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[0].weight.requires_grad_(False)  # before it is wrapped: so it lies last
    return model, torch.randn(2, 4, 3, dtype=torch.float64)


def unfrozen(run, accumulates):
    """Of each parameter the gradient of both microbatches, from all ranks' pieces."""
    model, rows = built()
    handle = fully_shard(model, run.world)
    first = handle.no_sync if accumulates else contextlib.nullcontext
    two_microbatches(model, rows, first, handle.finish)
    pieces = comm.all_gather_object([shard.grad for shard in handle.parameters()], group=run.world)
    return [torch.cat(of_one) for of_one in zip(*pieces, strict=True)]


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_gradient_of_before_is_lost(pool, ranks, accumulates):
    model, rows = built()
    two_microbatches(model, rows, contextlib.nullcontext)
    for got, param in zip(pool.run(ranks, unfrozen, accumulates)[0], model.parameters(), strict=True):
        torch.testing.assert_close(got, param.grad, rtol=1e-12, atol=0)
