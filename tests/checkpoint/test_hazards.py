"""What users do: links, foreign files, forks, relative paths, odd tensors, keys and facts."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint import Checkpoints, Keep, State, find
from checkpoint.shard import BLOCK
from collectives.agreement import Stopped
from collectives.layout import Box
from collectives.runtime import Runtime
from tests.checkpoint import tiny


def one(tensor: torch.Tensor) -> State:
    return State({"x": [(Box.whole(tensor.shape), tensor)]})


def values(run: Runtime, path: Path) -> torch.Tensor:
    """The tensor x of the newest checkpoint in a folder, or of one."""
    saved = find(path, group=run.world)
    dtype, shape = saved.tensors["x"]
    found = torch.full(shape, 77).to(dtype)
    saved.read({"x": [(Box.whole(shape), found)]})
    return found


def linked(run: Runtime, base: Path, path: Path) -> None:
    """A checkpoint of another run that is linked into ours, and has to go by our retention."""
    with Checkpoints(base, run.world) as saves:
        saves.save(1, one(torch.ones(3)))
    path.mkdir()
    (path / "step-000001").symlink_to(base / "step-000001")
    (path / "step-000007.tmp").write_text("a file of an editor's")
    (path / "step-000009").write_text("no folder either")
    with Checkpoints(path, run.world, keep=Keep(last=1)) as saves:
        saves.save(2, one(torch.zeros(3)))
    assert torch.equal(values(run, base), torch.ones(3))
    assert {entry.name for entry in path.iterdir()} == {"LOCK", "step-000002", "step-000009"}
    assert find(path, group=run.world).step == 2


def test_a_link_goes_and_what_it_leads_to_stays(pool, tmp_path):
    pool.run(1, linked, tmp_path / "base", tmp_path / "run")


def forked(run: Runtime, path: Path) -> None:
    """A process that was forked meanwhile, as a data loader's worker is, does not keep the folder."""
    reader, writer = os.pipe()
    with Checkpoints(path, run.world) as saves:
        saves.take()
        if not (child := os.fork()):
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    with Checkpoints(path, run.world) as again:
        again.take()
    os.close(writer)
    os.waitpid(child, 0)


def test_a_child_does_not_keep_the_folder(pool, tmp_path):
    pool.run(1, forked, tmp_path)


def relative(run: Runtime, path: Path) -> None:
    before = Path.cwd()
    try:
        os.chdir(path)
        with Checkpoints(Path("step-by-step"), run.world) as saves:  # which is no checkpoint's name
            saves.save(1, one(torch.ones(3)))
        saved = find(Path("step-by-step"), group=run.world)
    finally:
        os.chdir(before)
    saved.read({"x": [(Box.whole((3,)), found := torch.zeros(3))]})
    assert torch.equal(found, torch.ones(3))


def test_a_relative_path_stays_where_it_was(pool, tmp_path):
    pool.run(1, relative, tmp_path)


ODD = {
    "one of many": torch.arange(6.0).view(3, 2)[1:2, 1],
    "one by one": torch.arange(6.0).view(2, 3).T[1:2, 1:2],
    "transposed": torch.arange(6.0).view(2, 3).T,
    "expanded": torch.ones(1).expand(4),
    "learned": torch.nn.Parameter(torch.ones(2)),
}
REFUSED = {
    "meta": torch.empty(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "complex128": torch.ones(2, dtype=torch.complex128),
}


def odd_tensors(run: Runtime, path: Path) -> None:
    with Checkpoints(path, run.world, writer_group=run.new_group(range(run.size), "writers")) as saves:
        for step, tensor in enumerate(ODD.values()):
            saves.save(2 * step, one(tensor))
            assert torch.equal(values(run, path), tensor)
            saves.save_async(2 * step + 1, one(tensor))
            saves.wait()
            assert torch.equal(values(run, path), tensor)
        for tensor in REFUSED.values():
            for call in (saves.save, saves.save_async):
                with pytest.raises(Stopped, match=r"^x "):
                    call(99, one(tensor))


def test_odd_tensors(pool, tmp_path):
    pool.run(1, odd_tensors, tmp_path)


def refused(run: Runtime, path: Path, what: str) -> str:
    """The words, on every rank, though rank 0 alone makes the mistake."""
    good, bad = tiny.state(run.rank, run.size, 1), run.rank == 0
    about = {"out": Path("a"), "number": np.int64(3)} if bad and what == "about" else {}
    saves = Checkpoints(path, run.world, about=about)
    if what == "own" and bad:
        good.own = {"$tuple": 3}
    if what == "shared":
        good.shared = {3: "a", "b": 1} if bad else {"b": 1}
    with pytest.raises(Stopped) as stopped, saves:
        saves.save(1, good)
    return str(stopped.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("about", "rank 0: `about` cannot be JSON, .*PosixPath"),
        ("own", r"rank 0: own has the key '\$tuple': give text that does not begin with \$"),
        ("shared", "rank 0: shared has the key 3"),
    ],
)
def test_what_is_not_text_is_named_before_anything_is_written(pool, tmp_path, what, words):
    ranks = pool.run(2, refused, tmp_path / "run", what)
    assert ranks[0] == ranks[1] and re.search(words, ranks[0]), ranks
    assert not list((tmp_path / "run").glob("step-*"))


