"""The folder of a run that goes on in it."""

import errno
import json
import os

import pytest

from checkpoint import lock
from nd_mesh import folder


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


def test_two_runs_in_one_folder_are_refused(tmp_path):
    """T131: the second does not move the first's folder aside; when the first has ended it does."""
    folder.begin(tmp_path / "run")
    with lock.held(tmp_path / "run"):
        with pytest.raises(lock.Locked, match="belongs to a job that has not ended, process"):
            folder.begin(tmp_path / "run")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    folder.begin(tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1"}


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder.write(tmp_path / "a", "before")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        folder.write(tmp_path / "a", "after")
    assert (tmp_path / "a").read_text() == "before"
    assert folder.free_name(tmp_path / "a").name == "a.1"
