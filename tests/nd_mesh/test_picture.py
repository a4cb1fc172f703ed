"""The mesh as a picture: where cells lie, and the colours that are found there in the file."""

import sys
from pathlib import Path

import numpy as np
import pytest

from nd_mesh import picture
from nd_mesh.config import MeshConfig
from nd_mesh.mesh import Grid

CELL = 0.36 * 120  # pixels: inches of a cell, dots an inch


def colours(path: Path, corners: list[tuple[float, float]]) -> list[tuple[int, ...]]:
    """Near the upper left corner of each cell, where neither frame nor number is."""
    pixels = (pytest.importorskip("matplotlib.image").imread(path)[..., :3] * 255).round().astype(int)
    return [tuple(pixels[int((y + 0.17) * CELL), int((x + 0.17) * CELL)].tolist()) for x, y in corners]


def together(found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The cells of each colour."""
    return sorted(tuple(np.flatnonzero([colour == other for other in found]).tolist()) for colour in set(found))


def test_cells():
    assert picture.cells(6, 4) == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1.4), (1, 1.4)]
    assert picture.cells(3, 16) == [(0, 0), (1, 0), (2, 0)]
    sixteen = picture.cells(16, 16)
    assert sixteen[7:9] == [(7, 0), (0, 1)]  # a node of two rows
    many = picture.cells(256, 8)  # 32 nodes, two side by side: 16.8 cells wide, 22.4 high
    assert many[8] == (8.4, 0) and many[16] == (0, 1.4) and many[-1] == (15.4, pytest.approx(21))
    assert len(set(many)) == 256


def test_panels():
    dense, expert = picture.panels(Grid(MeshConfig(pp=2, dp=2, fsdp=2, tp=2, ep=2)))
    assert list(dense) == ["pp", "dp", "fsdp", "tp"] and list(expert) == ["pp", "expert_replicas", "ep", "tp"]
    assert dense["tp"][:2] == [(0, 1), (2, 3)] and expert["ep"][:2] == [(0, 2), (1, 3)]
    assert [list(view) for view in picture.panels(Grid(MeshConfig(dp=3)))] == [["dp"]]


def test_groups_have_colours_of_their_own(tmp_path):
    """Two nodes of four: panels are 4 cells wide, 6 with their titles, and 2.4 high; between them are 1 and 3."""
    pytest.importorskip("matplotlib")
    picture.draw(Grid(MeshConfig(pp=2, fsdp=2, tp=2, ep=2)), 4, tmp_path / "mesh.png")

    def panel(row: int, column: int) -> list[tuple[int, ...]]:
        x, y = 1 + 7 * column, 2.2 + 5.4 * row
        cells = [(x + rank % 4, y + rank // 4 * 1.4) for rank in range(8)]
        return together(colours(tmp_path / "mesh.png", cells))

    pp, pairs, tp = [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 2), (1, 3), (4, 6), (5, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [panel(0, 0), panel(0, 1), panel(0, 2)] == [pp, pairs, tp]  # pp, fsdp, tp
    assert [panel(1, 0), panel(1, 1), panel(1, 2)] == [pp, pairs, tp]  # pp, ep, tp


def test_many_groups_have_colours_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    picture.draw(Grid(MeshConfig(dp=32, tp=2)), 8, tmp_path / "mesh.png")
    cells = [(1 + 9 + rank % 8, 2.2 + rank // 8 * 1.4) for rank in range(64)]  # beside dp
    assert together(colours(tmp_path / "mesh.png", cells)) == [(r, r + 1) for r in range(0, 64, 2)]


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    for sizes in (MeshConfig(), MeshConfig(dp=1025)):
        with pytest.raises(ValueError, match=f"a picture of {sizes.dp} ranks shows nothing: draw a mesh of 2 to 1024"):
            picture.draw(Grid(sizes), 8, tmp_path / "mesh.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="a picture needs matplotlib, which is not installed: pip install matplotlib"):
        picture.draw(Grid(MeshConfig(dp=2)), 8, tmp_path / "mesh.png")
    assert not list(tmp_path.iterdir())
