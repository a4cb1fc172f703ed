"""The run around the trainer: what it tells before its first step, and what it leaves behind."""

import json

from collectives.runtime import Runtime
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
