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


def test_a_long_rank_map_is_shortened():
    sizes = MeshConfig(pp=2, dp=2, cp=3, tp=2, ep=3)
    shortened = ["rank   0  pp 0  dp 0  cp 0  tp 0  ep 0", "rank   1  pp 0  dp 0  cp 0  tp 1  ep 0"]
    shortened += ["rank   2  pp 0  dp 0  cp 1  tp 0  ep 1", "…", "rank  23  pp 1  dp 1  cp 2  tp 1  ep 2"]
    assert Grid(sizes).rank_map().splitlines() == shortened
    assert len(Grid(sizes).rank_map(whole=24).splitlines()) == 24


def test_both_views_of_8_ranks():
    grid = Grid(MeshConfig(pp=2, fsdp=2, tp=2, ep=2))
    assert grid.listing(GROUPS) == [
        "pp                        (0 4) (1 5) (2 6) (3 7)",
        "fsdp, batch, shard, data  (0 2) (1 3) (4 6) (5 7)",
        "tp, row                   (0 1) (2 3) (4 5) (6 7)",
        "tokens                    (0 2 4 6) (1 3 5 7)",
    ]
    assert grid.listing(EXPERT_GROUPS) == [
        "ep     (0 2) (1 3) (4 6) (5 7)",
        "ep_tp  (0 1 2 3) (4 5 6 7)",
    ]
    assert grid.listing(["pp", "cp", "tp"]) == ["pp  (0 4) (1 5) (2 6) (3 7)", "tp  (0 1) (2 3) (4 5) (6 7)"]
    assert Grid(MeshConfig()).listing(GROUPS) == []


def test_both_views_of_24_ranks():
    """Twelve ranks of data, dp 3 · fsdp 2 · cp 2, beside tp 2: an ep 2 is a cp, an ep 4 a cp and an fsdp. An ep 3 has
    ranks of two dp now and then, so that what is left is cut over all that have the same experts.
    """
    dense = Grid(MeshConfig(dp=3, fsdp=2, cp=2, tp=2)).views()
    assert list(dense) == ["dense"] and list(dense["dense"]) == list(GROUPS)
    assert dense["dense"]["dp"] == [(r, r + 8, r + 16) for r in range(8)]
    assert dense["dense"]["fsdp"][:5] == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12)]
    assert dense["dense"]["cp"][-3:] == [(17, 19), (20, 22), (21, 23)]
    assert dense["dense"]["row"] == [(r, r + 1, r + 2, r + 3) for r in range(0, 24, 4)]

    def experts(ep: int) -> dict[str, list[tuple[int, ...]]]:
        return Grid(MeshConfig(dp=3, fsdp=2, cp=2, tp=2, ep=ep)).views()["expert"]

    assert experts(2)["ep"][:4] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert experts(2)["expert_shard"][:4] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert experts(2)["expert_replicas"][:2] == [(0, 8, 16), (1, 9, 17)]
    assert experts(2)["expert_data"][:2] == [(0, 4, 8, 12, 16, 20), (1, 5, 9, 13, 17, 21)]
    four = [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15), (16, 18, 20, 22), (17, 19, 21, 23)]
    assert experts(4)["ep"] == four and experts(4)["expert_shard"] == [(r,) for r in range(24)]
    assert experts(4)["ep_tp"] == [tuple(range(8)), tuple(range(8, 16)), tuple(range(16, 24))]
    assert experts(3)["ep"][:2] == [(0, 2, 4), (1, 3, 5)] and experts(3)["ep"][2] == (6, 8, 10)
    assert experts(3)["expert_shard"] == experts(3)["expert_data"] == [(r, r + 6, r + 12, r + 18) for r in range(6)]


def test_long_lists_are_shortened():
    """Of 64 ranks as of more; 32 are told whole."""
    assert Grid(MeshConfig(pp=2, dp=4, tp=8)).listing(AXES) == [
        "pp  (0 32) (1 33) (2 34) … (31 63)",
        "dp  (0 8 16 24) (1 9 17 25) (2 10 18 26) … (39 47 55 63)",
        "tp  (0 1 2 … 7) (8 9 10 … 15) (16 17 18 … 23) … (56 57 58 … 63)",
    ]
    assert Grid(MeshConfig(dp=4, tp=8)).listing(["tp"]) == [
        "tp  (0 1 2 3 4 5 6 7) (8 9 10 11 12 13 14 15) (16 17 18 19 20 21 22 23) (24 25 26 27 28 29 30 31)"
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
