"""What lies in the folder: files that any reader of safetensors reads, a manifest that says where everything is."""

import hashlib
import json
import subprocess

import pytest
import torch
import xxhash
from safetensors import safe_open

from checkpoint import Checkpoints, State
from checkpoint.manifest import parse
from checkpoint.shard import BLOCK
from collectives.layout import Box
from tests.checkpoint import cuts

LARGE = (700, 1001)  # of float32: 2.67 blocks
ABOUT = {"mesh": {"dp": 3}, "config": {"lr": 0.1}}


def writes(run, path):
    rows = cuts.rows(LARGE, run.rank, run.size)
    large = {"large": [(box, box.index().float()) for box in rows]}
    found, optimizer = cuts.filled(run, "flat")
    small = {
        f"{kind}/{param.held.name}": [
            (box, part.view(box.local))
            for box, part in zip(
                param.held.boxes, tensor.view(-1).split([box.numel for box in param.held.boxes]), strict=True
            )
        ]
        for param in found
        if param.held.boxes
        for kind, tensor in {"parameter": param.detach(), "exp_avg": optimizer.state[param]["exp_avg"]}.items()
    }
    state = State(large | small, {"cursor": 7}, {"rank": run.rank})
    with Checkpoints(path, run.world, about=ABOUT) as checkpoints:
        return checkpoints.save(20, state)


@pytest.fixture(scope="module", params=[1, 3])
def saved(pool, request, tmp_path_factory):
    """(ranks, a checkpoint)."""
    return request.param, pool.run(request.param, writes, tmp_path_factory.mktemp("run"))[0]


def manifest(path):
    return json.loads((path / "manifest.json").read_text())


def expected(name, box):
    kind, _, tensor = name.partition("/")
    return box.index().float() if name == "large" else cuts.numbers(kind, tensor, [box]).view(box.local)


def test_the_library_reads_every_box(saved):
    """Names, dtypes, shapes and bits; and no file has more than the manifest says."""
    _, path = saved
    told = manifest(path)
    seen = {file: set() for file in told["files"]}
    for name, tensor in told["tensors"].items():
        for piece in tensor["pieces"]:
            key = f"{name}@{','.join(map(str, piece['offset']))}"
            seen[piece["file"]].add(key)
            with safe_open(path / piece["file"], "pt") as file:
                found = file.get_tensor(key)
            box = Box(tuple(tensor["shape"]), tuple(piece["offset"]), tuple(piece["local"]))
            wanted = expected(name, box)
            assert found.dtype == wanted.dtype and found.shape == wanted.shape, key
            assert torch.equal(cuts.bits(found), cuts.bits(wanted)), key
    for file, keys in seen.items():
        with safe_open(path / file, "pt") as opened:
            assert set(opened.keys()) == keys
    assert {tensor["dtype"] for tensor in told["tensors"].values()} >= {"F32", "BF16", "F64", "C64", "I64", "BOOL"}


def test_what_is_in_the_folder(saved):
    ranks, path = saved
    files = [f"rank-{rank}.safetensors" for rank in range(ranks)]
    assert path.name == "step-000020"
    assert sorted(entry.name for entry in path.iterdir()) == sorted(["COMMIT", "manifest.json", *files])
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["LOCK", "step-000020"]


def test_sha256sum_checks_the_commit(saved):
    _, path = saved
    digest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    assert (path / "COMMIT").read_text() == f"{digest}  manifest.json\n"
    told = subprocess.run(["sha256sum", "--check", "COMMIT"], cwd=path, capture_output=True, text=True, check=True)
    assert told.stdout == "manifest.json: OK\n"


def test_the_manifest(saved):
    ranks, path = saved
    told = manifest(path)
    assert set(told) == {"format", "step", "world", "files", "tensors", "shared", "own", "about"}
    assert (told["format"], told["step"], told["world"], told["about"]) == (1, 20, ranks, ABOUT)
    assert told["shared"] == {"cursor": 7} and told["own"] == [{"rank": rank} for rank in range(ranks)]
    assert set(told["files"]) == {f"rank-{rank}.safetensors" for rank in range(ranks)}
    for file, entry in told["files"].items():
        data = (path / file).read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        assert entry == {"bytes": len(data), "header": xxhash.xxh3_128_hexdigest(data[:length])}
        assert length % 8 == 0
    shapes = {f"{kind}/{name}": shape for name, (shape, _) in cuts.TENSORS.items() for kind in cuts.KINDS[:2]}
    found = {name: tuple(tensor["shape"]) for name, tensor in told["tensors"].items()}
    assert found == {"large": LARGE, **shapes}


def test_another_format_is_refused(saved):
    text = (saved[1] / "manifest.json").read_text()
    assert parse(text).text() == text
    with pytest.raises(ValueError, match="its format is 2, this code reads 1"):
        parse(text.replace('"format":1', '"format":2'))


def test_a_hash_for_each_block(saved):
    """Of a large piece several, each of its own bytes; every piece begins at a multiple of its element."""
    _, path = saved
    blocks = 0
    covered = {file: [] for file in manifest(path)["files"]}
    for name, tensor in manifest(path)["tensors"].items():
        for piece in tensor["pieces"]:
            data = (path / piece["file"]).read_bytes()
            wanted = expected(name, Box(tuple(tensor["shape"]), tuple(piece["offset"]), tuple(piece["local"])))
            stored = data[piece["at"] : piece["at"] + wanted.nbytes]
            assert stored == cuts.bits(wanted).numpy().tobytes(), name
            assert piece["hashes"] == [
                xxhash.xxh3_128_hexdigest(stored[at : at + BLOCK]) for at in range(0, len(stored), BLOCK)
            ]
            assert piece["at"] % wanted.element_size() == 0
            blocks = max(blocks, len(piece["hashes"]))
            covered[piece["file"]].append((piece["at"], piece["at"] + wanted.nbytes))
    assert blocks == {1: 3, 3: 1}[len(covered)]
    for file, spans in covered.items():  # header and pieces are the file, without a hole
        starts, stops = zip(*sorted(span for span in spans if span[0] < span[1]), strict=True)
        length = 8 + int.from_bytes((path / file).read_bytes()[:8], "little")
        assert starts == (length, *stops[:-1]) and stops[-1] == (path / file).stat().st_size
