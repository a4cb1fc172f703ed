"""Real strategies go on from each other's checkpoints: with the bits that were saved, and the steps of one run."""

import functools

import pytest
import torch

from checkpoint import Checkpoints, State, find, restore, training
from collectives import layout
from collectives.layout import Box
from ddp import overlapped
from tests.fsdp.models import sharded
from tests.shards import snapshot
from tests.zero import test_boxed


def under_ddp(run, seed):
    torch.manual_seed(seed)
    model = test_boxed.Model().double()
    layout.declare(model, lambda name: None, lambda name: False)
    handle = overlapped.wrap(model, run.world, average=False, cap=1000)
    return model, handle, torch.optim.AdamW(handle.parameters(), lr=0.05, eps=1e-4)


def under_zero(stage, run, seed):
    torch.manual_seed(seed)
    model = test_boxed.Model().double()
    handle = test_boxed.WRAP[stage](model, run.world, average=False, cap=1000)
    return model, handle, handle.optimizer(torch.optim.AdamW(handle.parameters(), lr=0.05, eps=1e-4))


def under_fsdp(run, seed):
    torch.manual_seed(seed)
    model = test_boxed.Model().double()
    handle = sharded(run, model, [model.up, model.unused])
    return model, handle, handle.optimizer(torch.optim.AdamW(handle.parameters(), lr=0.05, eps=1e-4))


STRATEGIES = {
    "ddp": under_ddp,
    **{f"zero {stage}": functools.partial(under_zero, stage) for stage in (1, 2, 3)},
    "fsdp": under_fsdp,
}


def weights(model, handle):
    with handle.whole():
        return snapshot(model)


def trained(run, kind, path):
    """Three steps, a checkpoint, and the weights after two more."""
    model, handle, optimizer = STRATEGIES[kind](run, 0)
    test_boxed.steps(run, model, handle, optimizer, range(3))
    with Checkpoints(path, run.world) as checkpoints:
        checkpoints.save(3, State(training(handle.parameters(), optimizer)))
    now = weights(model, handle)
    test_boxed.steps(run, model, handle, optimizer, range(3, 5))
    return now, weights(model, handle)


def resumed(run, kind, path):
    """The weights after a load, and after two more steps; and what a save at once would hold."""
    model, handle, optimizer = STRATEGIES[kind](run, 5)
    restore(find(path, group=run.world, verify=True), handle.parameters(), optimizer)
    handle.after_load()
    now = weights(model, handle)
    with Checkpoints(path.with_name(f"{path.name} again"), run.world) as checkpoints:
        checkpoints.save(3, State(training(handle.parameters(), optimizer)))
    test_boxed.steps(run, model, handle, optimizer, range(3, 5))
    return now, weights(model, handle)


def whole(run, path):
    """Every tensor of a checkpoint."""
    saved = find(path, group=run.world)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in saved.tensors.items()}
    saved.read({name: [(Box.whole(tensor.shape), tensor)] for name, tensor in tensors.items()})
    return tensors


CHANGES = [
    (("ddp", 2), ("zero 3", 3)),
    (("zero 1", 3), ("fsdp", 2)),
    (("fsdp", 3), ("zero 2", 4)),
    (("zero 3", 4), ("ddp", 1)),
    (("zero 2", 2), ("zero 1", 3)),
    (("fsdp", 4), ("fsdp", 3)),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_strategies_go_on_from_each_other(pool, tmp_path, before, after):
    """Bit for bit what was saved, and the steps after it those of the uninterrupted run."""
    path = tmp_path / "run"
    now, later = pool.run(before[1], trained, before[0], path, timeout=120)[0]
    for loaded, ours in pool.run(after[1], resumed, after[0], path, timeout=120):
        for name, value in now.items():
            assert torch.equal(loaded[name], value), name
            assert (ours[name] - later[name]).abs().max() <= 1e-12 * later[name].abs().max(), name
            assert name.startswith("unused") or not torch.equal(ours[name], value)
    first, again = (pool.run(1, whole, folder)[0] for folder in (path, tmp_path / "run again"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert len({name.partition("/")[0] for name in first}) == 4


def averaged(run, path):
    """Beside the parameters an average of one, called as an optimizer's state would be, and a buffer."""
    model, handle, optimizer = under_zero(3, run, 0)
    test_boxed.steps(run, model, handle, optimizer, range(1))
    table = Box.whole((3,))
    extra = {"ema/up.weight": [(Box.whole((2, 2)), torch.ones(2, 2))], "table": [(table, torch.arange(3.0))]}
    with Checkpoints(path, run.world) as checkpoints:
        checkpoints.save(1, State({**training(handle.parameters(), optimizer), **extra}))
    more = {name: [(box, torch.zeros(box.local))] for name, [(box, _)] in extra.items()}
    restore(find(path, group=run.world), handle.parameters(), optimizer, more)
    assert all(torch.equal(more[name][0][1], value) for name, [(_, value)] in extra.items())
    assert {kind for state in optimizer.state.values() for kind in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_further_tensors(pool, tmp_path):
    pool.run(2, averaged, tmp_path)
