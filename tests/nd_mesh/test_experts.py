"""Mixtures of experts in the trainer: who holds which, what a step sends and records, the bias, checkpoints, text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.watch import watching
from expert_parallel import Observation, dispatch
from nd_mesh import loop, metrics
from nd_mesh.config import Config, DataConfig, MeshConfig, ParallelConfig, WatchConfig
from nd_mesh.mesh import Grid
from tests import parity

E, F, K, D = 4, 8, 2, parity.MODEL.width
BYTES = 8  # of a float64
MIXTURE = {"experts": E, "expert_hidden": F, "choices": K, "balance": 0.5, "z_loss": 0.1}
BIASED = MIXTURE | {"score": "sigmoid", "bias_rate": 0.01, "pattern": "dm"}


def config(**settings: Any) -> Config:
    return parity.config(**MIXTURE | settings)


def run(pool, job, cfg: Config, *args: Any) -> list[Any]:
    return pool.run(Grid(cfg.mesh).size(), job, cfg, *args, timeout=60)


# -- the groups --------------------------------------------------------------------------------------------------------


def described(run: Runtime, cfg: Config) -> list[str]:
    return loop.describe(parity.built(run, cfg, parity.documents()))


@pytest.mark.parametrize(("sequence", "each"), [(False, 2), (True, 1)])
def test_a_run_says_where_its_experts_are(pool, sequence, each):
    cfg = config(dp=2, tp=2, ep=2, sequence=sequence, pattern="dm")
    assert f"layers [1] are mixtures of 4 experts, {each} a rank" in run(pool, described, cfg)[0]


def test_the_expert_view():
    """Four data ranks in pairs that share experts; those with the same experts are two apart."""
    grid = Grid(MeshConfig(dp=2, fsdp=2, ep=2))
    assert grid.groups("ep") == [(0, 1), (2, 3)]
    assert grid.groups("expert_data") == [(0, 2), (1, 3)]
    assert grid.groups("expert_shard") == [(0,), (1,), (2,), (3,)]  # within a dp each has other experts
    assert grid.groups("expert_replicas") == [(0, 2), (1, 3)]


def test_shards_of_experts_stay_within_dp_where_they_can():
    grid = Grid(MeshConfig(dp=2, fsdp=4, ep=2))
    assert grid.groups("expert_shard") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("expert_replicas") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    grid = Grid(MeshConfig(dp=3, fsdp=2, ep=3))  # 3 does not divide the two of a dp
    assert grid.groups("expert_shard") == [(0, 3), (1, 4), (2, 5)]
    assert grid.groups("expert_replicas") == [(rank,) for rank in range(6)]


def test_sequence_parallelism_folds_tp_into_ep():
    grid = Grid(MeshConfig(dp=2, cp=1, tp=2, ep=2))
    assert grid.groups("ep") == [(0, 2), (1, 3)]
    assert grid.groups("ep_tp") == [(0, 1, 2, 3)]
    assert grid.groups("expert_data") == [(0,), (1,), (2,), (3,)]


# -- what a rank holds -------------------------------------------------------------------------------------------------


def held(run: Runtime, cfg: Config) -> dict[str, int]:
    built = parity.built(run, cfg, parity.documents())
    return {p.held.name: p.numel() for p in built.handle.parameters() if ".experts." in p.held.name}


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 1),
        ({"dp": 2, "ep": 2}, 2),
        ({"dp": 4, "ep": 2}, 2),
        ({"fsdp": 4, "ep": 2}, 4),  # half of the experts, and of these half a matrix
        ({"dp": 2, "fsdp": 2, "ep": 4}, 4),
        ({"dp": 4, "ep": 2, "data": "zero3"}, 4),
        ({"tp": 2}, 2),
        ({"tp": 2, "dp": 2, "ep": 2}, 4),
        ({"tp": 2, "dp": 2, "ep": 2, "sequence": True}, 4),
        ({"cp": 2, "ep": 2}, 2),
    ],
)
def test_a_rank_holds_its_share(pool, settings, share):
    whole = parity.MODEL.layers * 3 * E * F * D
    for mine in run(pool, held, config(**settings)):
        assert sum(mine.values()) == whole / share


# -- what a step sends -------------------------------------------------------------------------------------------------


def sent_by_experts(run: Runtime, cfg: Config) -> tuple[float, int, dict[int, Observation]]:
    """Bytes of this rank's all-to-alls in forward and backward; the rows that it sent out and was sent; the loads."""
    built = parity.built(run, cfg, parity.documents())
    left, true = [], dispatch.Dispatch.arrive

    def arrive(self):
        mine = self.group.rank()
        left.append(sum(rows for rank, rows in enumerate(self.gives) if rank != mine))
        left.append(sum(rows for rank, rows in enumerate(self.takes) if rank != mine))
        return true(self)

    dispatch.Dispatch.arrive = arrive
    try:
        with watching(book := Ledger()):
            built.gradients(0)
    finally:
        dispatch.Dispatch.arrive = true
    return sum(row.algorithm for row in book.rows() if row.op == "all_to_all_single"), sum(left), built.observed


