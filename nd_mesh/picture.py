"""A mesh as a picture: for every axis that is cut a panel, in it the nodes as boxes and their ranks as cells.

Cells of one colour are one group, whose number stands below the rank's. The groups of rank 0 are framed. The title says
how many groups leave a node. Above is the dense view, below it, where experts are shared, the expert view. Drawn with
matplotlib, an extra; the same as text: Grid.listing.
"""

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from nd_mesh import placement
from nd_mesh.mesh import AXES, EXPERT_AXES, Grid

MOST = 1024  # ranks, of which a panel is still read
_CELL = 0.36  # inches
_GAP = 0.4  # cells, between nodes
_ROW = 8  # ranks of a node side by side, at most
_TITLE, _CAPTION = 6, 14  # cells that they need


def panels(grid: Grid) -> list[dict[str, list[tuple[int, ...]]]]:
    """The groups of each axis that is cut, a dictionary a view: dense, and where experts are shared expert."""
    views = (AXES,) if grid.sizes.ep == 1 else (AXES, EXPERT_AXES)
    found = [{axis: grid.groups(axis) for axis in view} for view in views]
    return [{axis: groups for axis, groups in view.items() if len(groups[0]) > 1} for view in found]


def pyplot() -> ModuleType:
    """matplotlib's, without a screen. Raises ValueError where it is not installed."""
    try:
        import matplotlib  # noqa: PLC0415, an extra
    except ImportError as error:
        raise ValueError("a picture needs matplotlib, which is not installed: pip install matplotlib") from error

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    return plt


def draw(grid: Grid, per_node: int, to: Path) -> None:
    """Write the PNG. Raises ValueError for a mesh of one rank, for more than can be read, and without matplotlib."""
    if not 1 < grid.size() <= MOST:
        raise ValueError(f"a picture of {grid.size()} ranks shows nothing: draw a mesh of 2 to {MOST}")
    plt = pyplot()
    corners, views = cells(grid.size(), per_node), panels(grid)
    node = _node(grid.size(), per_node)
    right, down = (max(ends) + size for ends, size in zip(zip(*corners[::per_node], strict=True), node, strict=True))
    right = max(right, _TITLE)
    width, height = max(max(map(len, views)) * (right + 1) + 1, _CAPTION), len(views) * (down + 3) + 1  # in cells
    figure, ax = plt.subplots(figsize=(width * _CELL, height * _CELL))
    figure.subplots_adjust(0, 0, 1, 1)
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    for row, (view, drawn) in enumerate(zip(("dense view", "expert view"), views, strict=False)):
        for column, (axis, groups) in enumerate(drawn.items()):
            x, y = 1 + column * (right + 1), 2.2 + row * (down + 3)
            out = len(placement.leaving(groups, per_node))
            told = f"groups that leave a node: {out} of {len(groups)}"
            title = {"fontsize": 9, "color": "firebrick" if out else "black", "verticalalignment": "bottom"}
            ax.text(x - 0.1, y - 0.3, f"{view}: {axis} {len(groups[0])}\n{told}", **title)
            _draw_panel(ax, groups, [(x + i, y + j) for i, j in corners], per_node)
    caption = "large: the rank; small: its group, as its colour; framed: the group of rank 0"
    ax.text(1, height - 0.3, caption, fontsize=7)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=120)
    plt.close(figure)


def cells(ranks: int, per_node: int) -> list[tuple[float, float]]:
    """Where each rank's cell begins, right and down, in cells: a node's ranks in rows of at most eight, and as many
    nodes side by side as make all of them about as wide as high.
    """
    wide, high = _node(ranks, per_node)
    nodes = math.ceil(ranks / per_node)
    across = min(nodes, max(1, round(math.sqrt(nodes * (high + _GAP) / (wide + _GAP)))))
    places = []
    for rank in range(ranks):
        node, within = divmod(rank, per_node)
        down, right = divmod(node, across)
        places.append((right * (wide + _GAP) + within % _ROW, down * (high + _GAP) + within // _ROW))
    return places


def _node(ranks: int, per_node: int) -> tuple[int, int]:
    """Its cells side by side, and its rows."""
    return min(per_node, _ROW), math.ceil(min(per_node, ranks) / _ROW)


def _draw_panel(
    ax: Any, groups: Sequence[Sequence[int]], corners: Sequence[tuple[float, float]], per_node: int
) -> None:
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    wide, high = _node(len(corners), per_node)
    for x, y in corners[::per_node]:
        ax.add_patch(
            Rectangle((x - 0.12, y - 0.12), wide + 0.24, high + 0.24, facecolor="whitesmoke", edgecolor="grey")
        )
    for number, group in enumerate(groups):
        for rank in group:
            x, y = corners[rank]
            ax.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=_colour(number), edgecolor="none"))
            if 0 in group:
                ax.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, fill=False, edgecolor="black", linewidth=1.6))
            ax.text(x + 0.5, y + 0.4, f"{rank}", ha="center", va="center", fontsize=8)
            ax.text(x + 0.5, y + 0.78, f"{number}", ha="center", va="center", fontsize=5)


def _colour(number: int) -> tuple[float, float, float]:
    """Neighbouring numbers have hues far apart, and no two the same."""
    return colorsys.hsv_to_rgb(number * (math.sqrt(5) - 1) / 2 % 1, 0.45, 0.95)
