"""What context parallelism costs in a step of the trainer: what a rank sends, by the ledger; what it keeps for
backward; what recomputation sends again; and what of the other strategies it makes less.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from collectives import layout
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.watch import watching
from nd_mesh.config import Config, DataConfig
from tests import parity
from tests.nd_mesh.test_pipeline import sent
from tests.nd_mesh.test_tensor_costs import KV, D, F, H, K, L, e, kept

B = parity.SGD.batch
SIZES = {"layers": L, "width": D, "heads": H, "kv_heads": KV, "hidden": F}


def config(context: int = parity.CONTEXT, **settings: Any) -> Config:
    return replace(parity.config(**{**SIZES, **settings}), data=DataConfig(context=context))


# -- what a rank sends -------------------------------------------------------------------------------------------------


def step(run: Runtime, cfg: Config) -> tuple[Counter[str], Counter[str], Counter[str], int]:
    """Bytes that forward and backward send among the ranks of cp, in both columns of the ledger, by operation; the
    collectives that ran again, and how many forwards did.
    """
    built, columns = parity.built(run, cfg, parity.documents()), (Counter(), Counter())
    with watching(book := Ledger()):
        built.gradients(0)
    [cp] = [set(ranks) for ranks in built.mesh.grid.groups("cp") if run.rank in ranks]
    for row in book.rows():
        if set(row.ranks) <= cp and row.op != "all_reduce":  # these are of gradients and counts
            columns[0][row.op] += row.algorithm
            columns[1][row.op] += row.wire
    return *columns, built.recomputed.collectives, built.recomputed.reruns


def ring(b: float, ranks: int) -> float:
    """Of an attention, forward and backward: k, v; k, v again; dk, dv, which need a hop more to come home."""
    return 2 * (ranks - 1) * b + 2 * (ranks - 1) * b + 2 * ranks * b


def heads(tokens: float, kv_heads: int, ranks: int) -> float:
    """Of an attention, forward and backward: queries, keys, values; the output. Tokens are a rank's."""
    return 2 * e * (2 * H + 2 * kv_heads) * K * tokens * (ranks - 1) / ranks


