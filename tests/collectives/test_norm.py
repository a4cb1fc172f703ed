"""The gradient norm of a model scattered over ranks, and its clipping, are those of the whole model in one process."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from collectives import layout, norm
from collectives.layout import Box, Held, Normal

EXACT = 1e-13  # of float64: the order of additions differs


@dataclass(frozen=True)
class Scattered:
    """Which boxes of which tensor each rank holds, and what the whole gradients are."""

    grads: dict[str, torch.Tensor]
    ranks: list[dict[str, list[Box]]]
    frozen: tuple[str, ...] = ()  # have no gradient

    def part(self, name, boxes):
        """The gradient that a rank holds of these boxes, one after the other."""
        whole = self.grads[name]
        return torch.cat([whole[box.slices(Box.whole(whole.shape))].flatten() for box in boxes])

    def trained(self):
        return {name: grad for name, grad in self.grads.items() if name not in self.frozen}


def random(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def pieces(shape, *edges):
    """Rows of a tensor, cut at these edges."""
    return [[Box.whole(shape).cut(0, first, last - first)] for first, last in itertools.pairwise(edges)]


def example_t34():
    top, bottom = pieces((2,), 0, 1, 2)
    whole = [Box.whole((2,))]
    return Scattered(
        {"replicated": torch.tensor([3.0, 4.0]).double(), "sharded": torch.tensor([6.0, 8.0]).double()},
        [{"replicated": whole, "sharded": top}, {"replicated": whole, "sharded": bottom}],
    )


def on_four_ranks(**changes):
    """Sharded over two and replicated over two, copied to the two ends, in flat ranges, on one rank only."""
    upper, lower = pieces((5, 6), 0, 3, 5)
    flat = [layout.flat_range((3, 7), first, last) for first, last in ((0, 10), (10, 21))]
    ends, scalar = [Box.whole((4, 3))], [Box.whole(())]
    grads = {"w": random(5, 6), "ends": random(4, 3), "flat": random(3, 7), "scalar": random()}
    ranks = [
        {"w": upper, "ends": ends},
        {"w": lower, "flat": flat[1]},
        {"w": upper, "flat": flat[0]},
        {"w": lower, "ends": ends},
    ]
    ranks[1]["scalar"] = scalar
    return Scattered(grads, ranks, **changes)


CASES = {
    "one rank": Scattered({"w": random(3, 4), "b": random(3)}, [{"w": [Box.whole((3, 4))], "b": [Box.whole((3,))]}]),
    "replicated and sharded": example_t34(),
    "four ranks": on_four_ranks(),
    "frozen": on_four_ranks(frozen=("flat", "ends")),
    "all frozen": on_four_ranks(frozen=("w", "flat", "ends", "scalar")),
    "a rank without parameters": Scattered({"w": random(5)}, [{}, *({"w": boxes} for boxes in pieces((5,), 0, 2, 5))]),
    "an empty piece": Scattered({"w": random(5)}, [{"w": boxes} for boxes in pieces((5,), 0, 5, 5)]),
}


def parameters(scattered, rank):
    for name, boxes in scattered.ranks[rank].items():
        part = scattered.part(name, boxes)
        param = nn.Parameter(torch.zeros_like(part))
        param.held = Held(name, tuple(boxes), Normal(1.0), decay=True)
        param.grad = None if name in scattered.frozen else part
        yield param


def norm_and_clipped(run, scattered, limit, copies_count=True):
    """The norm, and each parameter's gradient after clipping."""
    params = list(parameters(scattered, run.rank))
    layout.check(params, run.world)
    if not copies_count:
        for param in params:
            param.held.copies = 1
    total = norm.grad_norm(params, group=run.world)
    norm.clip(params, total, limit)
    return total, {param.held.name: param.grad for param in params}


def of_the_whole(scattered, limit):
    """The same by PyTorch, in one process."""
    params = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in scattered.trained().items()}
    for name, param in params.items():
        param.grad = scattered.grads[name].clone()
    total = nn.utils.clip_grad_norm_(params.values(), limit) if params else torch.zeros(())
    return total, {name: param.grad for name, param in params.items()}


def assert_as_in_one_process(results, scattered, limit):
    total, clipped = of_the_whole(scattered, limit)
    expected = Scattered(clipped, scattered.ranks)
    assert len({rank_total.item() for rank_total, _ in results}) == 1  # the same bits
    for rank, (rank_total, grads) in enumerate(results):
        assert rank_total.dtype == torch.float64
        torch.testing.assert_close(rank_total, total.double(), rtol=EXACT, atol=0)
        for name, boxes in scattered.ranks[rank].items():
            if name in scattered.frozen:
                assert grads[name] is None
            else:
                torch.testing.assert_close(grads[name], expected.part(name, boxes), rtol=EXACT, atol=0)


@pytest.mark.parametrize("limit", [0.5, 1e9])
@pytest.mark.parametrize("case", CASES)
def test_norm_and_clipping_are_those_of_one_process(pool, case, limit):
    scattered = CASES[case]
    results = pool.run(len(scattered.ranks), norm_and_clipped, scattered, limit)
    assert_as_in_one_process(results, scattered, limit)


def test_copies_are_counted_once(pool):
    """3 and 4 on both ranks, 6 on one and 8 on the other."""
    for total, _ in pool.run(2, norm_and_clipped, example_t34(), 1.0):
        assert abs(total - 125**0.5) < 1e-14 * 125**0.5


@pytest.mark.parametrize("case", ["replicated and sharded", "four ranks"])
def test_ignored_copies_are_found(pool, case):
    scattered = CASES[case]
    results = pool.run(len(scattered.ranks), norm_and_clipped, scattered, 1e9, False)
    with pytest.raises(AssertionError):
        assert_as_in_one_process(results, scattered, 1e9)


LOW = [(torch.float32, 1.0), (torch.float32, 1e25), (torch.bfloat16, 1.0), (torch.bfloat16, 1e25), (torch.float16, 1e4)]


@pytest.mark.parametrize(("dtype", "scale"), LOW)
def test_squares_of_low_precision_are_added_in_float64(pool, dtype, scale):
    """Also where a square, or the norm, is beyond the gradient's own range."""
    grad = (random(3001) * scale).to(dtype)
    scattered = Scattered({"w": grad}, [{"w": boxes} for boxes in pieces((3001,), 0, 1000, 3001)])
    for total, _ in pool.run(2, norm_and_clipped, scattered, 1e9):
        torch.testing.assert_close(total, grad.double().norm(), rtol=EXACT, atol=0)


def test_every_rank_learns_of_a_nan(pool):
    grad = torch.tensor([1.0, 2.0, float("nan")]).double()
    scattered = Scattered({"w": grad}, [{"w": boxes} for boxes in pieces((3,), 0, 1, 2, 3)])
    assert all(total.isnan() for total, _ in pool.run(3, norm_and_clipped, scattered, 1.0))
