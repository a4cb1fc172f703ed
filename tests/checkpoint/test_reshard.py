"""Any mesh reads what any other wrote: bit for bit, moments and counters too, and each rank only what it needs."""

import hashlib
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoints, State, find, reader, restore, training
from checkpoint.shard import BLOCK
from collectives.layout import Box
from tests.checkpoint import cuts
from tests.checkpoint.cuts import CUTS, SIZES

MESHES = list(itertools.product(SIZES, CUTS))


def covering():
    """Of all pairs of meshes as many as there are meshes, so that each mesh saves once and loads once, and each pair of
    sizes and each pair of cuts comes once.
    """
    sizes, cut = list(SIZES), list(CUTS)
    for i, a in itertools.product(range(5), range(5)):
        yield (sizes[i], cut[a]), (sizes[(i + a) % 5], cut[(2 * i + a) % 5])


def loads(run, wanted):
    """Each of (cut, path of a checkpoint)."""
    for cut, path in wanted:
        cuts.check(*cuts.read(run, cut, path))


def folder(path, mesh):
    return path / f"{mesh[0]} {mesh[1]}"


@pytest.fixture(scope="module")
def sources(pool, tmp_path_factory):
    """A folder with a checkpoint of every mesh."""
    path = tmp_path_factory.mktemp("sources")
    for size in SIZES:
        pool.run(size, writes, path, size, timeout=120)
    return path


def writes(run, path, size):
    for cut in CUTS:
        cuts.write(run, cut, folder(path, (size, cut)))


def test_a_covering_part_of_the_matrix(pool, sources, capsys):
    some = list(covering())
    for pairs in ({(a[0], b[0]) for a, b in some}, {(a[1], b[1]) for a, b in some}):
        assert len(pairs) == 25
    with capsys.disabled():
        print(f"\n{len(some)} of {len(MESHES) ** 2} pairs of meshes; all of them: make drill FOLDER=checkpoint")
    for size in SIZES:
        pool.run(
            size,
            loads,
            [(after[1], folder(sources, before)) for before, after in some if after[0] == size],
            timeout=120,
        )


@pytest.mark.drill
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", CUTS)
def test_the_whole_matrix(pool, sources, size, cut):
    pool.run(size, loads, [(cut, folder(sources, before)) for before in MESHES], timeout=120)


# -- save, load, save --------------------------------------------------------------------------------------------------


def digests(path):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def save_load_save(run, cut, path):
    """T51: saved, loaded, saved at once, loaded, saved; what lies in each folder. The last after five loads (T125)."""
    first = cuts.write(run, cut, path / "a")
    seen = [first]
    for name in "bc":
        params, optimizer = cuts.read(run, cut, seen[-1])
        with Checkpoints(path / name, run.world) as checkpoints:
            seen.append(checkpoints.save(5, State(training(params, optimizer))))
    params, optimizer = cuts.read(run, cut, first)
    for _ in range(4):
        restore(find(first, group=run.world), params, optimizer)
        cuts.check(params, optimizer)
    with Checkpoints(path / "d", run.world) as checkpoints:
        seen.append(checkpoints.save(5, State(training(params, optimizer))))
    return [digests(saved) for saved in seen]


@pytest.mark.parametrize("cut", CUTS)
def test_save_load_save(pool, tmp_path, cut):
    first, *others = pool.run(3, save_load_save, cut, tmp_path)[0]
    assert len(first) == 5 and others == [first] * 3


def hands_on(run, cut, path, to):
    params, optimizer = cuts.read(run, cut, path)
    with Checkpoints(to, run.world) as checkpoints:
        return checkpoints.save(5, State(training(params, optimizer)))


def test_from_mesh_to_mesh_and_back(pool, tmp_path):
    """What comes back after four other meshes is the first folder, byte for byte."""
    first = path = pool.run(2, cuts.write, "columns", tmp_path / "0")[0]
    for number, (size, cut) in enumerate([(3, "flat"), (8, "rows"), (1, "copies"), (4, "pairs"), (2, "columns")]):
        path = pool.run(size, hands_on, cut, path, tmp_path / str(number + 1))[0]
    assert digests(path) == digests(first)


