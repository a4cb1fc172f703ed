"""The folder of a checkpoint, whatever happens while it is written: a kill at any moment, a disk that fills."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives.runtime import Runtime
from nd_mesh import durable, loop, metrics, saved
from nd_mesh.agreement import Stopped
from nd_mesh.config import ConfigError
from tests import jobs
from tests.nd_mesh.test_state import config, equal, everything, records, stream, trainer, values

# -- a kill at any moment ----------------------------------------------------------------------------------------------


def photographed(run: Runtime, folder: Path, album: Path) -> list[dict]:
    """Save step 1, step 2, and step 2 again, and copy the folder before everything that touches a name, and at the end.

    What a kill of all ranks leaves behind is the folder as it was at that moment. Returns the states of steps 1 and 2.
    """
    built, states = trainer(run, config(run.size)), []
    built.step(0)
    built.save(folder, 1)
    states.append(everything(built))
    built.step(1)
    states.append(everything(built))
    watched = [
        (os, "fsync"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "mkdir"),
        (Path, "unlink"),
        (shutil, "rmtree"),
    ]
    real = {name: getattr(owner, name) for owner, name in watched}
    photographs = 0

    def photograph() -> None:
        nonlocal photographs
        subprocess.run(["cp", "-r", folder, album / f"{photographs:03}"], check=True)
        photographs += 1

    def patched(name: str):
        def call(*args, **kwargs):
            photograph()
            return real[name](*args, **kwargs)

        return call

    if run.rank == 0:
        for owner, name in watched:
            setattr(owner, name, patched(name))
    try:
        built.save(folder, 2)
        built.save(folder, 2)
    finally:
        for owner, name in watched:
            setattr(owner, name, real[name])
    if run.rank == 0:
        photograph()
    return states


def forced_and_named(run: Runtime, folder: Path) -> list[str]:
    """Save once; the names of what was forced to the disk and of what got its name, in their order, on this rank."""
    built, order = trainer(run, config(run.size)), []
    sync, rename = durable.sync, Path.rename

    def syncing(path: Path) -> None:
        order.append(path.name)
        sync(path)

    def renaming(path: Path, to: Path) -> Path:
        order.append(f"{path.name} is {Path(to).name}")
        return rename(path, to)

    durable.sync, Path.rename = syncing, renaming
    try:
        built.save(folder, 1)
    finally:
        durable.sync, Path.rename = sync, rename
    return order


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(pool, tmp_path):
    """A kill leaves what the system has in its memory; a loss of power does not."""
    out = tmp_path / "run"
    first, second = pool.run(2, forced_and_named, out)
    assert second == ["rank-1.safetensors"]  # and then this rank agrees that it has written
    assert first[0] == "rank-0.safetensors" and "state.json.tmp" in first
    assert first[-2:] == ["step-000001.tmp is step-000001", "run"]


def resumed_from_all(run: Runtime, album: Path) -> list[tuple[int, dict]]:
    """From each photograph: the step that is resumed and the state; then step 2 is saved there, and is the latest."""
    found = []
    for folder in sorted(album.iterdir()):
        built = trainer(run, config(run.size))
        step = built.resume(folder).step
        found.append((step, everything(built)))
        built.save(folder, 2)
        again = trainer(run, config(run.size))
        assert again.resume(folder).path == folder / "step-000002"
        assert equal(everything(again), found[-1][1])
    return found


def test_killed_at_any_moment_of_a_save(pool, tmp_path):
    (tmp_path / "album").mkdir()
    states = pool.run(2, photographed, tmp_path / "run", tmp_path / "album")[0]
    found = pool.run(1, resumed_from_all, tmp_path / "album")[0]
    assert all(equal(state, states[step - 1]) for step, state in found)
    steps = [step for step, _ in found]
    assert steps == sorted(steps) and {1, 2} == set(steps) and len(steps) >= 15, steps  # never back from 2 to 1


TOML = """
[model]
layers = 1
width = 8
heads = 2
kv_heads = 1
hidden = 8
dropout = 0.1
[data]
context = 16
[train]
steps = 40
sample = 3
save_every = 1
"""


@pytest.fixture
def command(tmp_path):
    """A training command that saves after every step."""
    (tmp_path / "text.txt").write_text("a small text, again and again\n" * 200)
    (tmp_path / "run.toml").write_text(TOML)
    return (*("-m", "nd_mesh", "train", str(tmp_path / "run.toml")), "--data.path", str(tmp_path / "text.txt"))


@pytest.mark.drill
def test_killed_at_random_until_it_is_done(tmp_path, command):
    """SIGKILL of a run again and again; it is resumed each time, and ends as one that was never killed."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert jobs.run([sys.executable, *command, "--train.out", str(whole)]).status == 0
    kills = 0
    for patience in (0.03, 0.31, 0.17, 0.09, 0.23, 60.0):
        before = saved.candidates(cut) if cut.exists() else []
        going_on = ("--train.resume", str(cut)) if before else ()
        process = subprocess.Popen(
            [sys.executable, *command, "--train.out", str(cut), *going_on], stdout=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if cut.exists() and len(saved.candidates(cut)) > len(before):  # it has saved something itself
                time.sleep(patience)
                break
            time.sleep(0.01)
        kills += process.poll() is None
        process.kill()
        process.communicate()
    assert jobs.run([sys.executable, *command, "--train.out", str(cut), "--train.resume", str(cut)]).status in (0, 2)
    assert kills >= 3
    assert records(cut) == records(whole)
    assert equal(values(cut / "step-000040"), values(whole / "step-000040"))


# -- a disk that fills -------------------------------------------------------------------------------------------------


def with_largest_file(run: Runtime, out: Path, rank: int, limit: int, resume: str = "") -> str:
    """A run in which no file of one rank may grow beyond so many bytes: the words with which it ends."""
    cfg = config(run.size, out=str(out), steps=24, save_every=2, resume=resume)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        loop.train(cfg, stream(), stream(), run)
    except Stopped as stopped:
        return str(stopped)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "done"


@pytest.mark.parametrize(
    ("rank", "limit", "file"),
    [(0, 300, "manifest.json"), (1, 1000, "step-000002.tmp/rank-1.safetensors")],
)
def test_no_room_for_a_file(pool, tmp_path, rank, limit, file):
    """Every rank ends with the same line, and the run can be started again."""
    out = tmp_path / "run"
    told = pool.run(2, with_largest_file, out, rank, limit)
    assert len(set(told)) == 1 and f"rank {rank}: {out / file}: " in told[0] and "\n" not in told[0], told
    assert pool.run(2, with_largest_file, out, rank, resource.RLIM_INFINITY) == ["done"] * 2


def with_full_disk(run: Runtime, out: Path, name: str, writes: int) -> str:
    """A run that finds the disk full after so many writes of files of that name."""
    real, seen = Path.open, 0

    def opened(self: Path, mode: str = "r", *args, **kwargs):
        nonlocal seen
        if "r" not in mode and self.name.startswith(name):
            seen += 1
            if seen > writes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, mode, *args, **kwargs)

    Path.open = opened
    try:
        loop.train(config(run.size, out=str(out), save_every=2), stream(), stream(), run)
    except Stopped as stopped:
        return str(stopped)
    finally:
        Path.open = real
    return "done"


