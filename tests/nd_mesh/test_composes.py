"""The README's table of what composes with what: each of its cells, tried."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from nd_mesh import mistakes
from nd_mesh.config import ConfigError
from nd_mesh.mesh import Grid
from tests import parity

README = Path(__file__).parents[2] / "nd_mesh" / "README.md"
RING, ALL_GATHER = {"cp": 2}, {"cp": 2, "attention": "all_gather"}
PIPELINES = [{"pp": 2, "schedule": name} for name in ("layer_wise", "gpipe", "1f1b", "zb_h1")]
PIPELINES += [
    {"pp": 2, "schedule": name, "stage_layers": (1, 0, 0, 1)} for name in ("interleaved", "zbv", "dualpipe_v")
]
# What each name of the table means, in all its ways.
WAYS: dict[str, list[dict[str, Any]]] = {
    "dp": [{"dp": 2}],
    "fsdp": [{"fsdp": 2}],
    "zero1, 2, 3": [{"data": f"zero{stage}"} for stage in (1, 2, 3)],
    "tp": [{"tp": 2}],
    "sequences": [{"tp": 2, "sequence": True}],
    "cp": [RING],
    "cp by ring, all_gather": [RING, ALL_GATHER, {"cp": 2, "order": "striped"}],
    "cp by ulysses, ring_ulysses": [
        {"cp": 2, "attention": "ulysses"},
        {"cp": 2, "attention": "ring_ulysses"},
    ],
    "pp": [{"pp": 2, "schedule": "1f1b"}],
    "pp, any schedule": PIPELINES,
    "ep": [{"dp": 2, "ep": 2, "experts": 4}],
    "recompute": [{"recompute": ("block",)}, {"recompute": ("attend", "ffn")}],
    "capacity, balance, bias": [{"experts": 4, "capacity": 1.0, "balance": 0.01, "bias_rate": 0.1}],
    "tied": [{"tied": True}],
    "dropout": [{"dropout": 0.1}],
    "checkpoints, asynchronous too": [{"save_every": 1}],
}
# Where the table says "if": what cannot run, and the note's reason.
SIX_HEADS = {"heads": 6, "kv_heads": 2}
UNFIT = {
    ("cp by ulysses, ring_ulysses", "tp"): (
        {"cp": 2, "tp": 2, "attention": "ulysses", **SIX_HEADS},
        "cannot share the 3 heads and 1 KV heads of a rank",
    ),
    ("cp by ulysses, ring_ulysses", "sequences"): (
        {"cp": 4, "attention": "ulysses", "tp": 4, "sequence": True},
        "cannot share the 3 heads and 1 KV heads of a rank",
    ),
    ("ep", "dp"): ({"dp": 2, "ep": 4, "experts": 4}, "folded out of the 2 ranks of dp · fsdp · cp"),
    ("ep", "fsdp"): ({"fsdp": 4, "ep": 4, "experts": 6}, "mesh.ep=4 does not divide model.experts=6"),
    ("ep", "zero1, 2, 3"): ({"dp": 3, "ep": 2, "experts": 4, "data": "zero1"}, "folded out of the 3 ranks"),
    ("ep", "cp"): ({"cp": 2, "ep": 4, "experts": 4}, "folded out of the 2 ranks of dp · fsdp · cp"),
    ("ep", "sequences"): (
        {"dp": 2, "ep": 2, "tp": 2, "sequence": True, "experts": 6},
        "mesh.ep=2 · mesh.tp=2, which sequence parallelism folds into it, does not divide model.experts=6",
    ),
}


def table() -> dict[tuple[str, str], str]:
    """Of each cell of the README its first word, by row and column."""
    section = README.read_text().split("## What composes with what\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = rows[0][1:]
    return {
        (name, head): cell.split()[0]
        for name, *cells in rows[2:]
        for head, cell in zip(heads, cells, strict=True)
        if cell
    }


def refusal(settings: dict[str, Any]) -> str:
    """The words with which this is refused, "" if it is not."""
    cfg = parity.config(vocab=256, **settings)
    try:
        mistakes.check(cfg, Grid(cfg.mesh).size())
    except ConfigError as mistake:
        return str(mistake)
    return ""


def test_the_table_is_whole():
    """Every pair is there once: the columns with each other, and each other row with every column."""
    columns, cells = ["dp", "fsdp", "zero1, 2, 3", "tp", "sequences", "cp", "pp", "ep"], table()
    assert {head for _, head in cells} == set(columns[:-1]) | {"ep"}
    assert {name for name, _ in cells} | set(columns) == set(WAYS)
    assert len(cells) == 1 + 2 + 3 + 4 + 5 + 5 + 6 + 7 + 5 * 8
    assert {pair for pair, word in cells.items() if word == "if"} == set(UNFIT)


@pytest.mark.parametrize("name", [name for name in WAYS if name not in ("dp", "cp", "pp")])
def test_each_cell(name):
    for (row, column), word in table().items():
        if row != name:
            continue
        for one, other in itertools.product(WAYS[row], WAYS[column]):
            assert bool(refusal(one | other)) == (word == "no"), (row, column, one, other, refusal(one | other))
        if word == "if":
            settings, words = UNFIT[row, column]
            assert words in refusal(settings)
