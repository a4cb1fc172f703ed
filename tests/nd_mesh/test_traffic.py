"""Traffic by axis: what the strategies' formulas say, each rank sends in its first step, to the byte."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from collectives.ledger import Ledger, Row
from collectives.runtime import Runtime
from collectives.watch import watching
from nd_mesh import traffic
from nd_mesh.config import Config
from nd_mesh.train import Trainer
from tests import grid, parity
from tests.nd_mesh.test_train import config as small
from tests.nd_mesh.test_watched import what_a_run_says

THREE = {"microbatches": 3}
ALL_CHOSEN = {"experts": 4, "choices": 4, "expert_hidden": 12}  # so each expert has every token, and routing is even
BIASED = ALL_CHOSEN | {"bias_rate": 0.1}
ODD = {"width": 20, "heads": 2, "kv_heads": 1, "hidden": 10}  # sizes that fill no cache line
AGAIN = ("k", "o", "ffn")
RUNS = {
    # data: uneven rows, a vocabulary of 37 that divides by nothing
    "overlapped": {"dp": 3, "cap": 1000, **THREE},
    "naive": {"dp": 2, "data": "naive", "tied": True},
    "bucketed, biases": {"dp": 2, "data": "bucketed", **BIASED},
    "zero1, norms of tp": {"dp": 2, "tp": 2, "sequence": True, "data": "zero1", "cap": 1000},
    "zero2": {"dp": 3, "data": "zero2", **ODD, **THREE},
    "zero3, tied": {"dp": 3, "data": "zero3", "tied": True, **THREE},
    "fsdp, replicas": {"fsdp": 2, "dp": 2, "data": "fsdp", **THREE},
    "fsdp, kept": {"fsdp": 3, "data": "fsdp", "reshard": False, **THREE},
    "replicas alone": {"dp": 2, "data": "fsdp", **ODD},
    # tp, cp
    "tp, shared keys": {"tp": 4, "recompute": AGAIN, **THREE},
    "sequences, shared keys": {"tp": 4, "sequence": True, "recompute": AGAIN},
    "sequences, kept, fsdp": {"tp": 2, "fsdp": 2, "sequence": True, "save_gathered": True, "recompute": ("block",)},
    "ring": {"cp": 3, "data": "fsdp", "recompute": ("attend",)},
    "all_gather": {"cp": 2, "attention": "all_gather", "order": "striped", "tp": 2, **THREE},
    "all_gather, kept": {
        "cp": 3,
        "attention": "all_gather",
        "order": "contiguous",
        "save_gathered": True,
        "recompute": ("block",),
    },
    "ulysses, copies": {"cp": 4, "attention": "ulysses", "recompute": ("attend",)},
    "ring_ulysses": {"cp": 4, "attention": "ring_ulysses", "kv_heads": 1, "data": "zero3", "recompute": ("block",)},
    # pp
    "1f1b, tied, zero1": {"pp": 2, "tp": 2, "sequence": True, "tied": True, "data": "zero1", **THREE},
    "four stages": {"pp": 4, "schedule": "zb_h1", **THREE},
    "layer_wise": {"pp": 3, "schedule": "layer_wise", "tied": True, "data": "zero2", **THREE},
    "gpipe, cp": {"pp": 2, "schedule": "gpipe", "virtual": 2, "cp": 2, "data": "naive", **THREE},
    "zbv, fsdp": {"pp": 2, "schedule": "zbv", "fsdp": 2, "tied": True, "data": "fsdp", "reduce_each": True, **THREE},
    "zbv, zero3, kept": {"pp": 2, "schedule": "zbv", "dp": 2, "tied": True, "data": "zero3", "reshard": False, **THREE},
    "interleaved, zero3": {
        "pp": 2,
        "schedule": "interleaved",
        "virtual": 3,
        "dp": 2,
        "data": "zero3",
        "reduce_each": True,
        **THREE,
    },
    "dualpipe_v, replicas": {"pp": 2, "schedule": "dualpipe_v", "dp": 2, "data": "fsdp", "reduce_each": True, **THREE},
    # ep
    "ep, tp": {"dp": 2, "ep": 2, "tp": 2, "recompute": ("ffn",), **ALL_CHOSEN, **THREE},
    "ep, sequences": {"dp": 2, "ep": 2, "tp": 2, "sequence": True, "shared_hidden": 12, **ALL_CHOSEN},
    "sequences over experts": {"dp": 2, "tp": 2, "sequence": True, "data": "naive", **ALL_CHOSEN},
    "ep over cp": {"cp": 2, "attention": "ulysses", "ep": 2, "data": "zero2", "recompute": ("block",), **ALL_CHOSEN},
    "ep, fsdp, biases": {"dp": 2, "fsdp": 2, "ep": 2, "data": "fsdp", "pattern": "dm", **BIASED},
    "ep, fewer than shards": {"fsdp": 4, "ep": 2, "experts": 2, "choices": 2, "expert_hidden": 12},
    "ep, pp": {"pp": 2, "schedule": "zbv", "dp": 2, "ep": 2, "data": "zero3", **ALL_CHOSEN, **THREE},
}


def ranks_of(cfg: Config) -> int:
    return traffic.Grid(cfg.mesh).size()


def first_step(run: Runtime, cfg: Config) -> list[traffic.Line]:
    text = (
        np.arange(20 * parity.CONTEXT + 1, dtype=np.uint8) % parity.VOCAB
    )  # no sample is short: padding has no expert
    built = parity.built(run, cfg, [text])
    with watching(book := Ledger()):
        built.step(0)
    return traffic.lines(book, cfg, run.rank)


def in_dtype(cfg: Config, dtype: str) -> Config:
    return replace(cfg, train=replace(cfg.train, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", RUNS)
def test_bytes_are_the_formulas(pool, name, dtype):
    """On every rank, of every operation on every group. Only objects, which are pickled, have no formula."""
    cfg = in_dtype(grid.run_of(RUNS[name]), dtype)
    for lines in pool.run(ranks_of(cfg), first_step, cfg):
        assert lines
        for line in lines:
            assert line.mark != "no formula" or line.op == "all_gather_object", line
            assert line.mark == "no formula" or line.measured == pytest.approx(line.formula, rel=1e-12), line


@pytest.mark.drill
def test_any_bytes_are_the_formulas(pool):
    """Of the grid's runs on up to four ranks. What depends on routing is there, and is marked."""
    for case, dtype in zip(grid.subset(4, together=2), itertools.cycle(("float64", "bfloat16", "float32", "float16"))):
        for lines in pool.run(ranks_of(case.first), first_step, in_dtype(case.first, dtype)):
            marks = {line.mark for line in lines if line.op != "all_gather_object"}
            assert marks <= {"", "depends on routing"}, (case.name, lines)


