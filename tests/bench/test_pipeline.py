"""A pipeline's training step beside PyTorch's: that all make the same step, with as many messages, and what stays."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from collectives import allocated, comm
from pipeline import bench
from pipeline.schedules import schedule
from tests.bench import ranks

NAMES = list(bench.pairs(1))
SIZES = [2, 4]


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_pipeline(pool, benchmark, size, name):
    ranks.record(benchmark, pool, size, bench.step, name, bench.SMALL if benchmark.disabled else bench.MODEL)
    if not benchmark.disabled:
        benchmark.extra_info["messages"] = pool.run(size, messages, name)
        benchmark.extra_info["kept_bytes"] = pool.run(size, kept, name)


def ways(run, name):
    return {"ours": bench.partial(bench.ours, name=name), **bench.pairs(run.size)[name]}


def trained(run, name):
    """Of everyone's second step the losses and gradients, of all ranks together."""
    return {who: everyones(run, way(run, bench.SMALL)) for who, way in ways(run, name).items()}


def everyones(run, step):
    step.run()
    for stage in step.stages.values():
        stage.zero_grad()
    losses = [loss.detach() for loss in step.run()]
    grads = {key: param.grad for number, stage in step.stages.items() for key, param in named(stage, number)}
    everyone = comm.all_gather_object((losses, grads), group=run.world)
    losses = [loss for losses, _ in everyone for loss in losses]
    return losses, {key: grad for _, own in everyone for key, grad in own.items()}


def named(stage, number):
    """A stage's parameters, by the names of the model."""
    first = number * len(stage.blocks)
    for name, param in stage.named_parameters():
        part, *rest = name.split(".")
        if part == "blocks":
            rest[0] = str(first + int(rest[0]))
        yield ".".join([part, *rest]), param


def alone(run, rows=bench.MICROBATCHES):
    """The same step of the whole model, of these rows at once."""
    stage = bench.cut(run, bench.SMALL, (run.rank,))[0]
    ids, labels = bench.rows(run)
    logits = stage(ids[:rows])
    losses = [bench.loss(mine, its) for mine, its in zip(logits.split(1), labels[:rows].split(1), strict=True)]
    sum(losses).backward()
    return [loss.detach() for loss in losses], {name: param.grad for name, param in stage.named_parameters()}


def deviation(mine, its):
    """Of all losses and gradients, relative to the largest entry of each."""
    (losses, grads), (expected, whole) = mine, its
    assert len(losses) == len(expected) and grads.keys() == whole.keys()
    pairs = [*zip(losses, expected, strict=True), *((grads[name], whole[name]) for name in whole)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def compared(run, name):
    """How far each is from the whole model in one process, and from it on fewer rows, where it must show."""
    made, whole, fewer = trained(run, name), alone(run), alone(run, bench.MICROBATCHES - 1)
    short = {who: (losses[:-1], grads) for who, (losses, grads) in made.items()}
    return [deviation(each, whole) for each in made.values()], [deviation(each, fewer) for each in short.values()]


@pytest.mark.parametrize("name", NAMES)
def test_everyone_makes_the_same_step(pool, name):
    for right, wrong in pool.run(2, compared, name):
        assert max(right) < 1e-4
        assert min(wrong) > 1e-2


class Sends(TorchDispatchMode):
    """Counts what is sent, whoever sends it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.c10d.send.default
        return func(*args, **(kwargs or {}))


def messages(run, name):
    """Sent by this rank in the second step."""
    counts = {}
    for who, way in ways(run, name).items():
        step = way(run, bench.SMALL)
        step.run()
        with Sends() as sends:
            step.run()
        counts[who] = sends.count
    return counts


def planned(name, size, rank):
    """A message wherever two neighbours are on two ranks, each way."""
    plan = schedule(name, size, bench.MICROBATCHES)
    crossing = [pair for pair in zip(plan.rank_of, plan.rank_of[1:], strict=False) if len(set(pair)) == 2]
    return sum(rank in pair for pair in crossing) * bench.MICROBATCHES


@pytest.mark.parametrize("name", NAMES)
def test_as_many_messages_as_pytorch(pool, name):
    for rank, counts in enumerate(pool.run(2, messages, name)):
        ours, its, *_ = counts.values()
        assert ours == its == planned(name, 2, rank)


def kept(run, name):
    """Bytes that stay between steps beside weights."""
    return {who: stays(run, way) for who, way in ways(run, name).items()}


def stays(run, way):
    def stepped():
        step = way(run, bench.SMALL)
        step.run()
        for stage in step.stages.values():
            stage.zero_grad()
        return step

    step, left = allocated.built_bytes(stepped, run.device)
    return left - sum(param.nbytes for stage in step.stages.values() for param in stage.parameters())


def test_received_tensors_do_not_stay(pool):
    """PyTorch has memory for those of all microbatches at all times."""
    rows = 2 * bench.MICROBATCHES * bench.CONTEXT * 8  # ids and labels, which each has
    received = bench.MICROBATCHES * bench.CONTEXT * bench.SMALL.width * 4
    for of_rank in pool.run(2, kept, "1f1b"):
        ours, its = of_rank.values()
        assert ours < rows + received / 8 and its >= rows + received
