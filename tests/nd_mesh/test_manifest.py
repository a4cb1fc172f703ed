"""manifest.json: what a run was."""

import json
import subprocess
from dataclasses import asdict, replace

import numpy as np

from nd_mesh import loop, manifest
from nd_mesh.config import Config, MeshConfig, validated
from tests.nd_mesh.runs import config, stream


def write_a_manifest(run, cfg):
    loop.train(cfg, stream(), stream(), run)


def test_content(pool, tmp_path):
    cfg = config(3, out=str(tmp_path / "run"), steps=1)
    pool.run(3, write_a_manifest, cfg)
    told = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert validated(told["config"]) == cfg
    assert [told["ranks"][str(rank)]["dp"] for rank in range(3)] == [0, 1, 2]
    assert (told["world"], told["backend"], told["device"]) == (3, "gloo", "cpu")
    assert told["data"] == manifest.data_hash(stream(), stream())
    assert set(told["versions"]) == {"python", "torch", "numpy", "ndparallel"} and all(told["versions"].values())
    assert told["commit"] and told["started"].endswith("+00:00")
    assert asdict(cfg).keys() == told["config"].keys()
    assert list(told["groups"]) == ["dense"] and told["groups"]["dense"]["dp"] == [[0, 1, 2]]


def write_groups(run, sizes, path):
    if run.rank == 0:
        path.write_text(json.dumps(manifest.of(Config(mesh=sizes), run, stream())))


def test_groups_of_both_views(pool, tmp_path):
    """By name, as lists of ranks; uncut axes too, whose groups are of one rank."""
    pool.run(8, write_groups, MeshConfig(pp=2, fsdp=2, tp=2, ep=2), tmp_path / "manifest.json")
    told = json.loads((tmp_path / "manifest.json").read_text())
    pairs = [[0, 2], [1, 3], [4, 6], [5, 7]]
    alone = [[rank] for rank in range(8)]
    assert told["groups"] == {
        "dense": {
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "dp": alone,
            "fsdp": pairs,
            "cp": alone,
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            **{"batch": pairs, "shard": pairs, "data": pairs},
            "row": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "tokens": [[0, 2, 4, 6], [1, 3, 5, 7]],
        },
        "expert": {
            "ep": pairs,
            "ep_tp": [[0, 1, 2, 3], [4, 5, 6, 7]],
            **{"expert_data": alone, "expert_shard": alone, "expert_replicas": alone},
        },
    }
    assert told["ranks"]["6"] == {"pp": 1, "dp": 0, "fsdp": 1, "cp": 0, "tp": 0, "expert_data": 0, "ep": 1}


def test_data_hash():
    """Every token, every document's start, and the cut between the streams count; where the data lies does not."""
    one = stream()
    other = replace(one, tokens=one.tokens.copy())
    known = manifest.data_hash(one, one)
    assert manifest.data_hash(other, other) == known
    other.tokens[-1] += 1
    moved = replace(one, starts=np.append(one.starts[:-1], one.starts[-1] + 1))
    shorter, longer = replace(one, tokens=one.tokens[:-3]), replace(one, tokens=np.append(one.tokens[-3:], one.tokens))
    hashes = [
        known,
        manifest.data_hash(one, other),
        manifest.data_hash(moved, one),
        manifest.data_hash(shorter, longer),
    ]
    assert len(set(hashes)) == 4 and all(len(digest) == 64 for digest in hashes)


def test_code_commit(tmp_path):
    """A commit, marked when files differ from it; none outside a repository or inside somebody else's."""

    def git(*command: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    assert manifest.code_commit(tmp_path) == "unknown"
    git("init", "-q")
    assert manifest.code_commit(tmp_path) == "unknown"
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("x = 1\n")
    git("add", "."), git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD").strip()
    assert manifest.code_commit(tmp_path) == head and manifest.code_commit(tmp_path / "inner") == "unknown"
    (tmp_path / "inner" / "a.py").write_text("x = 2\n")
    assert manifest.code_commit(tmp_path) == f"{head}-dirty"


def test_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert manifest.code_commit(tmp_path) == "unknown"