@pytest.mark.parametrize(
    "settings", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 4, "microbatches": 2}, {"cp": 3, "ep": 3, "experts": 6}]
)
def test_rows_travel_four_times(pool, settings):
    """Out and back, forward and backward: what leaves a rank and what it takes, each twice."""
    ranks = run(pool, sent_by_experts, config(**settings))
    for nbytes, moved, _ in ranks:
        assert nbytes == 2 * moved * D * BYTES > 0
    observed = ranks[0][2]
    tokens = sum(int(each.tokens.sum()) for each in observed.values())
    # Of every row that travels one rank says that it left and another that it came.
    assert sum(nbytes for nbytes, *_ in ranks) <= 4 * tokens * D * BYTES
    assert all(int(each.tokens.sum()) % K == 0 for each in observed.values())


# -- what is recorded --------------------------------------------------------------------------------------------------


def observed(run: Runtime, cfg: Config) -> tuple[dict[int, list[int]], dict[str, list[float]], dict[str, list[float]]]:
    """Tokens by layer of a step that follows an evaluation; the biases before and after it."""
    built = parity.built(run, cfg, parity.documents())
    built.evaluate()
    before = {name: bias.tolist() for name, bias in built.biases().items()}
    _, count, _ = built.gradients(0)
    built.update(0, count)
    after = {name: bias.tolist() for name, bias in built.biases().items()}
    return {layer: each.tokens.tolist() for layer, each in built.observed.items()}, before, after


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": ("block",)},
        {"dp": 2, "ep": 2, "recompute": ("attend", "ffn"), "microbatches": 3},
        {"tp": 2, "sequence": True, "cp": 2},
        {"tp": 2, "dp": 2, "ep": 2},
        {"pp": 2, "microbatches": 2},
    ],
)
def test_each_token_counts_once(pool, settings):
    """Not in evaluation, not in a forward that runs again, not by every rank that has a copy. Padding not at all: all
    samples are in this batch, and the last one is short.
    """
    model, short = BIASED | {"batch": 30}, DataConfig(context=10)
    expected, zeros, moved = run(pool, observed, replace(parity.config(**model), data=short))[0]
    assert set(expected) == {1} and list(zeros.values()) == [[0.0] * E]
    tokens = parity.stream(parity.documents(), short.context)
    assert tokens.samples * short.context > len(tokens.tokens) - 1  # else there is no padding
    load = torch.tensor(expected[1], dtype=torch.float64)
    assert moved["blocks.1.ffn.router.bias"] == (0.01 * torch.sign(load.mean() - load)).tolist()
    everyones: dict[str, list[float]] = {}
    for tokens, before, after in run(pool, observed, replace(parity.config(**model | settings), data=short)):
        assert tokens == expected
        assert all(bias == [0.0] * E for bias in before.values())
        everyones |= after
    assert everyones == moved


def test_a_step_without_a_label_moves_no_bias(pool):
    for before, after in pool.run(2, nothing_to_learn, parity.config(**BIASED, dp=2, ep=2), timeout=60):
        assert before == after


def nothing_to_learn(run: Runtime, cfg: Config) -> tuple[list[list[float]], list[list[float]]]:
    built = parity.built(run, cfg, parity.documents())
    built.gradients(0)
    before = [bias.tolist() for bias in built.biases().values()]
    built.update(0, 0)
    return before, [bias.tolist() for bias in built.biases().values()]


# -- a run -------------------------------------------------------------------------------------------------------------


def whole_run(run: Runtime, cfg: Config) -> None:
    stream = parity.stream(parity.documents(), cfg.data.context)
    loop.train(cfg, stream, stream, run)


def test_a_run_tells_of_its_experts_and_writes_the_same_text_on_any_mesh(pool, tmp_path: Path):
    train = replace(parity.ADAMW, steps=3, sample=12, prompt="\x01", evaluate_every=2)
    one = replace(
        parity.config(**BIASED | {"layers": 3, "pattern": "dmm", "capacity": 1.0}, train=train),
        watch=WatchConfig(journal=False),
    )
    parallel = ParallelConfig(attention="ring", sequence=True)
    texts, records = [], []
    for name, mesh, strategy in [
        ("one", MeshConfig(), ParallelConfig()),
        ("cut", MeshConfig(cp=2, tp=2, ep=2), parallel),
        ("deep", MeshConfig(pp=2, dp=2, ep=2), ParallelConfig(data="zero1")),
    ]:
        cfg = replace(one, mesh=mesh, parallel=strategy, train=replace(train, out=str(tmp_path / name)))
        run(pool, whole_run, cfg)
        texts.append((tmp_path / name / "sample.txt").read_text())
        records.append([record["experts"] for record in metrics.read(tmp_path / name) if "loss" in record])
    assert len(texts[0]) == 13 and texts[0] == texts[1] == texts[2]
    for step, *others in zip(*records, strict=True):
        assert step["tokens"].keys() == {"1", "2"} and step["imbalance"] >= 1 and 0 < step["overflow"] < 1
        for other in others:
            assert other["tokens"] == step["tokens"]
            for name in ("balance", "z", "entropy", "overflow", "imbalance"):
                assert other[name] == pytest.approx(step[name], rel=1e-12)
