"""`python -m checkpoint inspect` and `verify`: what they say of good, damaged, unfinished and missing folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoints, State, inspect, lock
from checkpoint.shard import BLOCK
from collectives.layout import Box
from tests.demos import ROOT

ABOUT = {"mesh": {"dp": 2, "tp": 1}, "ranks": [{"dp": 0, "tp": 0}, {"dp": 1, "tp": 0}], "commit": "1a2b3c"}


def values(rank, size):
    """Of "wide" rows, of "norm" a copy."""
    box = Box.whole((6, 5)).cut(0, 3 * rank if size == 2 else 0, 6 // size)
    wide = torch.arange(30, dtype=torch.float64).view(6, 5)[box.slices(Box.whole((6, 5)))]
    return {"wide": [(box, wide)], "norm": [(Box.whole((5,)), torch.ones(5))]}


def save(run, path, steps):
    with Checkpoints(path, run.world, about=ABOUT) as checkpoints:
        for step in steps:
            checkpoints.save(
                step, State(values(run.rank, run.size), {"losses": [0.5]}, {"random": run.rank, "cursor": 1})
            )


@pytest.fixture
def runs(pool, tmp_path) -> Path:
    """Three checkpoints of two ranks."""
    pool.run(2, save, tmp_path / "runs", (1, 2, 3))
    return tmp_path / "runs"


def said(capsys, *arguments) -> tuple[int, list[str], list[str]]:
    """Exit status, lines of stdout without blanks, lines of stderr."""
    status = inspect.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, [" ".join(line.split()) for line in out.splitlines() if line.strip()], err.splitlines()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_inspect_tells_what_a_checkpoint_consists_of(runs, capsys):
    status, out, err = said(capsys, "inspect", runs / "step-000002")
    total = sum(path.stat().st_size for path in (runs / "step-000002").glob("rank-*"))
    assert (status, err) == (0, [])
    assert out[0] == f"{runs / 'step-000002'}: complete, step 2, 2 ranks, {total:,} bytes of tensors' files"
    assert out[1:4] == [
        'mesh: {"dp": 2, "tp": 1}',
        'ranks: [{"dp": 0, "tp": 0}, {"dp": 1, "tp": 0}]',
        'commit: "1a2b3c"',
    ]
    sizes = [(runs / "step-000002" / f"rank-{rank}.safetensors").stat().st_size for rank in range(2)]
    norm = next(line for line in out if line.startswith("norm "))
    assert norm == "norm F32 [5] 1 [5] at [0]"
    assert (
        next(line for line in out if line.startswith("wide ")) == "wide F64 [6, 5] 2 [3, 5] at [0, 0]; [3, 5] at [3, 0]"
    )
    assert [line for line in out if line.startswith("rank-")] == [
        f"rank-0.safetensors {sizes[0]} 2",
        f"rank-1.safetensors {sizes[1]} 1",
    ]
    assert out[-2:] == ["small state of all ranks: losses", "small state of each rank: random, cursor"]


def test_inspect_tells_one_line_a_checkpoint(runs, capsys):
    (runs / "step-000004.tmp").mkdir()
    (runs / "step-000001").rename(runs / "step-000001.gone")
    (runs / "step-000002").rename(runs / "step-000002.old")
    (runs / "step-000003" / "COMMIT").write_text("")
    status, out, _ = said(capsys, "inspect", runs)
    found = {line.split()[0]: line.partition(" ")[2] for line in out if line.startswith("step-")}
    assert status == 0
    assert found["step-000001.gone"] == "half deleted: the next job deletes the rest"
    assert found["step-000002.old"].startswith("complete, moved aside for a second save of its step 2 2 ")
    assert found["step-000003"] == "DAMAGED"
    assert out[-1].startswith(f"{runs / 'step-000003' / 'manifest.json'} is not the one that ")
    assert found["step-000004.tmp"] == "never completed: the next job deletes it"


def test_inspect_knows_whether_somebody_is_writing(runs, capsys):
    (runs / "step-000004.tmp").mkdir()
    with lock.held(runs):
        status, out, _ = said(capsys, "inspect", runs)
    assert status == 0
    assert "step-000004.tmp being written" in out
    assert out[-1].startswith(f"the folder belongs to a job that has not ended, process {os.getpid()} on ")
    (runs / lock.NAME).write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "2", "since": "then"}))
    assert said(capsys, "inspect", runs)[1][-1].endswith("process 1 on elsewhere since then")


def test_verify_says_that_all_is_well(runs, capsys):
    status, out, err = said(capsys, "verify", runs / "step-000003")
    assert (status, err) == (0, [])
    total = sum(path.stat().st_size for path in (runs / "step-000003").glob("rank-*"))
    assert out == [f"{runs / 'step-000003'}: every byte of {total:,} is as it was written"]
    status, out, _ = said(capsys, "verify", runs)
    assert status == 0
    assert [Path(line.partition(":")[0]).name for line in out] == ["step-000003", "step-000002", "step-000001"]


def test_a_folder_that_has_a_manifest_of_its_own(runs, capsys):
    """As a run's has, whatever it is called."""
    (runs / "manifest.json").write_text("{}")
    other = runs.rename(runs.with_name("step-by-step.tmp"))
    for command, lines in (("inspect", 5), ("verify", 3)):
        status, out, err = said(capsys, command, other)
        assert (status, len(out), err) == (0, lines, [])


