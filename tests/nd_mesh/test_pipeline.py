"""Pipelines in the trainer: what the grid's steps do not show."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.watch import watching
from nd_mesh.config import Config
from nd_mesh.sample import generate
from tests import parity

MODEL = {"layers": 3, "dropout": 0.1, "tied": True, "kv_heads": 1}
ONE = parity.config(**MODEL)
USUAL = {"microbatches": 3, "pp": 2}
RUNS = {
    "1f1b": (2, {}),
    "zbv": (2, {"schedule": "zbv"}),
    "four stages": (4, {"pp": 4, "stage_layers": (1, 2, 0, 0)}),
    "zbv, tp and sequences": (4, {"schedule": "zbv", "tp": 2, "sequence": True}),
    "interleaved, fsdp": (4, {"schedule": "interleaved", "fsdp": 2, "data": "fsdp"}),
    "dualpipe_v, zero3": (4, {"schedule": "dualpipe_v", "dp": 2, "data": "zero3"}),
}


def config(**settings) -> Config:
    return parity.config(**{**MODEL, **USUAL, **settings})


def evaluated(run: Runtime, cfg: Config) -> tuple[float, list[int]]:
    """After a step the validation loss, and a sample; and the same again after another step."""
    built, told = parity.built(run, cfg, parity.documents()), []
    settings = {"context": parity.CONTEXT, "vocab": 37, "rows": built.rows}
    for step in range(2):
        built.step(step)
        told += [built.evaluate(), generate(built.model, [1, 2], 15, seed=0, **settings)]
    return told


@pytest.fixture(scope="module")
def alone(pool):
    [result] = pool.run(1, evaluated, ONE)
    return result


@pytest.mark.parametrize("name", RUNS)
def test_evaluation_and_text_do_not_depend_on_the_pipeline(pool, alone, name):
    ranks, settings = RUNS[name]
    for ours in pool.run(ranks, evaluated, config(**settings)):
        for mine, theirs in zip(ours[::2], alone[::2], strict=True):
            assert abs(mine - theirs) <= 1e-12 * theirs
        assert ours[1::2] == alone[1::2]
    assert len(set(alone[1])) > 4


def parameters(run: Runtime, cfg: Config) -> list[tuple[str, int, set[str]]]:
    built = parity.built(run, cfg, parity.documents())
    return [(p.held.name, p.numel(), p.held.sums.keys() - {"data"}) for p in built.handle.parameters()]


def test_a_rank_has_its_stages_and_nothing_else(pool):
    [whole] = pool.run(1, parameters, replace(ONE, model=replace(ONE.model, tied=False)))
    ranks = pool.run(2, parameters, config(tied=False, stage_layers=(1, 2)))
    assert sorted(itertools.chain(*ranks)) == sorted(whole)
    assert {name.split(".")[1] for name, *_ in ranks[1] if name.startswith("blocks")} == {"1", "2"}
    assert [name for name, *_ in ranks[0] if not name.startswith("blocks")] == ["embed.weight"]


def test_a_tied_weight_is_a_sum_of_two_copies_or_one_parameter(pool):
    for rank in pool.run(2, parameters, config()):
        assert [sums for name, _, sums in rank if name == "embed.weight"] == [{"tie"}]
        assert all(not sums for name, _, sums in rank if name != "embed.weight")
    first, second = pool.run(2, parameters, config(schedule="zbv"))
    assert [sums for name, _, sums in first if name == "embed.weight"] == [set()]
    assert all(name.startswith("blocks") for name, *_ in second)


def sent(run: Runtime, cfg: Config) -> int:
    """Bytes that this rank sends to other stages in the second step."""
    built, ledger = parity.built(run, cfg, parity.documents()), Ledger()
    built.gradients(0)
    with watching(ledger):
        built.gradients(1)
    return sum(row.wire for row in ledger.rows() if row.op == "send")


def test_activations_cross_a_boundary_once_and_nothing_else_does(pool):
    rows, width, itemsize = parity.SGD.batch, parity.MODEL.width, 8
    crossing = rows * parity.CONTEXT * width * itemsize  # of all microbatches, in one direction
    assert pool.run(2, sent, config()) == [crossing, crossing]
    assert pool.run(4, sent, config(pp=4, stage_layers=(1, 1, 1, 0))) == [c * crossing for c in (1, 2, 2, 1)]
    assert pool.run(2, sent, config(schedule="interleaved")) == [3 * crossing, 3 * crossing]
    six = {"virtual": 3, "stage_layers": (1, 0, 0, 1, 1, 0)}
    assert pool.run(2, sent, config(schedule="interleaved", **six)) == [5 * crossing, 5 * crossing]
    assert pool.run(4, sent, config(tp=2, sequence=True)) == [crossing / 2] * 4


def gathers(run: Runtime, cfg: Config) -> tuple[int, int]:
    """Of weights, and reductions of gradients, in a step."""
    built, ledger = parity.built(run, cfg, parity.documents()), Ledger()
    built.gradients(0)
    with watching(ledger):
        built.gradients(1)
    fsdp = next(ranks for ranks in built.mesh.grid.groups("fsdp") if run.rank in ranks)
    calls = {row.op: row.calls for row in ledger.rows() if row.ranks == fsdp}
    return calls["all_gather_single"], calls["reduce_scatter_single"]


def test_what_fsdp_sends_is_a_choice(pool):
    """Once a step a gather and a reduction a unit; or a gather whenever the rank turns to the other of its stages, and
    a reduction each microbatch.
    """
    base = {"fsdp": 2, "data": "fsdp", "tied": False, "schedule": "interleaved", "stage_layers": (1, 0, 1, 1)}
    # rank 0 does F0:0 F0:1 F2:0 F2:1 F0:2 B2:0 B2:1 F2:2 B0:0 B0:1 B2:2 B0:2 in stages 0, with the embedding, and 2
    turns, units, microbatches = 4 * 2 + 3 * 1, 3, 3
    for settings, expected in [
        ({"reshard": False}, (units, units)),
        ({}, (turns, units)),
        ({"reduce_each": True}, (turns, units * microbatches)),
    ]:
        assert pool.run(4, gathers, config(**base, **settings))[0] == expected, settings


def norms(run: Runtime, cfg: Config) -> list[float]:
    built = parity.built(run, cfg, parity.documents())
    return [built.step(step).grad_norm for step in range(2)]


def test_without_the_sum_of_tied_gradients_the_norm_is_another(pool):
    """What the grid would see: each copy has the gradient of one use alone."""
    [right] = pool.run(1, norms, ONE)
    wrong = pool.run(2, untied, config())
    assert not any(math.isclose(ours[0], right[0], rel_tol=1e-3) for ours in wrong)


def untied(run: Runtime, cfg: Config) -> list[float]:
    built = parity.built(run, cfg, parity.documents())
    for param in built.handle.parameters():
        param.held.sums.pop("tie", None)
    return [built.step(step).grad_norm for step in range(2)]


def test_float32_trains(pool):
    """Weights, activations and gradients cross in the run's dtype."""
    cfg = config(schedule="zb_h1")
    cfg = replace(cfg, train=replace(cfg.train, dtype="float32"))
    first, second = pool.run(2, norms, cfg)
    assert first == second and all(torch.tensor(first).isfinite())
