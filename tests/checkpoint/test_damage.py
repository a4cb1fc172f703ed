"""Damage to a complete checkpoint: refused on every rank, naming the file, and nothing of the model has changed."""

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from checkpoint import Checkpoints, Keep, State, find
from checkpoint.manifest import NAME as MANIFEST
from checkpoint.shard import BLOCK
from collectives import comm
from collectives.agreement import Stopped
from collectives.layout import Box
from collectives.runtime import Runtime
from tests.checkpoint import tiny

STEPS = (1, 2)
FILES = ("rank-0.safetensors", "rank-1.safetensors", MANIFEST, "COMMIT")
FLIPS = 100


def save(run: Runtime, path: Path, steps: tuple[int, ...] = STEPS, keep: Keep = Keep()) -> None:  # noqa: B008, frozen
    with Checkpoints(path, run.world, keep=keep) as saves:
        for step in steps:
            saves.save(step, tiny.state(run.rank, run.size, step))


def load(run: Runtime, path: Path, **options: bool) -> tuple[int, str]:
    """(step, "") of what is loaded, and it is right; (-1, words) of a load that is refused, which changes nothing."""
    tensors = tiny.empty()
    try:
        saved = find(path, group=run.world, **options)
        saved.read(tiny.wanted(tensors))
    except Stopped as stopped:
        assert tiny.same(tensors, tiny.empty()), "a refused load has changed the model"
        return -1, str(stopped)
    assert tiny.same(tensors, tiny.whole(saved.step, saved.shared["version"])), "other values than were saved"
    return saved.step, ""


# -- a byte ------------------------------------------------------------------------------------------------------------


def flips(run: Runtime, path: Path, places: list[tuple[str, int, int]]) -> list[str]:
    """Flip bytes of the newest checkpoint, one at a time; returns those that were not refused as they must be."""
    save(run, path)
    wrong = []
    for number, (name, part, by) in enumerate(places):
        file = path / "step-000002" / name
        at = part % file.stat().st_size
        flip(run, file, at, by)
        step, words = load(run, path, verify=number % 2 == 0)
        if step >= 0 or str(file) not in words:
            wrong.append(f"{name}, byte {at} by {by}: step {step}, {words!r}")
        flip(run, file, at, by)
    assert load(run, path) == (2, "")
    return wrong


def flip(run: Runtime, file: Path, at: int, by: int) -> None:
    """On the first rank, which all others ask for its manifest before they look at a file."""
    if run.rank == 0:
        with file.open("r+b") as opened:
            data = bytearray(opened.read())
            data[at] ^= by
            opened.seek(0)
            opened.write(data)


def drawn(count: int) -> list[tuple[str, int, int]]:
    draw = random.Random(count)
    return [(draw.choice(FILES), draw.randrange(1 << 40), draw.randrange(1, 256)) for _ in range(count)]


def test_a_byte_that_changes_is_noticed(pool, tmp_path):
    print(f"{FLIPS} of 1000 bytes, and each of COMMIT")
    places = drawn(FLIPS) + [("COMMIT", at, 1 << at % 8) for at in range(80)]
    assert pool.run(2, flips, tmp_path, places) == [[], []]


@pytest.mark.drill
def test_a_thousand_bytes(pool, tmp_path):
    assert pool.run(2, flips, tmp_path, drawn(1000), timeout=300.0) == [[], []]


def blocks(run: Runtime, path: Path) -> list[str]:
    """Bytes at the edges of the blocks of a tensor that has several."""
    values = torch.arange(5 * BLOCK // 16, dtype=torch.float64)
    box = Box.whole(values.shape)
    with Checkpoints(path, run.world) as saves:
        saves.save(1, State({"long": [(box, values)]} if run.rank == 0 else {}))
    file, wrong = path / "step-000001" / "rank-0.safetensors", []
    first = file.stat().st_size - values.nbytes
    for at in (0, 8, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, values.nbytes - 1):
        flip(run, file, first + at, 1)
        into = torch.zeros_like(values)
        with pytest.raises(Stopped) as stopped:
            find(path, group=run.world).read({"long": [(box, into)]})
        start = at // BLOCK * BLOCK
        words = f"{file} is damaged between bytes {first + start:,} and "
        if words not in str(stopped.value) or into.any():
            wrong.append(str(stopped.value))
        flip(run, file, first + at, 1)
    return wrong


def test_the_block_is_named(pool, tmp_path):
    assert pool.run(2, blocks, tmp_path) == [[], []]


# -- a file ------------------------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def grow(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"\0")


def delete(file: Path) -> None:
    file.unlink()


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def take_the_other_step(file: Path) -> None:
    shutil.copyfile(file.parent.with_name("step-000001") / file.name, file)


def become_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def damaged(run: Runtime, path: Path, name: str, damage: Callable[[Path], None]) -> list[tuple[int, str]]:
    save(run, path)
    comm.barrier(group=run.world)
    if run.rank == 0:
        damage(path / "step-000002" / name)
    return [load(run, path), load(run, path, verify=True), load(run, path, fallback=True)]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage", [cut, halve, empty, grow, delete, zero, take_the_other_step, become_a_folder], ids=lambda f: f.__name__
)
def test_a_file_that_is_not_what_was_written(pool, tmp_path, name, damage):
    ranks = pool.run(2, damaged, tmp_path / "run", name, damage)
    assert ranks[0] == ranks[1]
    plain, verified, fallback = ranks[0]
    for step, words in (plain, verified):
        assert step == -1 and str(tmp_path / "run" / "step-000002" / name) in words, words
        assert words.endswith("name an earlier checkpoint, or allow to fall back to one")
    assert fallback == (1, "")


