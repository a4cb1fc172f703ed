"""What a machine with one GPU can show: NCCL with one rank, several ranks on gloo with CUDA tensors."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoints, State, find, random_state
from collectives import comm, runtime
from collectives.algorithms import direct, doubling, halving, naive, ring, star, tree
from collectives.competitors import BACKEND, COLLECTIVES, competitors
from collectives.layout import Box
from collectives.runtime import Runtime
from nd_mesh.mesh import Grid
from tests import grid, jobs, parity
from tests.parity import config, documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def on_gpu(run: Runtime, job, *args):
    """The job with its tensors on the GPU, which all ranks share; gloo carries them."""
    return job(replace(run, device=torch.device("cuda:0")), *args)


SHARDED = {"data": "fsdp", "recompute": ("block",)}
CUT = [{"tp": 2}, {"tp": 4, "sequence": True}, SHARDED | {"fsdp": 2, "tp": 2, "sequence": True, "save_gathered": True}]
DATA = [{"dp": 1}, {"dp": 2}, {"dp": 3}, SHARDED | {"fsdp": 3}, SHARDED | {"dp": 2, "fsdp": 2, "prefetch": 2}]


PIPED = [{"pp": 2, "schedule": "zbv", "stage_layers": (1, 0, 0, 1)}, SHARDED | {"pp": 2, "fsdp": 2, "tied": True}]


ROWS = [{"cp": 2}, {"cp": 2, "tp": 2, "sequence": True, "attention": "ulysses"}]
EXPERTS = grid.MIXTURES["sigmoid 3 of 12, bias, shared"]
SHARED = [EXPERTS | {"dp": 2, "ep": 2}, EXPERTS | SHARDED | {"cp": 2, "fsdp": 2, "ep": 2}]


@pytest.mark.parametrize("where", DATA + CUT + PIPED + ROWS + SHARED)
def test_parity_on_gloo(pool, where):
    cfg = config(**where, dropout=0.1, microbatches=2)
    for initial, done in pool.run(Grid(cfg.mesh).size(), on_gpu, parity.train, cfg, documents(), 4, timeout=120):
        expected = parity.reference(cfg, initial, documents(), 4)
        worst = parity.judge(initial, done, expected)
        assert max(worst.values()) <= 1, worst


def collectives_on_gpu(run: Runtime) -> None:
    """Strided CUDA tensors through the operations of comm."""
    for ordered in (False, True):
        strided = (torch.arange(12.0, device=run.device).view(3, 4) * (run.rank + 1)).T[:, ::2]
        expected = strided / (run.rank + 1) * sum(range(1, run.size + 1))
        comm.all_reduce(strided, group=run.world, ordered=ordered)
        assert torch.equal(strided, expected)
    pieces = torch.full((run.size, 5), float(run.rank), device=run.device)
    mine = torch.empty(5, device=run.device)
    comm.reduce_scatter_single(mine, pieces, group=run.world)
    assert torch.equal(mine, torch.full_like(mine, sum(range(run.size))))
    whole = torch.empty(run.size, 5, device=run.device)
    comm.all_gather_single(whole, pieces[0], group=run.world)
    assert torch.equal(whole[:, 0], torch.arange(run.size, device=run.device, dtype=whole.dtype))


def algorithms_on_gpu(run: Runtime) -> None:
    """Every algorithm that is written out; the sum of ones, by each that sums on all ranks."""
    for collective in COLLECTIVES:
        for who, call in competitors(collective, 4 * 1003 * run.size, run).items():
            if who != BACKEND:
                call()
                call(async_op=True).wait()
    for module in (naive, star, ring, tree, doubling, halving, direct):
        ones = torch.ones(1003, device=run.device)
        module.all_reduce(ones, group=run.world)
        assert torch.equal(ones, torch.full_like(ones, run.size)), module.__name__


def checkpoint_on_gpu(run: Runtime, folder: Path) -> None:
    """Saved behind training, which changes the state at once; loaded into memory of the GPU, in another cut."""
    whole = Box.whole((8 * run.size, 6))
    values = torch.arange(48.0 * run.size, device=run.device).view(whole.shape)
    rows = whole.cut(0, 8 * run.rank, 8)
    mine = values[rows.slices(whole)].clone()
    writers = run.new_group(range(run.size), "writers", backend="gloo")
    with Checkpoints(folder, run.world, writer_group=writers) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save_async(step, State({"x": [(rows, mine)]}, own={"random": random_state.capture()}))
            mine.add_(1000)
    saved = find(folder, group=run.world)
    found = torch.zeros_like(values)
    saved.read({"x": [(whole, found)]})
    assert torch.equal(found, values + 2000)
    random_state.restore(saved.own["random"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_on_gloo(pool, tmp_path, ranks):
    pool.run(ranks, on_gpu, checkpoint_on_gpu, tmp_path, timeout=120)


@pytest.mark.parametrize("job", [collectives_on_gpu, algorithms_on_gpu])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives_on_gloo(pool, ranks, job):
    pool.run(ranks, on_gpu, job, timeout=120)


def test_nccl_with_one_rank():
    ending = jobs.run([sys.executable, "-m", "tests.test_gpu"], limit=120)
    assert ending.status == 0, ending.output


def one_rank() -> None:
    """A world of one on its own GPU with NCCL: collectives, and parity with the reference."""
    with runtime.start() as run:
        assert run.backend == "nccl" and run.device.type == "cuda"
        collectives_on_gpu(run)
        algorithms_on_gpu(run)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint_on_gpu(run, Path(folder))
        for where in ({"dp": 1}, SHARDED):
            cfg = config(**where, dropout=0.1, microbatches=2)
            initial, done = parity.train(run, cfg, documents(), 4)
            worst = parity.judge(initial, done, parity.reference(cfg, initial, documents(), 4))
            assert max(worst.values()) <= 1, worst


if __name__ == "__main__":
    one_rank()
