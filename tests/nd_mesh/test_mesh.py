"""The mesh: pictures without ranks, then the groups themselves."""

import itertools
import math
import random
import time

import pytest
import torch

from collectives import comm
from collectives.runtime import Runtime
from nd_mesh.config import MeshConfig
from nd_mesh.mesh import AXES, EXPERT_GROUPS, GROUPS, Grid, Mesh


def test_tp_is_innermost():
    grid = Grid(MeshConfig(pp=2, dp=2, tp=2))
    assert grid.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert grid.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.groups("cp") == [(rank,) for rank in range(8)]


def test_combined_groups():
    grid = Grid(MeshConfig(dp=2, fsdp=2, cp=2, tp=2))
    assert grid.groups("batch")[0] == (0, 4, 8, 12)
    assert grid.groups("shard") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert grid.groups("data") == [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]


def test_ep_is_folded_out_of_data():
    grid = Grid(MeshConfig(pp=2, dp=2, fsdp=2, tp=2, ep=2))
    assert grid.groups("ep")[:4] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("expert_data")[:4] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_the_lecture_example():
    """128 ranks of DP 8, TP 4, PP 2, CP 2: rank 0's groups in our order of axes."""
    grid = Grid(MeshConfig(dp=8, tp=4, pp=2, cp=2))
    assert {axis: grid.groups(axis)[0] for axis in ("dp", "tp", "pp", "cp")} == {
        "dp": (0, 8, 16, 24, 32, 40, 48, 56),
        "tp": (0, 1, 2, 3),
        "pp": (0, 64),
        "cp": (0, 4),
    }


def test_rank_map():
    assert Grid(MeshConfig(dp=2, tp=2)).rank_map().splitlines() == [
        "rank   0  dp 0  tp 0",
        "rank   1  dp 0  tp 1",
        "rank   2  dp 1  tp 0",
        "rank   3  dp 1  tp 1",
    ]


def factorisations(ranks: int) -> list[MeshConfig]:
    """Every mesh of this many ranks, each with every ep that its data ranks allow."""
    sizes = [s for s in itertools.product(range(1, ranks + 1), repeat=len(AXES)) if math.prod(s) == ranks]
    meshes = [dict(zip(AXES, s, strict=True)) for s in sizes]
    data = [m["dp"] * m["fsdp"] * m["cp"] for m in meshes]
    return [MeshConfig(**m, ep=ep) for m, d in zip(meshes, data, strict=True) for ep in range(1, d + 1) if d % ep == 0]


@pytest.mark.parametrize("ranks", [1, 4, 6, 8])
def test_groups_partition_the_ranks(ranks):
    for sizes in factorisations(ranks):
        for name in (*GROUPS, *EXPERT_GROUPS):
            assert sorted(itertools.chain(*Grid(sizes).groups(name))) == list(range(ranks))


def sums_of_ranks(run: Runtime, meshes: list[MeshConfig]) -> None:
    """Each group's all-reduce of the ranks is the sum of its members, though ranks arrive at different times."""
    for sizes in meshes:
        time.sleep(random.random() / 100)
        mesh = Mesh(sizes, run)
        for name in (*GROUPS, *EXPERT_GROUPS):
            total = torch.tensor(run.rank)
            comm.all_reduce(total, group=mesh.group(name))
            members = next(group for group in mesh.grid.groups(name) if run.rank in group)
            assert (total, mesh.size(name), mesh.rank(name)) == (sum(members), len(members), members.index(run.rank))


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_every_mesh_can_be_built(pool, ranks):
    pool.run(ranks, sums_of_ranks, factorisations(ranks))