@pytest.mark.parametrize(
    ("name", "writes", "steps"),
    [("state.json", 1, [2]), ("metrics.jsonl", 6, [4, 2]), ("sample.txt", 0, [10, 8, 6, 4, 2])],
)
def test_disk_full_on_rank_zero(pool, tmp_path, name, writes, steps):
    """The run ends at once; what was saved is there; resumed with room again, it ends well."""
    out = tmp_path / "run"
    told = pool.run(2, with_full_disk, out, name, writes)
    assert told[0] == told[1] and name in told[0] and "No space left on device" in told[0], told
    assert [step for step, _ in saved.candidates(out)] == steps
    if name == "state.json":
        assert pool.run(2, with_largest_file, out, 0, resource.RLIM_INFINITY, str(out)) == ["done"] * 2
        assert [r["step"] for r in metrics.read(out) if "loss" in r] == list(range(1, 25))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 400 KB; where we may not mount one, the test is skipped."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a file system that can be filled: run as root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def on_a_small_disk(run: Runtime, out: Path, free: int) -> list[str]:
    """A run on a disk of which so many bytes are free, then whatever it saved is loaded."""
    if run.rank == 0:
        space = os.statvfs(out.parent)
        (out.parent / "filler").write_bytes(b"x" * max(0, space.f_bavail * space.f_frsize - free))
    try:
        loop.train(config(run.size, out=str(out), save_every=1), stream(), stream(), run)
        told = ["done"]
    except Stopped as stopped:
        told = [str(stopped)]
    for _, folder in saved.candidates(out) if out.exists() else []:
        told.append(str(trainer(run, config(run.size)).resume(folder).step))
    return told


