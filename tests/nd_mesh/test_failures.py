"""A rank that fails, anywhere, takes the job down within seconds, its own words first; wrong input is one line."""

import re
import sys

import pytest

from tests import jobs

SCRIPT = ("-m", "tests.nd_mesh.failing_train")


def failing(mode: str, place: str, folder, *, ranks: int = 2, **watch) -> jobs.Ending:
    """The ending of a training on torchrun whose last rank fails in `mode` at `place`."""
    return jobs.run([*jobs.TORCHRUN, "--nproc-per-node", str(ranks), *SCRIPT, mode, place, str(folder)], **watch)


def judge_raise(ending: jobs.Ending, rank: int) -> None:
    assert ending.status != 0 and ending.gone_after < 10, ending
    first = re.search(r"^\w*Error\b.*$", ending.output, re.MULTILINE)
    assert first and first.group() == "ArithmeticError: on purpose", ending.output
    assert f"rank {rank} failed:\nTraceback" in ending.output


def test_raise(tmp_path):
    judge_raise(failing("raise", "gradients", tmp_path), rank=1)


@pytest.mark.drill
@pytest.mark.parametrize("place", ["build", "read", "update", "evaluate", "sample"])
def test_raise_anywhere(tmp_path, place):
    judge_raise(failing("raise", place, tmp_path, ranks=4), rank=3)


@pytest.mark.drill
def test_kill(tmp_path):
    ending = failing("kill", "update", tmp_path)
    assert ending.status != 0 and ending.gone_after < 10, ending


@pytest.mark.drill
def test_exit_with_zero(tmp_path):
    ending = failing("exit", "gradients", tmp_path, error="rank 1 left the job alone: sys.exit(0)")
    assert ending.status != 0 and ending.gone_after < 10 and ending.error_after < 10, ending


@pytest.mark.drill
@pytest.mark.parametrize("mode", ["kill", "exit"])
@pytest.mark.parametrize("place", ["build", "evaluate", "sample"])
def test_kill_and_exit_anywhere(tmp_path, mode, place):
    ending = failing(mode, place, tmp_path, ranks=3)
    assert ending.status != 0 and ending.gone_after < 10, ending


@pytest.mark.drill
def test_stop(tmp_path):
    """With a time-out of 5 s the survivor's error comes within 10; torchrun kills what is stopped after 30 s."""
    ending = failing("stop", "gradients", tmp_path, error="rank 0 failed:", limit=90)
    assert ending.status != 0 and ending.error_after < 10 and ending.gone_after < 45, ending


@pytest.mark.parametrize("place", ["gradients", pytest.param("report", marks=pytest.mark.drill)])
def test_raise_in_a_world_of_one(tmp_path, place):
    ending = jobs.run([sys.executable, *SCRIPT, "raise", place, str(tmp_path)])
    assert ending.status != 0 and ending.gone_after < 10
    assert ending.output.rstrip().endswith("ArithmeticError: on purpose"), ending.output


def test_wrong_input_is_one_line_a_rank(tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nstepz = 3\n")
    words = "error: unknown setting train.stepz: did you mean train.steps?"
    train = ("-m", "nd_mesh", "train", str(tmp_path / "run.toml"))
    ending = jobs.run([*jobs.TORCHRUN, "--nproc-per-node", "3", *train])
    told = {line for line in ending.output.splitlines() if "error:" in line}
    assert ending.status != 0 and told, (
        ending.output
    )  # torchrun may end a rank before it has told; the words are the same
    assert told <= {f"rank {rank}: {words}" for rank in range(3)}, ending.output
