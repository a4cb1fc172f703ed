"""The loss scale: it falls until gradients fit, rises again, is the same on all ranks, and a checkpoint keeps it."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from checkpoint import State
from collectives.agreement import Stopped
from collectives.runtime import Runtime
from nd_mesh import mistakes, train
from nd_mesh.config import Config, ConfigError
from nd_mesh.loop import describe
from nd_mesh.precision import LARGEST_SCALE, Precision, Scaler
from nd_mesh.train import Trainer
from tests import parity
from tests.nd_mesh.runs import equal, everything
from tests.nd_mesh.test_nonfinite import an_inf

# -- by itself ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finite", "scales"),
    [
        ("++++++", [8, 8, 16, 16, 16, 32]),  # doubled after three
        ("--+++-", [4, 2, 2, 2, 4, 2]),
        ("++-++-+++", [8, 8, 4, 4, 4, 2, 2, 2, 4]),  # in a row
        ("-----", [4, 2, 1, 1, 1]),
    ],
)
def test_it_follows(finite, scales):
    scaler, seen = Scaler(8.0, steps=3), []
    for each in finite:
        scaler.update(finite=each == "+")
        seen.append(scaler.scale)
    assert seen == scales
    assert scaler.lowest == (scales[-1] == 1)


def test_it_stays_in_range():
    scaler = Scaler(LARGEST_SCALE / 2, steps=1)
    for _ in range(3):
        scaler.update(finite=True)
    assert scaler.scale == LARGEST_SCALE


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_others_have_none(dtype):
    scaler = Scaler.of(replace(Config().train, dtype=dtype, scale_steps=1))
    for finite in (True, False, True, True):
        scaler.update(finite)
        assert scaler.scale == 1 and scaler.lowest


def test_dtypes():
    table = {
        "float64": (torch.float64, torch.float64, False),
        "float32": (torch.float32, torch.float32, False),
        "bfloat16": (torch.bfloat16, torch.float32, True),
        "float16": (torch.float16, torch.float32, True),
    }
    for name, (weights, masters, mixed) in table.items():
        precision = Precision.of(name)
        assert (precision.weights, precision.masters, precision.mixed) == (weights, masters, mixed)


@pytest.mark.parametrize("scale", [0.5, 3.0, 1000.0, 2.0**31, 0.0, -2.0, float("inf"), float("nan")])
def test_only_powers_of_two(scale):
    config = replace(Config(), train=replace(Config().train, loss_scale=scale))
    with pytest.raises(ConfigError, match=r"train\.loss_scale="):
        mistakes.check(config, 1)
    mistakes.check(replace(config, train=replace(config.train, loss_scale=2.0**30)), 1)


def test_it_grows_after_some_steps():
    with pytest.raises(ConfigError, match=r"train\.scale_steps=0 must be positive"):
        mistakes.check(replace(Config(), train=replace(Config().train, scale_steps=0)), 1)


# -- in a run ----------------------------------------------------------------------------------------------------------

HALF = {"dtype": "float16", "loss_scale": 2.0**26, "scale_steps": 2, "steps": 12, "optimizer": "adamw", "lr": 0.01}


def records_of(trainer: Trainer, steps: range) -> list:
    return [replace(trainer.step(step), seconds=0, slowest=0, median=0) for step in steps]


def told(records: list) -> list:
    """As text: a norm of nan is no other nan."""
    return [repr(record) for record in records]


def in_one_go(run: Runtime, config: Config, at: list[int], folder: Path) -> tuple[list, dict]:
    trainer, records = parity.built(run, config, parity.documents()), []
    for step in range(config.train.steps):
        if step in at:
            with trainer.checkpoints(folder / str(step)) as checkpoints:
                trainer.save(checkpoints, step)
        records += records_of(trainer, range(step, step + 1))
    return records, everything(trainer)


def resumed(run: Runtime, config: Config, folder: Path) -> tuple[list, dict]:
    trainer = parity.built(run, config, parity.documents())
    first = trainer.resume(folder).step
    return records_of(trainer, range(first, config.train.steps)), everything(trainer)


@pytest.mark.parametrize("case", [{"dp": 2, "data": "zero1"}, {"pp": 2, "microbatches": 2}], ids=["dp", "pp"])
def test_it_backs_off_grows_and_comes_back(pool, tmp_path, case):
    """A run from too large a scale, saved after a step that was left out, and between two of those it takes to grow."""
    config = parity.config(**HALF, **case)
    (records, after), (other, _) = pool.run(2, in_one_go, config, [1, 9], tmp_path)
    assert told(records) == told(other)
    scales, skipped = [record.loss_scale for record in records], [record.skipped for record in records]
    assert scales[0] == 2.0**26 and skipped[0], "nothing has been too large"
    first = skipped.index(False)
    assert scales[: first + 1] == [2.0**26 / 2**i for i in range(first + 1)]
    good = 0
    for step in range(first, len(records) - 1):
        good = 0 if skipped[step] or good == 2 else good
        good += not skipped[step]
        factor = 0.5 if skipped[step] else 2.0 if good == 2 else 1.0
        assert scales[step + 1] == factor * scales[step]
    for step in (1, 9):
        again, state = pool.run(2, resumed, config, tmp_path / str(step))[0]
        assert told(again) == told(records[step:]) and equal(state, after)


def without_a_scale(run: Runtime, config: Config, folder: Path) -> float:
    """Resume from a checkpoint that knows of no scale."""
    trainer = parity.built(run, config, parity.documents())

    def older(tensors: dict, shared: dict) -> State:
        return State(tensors, {name: value for name, value in shared.items() if name != "scaler"})

    with mock.patch.object(train, "State", older), trainer.checkpoints(folder) as checkpoints:
        trainer.save(checkpoints, 0)
    again = parity.built(run, config, parity.documents())
    again.resume(folder)
    return again.scaler.scale


def test_an_older_checkpoint_begins_with_the_setting(pool, tmp_path):
    assert pool.run(1, without_a_scale, parity.config(**HALF), tmp_path) == [2.0**26]


def at_the_lowest(run: Runtime, config: Config) -> list:
    """Steps with an inf each, until all ranks stop."""
    trainer, scales = parity.built(run, config, parity.documents()), []
    try:
        for step in range(4):
            with an_inf(trainer, 1):
                scales.append(trainer.step(step).loss_scale)
    except Stopped as end:
        return [*scales, str(end)[:40]]
    return scales


@pytest.mark.parametrize(
    ("nonfinite", "seen"), [("raise", [4, 2, "step 3: the gradient norm is "]), ("skip", [4, 2, 1, 1])]
)
def test_a_smaller_scale_is_tried_first(pool, nonfinite, seen):
    config = parity.config(dtype="float16", loss_scale=4.0, nonfinite=nonfinite, dp=2)
    for scales in pool.run(2, at_the_lowest, config):
        assert scales[:-1] == seen[:-1] and str(scales[-1]).startswith(str(seen[-1]))


def norms(run: Runtime, config: Config) -> list[str]:
    trainer = parity.built(run, config, parity.documents())
    return [trainer.step(step).grad_norm.hex() for step in range(2)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case",
    [
        {"dp": 2, "data": "zero3"},
        {"tp": 2},
        {"pp": 2, "microbatches": 2, "tied": True},
        {"dp": 2, "ep": 2, "experts": 4},
    ],
)
def test_the_norm_has_the_same_bits_on_every_rank(pool, case, dtype):
    first, second = pool.run(2, norms, parity.config(dtype=dtype, **case))
    assert first == second


def described(run: Runtime, config: Config) -> list[str]:
    return describe(parity.built(run, config, parity.documents()))


@pytest.mark.parametrize(
    ("dtype", "said"), [("bfloat16", "bfloat16 with masters in float32, mesh"), ("float64", "float64, mesh")]
)
def test_a_run_says_what_it_computes_in_and_what_the_hardware_has(pool, dtype, said):
    [[first, second, *_]] = pool.run(1, described, parity.config(dtype=dtype))
    assert said in first
    native = {True: "native", False: "emulated"}[torch.ops.mkldnn._is_mkldnn_bf16_supported()]
    assert second.startswith("CPU with ") and f"bfloat16 {native}" in second
