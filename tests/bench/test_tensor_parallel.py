"""A training step cut by ours beside PyTorch's styles: that all make the same step, and with which collectives."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from collectives import comm
from collectives.layout import Box
from tensor_parallel import bench
from tests.bench import ranks


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize("cut", bench.WAYS)
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel(pool, benchmark, size, cut):
    small = benchmark.disabled
    ranks.record(benchmark, pool, size, bench.step, cut, bench.SMALL if small else bench.MODEL)
    if not small:
        benchmark.extra_info["collectives"] = pool.run(size, everyones_collectives)[0]


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize("size", [2, 4])
def test_vocab_parallel_cross_entropy(pool, benchmark, size):
    ranks.record(benchmark, pool, size, bench.entropy, 64 if benchmark.disabled else bench.VOCABULARY)


def everyones_collectives(run):
    return {who: dict(bench.collectives(run, way, bench.SMALL)) for who, way in everyone().items()}


def everyone():
    """All that communicate, each once."""
    ways = {who: way for ways in bench.WAYS.values() for who, way in ways.items()}
    return {who: way for who, way in ways.items() if who != "no communication"}


LOSS = {"ours": 2, "theirs": 3}  # theirs sends the maximum, the sum of exponentials and the label's logit one by one
EXPECTED = {  # one layer, and around it the embedding and the head
    "tensor_parallel": {"all_reduce": 4 + 2 + LOSS["ours"]},
    "DTensor, plain": {"all_reduce": 2 + 5 + 2 + LOSS["theirs"]},  # five matrices begin a region
    "DTensor, shared input": {"all_reduce": 4 + 2 + LOSS["theirs"]},
    "DTensor, sequence parallel": {
        "reduce_scatter_tensor": 4 + 2,
        "all_gather_into_tensor": 4 + 2,
        "all_reduce": 3 + LOSS["theirs"],  # each norm's gradient by itself
    },
    "tensor_parallel, save_gathered=False": {
        "reduce_scatter_single": 4 + 2,
        "all_gather_single": 4 + 2 + 3,
        "all_reduce": 1 + LOSS["ours"],
    },
    "tensor_parallel, save_gathered=True": {
        "reduce_scatter_single": 4 + 2,
        "all_gather_single": 4 + 2,
        "all_reduce": 1 + LOSS["ours"],
    },
}


def test_collectives_of_a_step(pool):
    for counts in pool.run(2, everyones_collectives):
        assert counts == EXPECTED


def trained(run):
    """The weights of the whole model before, and after two steps of everyone."""
    return [whole(run, bench.built(bench.SMALL)), *(after(run, way) for way in everyone().values())]


def after(run, way):
    made = way(run, bench.built(bench.SMALL))
    bench.steps(made, bench.rows(run), 2)
    return whole(run, made.model)


def whole(run, model):
    """All parameters as one row, of a rank's boxes and of DTensors."""
    return torch.cat([gathered(run, param).flatten() for param in model.parameters()])


def gathered(run, param):
    if isinstance(param, DTensor):
        return param.full_tensor().detach()
    boxes = param.held.boxes
    full = torch.empty(boxes[0].shape)
    for [box], piece in comm.all_gather_object((boxes, param.detach()), group=run.world):
        full[box.slices(Box.whole(box.shape))] = piece
    return full


@pytest.mark.parametrize("size", [2, 4])
def test_all_that_communicate_make_the_same_step(pool, size):
    start, *ends = pool.run(size, trained)[0]
    assert len(ends) == 6
    for weights in ends:
        torch.testing.assert_close(weights, ends[0], rtol=0, atol=1e-6)
        assert (weights - start).abs().max() > 1e-4
