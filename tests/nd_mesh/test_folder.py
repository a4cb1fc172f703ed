"""The folder of a run that goes on in it."""

import json

import pytest

from nd_mesh import folder, metrics
from nd_mesh.config import ConfigError


def run_folder(out, steps, torn=b""):
    out.mkdir()
    records = b"".join(json.dumps({"step": step, "loss": 0.1}).encode() + b"\n" for step in steps)
    (out / "metrics.jsonl").write_bytes(records + torn)
    (out / "manifest.json").write_text("first")
    for name in ("step-000002", "step-000004", "step-000004.old", "step-000006", "step-000008.tmp"):
        (out / name).mkdir()
    return records


@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "lo', b'{"step": 8}', b"\0\0\0\n"])
def test_what_is_later_is_kept_aside(tmp_path, torn):
    """Also a record that a full disk or a kill cut off."""
    records = run_folder(tmp_path / "run", [1, 2, 3, 4, 4, 5, 6, 7], torn).splitlines(keepends=True)
    folder.go_on(tmp_path / "run", 4)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"metrics.jsonl", "tail.1", "step-000002", "step-000004", "step-000004.old", "step-000008.tmp"}
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b"".join(records[:5])
    assert (tmp_path / "run" / "tail.1" / "metrics.jsonl").read_bytes() == b"".join(records[5:]) + torn
    assert (tmp_path / "run" / "tail.1" / "step-000006").is_dir()
    assert (tmp_path / "run" / "tail.1" / "manifest.json").read_text() == "first"


def test_again(tmp_path):
    records = run_folder(tmp_path / "run", [1, 2, 3, 4])
    for step in (4, 3, 2):
        folder.go_on(tmp_path / "run", step)
    kept = [(tmp_path / "run" / name / "metrics.jsonl").read_bytes() for name in ("", "tail.3", "tail.2", "tail.1")]
    assert b"".join(kept) == records and kept[0].count(b"\n") == 2


@pytest.mark.parametrize("going_on", [False, True])
def test_two_runs_in_one_folder_are_refused(tmp_path, going_on):
    """T131: the second neither moves the first's folder aside nor writes into it; when the first has gone it may."""
    first, second = (metrics.Report(tmp_path / "run", 9, shown=True) for _ in range(2))
    first.open({}, going_on=False)
    with pytest.raises(ConfigError, match="belongs to a run that has not ended"):
        second.open({}, going_on=going_on)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    del first  # as when it failed; a killed one too
    second.open({}, going_on=going_on)
    with pytest.raises(ConfigError, match="belongs to a run"):
        metrics.Report(tmp_path / "run", 9, shown=True).open({}, going_on=False)