def cut_later(run: Runtime, path: Path) -> list[str]:
    """A file is cut after the checkpoint was found, so that its manifest says otherwise; then it is looked for."""
    save(run, path)
    saved, words = find(path, group=run.world), []
    comm.barrier(group=run.world)
    if run.rank == 0:
        cut(path / "step-000002" / FILES[1])
    comm.barrier(group=run.world)
    for act in (lambda: saved.read(tiny.wanted(tiny.empty())), lambda: find(path, group=run.world)):
        with pytest.raises(Stopped) as stopped:
            act()
        words.append(str(stopped.value))
    return words


def test_a_file_that_is_cut_after_it_was_found(pool, tmp_path):
    for words in pool.run(2, cut_later, tmp_path):
        assert all(re.search(rf"{tmp_path}/step-000002/{FILES[1]} has \d+ bytes, \d+ were written", w) for w in words)


def header_of_another(run: Runtime, path: Path) -> None:
    """The header of a file in which lies nothing that is wanted."""
    save(run, path)
    saved = find(path, group=run.world)
    [piece] = saved.manifest.tensors["count"].pieces
    [other] = {*FILES[:2]} - {piece.file}
    flip(run, saved.path / other, 20, 1)
    with pytest.raises(Stopped) as stopped:
        saved.read({"count": tiny.wanted(tiny.empty())["count"]}, all_names=False)
    assert f"{saved.path / other} is damaged in its header" in str(stopped.value)
    flip(run, saved.path / other, 20, 1)
    flip(run, saved.path / other, -1, 1)
    saved.read({"count": tiny.wanted(tiny.empty())["count"]}, all_names=False)


def test_a_part_is_read_past_damage_elsewhere_but_for_headers(pool, tmp_path):
    pool.run(2, header_of_another, tmp_path)


def swap(file: Path) -> None:
    """Two ranks' files change places."""
    other, aside = file.with_name("rank-1.safetensors"), file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


def edit(text: str, by: str) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = file.read_text()
        assert text in content
        file.write_text(content.replace(text, by, 1))
        json.loads(file.read_text())

    return damage


def level(run: Runtime, path: Path) -> None:
    """A checkpoint with two files of one size."""
    box = Box((4, 3), (2 * run.rank, 0), (2, 3))
    with Checkpoints(path, run.world) as saves:
        for step in STEPS:
            saves.save(step, State({"rows": [(box, torch.full((2, 3), 10.0 * step + run.rank))]}))
    if run.rank == 0:
        newest = path / "step-000002"
        assert len({(newest / name).stat().st_size for name in FILES[:2]}) == 1
        swap(newest / FILES[0])


def swapped(run: Runtime, path: Path, equal: bool) -> list[tuple[int, str]]:
    if not equal:
        return damaged(run, path, FILES[0], swap)
    level(run, path)
    rows = torch.zeros(4, 3)
    with pytest.raises(Stopped) as stopped:
        find(path, group=run.world).read({"rows": [(Box.whole((4, 3)), rows)]})
    assert not rows.any()
    with pytest.raises(Stopped) as verified:
        find(path, group=run.world, verify=True)
    return [(-1, str(stopped.value)), (-1, str(verified.value))]


@pytest.mark.parametrize("equal", [False, True])
def test_two_files_that_change_places(pool, tmp_path, equal):
    ranks = pool.run(2, swapped, tmp_path / "run", equal)
    assert ranks[0] == ranks[1]
    for step, words in ranks[0][:2]:
        assert step == -1 and str(tmp_path / "run" / "step-000002" / "rank-") in words, words


EDITS = {
    "step": ('"step":2', '"step":3'),
    "white space": ('"step":2', '"step": 2'),
    "a number of bytes": ('"bytes":', '"bytes":1'),
    "a hash": ('"header":"', '"header":"0'),
    "a name": ('"rows"', '"rowz"'),
    "small state": ('"version":0', '"version":1'),
}


def edited(run: Runtime, path: Path, which: str) -> list[tuple[int, str]]:
    return damaged(run, path, MANIFEST, edit(*EDITS[which]))


