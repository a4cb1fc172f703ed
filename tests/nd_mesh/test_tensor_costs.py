"""What tensor parallelism costs in a step of the trainer: what a rank sends, by the ledger; what it keeps for backward;
and what recomputation sends again.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.saved import saving
from collectives.watch import watching
from nd_mesh.config import Config
from tests import parity

MODES = {"tp": {}, "gathered again": {"sequence": True}, "kept": {"sequence": True, "save_gathered": True}}
LAYER, HEAD = {"tp": 8, "gathered again": 10, "kept": 8}, {"tp": 2, "gathered again": 3, "kept": 2}  # of N·D·(P-1)/P
L, D, H, KV, F, T, e = 2, 32, 8, 2, 20, parity.CONTEXT, 8
K, N = D // H, parity.SGD.batch * T


def config(tp: int, mode: str, **settings: Any) -> Config:
    sizes = {"layers": L, "width": D, "heads": H, "kv_heads": KV, "hidden": F}
    return parity.config(**sizes, tp=tp, **MODES[mode], **settings)


def step(run: Runtime, cfg: Config) -> tuple[Counter[tuple[int, ...]], Counter[str], int]:
    """Bytes that forward, backward and the sums after it send, by the ranks that they join; the collectives that ran
    again, and how many forwards did.
    """
    built, sent = parity.built(run, cfg, parity.documents()), Counter()
    with watching(book := Ledger()):
        built.gradients(0)
    for row in book.rows():
        sent[row.ranks] += row.algorithm
    return sent, built.recomputed.collectives, built.recomputed.reruns


@pytest.mark.parametrize("recompute", [(), ("block",)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_of_a_step_are_the_formula(pool, tp, mode, recompute):
    """Rows in three uneven microbatches; two heads of keys and values, which four ranks share in pairs. The sums tell
    of each parameter whether it has a gradient.
    """
    units = L * (LAYER[mode] + (4 if recompute else 0)) + 2 + HEAD[mode]  # 2: the embedding
    norms = (2 * L + 1) * (D + 1) if MODES[mode] else 0
    over_tp = e * (units * N * D + 6 * N + 2 * norms) * (tp - 1) / tp  # 6: the loss
    over_kv = e * 2 * 2 * L * (K * D + 1) * (2 - 1) / 2
    ranks = pool.run(tp, step, config(tp, mode, recompute=recompute, microbatches=3))
    for rank, (sent, _, _) in enumerate(ranks):
        assert sent[tuple(range(tp))] == pytest.approx(over_tp, rel=1e-12)
        if tp == 4:
            assert sent[(0, 1) if rank < 2 else (2, 3)] == pytest.approx(over_kv, rel=1e-12)


def again(mode: str, gathers: int, sums: int) -> dict[str, int]:
    """Inputs of columns that are gathered once more a layer, outputs of rows that are summed once more."""
    calls = {"all_gather_single": gathers, "reduce_scatter_single": sums} if MODES[mode] else {"all_reduce": sums}
    return {op: L * count for op, count in calls.items() if count}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("recompute", "gathers", "sums"),
    [
        (("block",), 2, 2),
        (("ffn",), 1, 1),
        (("attend",), 0, 0),
        (("o",), 0, 1),
        (("k", "attend", "ffn"), 2, 1),
        (("q", "k", "v"), 3, 0),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_collectives_of_forward_run_again(pool, mode, recompute, gathers, sums):
    """Queries, keys and values that run again by themselves no longer share an input."""
    for _, collectives, reruns in pool.run(2, step, config(2, mode, recompute=recompute, dropout=0.1)):
        assert collectives == again(mode, gathers, sums)
        assert reruns == L * len(recompute)


@pytest.mark.parametrize("mode", MODES)
def test_shards_are_not_gathered_again(pool, mode):
    """Of a run that is fully sharded too, what runs again is tensor parallelism's alone."""
    for _, collectives, _ in pool.run(4, step, config(2, mode, fsdp=2, recompute=("block",))):
        assert collectives == again(mode, 2, 2)


def kept(run: Runtime, cfg: Config) -> tuple[int, int]:
    """Bytes that autograd keeps of a layer: those of three layers less those of two; bytes of a layer's input."""
    keeps, inputs = [], []
    for layers in (2, 3):
        more = replace(cfg, model=replace(cfg.model, layers=layers))
        built = parity.built(run, more, parity.documents())
        built.model.blocks["1"].register_forward_pre_hook(lambda _, args: inputs.append(args[0].nbytes))
        [batch] = built.microbatches(0)
        with saving() as saved:
            hidden = built.model(batch.ids, where=batch.where)
        keeps.append(saved.nbytes(without=built.model.parameters()))
        del hidden
    return keeps[1] - keeps[0], inputs[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_kept_are_the_formula(pool, tp, mode):
    """The mask is a number for each pair of tokens, made a layer; dropout's masks are a byte an element."""
    stream = tp if MODES[mode] else 1  # into how many pieces it is cut
    gathered = tp if mode == "gathered again" else 1
    whole = (4 * D + 2) / stream + 2 * D / gathered + 2 * K
    cut = (3 * H * K + H + 4 * F) / tp + 2 * max(KV / tp, 1) * K
    expected = e * (N * (whole + cut) + parity.SGD.batch * T**2) + 2 * N * D / stream
    assert pool.run(tp, kept, config(tp, mode, dropout=0.1)) == tp * [(expected, e * N * D // stream)]
