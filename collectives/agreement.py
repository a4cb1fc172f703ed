"""What one rank finds out, every rank acts on: a failure on any rank stops all of them, with the same words.

A rank that raises alone leaves the others waiting in a collective. So whatever may fail on one rank only (a full disk,
a file that is not there, a decision of rank 0) is done through `together` or `gathered`: they end well on every rank,
or on every rank with one and the same `Stopped`.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from collectives import comm

T = TypeVar("T")


class Stopped(ValueError):
    """Raised on every rank at the same point with the same line: all can leave in good order."""


def together(act: Callable[[], T], *, group: dist.ProcessGroup) -> T:
    """Call `act` on every rank; returns what it returned on this one.

    Raises Stopped on every rank if it raised on any. What is no OSError and no ValueError is a fault of the program:
    that rank also prints its traceback. Collective; returns on no rank before all have acted.
    """
    result, failure = _acted(act)
    _stop(comm.all_gather_object(failure, group=group))
    return result


def gathered(act: Callable[[], T], *, group: dist.ProcessGroup) -> list[T]:
    """As `together`; returns what `act` returned on each rank, picklable, in rank order."""
    everyone = comm.all_gather_object(_acted(act), group=group)
    _stop([failure for _, failure in everyone])
    return [result for result, _ in everyone]


def agree(failure: str, device: torch.device, *, group: dist.ProcessGroup) -> None:
    """Raise Stopped on every rank if any rank comes with a failure; costs one byte otherwise. Collective."""
    failed = torch.tensor(bool(failure), dtype=torch.uint8, device=device)
    comm.all_reduce(failed, comm.MAX, group=group)
    if failed:
        _stop(comm.all_gather_object(failure, group=group))


def words(error: Exception) -> str:
    """One line: of a file that could not be read or written its path and the reason."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _acted(act: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return act(), ""
    except Exception as error:
        if not isinstance(error, OSError | ValueError):
            print(traceback.format_exc(), file=sys.stderr, end="")
        return None, words(error) or type(error).__name__


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