# -- bytes -------------------------------------------------------------------------------------------------------------

MODEL = {"embed": (2048, 128), "up": (128, 1029), "down": (1029, 128), "norm": (128,), "cube": (7, 64, 65), "scale": ()}


def of_a_model(run, cut, times):
    """Float32, some 2.2 MB for each of `times`."""
    shapes = {f"{name}.{i}": shape for name, shape in MODEL.items() for i in range(times)}
    held = {name: cuts.boxes(shape, cut, run.rank, run.size) for name, shape in shapes.items()}
    return {name: [(box, box.index().float()) for box in boxes] for name, boxes in held.items() if boxes}


def bytes_written(run, cut, path):
    with Checkpoints(path, run.world) as checkpoints:
        saved = checkpoints.save(0, State(of_a_model(run, cut, run.size)))
    tensors = find(path, group=run.world).tensors
    payload = sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors.values())
    return payload, {file.name: file.stat().st_size for file in saved.iterdir()}


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.drill)])
@pytest.mark.parametrize("cut", CUTS)
def test_files_are_hardly_more_than_the_payload(pool, tmp_path, cut, size):
    """From 1 MB a rank on, within 3 %; and copies are shared."""
    payload, files = pool.run(size, bytes_written, cut, tmp_path)[0]
    assert payload >= size << 20
    assert payload <= sum(files.values()) <= 1.03 * payload, sum(files.values()) / payload
    ranks = [files[f"rank-{rank}.safetensors"] for rank in range(size)]
    assert cut != "copies" or max(ranks) <= 1.05 * payload / size, ranks


SLICED = (8192, 512)  # float32, 16 MB: a block is 512 rows


def saves_sliced(run, path):
    box = Box.whole(SLICED).cut(0, *cuts.share(SLICED[0], run.rank, run.size))
    with Checkpoints(path, run.world) as checkpoints:
        checkpoints.save(0, State({"w": [(box, box.index().float())]}))


def reads_a_slice(run, path, box):
    """Blocks and headers that were hashed, in bytes, and the memory of the files that this process has touched."""
    hashed, real = [], reader.digest

    def counted(data):
        hashed.append(len(data))
        return real(data)

    saved = find(path, group=run.world)
    wanted = torch.empty(box.local)
    mine = reader.Reader(saved.path, saved.manifest)
    reader.digest = counted
    try:
        assert mine.verify({"w": [(box, wanted)]}) == []
    finally:
        reader.digest = real
    mine.fill({"w": [(box, wanted)]})
    assert torch.equal(wanted, box.index().float())
    touched, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = str(saved.path) in line
        elif ours and line.startswith("Rss:"):
            touched += int(line.split()[1]) << 10
    return sum(hashed), touched


SLICES = {  # box: its bytes rounded up to blocks
    "ten rows": (Box(SLICED, (1000, 0), (10, 512)), 1 * BLOCK),
    "over the end of a block": (Box(SLICED, (1020, 0), (10, 512)), 2 * BLOCK),
    "over the end of a file": (Box(SLICED, (4090, 0), (10, 512)), 2 * BLOCK),
    "one column": (Box(SLICED, (0, 7), (8192, 1)), 16 * BLOCK),
    "one column of one block": (Box(SLICED, (512, 7), (512, 1)), 1 * BLOCK),
    "one number": (Box(SLICED, (8191, 511), (1, 1)), 1 * BLOCK),
}


@pytest.fixture(scope="module")
def sliced(pool, tmp_path_factory):
    path = tmp_path_factory.mktemp("sliced")
    pool.run(2, saves_sliced, path)
    return path


@pytest.mark.parametrize("case", SLICES)
def test_a_reader_of_a_slice_reads_its_blocks(pool, sliced, case):
    box, blocks = SLICES[case]
    around = 64 << 10  # what the kernel maps about a page that is touched
    for hashed, touched in pool.run(1, reads_a_slice, sliced, box):
        assert blocks <= hashed <= blocks + 2 * 4096
        assert touched <= blocks + 6 * around