def test_a_sum_by_axis_typed_by_hand():
    """Of eight ranks, none of which is there; rank 0 has the first of two stages, and a half of each matrix."""
    sizes = {"layers": 2, "width": 8, "heads": 2, "kv_heads": 2, "hidden": 12}
    cfg = parity.config(pp=2, dp=2, tp=2, data="naive", batch=7, **sizes)
    a = 4 * 12 * 8 * 8  # bytes of four of the seven rows, of 12 tokens and 8 channels
    # q, k, v 4·8, o 8·4, gate, up 6·8, down 8·6, two norms; 19 of 37 rows of the embedding: ten parameters
    n = 8 * (3 * 4 * 8 + 8 * 4 + 2 * 6 * 8 + 8 * 6 + 2 * 8 + 19 * 8)
    told = 8 + len('[[[4, 12, 8], "float64", true]]')  # how long, and what comes
    assert traffic.by_axis(cfg, 0) == {
        "dp": n + 8 * 10 + 24 + 8,  # whether each has a gradient, counts, loss
        "tp": 4 * a + a,  # a layer, the embedding
        "pp": a + told + 16 + 8,  # an agreement, the loss
        "world": 2 * 8 * 7 / 8 + 8 * 7,  # the norm; the seconds
    }


def test_groups_of_the_expert_view_have_names():
    cfg = parity.config(dp=4, tp=2, ep=2)
    names = {(0, 1): "tp", (0, 2, 4, 6): "dp", (0, 2): "ep", (0, 4): "expert data", tuple(range(8)): "world"}
    assert {ranks: traffic.axis_of(traffic.Grid(cfg.mesh), ranks) for ranks in names} == names
    pipeline, keys = parity.config(pp=4), parity.config(tp=4, kv_heads=2)
    assert traffic.axis_of(traffic.Grid(pipeline.mesh), (1, 2)) == "pp"
    assert traffic.axis_of(traffic.Grid(keys.mesh), (2, 3)) == "tp"