def ended(run: Runtime, path: Path) -> None:
    with Checkpoints(path, run.world) as saves:
        saves.save(1, one(torch.ones(3)))
    with pytest.raises(ValueError, match="have ended with their `with`"):
        saves.save(2, one(torch.ones(3)))


def test_after_its_end_nothing_is_saved_without_the_lock(pool, tmp_path):
    pool.run(1, ended, tmp_path)


UNFIT = {
    "too short": (Box.whole((5,)), torch.zeros(1), "comes with a tensor of shape [1]"),
    "too long": (Box.whole((5,)), torch.zeros(10), "comes with a tensor of shape [10]"),
    "sticks out": (Box((5,), (3,), (5,)), torch.zeros(5), "[5] at [3] is no part of [5]"),
    "meta": (Box.whole((5,)), torch.empty(5, device="meta"), "has no memory of its own"),
    "expanded": (Box.whole((5,)), torch.zeros(1).expand(5), "has no memory of its own"),
    "dtype": (Box.whole((5,)), torch.zeros(5, dtype=torch.complex128), "x is torch.float32, here torch.complex128"),
}


def unfit(run: Runtime, path: Path) -> list[str]:
    """On rank 1 a target cannot be filled; before it comes one that could."""
    told = []
    with Checkpoints(path, run.world) as saves:
        saves.save(1, State({name: [(Box.whole((5,)), torch.arange(5.0))] for name in ("a", "x")}))
        saved = saves.open()
        for box, tensor, _ in UNFIT.values():
            first, chosen = torch.zeros(5), (box, tensor) if run.rank else (Box.whole((5,)), torch.zeros(5))
            with pytest.raises(Stopped) as stopped:
                saved.read({"a": [(Box.whole((5,)), first)], "x": [chosen]})
            assert not first.any()
            told.append(str(stopped.value))
    return told


def test_nothing_is_filled_where_one_target_is_unfit(pool, tmp_path):
    ranks = pool.run(2, unfit, tmp_path)
    assert ranks[0] == ranks[1]
    assert all(words in told for told, (_, _, words) in zip(ranks[0], UNFIT.values(), strict=True)), ranks[0]


def one_more_than_a_block(run: Runtime, path: Path) -> None:
    """The last element alone lies in the last block: it is damaged, and the range that has it is refused, no other."""
    numel = BLOCK // 4 + 1
    with Checkpoints(path, run.world) as saves:
        saved = find(saves.save(1, one(torch.zeros(numel))), group=run.world)
    [file] = saved.path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    last, others = Box.whole((numel,)).cut(0, 1, numel - 1), Box.whole((numel,)).cut(0, 0, numel - 1)
    with pytest.raises(Stopped, match="is damaged between bytes"):
        saved.read({"x": [(last, torch.ones(numel - 1))]})
    saved.read({"x": [(others, torch.ones(numel - 1))]})


def test_the_block_of_the_last_element(pool, tmp_path):
    pool.run(1, one_more_than_a_block, tmp_path)
