"""The calibration: the fit, the calls that it measures against the bytes of the model, and what it tells."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collectives import calibrate, comm, cost
from collectives.calibrate import BACKEND, BACKENDS, COLLECTIVES, MESSAGES, SHIFT, SHIFTS
from collectives.cost import Link, Topology
from collectives.turns import Row
from collectives.watch import Watcher, watching

ROOT = Path(__file__).parent.parent.parent
LINK = Link(2e-4, 1.5e9)


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_points_on_a_line_give_the_line():
    found = calibrate.fit({n: LINK.latency + n / LINK.bandwidth for n in SHIFTS})
    assert (found.latency, found.bandwidth) == (pytest.approx(LINK.latency), pytest.approx(LINK.bandwidth))


def test_relative_errors_count():
    """A long message that is 10 % slow moves the bandwidth and leaves the latency; so do the normal equations."""
    n = np.array(SHIFTS, dtype=float)
    t = LINK.latency + n / LINK.bandwidth
    t[-1] *= 1.1
    found = calibrate.fit(dict(zip(SHIFTS, t.tolist(), strict=True)))
    system = np.array([[(1 / t**2).sum(), (n / t**2).sum()], [(n / t**2).sum(), (n**2 / t**2).sum()]])
    latency, per_byte = np.linalg.solve(system, np.array([(1 / t).sum(), (n / t).sum()]))
    assert (found.latency, found.bandwidth) == (pytest.approx(latency), pytest.approx(1 / per_byte))
    assert found.latency == pytest.approx(LINK.latency, rel=0.02) and found.bandwidth < 0.99 * LINK.bandwidth


def test_a_latency_below_zero_is_none_and_a_falling_line_is_refused():
    assert calibrate.fit({1: 0.5, 2: 2.0}).latency == 0.0
    with pytest.raises(ValueError, match="longer messages took no longer"):
        calibrate.fit({1: 2.0, 2: 1.0})


# -- what is measured --------------------------------------------------------------------------------------------------


def test_everyone_who_can_do_a_collective_takes_part():
    here = {(name, who) for name in COLLECTIVES for who in calibrate.competitors(name) if who != BACKEND}
    assert here == {key for key in cost.ALGORITHMS if key[0] in COLLECTIVES and key[1] != "hierarchical"}
    assert {name for name in COLLECTIVES if BACKEND in calibrate.competitors(name)} == set(BACKENDS)


class Count(Watcher):
    """Bytes that this rank sends in exchanges, and whether a call is the backend's."""

    def __init__(self):
        self.sent, self.ops = 0, []

    def begins(self, call):
        self.ops.append(call.op)
        self.sent += sum(part.nbytes for part in call.sends)


def counted(run, n):
    """(collective, who) → (bytes, operations seen) of one call on this rank."""
    found = {}
    for collective in COLLECTIVES:
        for who, call in calibrate._collective(run, collective, n).calls.items():
            with watching(count := Count()):
                call()
            comm.barrier(group=run.world)
            found[collective, who] = count.sent, count.ops
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_measured_sends_the_bytes_that_the_model_predicts(pool, ranks):
    n = 4 * 120 * ranks
    for rank, found in enumerate(pool.run(ranks, counted, n)):
        for (collective, who), (sent, ops) in found.items():
            if who == BACKEND:
                assert ops == [BACKENDS[collective].__name__]
            else:
                choice = {"chunks": 1} if (collective, who) == ("broadcast", "ring") else {}
                expected = cost.of(collective, who, n, ranks, Topology(LINK, LINK, ranks), **choice).sent_by[rank]
                assert sent == pytest.approx(expected), (collective, who)


def shifted(run):
    [call] = calibrate._shift(run, 4096).calls.values()
    with watching(count := Count()):
        call()
    return count.sent


def test_the_shift_sends_one_message(pool):
    assert pool.run(3, shifted) == [4096] * 3


# -- what is told ------------------------------------------------------------------------------------------------------


def rows(size, factor):
    """As of a machine that the model describes, but for collectives slower by a factor; the backend's takes 1 ms."""
    machine = Topology(LINK, LINK, size)
    found = [_row(calibrate._name(SHIFT, n), SHIFT, LINK.latency + n / LINK.bandwidth) for n in SHIFTS]
    for collective in COLLECTIVES:
        for n in MESSAGES:
            for who in calibrate.competitors(collective):
                whole = n // (4 * size) * 4 * size
                choice = {"chunks": max(1, -(-n // 2**20))} if (collective, who) == ("broadcast", "ring") else {}
                model = cost.of(collective, who, whole, size, machine, **choice).seconds if who != BACKEND else 1e-3
                found.append(_row(calibrate._name(collective, n), who, model * (factor if who != BACKEND else 1)))
    return found


def _row(case, who, seconds):
    return Row(case, who, (seconds,) * 2, 0.0, 0, 0, None)


def test_measured_as_predicted_is_a_ratio_of_one():
    for size, factor in ((2, 1.0), (3, 2.5)):
        found = calibrate.world(size, rows(size, factor))
        assert found.link.latency == pytest.approx(LINK.latency)
        assert {p.ratio for p in found.points if p.who == BACKEND} == {None}
        assert all(p.ratio == pytest.approx(factor) for p in found.points if p.who != BACKEND)
        assert all(point.n % (4 * size) == 0 for point in found.points)


def test_the_report():
    text = calibrate.report(calibrate.world(2, rows(2, 2.5)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[1].startswith("the shift: α 200 µs, 1.500 GB/s") and lines[1].endswith("measured / fitted 1.00 … 1.00")
    naive = next(line for line in lines if line.startswith("all_reduce     naive"))
    assert naive.split()[2:5] == ["0.20", "→", "0.51"] and naive.count("× 2.5") == len(MESSAGES)
    assert sum(BACKEND in line for line in lines) == len(BACKENDS)
    assert "× 2.50" in lines[-1]


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    worlds = [calibrate.world(size, rows(size, 1.5)) for size in (2, 4)]
    calibrate.draw(worlds, tmp_path / "new" / "bus.png")
    assert (tmp_path / "new" / "bus.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--rounds", "1"]])
def test_too_few_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        calibrate.main(arguments)
    assert "at least 2 rounds and 2 ranks" in capsys.readouterr().err


def test_without_matplotlib_it_says_so_before_it_measures(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        calibrate.main(["--figure", "bus.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_command():
    command = [sys.executable, "-m", "collectives.calibrate", "--ranks", "2", "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and "all_reduce     ring" in done.stdout and calibrate.OFF in done.stdout
