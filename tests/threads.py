"""Ranks that are threads of this process and take turns: what tests/ordered.py runs its jobs on.

One rank runs at a time, until it gives way; which is next is drawn from a seed, so a run can be repeated, and other
seeds are other orders of events. When none can go on that is known at once: no time-out, no polling. What belongs to
the process, such as torch's default generator, all ranks share.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Halt(Exception):
    """Ends every rank: each that waits gets it."""


class Stopped(BaseException):
    """Ends a rank because another has raised something of its own."""


class Turns:
    """Who runs, who waits for what, and whether all have to stop."""

    def __init__(self, ranks: int, seed: int, deadlock: Callable[[], Halt]):
        self.waits: dict[int, Any] = dict.fromkeys(range(ranks))  # of ranks that have not ended: for what, or None
        self._failure: BaseException | None = None
        self._deadlock, self._draw, self._lock = deadlock, random.Random(seed), threading.Lock()
        self._mine = [threading.Condition(self._lock) for _ in range(ranks)]  # to wake only the one whose turn it is
        self._turn = self._draw.randrange(ranks)

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Each job on a thread of its own, rank by rank: their results. Raises what the first to fail has raised."""
        results: list[Any] = [None] * len(jobs)
        threads = [
            threading.Thread(target=self._work, args=(rank, job, results), daemon=True) for rank, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure:
            raise self._failure
        return results

    def give_way(self, rank: int, awaited: Any = None) -> None:
        """Let others run. The turn comes back at any time, but not before `awaited.done` is true."""
        with self._lock:
            self.waits[rank] = awaited
            self._next()
            self._take(rank)
            self.waits[rank] = None

    def halt(self, failure: Halt) -> Halt:
        """Every rank that waits, now or later, raises this; the first one counts."""
        self._failure = self._failure or failure
        return self._failure

    def _work(self, rank: int, job: Callable[[], Any], results: list[Any]) -> None:
        try:
            with self._lock:
                self._take(rank)
            results[rank] = job()
        except BaseException as failure:
            if self._failure is None:
                failure.add_note(f"raised on rank {rank}")
                self._failure = failure
        with self._lock:
            del self.waits[rank]
            self._next()

    def _take(self, rank: int) -> None:
        self._mine[rank].wait_for(lambda: self._turn == rank or self._failure)
        if self._failure:
            raise type(self._failure)(*self._failure.args) if isinstance(self._failure, Halt) else Stopped

    def _next(self) -> None:
        ready = [rank for rank, awaited in self.waits.items() if awaited is None or awaited.done]
        if ready:
            self._turn = self._draw.choice(ready)
        elif self.waits:
            self.halt(self._deadlock())
        for condition in self._mine if self._failure else [self._mine[self._turn]]:
            condition.notify()


@dataclass(frozen=True, eq=False)
class Group:
    """A process group, as far as an algorithm looks at it. `members` are ranks in the world, `me` is one of them."""

    network: Any
    group_name: str
    members: tuple[int, ...]
    me: int

    def rank(self) -> int:
        """This rank's number in the group."""
        return self.members.index(self.me)

    def size(self) -> int:
        """How many ranks it has."""
        return len(self.members)


class Rank:
    """What a job is given, as collectives.runtime.Runtime."""

    def __init__(self, rank: int, size: int, network: Any):
        self.rank, self.size, self.network, self.device = rank, size, network, torch.device("cpu")
        self.world = Group(network, "world", tuple(range(size)), rank)
        self.groups: dict[tuple[str, tuple[int, ...]], Group] = {}  # in the order of their making

    def new_group(self, ranks: Sequence[int], label: str = "") -> Group | None:
        """As Runtime.new_group."""
        members = tuple(ranks)
        if members != tuple(sorted(set(members))):
            raise ValueError(f"group ranks {members} must be in ascending order and distinct")
        if (label, members) not in self.groups:
            whole = not label and members == self.world.members
            name = f"group {label} {members}" if label else f"group {members}"
            self.groups[label, members] = self.world if whole else Group(self.network, name, members, self.rank)
        return self.groups[label, members] if self.rank in members else None