def test_what_differs_is_marked():
    """A byte more, an operation that nobody expects, one that is missing; what the router chooses is no difference."""
    cfg = parity.config(dp=2, data="naive")
    sent = {op: sum(float(term.nbytes) for term in terms) for op, terms in by_op(cfg).items()}
    assert list(sent) == ["all_reduce", "all_gather_single"]
    assert marks(cfg, sent) == {"all_reduce": "", "all_gather_single": ""}
    assert marks(cfg, sent | {"all_reduce": sent["all_reduce"] + 1})["all_reduce"] == "DIFFERS"
    assert marks(cfg, sent | {"broadcast": 5.0})["broadcast"] == "no formula"
    assert marks(cfg, {"all_reduce": sent["all_reduce"]})["all_gather_single"] == "DIFFERS"
    assert marks(parity.config(dp=2, ep=2, **ALL_CHOSEN), {})["all_to_all_single"] == "depends on routing"


def by_op(cfg: Config) -> dict[str, list[traffic.Term]]:
    found: dict[str, list[traffic.Term]] = {}
    for term in traffic.expected(cfg, 0):
        found.setdefault(term.op, []).append(term)
    return found


def marks(cfg: Config, sent: dict[str, float]) -> dict[str, str]:
    rows = [Row(op, (0, 1), 1, nbytes, nbytes) for op, nbytes in sent.items()]
    return {line.op: line.mark for line in traffic.lines(SimpleNamespace(rows=lambda: rows), cfg, 0)}


TABLE = """\
traffic of the first step: bytes that rank 0 of 2 sends, measured, and by the strategies' formulas
axis                    ranks      calls      measured       formula
tp                                    14       104,336       104,336
  all_reduce            0,1           13       104,328       104,328  attention 40,960 + feed-forward 40,960 +
                                                                      embedding 10,240 + head 10,240 +
                                                                      loss of tokens 1,920 + norm 8
  all_gather_single     0,1            1             8             8  seconds
all                                   14       104,336       104,336
"""


def test_a_run_tells_it_once(pool, tmp_path):
    """After its first step, also of a resumed one; word for word."""
    cfg = small(2, out=str(tmp_path / "run"), save_every=4)
    cfg = replace(cfg, mesh=replace(cfg.mesh, dp=1, tp=2))
    said = pool.run(2, what_a_run_says, cfg)[0]
    assert said.count("traffic of the first step") == 1
    assert TABLE in said
    again = replace(cfg, train=replace(cfg.train, resume=f"{cfg.train.out}/step-000004", out=str(tmp_path / "again")))
    assert TABLE in pool.run(2, what_a_run_says, again)[0]


def counted_steps(run: Runtime, cfg: Config) -> list[int]:
    """The steps in which calls were counted."""
    now, counted, step = [0], [], Trainer.step

    def stepping(self: Trainer, number: int):
        now[0] = number + 1
        return step(self, number)

    with (
        mock.patch.object(Trainer, "step", stepping),
        mock.patch.object(Ledger, "ends", lambda *_: counted.append(now[0])),
    ):
        what_a_run_says(run, cfg)
    return sorted(set(counted))


def test_later_steps_are_not_counted(pool, tmp_path):
    assert pool.run(2, counted_steps, small(2, out=str(tmp_path / "run"))) == [[1], [1]]


def says_with_a_fault(run: Runtime, cfg: Config) -> str:
    """Of a run in which rank 1 expects a byte more."""
    real = traffic.expected

    def expected(cfg: Config, rank: int):
        first, *others = real(cfg, rank)
        return [first._replace(nbytes=first.nbytes + rank), *others]

    with mock.patch.object(traffic, "expected", expected):
        return what_a_run_says(run, cfg)


def test_a_difference_on_another_rank_is_told(pool, tmp_path):
    said = pool.run(3, says_with_a_fault, small(3, out=str(tmp_path / "run")))[0]
    assert "DIFFERS" not in said
    assert "it differs on ranks 1, 2" in said