@pytest.mark.parametrize("free", [0, 4096, 8192, 60_000, 110_000, 170_000])
def test_a_disk_that_fills_loses_nothing_that_was_saved(pool, small_disk, free):
    ranks = pool.run(2, on_a_small_disk, small_disk / "run", free)
    assert ranks[0] == ranks[1] and "No space left on device" in ranks[0][0], ranks
    steps = [int(step) for step in ranks[0][1:]]
    assert steps == list(range(len(steps), 0, -1)) and (steps or free < 60_000), ranks


def test_the_command_ends_with_one_line(tmp_path, command):
    ending = jobs.run([sys.executable, *command, "--train.out", str(tmp_path / "out"), "--train.resume", "nowhere"])
    words = "error: train.resume=nowhere is not a folder: name a checkpoint, or the folder of a run"
    assert ending.status == 2 and ending.output.splitlines() == [words]


@pytest.mark.drill
def test_one_line_on_every_rank_and_a_status(tmp_path):
    """The command, two ranks, the last of which has no room for its file."""
    ranks = ("--nproc-per-node", "2", "-m", "tests.nd_mesh.failing_train", "full", "save", str(tmp_path))
    ending = jobs.run([*jobs.TORCHRUN, *ranks])
    path = tmp_path / "out" / "step-000001.tmp" / "rank-1.safetensors"
    for rank in (0, 1):
        assert f"rank {rank}: error: rank 1: {path}: " in ending.output, ending.output
    assert ending.status != 0 and ending.gone_after < 10 and "failed:\nTraceback" not in ending.output


# -- which one is resumed ----------------------------------------------------------------------------------------------


def test_the_latest_complete_one(tmp_path):
    def make(name: str, files: dict[str, int]) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rank-0.safetensors").write_bytes(b"1234")
        durable.write(folder / "state.json", f'{{"step": {int(name[5:11])}, "files": {files}}}'.replace("'", '"'))

    make("step-000009", {"rank-0.safetensors": 4})
    make("step-000010.old", {"rank-0.safetensors": 4})
    make("step-000011", {"rank-0.safetensors": 5})
    make("step-000012.tmp", {"rank-0.safetensors": 4})
    assert saved.choose(tmp_path).path.name == "step-000010.old"
    make("step-000010", {"rank-0.safetensors": 4})
    make("step-1000000", {"rank-0.safetensors": 4, "rank-1.safetensors": 4})
    assert saved.choose(tmp_path).path.name == "step-000010"
    with pytest.raises(ConfigError, match="not the size it was written"):
        saved.choose(tmp_path / "step-000011")


def test_durable_write(tmp_path, monkeypatch):
    """Whole or not at all."""
    durable.write(tmp_path / "a", "before")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        durable.write(tmp_path / "a", "after")
    assert (tmp_path / "a").read_text() == "before"
    assert durable.free_name(tmp_path / "a").name == "a.1"
