"""The run around the trainer: what it tells before its first step, and what it leaves behind."""

import json

import numpy as np
import pytest

from collectives.runtime import Runtime
from nd_mesh import __main__ as command
from nd_mesh import loop, metrics
from nd_mesh.config import Config
from nd_mesh.metrics import Record
from tests import parity
from tests.nd_mesh.test_train import config, documents, trainer


def described(run: Runtime, cfg: Config) -> list[str]:
    return loop.describe(trainer(run, cfg, documents()))


def test_an_uneven_deal_is_told(pool):
    told = [line for line in pool.run(3, described, config(3, batch=5))[0] if "unevenly" in line]
    assert told == ["rows are dealt unevenly: [2, 2, 1] a rank, each over 1 microbatches"]
    assert not any("unevenly" in line for line in pool.run(3, described, config(3, batch=6))[0])


def report_a_run(run: Runtime, cfg: Config) -> None:
    stream = parity.stream(documents(), 16)
    loop.train(cfg, stream, stream, run)


def test_files_of_a_run(pool, tmp_path):
    """metrics.jsonl in full precision, the sample, the curve; an earlier run in the same folder is kept."""
    cfg = config(2, out=str(tmp_path / "run"), evaluate_every=4)
    for _ in range(2):
        pool.run(2, report_a_run, cfg)
    for folder in ("run", "run.1"):
        records = metrics.read(tmp_path / folder)
        steps = [Record(**record) for record in records if "loss" in record]
        assert [step.step for step in steps] == list(range(1, 9))
        assert [record["step"] for record in records if "validation_loss" in record] == [4, 8]
        assert (tmp_path / folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / folder / "sample.txt").read_text().startswith("\x01")
    first, again = (
        [json.dumps(r["loss"]) for r in metrics.read(tmp_path / f) if "loss" in r] for f in ("run", "run.1")
    )
    assert first == again and all(len(loss) > 12 for loss in first)


def test_the_distance_of_two_curves():
    """At the steps that both have: a run that was resumed elsewhere has no first ones."""
    steps = np.arange(1, 11.0)
    whole, rest = np.stack([steps, 1 / steps], 1), np.stack([steps[5:], 1 / steps[5:] + 1e-3], 1)
    for pair in ((whole, rest), (rest, whole)):
        found, apart = metrics.distance(*pair)
        assert found.tolist() == [6, 7, 8, 9, 10] and apart == pytest.approx(np.full(5, 1e-3), rel=1e-12)


def test_distances_in_words(tmp_path):
    for name, steps, off in (("one", range(1, 31), 0.0), ("two", range(1, 31), 1e-4), ("late", range(40, 50), 0.0)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": 1.0 + off * step}) + "\n" for step in steps]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    assert metrics.distances([tmp_path / name for name in ("one", "two", "late")]) == [
        "two from one: 2.0e-03 up to step 20, 3.0e-03 up to step 30",
        "late from one: no step that both have",
    ]


def test_curves_of_several_runs(tmp_path, capsys):
    """Of a run that was killed the line that it was writing is left out; another that is no record is named."""
    pytest.importorskip("matplotlib")
    folders = [tmp_path / name for name in ("one", "killed")]
    for folder in folders:
        folder.mkdir()
        lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 5)]
        (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "lo'[: 15 * (folder.name == "killed")]]))
    assert [len(metrics.read(folder)) for folder in folders] == [4, 4]
    assert command.main(["plot", *map(str, folders), "--out", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    (folders[1] / "metrics.jsonl").write_text('{"step": 1}\n{"st\n')
    assert command.main(["plot", *map(str, folders), "--out", str(tmp_path / "x.png")]) == 2
    assert "metrics.jsonl, line 2 is not a record of a run: '{\"st'\n" in capsys.readouterr().err
    assert command.main(["plot", str(folders[0]), "--out", str(tmp_path / "x.png"), "--mesh.dp", "2"]) == 2
    assert capsys.readouterr().err == "error: --mesh.dp: plot has no settings of a run\n"
