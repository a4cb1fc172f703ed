"""The calibration: the fit, the calls that it measures against the bytes of the model, and what it tells."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collectives import calibrate, comparison, demo
from collectives.calibrate import COLLECTIVES, MESSAGES, SHIFT, SHIFTS, SWEEP
from collectives.competitors import BACKEND, NODE, able, predicted
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


def test_long_messages_are_for_those_who_do_not_send_them_three_times():
    for n in SWEEP:
        found = able("all_reduce", 8, n)
        assert ("naive" in found) == ("tree" in found) == (n <= 1 << 22)
        assert {"ring", "direct", "halving", "hierarchical", BACKEND} <= set(found)


class Count(Watcher):
    """Bytes that this rank sends in exchanges."""

    def __init__(self):
        self.sent = 0

    def begins(self, call):
        self.sent += sum(part.nbytes for part in call.sends)


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
    machine = Topology(LINK, LINK, NODE)
    found = [_row(calibrate._name(SHIFT, n), SHIFT, LINK.latency + n / LINK.bandwidth) for n in SHIFTS]
    for collective in COLLECTIVES:
        for n in MESSAGES:
            for who in able(collective, size):
                model = predicted(collective, who, n, size, machine)
                seconds = factor * model.seconds if model else 1e-3
                found.append(_row(calibrate._name(collective, n), who, seconds))
    return found


def _row(case, who, seconds):
    return Row(case, who, (seconds,) * 2, 0.0, 0, 0, None)


def test_measured_as_predicted_is_a_ratio_of_one():
    for size, factor in ((2, 1.0), (3, 2.5)):
        found = calibrate.world(size, rows(size, factor), MESSAGES)
        assert found.link.latency == pytest.approx(LINK.latency)
        assert {p.ratio for p in found.points if p.who == BACKEND} == {None}
        assert all(p.ratio == pytest.approx(factor) for p in found.points if p.who != BACKEND)


def test_the_report():
    text = calibrate.report(calibrate.world(2, rows(2, 2.5), MESSAGES))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[1].startswith("the shift: α 200 µs, 1.500 GB/s") and lines[1].endswith("measured / fitted 1.00 … 1.00")
    naive = next(line for line in lines if line.startswith("all_reduce     naive"))
    assert naive.split()[2:5] == ["0.20", "→", "0.51"] and naive.count("× 2.5") == len(MESSAGES)
    assert sum(BACKEND in line for line in lines) == len(COLLECTIVES)
    assert "× 2.50" in lines[-1]


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    worlds = [calibrate.world(size, rows(size, 1.5), MESSAGES) for size in (2, 4)]
    calibrate.draw(worlds, tmp_path / "bus.png")
    assert (tmp_path / "bus.png").read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.parametrize(
    "name, message", [("bus.xyz", "must end in .png"), ("file/bus.png", "cannot be written"), ("new/bus.png", "")]
)
def test_what_cannot_be_drawn_is_refused_before_it_measures(name, message, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    (tmp_path / "file").touch()
    why = demo.no_figure(tmp_path / name)
    assert message in why and bool(message) == bool(why)


def test_under_torchrun_it_measures_nothing(monkeypatch, capsys):
    """Each of torchrun's ranks would start a world of its own, all at once."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["bench"])
    for main in (lambda: calibrate.main([]), lambda: comparison.main(lambda run: [], ranks=[1])):
        with pytest.raises(SystemExit, match="2"):
            main()
        assert "not with torchrun" in capsys.readouterr().err


@pytest.mark.drill
def test_the_command():
    command = [sys.executable, "-m", "collectives", "calibrate", "--ranks", "2", "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and "all_reduce     ring" in done.stdout and calibrate.OFF in done.stdout