def expected(cfg: Config, padded: int) -> dict[str, float]:
    """Bytes of a step, by operation, for rows that are padded to so many tokens."""
    cp, tp, kept_whole, exchanging = cfg.mesh.cp, cfg.mesh.tp, cfg.parallel.save_gathered, cfg.parallel.ulysses
    tokens = B * padded / cp
    b = e * tokens * KV * K / tp
    sends = {
        "ring": {"exchange": ring(b, cp)},
        "all_gather": {
            "all_gather_single": 2 * (cp - 1) * b * (1 if kept_whole else 2),
            "reduce_scatter_single": 2 * (cp - 1) * b,
        },
        "ulysses": {"all_to_all_single": heads(tokens, max(KV, cp), cp)},
        "ring_ulysses": {
            "all_to_all_single": heads(tokens, max(KV, exchanging), exchanging),
            **({"exchange": ring(b, cp // exchanging)} if cp > exchanging else {}),
        },
    }
    return {op: L * nbytes for op, nbytes in sends[cfg.parallel.attention].items()}


SENT = {  # the rows' tokens with their padding, and what cuts
    "ring 2": (12, {"cp": 2}),
    "ring 3": (12, {"cp": 3}),
    "ring 4, padded": (16, {"cp": 4}),
    "ring, tp": (12, {"cp": 2, "tp": 2}),
    "gathered again": (12, {"cp": 3, "attention": "all_gather"}),
    "gathered, kept": (12, {"cp": 2, "attention": "all_gather", "save_gathered": True}),
    "gathered, kept, tp": (12, {"cp": 2, "tp": 2, "attention": "all_gather", "save_gathered": True}),
    "ulysses": (12, {"cp": 2, "attention": "ulysses", "order": "contiguous"}),
    "ulysses, heads copied": (12, {"cp": 4, "attention": "ulysses", "order": "striped"}),
    "ring_ulysses": (12, {"cp": 4, "attention": "ring_ulysses", "order": "striped"}),
    "ring_ulysses of one ring": (12, {"cp": 4, "attention": "ring_ulysses", "order": "striped", "ulysses": 4}),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes_of_a_step_are_the_formula(pool, name):
    """Rows in three uneven microbatches. What a formula says, every rank sends to the byte."""
    padded, settings = SENT[name]
    cfg = config(**settings, microbatches=3)
    for algorithm, wire, *_ in pool.run(cfg.mesh.cp * cfg.mesh.tp, step, cfg):
        assert algorithm == pytest.approx(expected(cfg, padded), rel=1e-12)
        assert wire == pytest.approx(expected(cfg, padded), rel=1e-12)


@pytest.mark.parametrize(
    ("method", "recompute", "again"),
    [
        ("ring", ("block",), {"exchange": 3}),
        ("ring", ("attend",), {"exchange": 3}),
        ("ring", ("q", "k", "v", "o", "ffn"), {}),
        ("all_gather", ("attend",), {"all_gather_single": 1}),
        ("ulysses", ("attend",), {"all_to_all_single": 4}),
        ("ring_ulysses", ("attend",), {"all_to_all_single": 4, "exchange": 1}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_attention_that_runs_again_sends_again(pool, method, recompute, again):
    for *_, collectives, reruns in pool.run(4, step, config(cp=4, attention=method, recompute=recompute)):
        assert collectives == {op: L * calls for op, calls in again.items()}
        assert reruns == L * len(recompute)


def test_a_pipeline_sends_the_tokens_of_a_part(pool):
    """B·T/cp·D across a boundary, in each direction; padding too."""
    for context, padded in [(12, 12), (13, 16)]:
        cfg = config(context, pp=2, cp=2, microbatches=3)
        assert pool.run(4, sent, cfg) == [e * B * padded // 2 * D] * 4


# -- what a rank has ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cp", "padded", "order"), [(2, 12, "zigzag"), (3, 12, "striped"), (4, 16, "zigzag")])
def test_bytes_that_a_ring_keeps_fall_as_cp(pool, cp, padded, order):
    """Those of a layer of one process with the tokens of a part, and no mask of all pairs."""
    tokens = B * padded // cp
    whole = e * tokens * (6 * D + 2 + 2 * K + (3 * H + 2 * KV) * K + H + 4 * F) + 2 * tokens * D
    for ours in pool.run(cp, kept, config(cp=cp, order=order, dropout=0.1)):
        assert ours == (whole, e * tokens * D)


def held(run: Runtime, cfg: Config) -> tuple[int, set[int]]:
    """Bytes of this rank's parameters, and how many ranks hold the same box, once all hold each tensor exactly."""
    built = parity.built(run, cfg, parity.documents())
    params = built.handle.parameters()
    layout.check(params, run.world)
    return sum(param.nbytes for param in params), {param.held.copies for param in params if param.numel()}


@pytest.mark.parametrize(
    ("ranks", "settings", "shards"),
    [
        (4, {"cp": 2, "fsdp": 2, "data": "fsdp"}, 4),
        (2, {"cp": 2, "data": "fsdp"}, 2),
        (4, {"cp": 2, "dp": 2, "data": "fsdp"}, 2),
        (4, {"cp": 2, "dp": 2, "data": "zero3"}, 4),
        (2, {"cp": 2}, 1),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_weights_are_cut_over_cp_too(pool, ranks, settings, shards):
    """FSDP cuts over fsdp · cp, ZeRO over dp · cp; what is left of the world has copies. A row of 37, the vocabulary's,
    is one too many.
    """
    [(whole, _)] = pool.run(1, held, config())
    each = pool.run(ranks, held, config(**settings))
    assert sum(nbytes for nbytes, _ in each) == whole * ranks // shards
    assert max(nbytes for nbytes, _ in each) - whole / shards <= 2 * e * D
    assert all(copies == {ranks // shards} for _, copies in each)
