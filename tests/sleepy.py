"""Training in which ranks dawdle, each where it likes: whoever reads what has not arrived yet, or frees what is still
being sent, shows.
"""

import time

import torch
from torch import nn

from tests.shards import pieces, snapshot


class Sleepy(nn.Module):
    """A layer of 1 MB that sleeps for a while, other on every rank, before forward and before backward."""

    def __init__(self, numbers):
        super().__init__()
        self.linear, self.numbers = nn.Linear(512, 512), numbers

    def forward(self, x):
        self.sleep()
        out = self.linear(x)
        out.register_hook(self.sleep)
        return torch.tanh(out)

    def sleep(self, *_):
        time.sleep(float(torch.rand((), generator=self.numbers)) * 0.01)


def sleepy_steps(run, wrap, microbatches):
    """What this rank holds after two steps of four layers."""
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(run.rank)
    model = nn.Sequential(*(Sleepy(numbers) for _ in range(4)))
    handle = wrap(model, run.world)
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(10 + run.rank)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(microbatches - 1):
            with handle.no_sync():
                model(torch.randn(4, 512, generator=data)).square().sum().backward()
        model(torch.randn(4, 512, generator=data)).square().sum().backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
    with handle.whole():
        return pieces(handle), snapshot(model)
