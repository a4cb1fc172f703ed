"""A gradient that is not finite on one rank: all ranks leave the step out, and nothing has moved; or all of them stop.

Judged by bits: the run with an inf equals the run that never had the step.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from collectives.agreement import Stopped
from collectives.runtime import Runtime
from nd_mesh import train
from nd_mesh.config import Config
from nd_mesh.metrics import Record, Report, read
from nd_mesh.train import Trainer
from tests import parity
from tests.nd_mesh.in_16_bits import every_second
from tests.nd_mesh.runs import equal, everything

STEPS, BAD = 4, 2  # step 2 is the third
MIXTURE = {"experts": 4, "expert_hidden": 12, "shared_hidden": 6, "balance": 0.1, "bias_rate": 0.01}
CASES = [
    *({"dp": 2, "data": data} for data in ("naive", "bucketed", "overlapped", "zero1", "zero2", "zero3", "fsdp")),
    {"fsdp": 2},
    {"tp": 2, "sequence": True},
    {"cp": 2},
    {"pp": 2, "microbatches": 2, "tied": True},
    {"pp": 2, "microbatches": 2, "schedule": "zb_h1", "data": "zero3"},
    *({"dp": 2, "ep": 2, "data": data} | MIXTURE for data in ("auto", "fsdp")),
]


@contextlib.contextmanager
def an_inf(trainer: Trainer, rank: int) -> Iterator[None]:
    """In it one number of one gradient of one rank is inf."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        spoiled = grad.clone()
        spoiled.view(-1)[-1] = math.inf
        return spoiled

    params = [param for param in trainer.model.parameters() if param.dim() > 1]
    hook = params[-1].register_hook(spoil) if trainer.run.rank == rank else None
    yield
    if hook is not None:
        hook.remove()


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a step moves on this rank: masters, optimizer, biases, the weights of the model, tokens."""
    weights = [(f"weight {i}", torch.from_numpy(values)) for i, values in enumerate(weights_of(trainer))]
    biases = {name: bias.clone() for name, bias in trainer.biases().items()}
    return everything(trainer) | biases | dict(weights) | {"tokens": torch.tensor(trainer.tokens)}


def weights_of(trainer: Trainer) -> list:
    with trainer.handle.whole():
        return [parity.copied(param.float()) for param in trainer.model.parameters()]


def steps(run: Runtime, config: Config, bad: int, rank: int, fault: str = "none") -> tuple[list, dict]:
    """The records of a run in which that rank has an inf in step `bad`, and the state at the end."""
    with FAULTS[fault]():
        trainer, records = parity.built(run, config, parity.documents()), []
        for step in range(STEPS):
            with an_inf(trainer, rank) if step == bad else contextlib.nullcontext():
                records.append(trainer.step(step))
        return records, state(trainer)


def without(run: Runtime, config: Config, bad: int) -> tuple[list, dict]:
    """The same of a run that knows nothing of step `bad`, but for the scale of the steps after it."""
    trainer, records = parity.built(run, config, parity.documents()), []
    for step in range(STEPS):
        if step == bad:
            trainer.scaler.update(finite=False)
        else:
            records.append(trainer.step(step))
    return records, state(trainer)


def timeless(records: list) -> list:
    return [replace(record, seconds=0, slowest=0, median=0) for record in records]


@pytest.mark.parametrize(("case", "optimizer"), every_second(CASES, ["adamw", "sgd"]))
def test_the_step_was_not(pool, case, optimizer):
    check(pool, parity.config(dtype="bfloat16", nonfinite="skip", **OPTIMIZERS[optimizer], **case), BAD)


@pytest.mark.parametrize(
    ("data", "dtype"),
    [("auto", "float64"), ("zero1", "float32"), ("auto", "float16"), ("zero1", "float16"), ("fsdp", "float16")],
)
def test_in_any_precision_even_the_first_step(pool, data, dtype):
    """Of an optimizer that has no state yet."""
    check(pool, parity.config(dtype=dtype, nonfinite="skip", data=data, dp=2, **OPTIMIZERS["adamw"]), 0)


OPTIMIZERS = {"adamw": {"optimizer": "adamw", "lr": 0.01}, "sgd": {"optimizer": "sgd", "momentum": 0.8}}


def check(pool, config: Config, bad: int) -> None:
    ours, right = pool.run(2, steps, config, bad, 1), pool.run(2, without, config, bad)
    records = timeless(ours[0][0])
    assert [record.skipped for record in records] == [step == bad for step in range(STEPS)]
    assert not math.isfinite(records[bad].grad_norm)
    for (mine, after), (expected, never) in zip(ours, right, strict=True):
        kept = [record for record in timeless(mine) if not record.skipped]
        assert kept == [record for record in records if not record.skipped] == timeless(expected)
        assert equal(after, never)


@pytest.mark.parametrize("case", [{"dp": 2, "data": "zero2"}, {"tp": 2}, {"pp": 2, "microbatches": 2}])
def test_all_ranks_stop(pool, case):
    """With the same words, and nothing has moved."""
    told, moved = zip(*pool.run(2, stopped, parity.config(dtype="float32", **case)), strict=True)
    assert told[0] == told[1] and not any(moved)
    assert told[0].startswith("step 3: the gradient norm is ") and "train.nonfinite=skip" in told[0]


def stopped(run: Runtime, config: Config) -> tuple[str, bool]:
    trainer = parity.built(run, config, parity.documents())
    for step in range(BAD):
        trainer.step(step)
    before = state(trainer)
    with pytest.raises(Stopped) as told, an_inf(trainer, 1):
        trainer.step(BAD)
    return str(told.value), not equal(before, state(trainer))


def test_it_is_said(tmp_path, capsys):
    report = Report(tmp_path, 100, shown=True)
    report.step(Record(7, 3.0, 10, math.inf, 0.1, 1.0, 1.0, 1.0, loss_scale=8.0, skipped=True))
    assert "step 7 was left out: the gradient norm is inf at a loss scale of 8\n" in capsys.readouterr().out
    [record] = read(tmp_path)
    assert record["skipped"] and record["grad_norm"] == math.inf and record["loss_scale"] == 8


# -- a fault that must show --------------------------------------------------------------------------------------------


def test_a_rank_that_decides_alone_shows(pool):
    """Under tensor parallelism a rank's own gradient may be finite where another's is not."""
    config = parity.config(dtype="bfloat16", nonfinite="skip", tp=2)
    records = [records for records, _ in pool.run(2, steps, config, BAD, 1, "own norm")]
    assert [record[BAD].skipped for record in records] == [False, True]


def _own_norm():
    def grad_norm(params, *, group):
        return torch.stack([param.grad.double().norm() for param in params]).norm()

    return mock.patch.object(train, "grad_norm", grad_norm)


FAULTS = {"none": contextlib.nullcontext, "own norm": _own_norm}
