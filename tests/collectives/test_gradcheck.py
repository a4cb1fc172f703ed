"""torch's gradcheck and gradgradcheck of every collective with a backward, in lockstep on all ranks.

Every rank checks the same function, of all ranks' inputs together. How they come to a rank's own x, and its y back to
all, is written here with torch.distributed alone.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from tests.collectives.duals import cases, ends_of, mine, simplest


class Mine(torch.autograd.Function):
    """forward: this rank's numbers out of all ranks'; backward: Everyones, because all ranks need all of it."""

    @staticmethod
    def forward(ctx, everyones, numbers):
        ctx.numbers = numbers
        return everyones.split(numbers)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, dout):
        return Everyones.apply(dout, ctx.numbers), None


class Everyones(torch.autograd.Function):
    """forward: all ranks' numbers, on every rank; backward: Mine, because all go on alike with them."""

    @staticmethod
    def forward(ctx, own, numbers):
        ctx.numbers = numbers
        padded = [own.new_zeros(max(numbers)) for _ in numbers]
        dist.all_gather(padded, nn.functional.pad(own, (0, max(numbers) - len(own))))
        return torch.cat([part[:length] for part, length in zip(padded, numbers, strict=True)])

    @staticmethod
    def backward(ctx, dout):
        return Mine.apply(dout, ctx.numbers), None


class Copy(torch.autograd.Function):
    """forward: a copy for this rank; backward: First, because all have the whole gradient, rank 0 too."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        return First.apply(dout)


class First(torch.autograd.Function):
    """forward: rank 0's, on every rank; backward: Copy, the gradient is given to all."""

    @staticmethod
    def forward(ctx, x):
        dist.broadcast(first := x.clone(memory_format=torch.contiguous_format), 0)
        return first

    @staticmethod
    def backward(ctx, dout):
        return Copy.apply(dout)


def checked_by_torch(run, name):
    case = cases(run.size, shape=(1, 1, 1))[name]
    starts, ends = ([torch.Size(shape).numel() for shape in shapes] for shapes in (case.shapes, ends_of(case)))

    def of_all(everyones):
        own = Mine.apply(everyones, starts) if len(starts) > 1 else Copy.apply(everyones)
        y = case.call(own.view(mine(case.shapes, run.rank)).square(), group=run.world).square().flatten()
        return Everyones.apply(y, ends) if len(ends) > 1 else First.apply(y)

    x, dout = (torch.linspace(-0.9, 1.1, sum(n), dtype=torch.float64, requires_grad=True) for n in (starts, ends))
    return gradcheck(of_all, x) and gradgradcheck(of_all, x, dout)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.drill)])
def test_gradcheck(pool, ranks):
    for name in simplest(ranks):
        assert pool.run(ranks, checked_by_torch, name) == ranks * [True], name