@pytest.mark.parametrize("file", ["rank-0.safetensors", "rank-1.safetensors", "manifest.json", "COMMIT"])
def test_verify_sees_every_byte(runs, capsys, file):
    path = runs / "step-000002" / file
    length = path.stat().st_size
    for at in {*range(0, length, max(1, length // 40)), length - 1}:
        flip(path, at)
        status, out, err = said(capsys, "verify", runs / "step-000002")
        assert (status, len(out), err) == (1, 1, []), at
        assert str(path) in out[0]
        flip(path, at)
    assert said(capsys, "verify", runs / "step-000002")[0] == 0


def test_verify_has_a_line_for_each_damaged_file(runs, capsys):
    paths = [runs / "step-000002" / f"rank-{rank}.safetensors" for rank in range(2)]
    flip(paths[0], 20)
    flip(paths[0], paths[0].stat().st_size - 1)
    flip(paths[1], paths[1].stat().st_size - 1)
    status, out, _ = said(capsys, "verify", runs)
    assert status == 1
    assert len(out) == 4
    assert [line.split(" is ")[0] for line in out[1:3]] == [str(path) for path in paths]
    assert out[1].endswith(" and 1 more")


def large(run, path):
    numbers = torch.arange(3 * BLOCK // 8, dtype=torch.float64)
    with Checkpoints(path, run.world) as checkpoints:
        checkpoints.save(1, State({"large": [(Box.whole(numbers.shape), numbers)]}))


def test_verify_of_a_tensor_of_several_blocks(pool, tmp_path, capsys):
    pool.run(1, large, tmp_path)
    path = tmp_path / "step-000001" / "rank-0.safetensors"
    for at in (100, 2 * BLOCK):
        flip(path, path.stat().st_size - at)
    status, out, _ = said(capsys, "verify", tmp_path)
    assert (status, len(out)) == (1, 1)
    assert out[0].endswith(" and 1 more")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_one_line_where_there_is_nothing(runs, capsys, command):
    (runs / "empty").mkdir()
    (runs / "step-000004.tmp").mkdir()
    cases = {
        "missing": "is not a folder: name a checkpoint, or a folder of checkpoints",
        "step-000002/COMMIT": "is not a folder: name a checkpoint, or a folder of checkpoints",
        "step-000004.tmp": "is a save that did not end, or is being deleted: name another checkpoint",
        "empty": f"has no {'complete ' if command == 'verify' else ''}checkpoint: name another folder",
    }
    for name, message in cases.items():
        assert said(capsys, command, runs / name) == (1, [], [f"{runs / name} {message}"])


def test_a_damaged_checkpoint_is_not_inspected(runs, capsys):
    path = runs / "step-000002" / "rank-1.safetensors"
    path.unlink()
    for status, out, err in (said(capsys, command, runs / "step-000002") for command in ("inspect", "verify")):
        assert status == 1
        assert [*out, *err] == [f"{path}: No such file or directory"]


def test_nothing_is_changed(runs, capsys):
    (runs / "step-000004.tmp").mkdir()
    before = {path: path.stat().st_mtime_ns for path in sorted(runs.rglob("*"))}
    said(capsys, "inspect", runs)
    said(capsys, "verify", runs)
    assert {path: path.stat().st_mtime_ns for path in sorted(runs.rglob("*"))} == before


def test_from_the_shell(runs):
    command = (sys.executable, "-m", "checkpoint")
    good = subprocess.run([*command, "verify", runs], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (good.returncode, len(good.stdout.splitlines()), good.stderr) == (0, 3, "")
    wrong = subprocess.run([*command, "verfy", runs], cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert f"unrecognized arguments: verfy {runs}" in wrong.stderr
