"""A module in units, one process that does the same, and how far apart their gradients and updates are."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from collectives.runtime import Runtime
from fsdp import fully_shard
from tests.shards import assembled, pieces

F64 = torch.float64
ULP = torch.finfo(F64).eps


@dataclass(frozen=True)
class Case:
    """A module, the names of the units in it, from the inside out, and what a step does with it on a rank's rows.

    work(model, x, step): forwards and backwards.
    """

    build: Callable[[], nn.Module]
    units: str
    work: Callable[[nn.Module, Tensor, int], Any]
    width: int = 4
    steps: int = 3


def inner(model: nn.Module, names: str) -> list[nn.Module]:
    """The modules of these names."""
    return [model.get_submodule(name) for name in names.split()]


def sharded(run: Runtime, model: nn.Module, units: Sequence[nn.Module], **settings: Any):
    """The handle of a module with these units in it."""
    settings = {"group": run.world, "average": False, **settings}
    for unit in units:
        fully_shard(unit, **settings)
    return fully_shard(model, **settings)


def rows(case: Case, rank: int, step: int) -> Tensor:
    """A rank's rows: as many as its number and three."""
    numbers = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rank + 3, case.width, generator=numbers, dtype=F64)


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().double()


def sgd(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def in_units(run: Runtime, case: Case, settings: dict[str, Any]) -> list:
    """Of each step what this rank holds: before the update, and after it."""
    model, held = built(case), []
    handle = sharded(run, model, inner(model, case.units), **settings)
    optimizer = sgd(handle.parameters())
    for step in range(case.steps):
        optimizer.zero_grad()
        case.work(model, rows(case, run.rank, step), step)
        handle.finish()
        before = pieces(handle)
        optimizer.step()
        handle.after_step()
        held.append((before, pieces(handle)))
    assert not any(param.grad is not None for param in model.parameters())
    return held


def alone(case: Case, ranks: int) -> list[tuple[dict, dict]]:
    """The same by one process that goes through all ranks' rows: (gradients, values) after each step."""
    model, done = built(case), []
    optimizer = sgd(model.parameters())
    for step in range(case.steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            case.work(model, rows(case, rank, step), step)
        grads = {name: copy.deepcopy(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
        done.append((grads, {name: param.detach().clone() for name, param in model.named_parameters()}))
    return done


def check(pool: Any, case: Case, ranks: int = 2, **settings: Any) -> None:
    """The gradients and updates of a case are those of one process."""
    before = {name: param.detach().clone() for name, param in built(case).named_parameters()}
    held = pool.run(ranks, in_units, case, settings)
    for (true_grads, true_values), on_ranks in zip(alone(case, ranks), zip(*held, strict=True), strict=True):
        first, second = zip(*on_ranks, strict=True)
        check_grads(assembled(first)[0], true_grads)
        values = assembled(second)[1]
        for name, value in true_values.items():
            moved, size = float((value - before[name]).abs().max()), float(value.abs().max())
            error = float((values[name] - value).abs().max())
            assert error <= 1e-10 * moved + 4 * ULP * size, f"{name}: an update off by {error} of {moved}"
        before = true_values


def check_grads(grads: dict, expected: dict) -> None:
    """Within rounding of float64, and none where there should be none."""
    assert {name for name, grad in grads.items() if grad is None} == {n for n, g in expected.items() if g is None}
    there = {name: grad for name, grad in expected.items() if grad is not None}
    largest = max((float(grad.abs().max()) for grad in there.values()), default=0.0)
    for name, grad in there.items():
        error, size = float((grads[name] - grad).abs().max()), float(grad.abs().max())
        assert error <= 1e-12 * size + 1e-14 * largest, f"{name}: a gradient off by {error} of {size}"
