"""Masters in float32 around copies in 16 bits: what is added up, what is kept, what is rounded."""

import pytest
import torch
from torch import nn

from collectives import layout
from collectives.runtime import Runtime
from ddp import bucketed, naive, overlapped
from nd_mesh import masters

VERSIONS = {"naive": naive.wrap, "bucketed": bucketed.wrap, "overlapped": overlapped.wrap}


def built(run: Runtime, version: str) -> tuple[nn.Module, masters.Masters]:
    """Two layers of one weight each, with masters of 1 + 2^-12, which rounds to 1 in bfloat16."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    layout.declare(model, lambda name: layout.Constant(1.0), lambda name: False)
    settings = {"weights": torch.bfloat16, "device": run.device, "average": False}
    settings |= {} if version == "naive" else {"cap": 1}  # a bucket a weight
    handle = masters.wrap(VERSIONS[version], model, run.world, **settings)
    with torch.no_grad():
        for master in handle.parameters():
            master.fill_(1 + 2**-12)
    handle.after_load()
    return model, handle


def gradients(run: Runtime, version: str) -> list:
    """Of a weight with which each rank sees 256 once and 1 twice, and of one that rank 1 does not use. Rank 0 sees
    another 1 with both, when sums are under way.
    """
    model, handle = built(run, version)
    first, second = model
    for x, sync in ((256.0, False), (1.0, False), (1.0, True)):
        y = first(torch.tensor([[x]], dtype=torch.bfloat16))
        with torch.enable_grad() if sync else handle.no_sync():
            (second(y.detach()) + y if run.rank == 0 else y).sum().backward()
    if run.rank == 0:
        one = torch.ones(1, 1, dtype=torch.bfloat16)
        (first(one) + second(one)).sum().backward()
    handle.finish()
    grads = [(master.grad.dtype, master.grad.item()) for master in handle.parameters()]
    return [*grads, [param.grad for param in model.parameters()]]


@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_are_added_in_float32(pool, version):
    """In bfloat16 256 + 1 + 1 is 256, and 258 + 258 is no number at all."""
    for first, second, of_weights in pool.run(2, gradients, version):
        assert first == (torch.float32, 517.0)
        assert second == (torch.float32, 259.0)
        assert of_weights == [None, None]


def updates(run: Runtime) -> list:
    """(masters, weights) after each of a step too small for the weights, of writing one by hand, of two steps more."""
    model, handle = built(run, "overlapped")
    optimizer = torch.optim.SGD(handle.parameters(), lr=2**-12)
    seen = []

    def look() -> None:
        seen.append([[p.item() for p in handle.parameters()], [p.item() for p in model.parameters()]])

    def step() -> None:
        optimizer.zero_grad()
        x = torch.ones(1, 1, dtype=torch.bfloat16)
        (model[0](x) + model[1](x)).sum().backward()
        handle.finish()
        optimizer.step()
        handle.after_step()

    look()
    step()
    look()
    with handle.whole(), torch.no_grad():
        model[0].weight.fill_(3)
    look()
    for _ in range(16):
        step()
    look()
    return seen


def test_small_steps_add_up_in_the_masters(pool):
    [seen] = pool.run(1, updates)
    assert seen == [
        [[1 + 2**-12, 1 + 2**-12], [1, 1]],
        [[1, 1], [1, 1]],  # of one step of 2^-12
        [[3, 1], [3, 1]],  # what was written is the master; what was not stays
        [[3 - 2**-8, 1 - 2**-8], [3, 1 - 2**-8]],  # 16 steps more: beside 1 the weights are 2^-8 apart, beside 3, 2^-6
    ]
