"""Any mesh reads what any other wrote: bit for bit, moments and counters too, and each rank only what it needs."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch

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
        pool.run(size, writes, path, size)
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
        pool.run(size, loads, [(after[1], folder(sources, before)) for before, after in some if after[0] == size])


@pytest.mark.drill
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", CUTS)
def test_the_whole_matrix(pool, sources, size, cut):
    pool.run(size, loads, [(cut, folder(sources, before)) for before in MESHES], timeout=60)
