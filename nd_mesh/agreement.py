"""What one rank finds out, every rank acts on: a failure on any rank stops all of them, with the same words.

A rank that raises alone leaves the others waiting in a collective. So whatever may fail on one rank only (a full disk,
a file that is not there, a decision of rank 0) is done through `attempt`: it ends on every rank with the results of
all, or on every rank with one and the same `Stopped`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives import comm
from collectives.runtime import Runtime
from nd_mesh.config import ConfigError


class Stopped(ConfigError):
    """Raised on every rank at the same point with the same line: all can leave in good order."""


def attempt(act: Callable[[], Any], run: Runtime) -> list[Any]:
    """Call `act` on every rank. After: every rank has what it returned on each, picklable, in rank order.

    Raises Stopped on every rank if it raised OSError or ConfigError on any. Collective over the world; returns on no
    rank before all have acted.
    """
    result, failure = None, ""
    try:
        result = act()
    except OSError as error:
        failure = words(error)
    except ConfigError as mistake:
        failure = str(mistake)
    everyone = comm.all_gather_object((result, failure), group=run.world)
    _stop([failure for _, failure in everyone])
    return [result for result, _ in everyone]


def agree(failure: str, run: Runtime) -> None:
    """Raise Stopped on every rank if any rank comes with a failure; costs one byte a step otherwise. Collective."""
    failed = torch.tensor(bool(failure), dtype=torch.uint8, device=run.device)
    comm.all_reduce(failed, comm.MAX, group=run.world)
    if failed:
        _stop(comm.all_gather_object(failure, group=run.world))


def words(error: OSError) -> str:
    """One line about a file that could not be read or written: its path and the reason."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _stop(failures: Sequence[str]) -> None:
    """Raise what any of the ranks reports. What all of them say is said once, without a rank."""
    told: dict[str, int] = {}
    for rank, failure in enumerate(failures):
        if failure:
            told.setdefault(failure, rank)
    if len(told) == 1 and all(failures):
        raise Stopped(failures[0])
    if told:
        raise Stopped("; ".join(f"rank {rank}: {failure}" for failure, rank in told.items()))