@pytest.mark.parametrize("which", EDITS)
def test_a_manifest_that_was_edited(pool, tmp_path, which):
    ranks = pool.run(2, edited, tmp_path / "run", which)
    assert ranks[0] == ranks[1]
    for step, words in ranks[0][:2]:
        assert step == -1 and str(tmp_path / "run" / "step-000002" / MANIFEST) in words, words


# -- a folder ----------------------------------------------------------------------------------------------------------


def moved(run: Runtime, path: Path, act: str) -> tuple[int, str]:
    save(run, path)
    comm.barrier(group=run.world)
    one, two = (path / f"step-{step:06d}" for step in STEPS)
    if run.rank == 0:
        if act == "renamed":
            two.rename(path / "step-000003")
        elif act == "replaced":
            shutil.rmtree(two)
            shutil.copytree(one, two)
        else:  # both, so that they fit each other
            for name in (MANIFEST, "COMMIT"):
                shutil.copyfile(one / name, two / name)
    return load(run, path)


@pytest.mark.parametrize("act", ["renamed", "replaced", "told by another"])
def test_a_folder_under_the_name_of_another_step(pool, tmp_path, act):
    ranks = pool.run(2, moved, tmp_path, act)
    path = tmp_path / ("step-000003" if act == "renamed" else "step-000002")
    step = 2 if act == "renamed" else 1
    assert ranks[0] == ranks[1] and ranks[0][0] == -1
    assert ranks[0][1].startswith(f"{path} is the checkpoint of step {step}") or "rank 0: " in ranks[0][1], ranks


# -- a disk that does not read -----------------------------------------------------------------------------------------


def unreadable(run: Runtime, path: Path, name: str, rank: int) -> list[tuple[int, str]]:
    """The disk gives an error for a file, on one rank."""
    save(run, path)
    real = Path.open

    def fails(self: Path, *args, **kwargs):
        if self.name == name:
            raise OSError(errno.EIO, "Input/output error", str(self))
        return real(self, *args, **kwargs)

    with mock.patch.object(Path, "open", fails) if run.rank == rank else nullcontext():
        found = [load(run, path), load(run, path, verify=True)]
    assert load(run, path) == (2, "")
    return found


@pytest.mark.parametrize(("name", "rank"), [(FILES[0], 0), (FILES[0], 1), (FILES[1], 0), (MANIFEST, 0), ("COMMIT", 0)])
def test_a_file_that_cannot_be_read(pool, tmp_path, name, rank):
    ranks = pool.run(2, unreadable, tmp_path, name, rank)
    assert ranks[0] == ranks[1]
    for step, words in ranks[0]:
        assert step == -1 and f"{tmp_path / 'step-000002' / name}: Input/output error" in words, words


# -- falling back ------------------------------------------------------------------------------------------------------


def fall_back(run: Runtime, path: Path, bad: dict[int, str]) -> list[tuple[int, str]]:
    save(run, path, (1, 2, 3))
    for step, name in bad.items():
        flip(run, path / f"step-{step:06d}" / name, -1, 1)
    return [load(run, path), load(run, path, fallback=True)]


@pytest.mark.parametrize(
    ("bad", "taken"),
    [
        ({}, 3),
        ({3: FILES[0]}, 2),
        ({3: MANIFEST, 2: FILES[1]}, 1),
        ({2: FILES[0]}, 3),
        ({3: "COMMIT", 2: FILES[0], 1: MANIFEST}, -1),
    ],
)
def test_an_earlier_one_is_taken_only_when_told_to(pool, tmp_path, bad, taken):
    ranks = pool.run(2, fall_back, tmp_path, bad)
    assert ranks[0] == ranks[1]
    (step, words), (fallen, why) = ranks[0]
    assert fallen == taken and step == (-1 if 3 in bad else 3)
    if 3 in bad:
        assert str(tmp_path / "step-000003" / bad[3]) in words and "step-000002" not in words
        assert words.endswith("; name an earlier checkpoint, or allow to fall back to one")
    if taken == -1:
        assert all(str(tmp_path / f"step-{bad_step:06d}" / name) in why for bad_step, name in bad.items())


def save_behind(run: Runtime, path: Path, keep: Keep) -> tuple[int, str]:
    """Fall back from step 10, which is damaged, to 8, and save 9."""
    save(run, path, (8, 10))
    flip(run, path / "step-000010" / FILES[0], -1, 1)
    assert load(run, path, fallback=True) == (8, "")
    save(run, path, (9,), keep)
    return load(run, path, fallback=True)


@pytest.mark.parametrize("keep", [Keep(last=1), Keep(last=1, every=8), Keep(last=2), Keep()])
def test_what_is_saved_after_a_fall_back_stays(pool, tmp_path, keep):
    assert pool.run(2, save_behind, tmp_path, keep) == [(9, "")] * 2
