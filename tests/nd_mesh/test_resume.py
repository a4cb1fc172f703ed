"""A run that is saved, cut off and resumed: the same bits on the same mesh, one line where it cannot, nothing lost."""

import errno
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import Keep, Storm
from checkpoint.folder import candidates
from collectives.agreement import Stopped
from collectives.runtime import Runtime
from nd_mesh import loop, metrics
from nd_mesh.config import CheckpointConfig, Config, DataConfig
from nd_mesh.train import Trainer, learning_rate
from tests import jobs
from tests.nd_mesh.runs import MODEL, config, equal, everything, records, run_until, save, stream, trainer, values

# -- the same mesh: the same bits --------------------------------------------------------------------------------------


def in_one_go(run: Runtime, cfg: Config, at: list[int], folder: Path) -> tuple[list, dict]:
    """All steps, with checkpoints on the way: (records without times, final state)."""
    built, records = trainer(run, cfg), []
    for step in range(cfg.train.steps):
        if step in at:
            save(built, folder / str(step), step)
        records.append(replace(built.step(step), seconds=0, slowest=0, median=0))
    return records, everything(built)


def from_a_checkpoint(run: Runtime, cfg: Config, folder: Path) -> tuple[list, dict]:
    built, records = trainer(run, cfg), []
    for step in range(built.resume(folder).step, cfg.train.steps):
        records.append(replace(built.step(step), seconds=0, slowest=0, median=0))
    return records, everything(built)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_bitwise(pool, tmp_path, optimizer):
    """Saved before the first step, in and after the warm-up, in a later epoch, with dropout and accumulation."""
    at, cfg = [0, 2, 3, 7], config(3, optimizer=optimizer)
    whole = pool.run(3, in_one_go, cfg, at, tmp_path)
    again = pool.run(3, in_one_go, cfg, [], tmp_path)
    for step in at:
        resumed = pool.run(3, from_a_checkpoint, cfg, tmp_path / str(step))
        for rank in range(3):
            assert resumed[rank][0] == whole[rank][0][step:] == again[rank][0][step:]
            assert equal(resumed[rank][1], whole[rank][1]) and equal(again[rank][1], whole[rank][1])
    assert [record.lr for record in whole[0][0]] == [learning_rate(cfg.train, step) for step in range(10)]


def test_a_run_cut_off_goes_on_in_its_folder(pool, tmp_path):
    """Records and checkpoints end as those of a run that was left alone; what came after the checkpoint is kept."""
    whole, cut = (
        config(2, out=str(tmp_path / "whole"), save_every=4),
        config(2, out=str(tmp_path / "cut"), save_every=4),
    )
    assert pool.run(2, run_until, whole, None) == ["done"] * 2
    pool.run(2, run_until, cut, 6)
    assert [step for step, _ in candidates(tmp_path / "cut")] == [4]
    assert pool.run(2, run_until, replace(cut, train=replace(cut.train, resume=cut.train.out)), None) == ["done"] * 2
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert [r["step"] for r in records(tmp_path / "cut") if "loss" in r] == list(range(1, 11))
    assert [r["step"] for r in metrics.read(tmp_path / "cut" / "tail.1")] == [5, 6, 6]
    for step in ("step-000004", "step-000008", "step-000010"):
        assert equal(values(tmp_path / "cut" / step), values(tmp_path / "whole" / step))

    elsewhere = replace(cut, train=replace(cut.train, resume=f"{cut.train.out}/step-000008", out=str(tmp_path / "new")))
    assert pool.run(2, run_until, elsewhere, None) == ["done"] * 2
    assert records(tmp_path / "new") == [r for r in records(tmp_path / "whole") if r["step"] > 8]
    assert len(records(tmp_path / "cut")) == len(records(tmp_path / "whole"))

    done = replace(cut, train=replace(cut.train, resume=cut.train.out))
    assert "is at step 10 of train.steps=10: raise train.steps" in pool.run(2, run_until, done, None)[1]


# -- written behind the steps, and thinned out -------------------------------------------------------------------------


def test_written_behind(pool, tmp_path):
    """The same checkpoints as when training waits for each; those that stay are as asked for."""
    asynchronous = CheckpointConfig(asynchronous=True, keep_last=2, keep_every=4, writers=1)
    behind = config(2, asynchronous, out=str(tmp_path / "behind"), save_every=1)
    waited = config(2, out=str(tmp_path / "waited"), save_every=1)
    for cfg in (behind, waited):
        assert pool.run(2, run_until, cfg, None) == ["done"] * 2
    assert [step for step, _ in candidates(tmp_path / "behind")] == [10, 9, 8, 4]
    for step in ("step-000004", "step-000009", "step-000010"):
        assert equal(values(tmp_path / "behind" / step), values(tmp_path / "waited" / step))
    assert records(tmp_path / "behind") == records(tmp_path / "waited")


def test_a_damaged_one(pool, tmp_path):
    """Refused, with the file; a run that may fall back goes on from the one before, to the same end."""
    cut = config(2, out=str(tmp_path / "cut"), save_every=2)
    assert pool.run(2, run_until, cut, None) == ["done"] * 2
    whole = records(tmp_path / "cut")
    file = tmp_path / "cut" / "step-000010" / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = replace(cut, train=replace(cut.train, resume=cut.train.out))
    told = pool.run(2, run_until, again, None)
    assert told[0] == told[1] and f"{file} is damaged" in told[0], told
    falling_back = replace(again, checkpoint=CheckpointConfig(fallback=True))
    assert pool.run(2, run_until, falling_back, None) == ["done"] * 2
    assert records(tmp_path / "cut") == whole


