"""What the coordinator finds out before it commits: shares that are not every tensor, files that are not there."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from checkpoint import Checkpoints, Keep, State, checkpoints, find, folder
from checkpoint.files import Files
from checkpoint.plan import Share, deal
from collectives.agreement import Stopped
from collectives.layout import Box
from collectives.runtime import Runtime
from tests.checkpoint import tiny


def refused(run: Runtime, path: Path, step: int, state: State, saves: Checkpoints) -> str:
    """The words with which a save stops, after which everything is as before, and the next save works."""
    with pytest.raises(Stopped) as stopped:
        saves.save(step, state)
    assert find(path, group=run.world, verify=True).step == 1
    return str(stopped.value)


# -- what is written ---------------------------------------------------------------------------------------------------


def drops_a_tensor(shares: list[Share]) -> None:
    for share in shares:
        share.pop("copy", None)


def drops_a_box(shares: list[Share]) -> None:
    del shares[1]["rows"]


def writes_twice(shares: list[Share]) -> None:
    for share in shares:
        share["copy"] = [Box.whole(tiny.SHAPES["copy"])]


DEALS = {
    "copy was written by nobody": drops_a_tensor,
    "rows: 6 of its 15 elements are there": drops_a_box,
    "copy: [4] at [0] and [4] at [0] overlap": writes_twice,
}


def dealt_wrongly(run: Runtime, path: Path, spoil: Callable[[list[Share]], None]) -> str:
    def spoilt(held):
        shares = deal(held)
        spoil(shares)
        return shares

    with Checkpoints(path, run.world) as saves:
        saves.save(1, State({"w": [(Box.whole((2,)), torch.ones(2))]}))
        with mock.patch.object(checkpoints, "deal", spoilt):
            return refused(run, path, 2, tiny.state(run.rank, run.size, 2), saves)


@pytest.mark.parametrize("words", DEALS)
def test_a_deal_that_is_not_every_tensor_once(pool, tmp_path, words):
    assert (
        pool.run(2, dealt_wrongly, tmp_path, DEALS[words])
        == [f"rank 0: what the ranks wrote is not complete: {words}"] * 2
    )


def test_what_is_held_may_change(pool, tmp_path):
    """Another tensor, another cut of it on one rank only: who writes what is found anew."""
    pool.run(2, changes, tmp_path)


def changes(run: Runtime, path: Path) -> None:
    half = Box((4,), (2 * run.rank,), (2,))
    whole = Box.whole((4,))
    values = torch.arange(4.0)
    held = [
        {"a": [(half, values[half.slices(whole)])]},
        {"a": [(half, values[half.slices(whole)])], "b": [(whole, values)]},
        {"a": [(whole, values)] if run.rank == 0 else []},
        {"a": [(whole, values)], "b": [(whole, values)] if run.rank == 1 else []},
    ]
    with Checkpoints(path, run.world) as saves:
        for step, tensors in enumerate(held):
            saves.save(step, State(tensors))
            saved = find(path, group=run.world)
            targets = {name: [(whole, torch.zeros(4))] for name in ({"a", "b"} if step % 2 else {"a"})}
            saved.read(targets)
            assert all(torch.equal(tensor, values) for [(_, tensor)] in targets.values())


# -- where it is written -----------------------------------------------------------------------------------------------


class Elsewhere(Files):
    """A folder that this rank does not share: what it writes lies in another one."""

    def write(self, path, chunks):
        other = Path(f"{path.parent}.elsewhere")
        other.mkdir()
        super().write(other / path.name, chunks)

    def sync(self, path):
        pass


class Short(Files):
    """A disk that drops the last byte of a rank's file."""

    def sync(self, path):
        os.truncate(path, path.stat().st_size - 1)


def not_there(run: Runtime, path: Path, kind: type[Files]) -> str:
    files = Files()
    with Checkpoints(path, run.world, files=files) as saves:
        saves.save(1, tiny.state(run.rank, run.size, 1))
        saves.files = kind() if run.rank == 1 else files
        return refused(run, path, 2, tiny.state(run.rank, run.size, 2), saves)


@pytest.mark.parametrize(
    ("kind", "words"), [(Elsewhere, "No such file or directory"), (Short, "its rank wrote")], ids=["other", "short"]
)
def test_a_file_that_the_coordinator_does_not_see(pool, tmp_path, kind, words):
    told = pool.run(2, not_there, tmp_path, kind)
    assert told[0] == told[1] and f"{tmp_path}/step-000002.tmp/rank-1.safetensors" in told[0] and words in told[0]


# -- what stays --------------------------------------------------------------------------------------------------------


def kept(run: Runtime, path: Path, keep: Keep, behind: bool) -> list[list[int]]:
    """The steps in the folder after each of seven saves."""
    writers, steps = run.new_group(range(run.size), "writers"), []
    with Checkpoints(path, run.world, writer_group=writers, keep=keep) as saves:
        for step in range(1, 8):
            (saves.save_async if behind else saves.save)(step, tiny.state(run.rank, run.size, step))
            saves.wait()
            steps.append(sorted(step for step, _ in folder.candidates(path)))
    return steps


@pytest.mark.parametrize("behind", [False, True], ids=["save", "save_async"])
def test_exactly_those_that_are_to_be_kept_stay(pool, tmp_path, behind):
    [steps] = pool.run(1, kept, tmp_path, Keep(last=2, every=3), behind)
    assert steps == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7]]


# -- a copy to host memory that fails ----------------------------------------------------------------------------------


def no_memory(run: Runtime, path: Path) -> tuple[str, int]:
    writers = run.new_group(range(run.size), "writers")
    with Checkpoints(path, run.world, writer_group=writers) as saves:
        broken = mock.patch.object(saves._staging, "_slot", side_effect=RuntimeError("no memory"))
        with broken if run.rank == 1 else contextlib.nullcontext(), pytest.raises(Stopped) as stopped:
            saves.save_async(1, tiny.state(run.rank, run.size, 1))
        saves.save_async(2, tiny.state(run.rank, run.size, 2))
    return str(stopped.value), find(path, group=run.world, verify=True).step


def test_no_memory_for_the_copy_on_one_rank(pool, tmp_path):
    assert pool.run(2, no_memory, tmp_path) == [("rank 1: RuntimeError: no memory", 2)] * 2
