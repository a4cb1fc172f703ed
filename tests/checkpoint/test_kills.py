"""Ranks of a running job are killed at random moments: what was committed is found, and the job goes on from it."""

import os
import random
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoints, Keep, Saved, State, find
from collectives.layout import Box
from collectives.runtime import Runtime
from tests.pool import Pool, RankFailed

RANKS, WIDTH = 2, 6
KEPT = 2
PROMISED = "promised"  # the file with the newest step that the run knows to be durable


def advance(values: torch.Tensor, step: int) -> None:
    """A step of the run: every number of the next state depends on all of the last."""
    values.mul_(3).add_(values.sum() + step).remainder_(1009)


def expected(step: int) -> torch.Tensor:
    values = torch.arange(float(WIDTH), dtype=torch.float64)
    for done in range(step):
        advance(values, done)
    return values


def state(run: Runtime, values: torch.Tensor, step: int) -> State:
    rows = WIDTH // run.size
    part = Box((WIDTH,), (run.rank * rows,), (rows,))
    copies = {"copy": [(Box.whole((WIDTH,)), values)]}
    return State({"cut": [(part, values[run.rank * rows :][:rows])], **copies}, shared={"step": step})


def read(saved: Saved) -> torch.Tensor:
    cut, copy = torch.zeros(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)
    saved.read({name: [(Box.whole((WIDTH,)), tensor)] for name, tensor in (("cut", cut), ("copy", copy))})
    assert saved.shared["step"] == saved.step and torch.equal(cut, copy)
    return copy


def train(run: Runtime, base: Path, number: int, behind: bool) -> None:
    """Resume, then save every step until killed. What is found must be whole, right, and not older than promised."""
    promise = os.open(base / PROMISED, os.O_RDWR | os.O_CREAT)
    [promised] = struct.unpack("q", os.pread(promise, 8, 0) or struct.pack("q", -1))
    (base / f"pid {number} {run.rank}").write_text(str(os.getpid()))

    def durable(step: int) -> None:
        os.pwrite(promise, struct.pack("q", step), 0)

    def log(line: str) -> None:
        if line.split()[2:4] == ["is", "durable"]:
            durable(int(line.split()[1]))

    step, values = 0, expected(0)
    if promised >= 0:
        saved = find(base / "run", group=run.world, verify=True)
        step, values = saved.step, read(saved)
        assert step >= promised, f"step {promised} was durable, step {step} is found"
        assert torch.equal(values, expected(step)), f"step {step} has other values"
    writers = run.new_group(range(run.size), "writers")
    with Checkpoints(base / "run", run.world, writer_group=writers, keep=Keep(last=KEPT), log=log) as saves:
        while True:  # first the step that is there, once more
            (saves.save_async if behind else saves.save)(step, state(run, values, step))
            if not behind:
                durable(step)
            advance(values, step)
            step += 1


def strike(base: Path, number: int, draw: random.Random, before: int) -> None:
    """Kill one rank or all of them, soon after they have started, or after they have committed something."""
    victims = [draw.randrange(RANKS)] if draw.random() < 0.5 else range(RANKS)
    delay, early, steps = draw.uniform(0.0, 0.05), draw.random() < 0.25, draw.randrange(4)
    pids = [base / f"pid {number} {rank}" for rank in range(RANKS)]
    while not all(path.exists() and path.read_text() for path in pids) or not (
        early or promised(base) > before + steps
    ):
        time.sleep(0.001)
    time.sleep(delay)
    for rank in victims:
        os.kill(int(pids[rank].read_text()), signal.SIGKILL)


def promised(base: Path) -> int:
    try:
        return struct.unpack("q", (base / PROMISED).read_bytes())[0]
    except (FileNotFoundError, struct.error):
        return -1


@pytest.fixture
def mortals() -> Iterator[Pool]:
    """Ranks of this test's own, for they do not survive it."""
    pool = Pool()
    yield pool
    pool.close()


def kill(pool: Pool, base: Path, kills: int, seed: int) -> None:
    """A job that is killed so many times, and each time goes on."""
    draw, saved = random.Random(seed), 0
    for number in range(kills):
        before = promised(base)
        striker = threading.Thread(target=strike, args=(base, number, draw, before), daemon=True)
        striker.start()
        with pytest.raises(RankFailed, match="killed by SIGKILL"):
            pool.run(RANKS, train, base, number, number % 2 == 1, timeout=60.0)
        striker.join()
        saved += promised(base) - before
        names = [path.name for path in (base / "run").glob("step-*")] if (base / "run").exists() else []
        assert len([name for name in names if "." not in name]) <= KEPT + 1, names
    pool.run(1, resume, base, promised(base))
    print(f"{kills} kills, {saved} steps durable")
    assert saved >= kills // 2, "the job did not go on"


def resume(run: Runtime, base: Path, least: int) -> None:
    """On another number of ranks; what the kills left over goes away."""
    saved = find(base / "run", group=run.world, verify=True)
    assert saved.step >= least and torch.equal(read(saved), expected(saved.step))
    with Checkpoints(base / "run", run.world, keep=Keep(last=KEPT)) as saves:
        saves.save(saved.step + 1, state(run, expected(saved.step + 1), saved.step + 1))
    assert {path.name.partition("-")[0] for path in (base / "run").iterdir()} == {"LOCK", "step"}
    assert not [path for path in (base / "run").iterdir() if path.suffix]


def test_what_was_committed_survives_kills(mortals, tmp_path):
    print("3 of 200 kills")
    kill(mortals, tmp_path, 3, seed=0)


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(1, 5))
def test_two_hundred_kills(mortals, tmp_path, seed):
    kill(mortals, tmp_path, 50, seed)