def saved_with_settings(run: Runtime, cfg: Config, folder: Path) -> tuple:
    """Three steps, a checkpoint, and what another trainer takes from it."""
    built = trainer(run, cfg)
    assert sum(built.step(step).tokens for step in range(3)) == built.tokens
    with built.checkpoints(folder) as checkpoints:
        built.save(checkpoints, 3)
        pending = len(checkpoints._pending)
    again = trainer(run, cfg)
    found = again.resume(folder)
    assert (again.tokens, again.metrics) == (built.tokens, built.metrics)
    return checkpoints.keep, checkpoints.storm, pending, found.shared, found.manifest.about, built.tokens, built.metrics


def test_settings_and_what_it_tells_of_the_run(pool, tmp_path):
    settings = CheckpointConfig(asynchronous=True, keep_last=2, keep_every=4, writers=1, bandwidth=3)
    ranks = pool.run(2, saved_with_settings, config(2, settings), tmp_path)
    for keep, storm, pending, shared, about, tokens, last in ranks:
        assert (keep, storm, pending) == (Keep(2, 4), Storm(1, 3_000_000), 1)
        assert tokens > 0 and last.keys() == {"loss", "grad_norm", "lr"}
        consumed = {"step": 3, "data_cursor": 3, "samples": 15, "tokens": tokens}
        assert shared == consumed | {"metrics": last, "scaler": {"scale": 1.0, "good": 3}}
        assert about.keys() >= {"started", "world", "backend", "device", "commit", "data", "versions", "config"}
        assert [about["ranks"][str(rank)]["dp"] for rank in range(2)] == [0, 1]
        assert about["config"]["mesh"]["dp"] == 2 and about["versions"].keys() >= {"python", "torch", "numpy"}


# -- what is refused ---------------------------------------------------------------------------------------------------


def steps_then_save(run: Runtime, cfg: Config, steps: int, folder: Path) -> dict[str, torch.Tensor]:
    built = trainer(run, cfg)
    for step in range(steps):
        built.step(step)
    save(built, folder, steps)
    return everything(built)


def loaded(run: Runtime, cfg: Config, folder: Path) -> dict[str, torch.Tensor]:
    built = trainer(run, cfg)
    built.resume(folder)
    return everything(built)


def refused(run: Runtime, cfg: Config, folder: Path) -> tuple[str, bool]:
    """The words with which a resume is refused, and whether the trainer is as it was."""
    built = trainer(run, cfg)
    before = everything(built)
    with pytest.raises(Stopped) as error:
        built.resume(folder)
    return str(error.value), equal(everything(built), before)


@pytest.fixture(scope="module")
def checkpoint(pool, tmp_path_factory):
    """Two steps of AdamW on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    pool.run(2, steps_then_save, config(2), 2, folder)
    return folder / "step-000002"


OTHERS = {
    "model.width was 8, is 16": replace(config(3), model=replace(MODEL, width=16)),
    "model.dropout was 0.1, is 0.2": replace(config(3), model=replace(MODEL, dropout=0.2)),
    "train.seed was 0, is 1": config(3, seed=1),
    "train.batch was 5, is 6; train.optimizer was adamw, is sgd": config(3, batch=6, optimizer="sgd"),
    "train.dtype was float32, is float64": config(3, dtype="float64"),
    "data.context was 8, is 9": replace(config(3), data=DataConfig(context=9)),
}


@pytest.mark.parametrize("words", OTHERS)
def test_another_run(pool, checkpoint, words):
    ranks = pool.run(3, refused, OTHERS[words], checkpoint)
    assert all(f"is of another run: {words}" in told and untouched for told, untouched in ranks)


def refused_other_data(run: Runtime, folder: Path) -> str:
    texts = stream()
    texts.tokens[7] += 1
    with pytest.raises(Stopped) as error:
        Trainer(config(run.size), texts, stream(), run).resume(folder)
    return str(error.value)


def test_other_data(pool, checkpoint):
    assert all(
        "is of another run: the data's hash was " in told for told in pool.run(2, refused_other_data, checkpoint)
    )


def test_what_may_change(pool, checkpoint):
    """Mesh, microbatches, the number of steps, rate, clipping, momentum, decay, and what is written."""
    train = {"microbatches": 1, "steps": 50, "lr": 0.1, "warmup": 0, "clip": 0.0, "weight_decay": 0.0, "out": "other"}
    assert len(pool.run(3, loaded, config(3, **train), checkpoint)) == 3


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "is not a folder"),
        ("", "has no complete checkpoint"),
        ("step-000001.tmp", "is a save that did not end"),
    ],
)
def test_nothing_to_resume(pool, tmp_path, path, words):
    (tmp_path / "step-000001.tmp").mkdir()
    assert all(words in told for told, _ in pool.run(2, refused, config(2), tmp_path / path))


# -- a kill, a disk that fills -----------------------------------------------------------------------------------------


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
        before = candidates(cut) if cut.exists() else []
        going_on = ("--train.resume", str(cut)) if before else ()
        process = subprocess.Popen(
            [sys.executable, *command, "--train.out", str(cut), *going_on], stdout=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if cut.exists() and len(candidates(cut)) > len(before):  # it has saved something itself
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
    [("metrics.jsonl", 6, [4, 2]), ("sample.txt", 0, [10, 8, 6, 4, 2])],
)
def test_disk_full_on_rank_zero(pool, tmp_path, name, writes, steps):
    """The run ends at once; what was saved is there; resumed with room again, it ends well."""
    out = tmp_path / "run"
    told = pool.run(2, with_full_disk, out, name, writes)
    assert told[0] == told[1] and name in told[0] and "No space left on device" in told[0], told
    assert [step for step, _ in candidates(out)] == steps


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
    for _, folder in candidates(out) if out.exists() else []:
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
    words = f"error: {Path('nowhere').absolute()} is not a folder: name a checkpoint, or a folder of checkpoints"
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
