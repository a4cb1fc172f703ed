"""Who watches this process's communication: one decorator, put on every operation of comm.py and on p2p.exchange.

    with watching(Journal(folder, run.rank), ledger := Ledger(), Checked(run)):
        ...

A watcher is told when a call begins, when it is launched, when this rank waits for it, and when it has ended: for an
asynchronous call that is in `wait()` of the handle, which is wrapped. A call that consists of others (an ordered
all_reduce is two exchanges, the second of which starts in its `wait()`) is their `outer`, so nothing is counted twice.
Nobody watching, a call costs a look at two attributes. PyTorch's counterparts: the flight recorder,
TORCH_DISTRIBUTED_DEBUG=DETAIL, CommDebugMode.

The one state of the project that belongs to the process: process groups do too, torch's take no attributes, and a
context variable would not reach the threads of autograd. All ranks of a job begin and end to watch at the same place.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch.distributed as dist

from collectives.call import CALLS, Call


class Watcher:
    """Told of every call, in this order. Each method may raise, which the caller of the operation then sees."""

    def begins(self, call: Call) -> None:
        """Before anything is sent."""

    def launched(self, call: Call) -> None:
        """The operation has returned. From here on `call.parts` holds what it has started so far."""

    def waits(self, call: Call) -> None:
        """Before this rank waits for an asynchronous call."""

    def ends(self, call: Call) -> None:
        """The result is there; `call.parts` is complete."""


@dataclass(frozen=True)
class _Group:
    name: str
    ranks: tuple[int, ...]
    rank: int
    collectives: Iterator[int] = field(default_factory=functools.partial(count, 1))
    exchanges: Iterator[int] = field(default_factory=functools.partial(count, 1))


@dataclass(frozen=True)
class _Session:
    watchers: tuple[Watcher, ...]
    groups: dict[dist.ProcessGroup, _Group]

    def fill(self, call: Call) -> None:
        """The group, the number, what it is about, and the call of which this is a part."""
        group = self.groups.get(call.group) or self.groups.setdefault(call.group, _seen(call.group))
        call.name, call.ranks, call.rank, call.outer = group.name, group.ranks, group.rank, _HERE.call
        if call.outer:
            call.outer.parts.append(call)
            call.number, call.about = call.outer.number, call.outer.about
        else:
            call.number = next(group.exchanges if call.point_to_point else group.collectives)
            call.about = _HERE.about
        call.began = time.time()


def _seen(group: dist.ProcessGroup) -> _Group:
    return _Group(group.group_name, tuple(dist.get_process_group_ranks(group)), group.rank())


class _Process:
    session: _Session | None = None


class _Thread(threading.local):
    call: Call | None = None  # in which this thread is
    session: _Session | None = None  # of that call
    about: str = ""  # what its calls are about


_PROCESS = _Process()
_HERE = _Thread()


@contextlib.contextmanager
def watching(*watchers: Watcher) -> Iterator[None]:
    """Inside, these watchers see every call of this process, from all of its threads, beside those that already watch.

    A handle that is waited on after the end is still seen by who saw it begin. Every rank enters and leaves at the same
    place, because calls are counted from where the first watcher came.
    """
    before = _PROCESS.session
    if watchers:
        groups = before.groups if before else {}
        _PROCESS.session = _Session((*(before.watchers if before else ()), *watchers), groups)
    try:
        yield
    finally:
        _PROCESS.session = before


def watches(watcher: Watcher) -> bool:
    """Whether this watcher is told of the calls that begin now."""
    return _PROCESS.session is not None and watcher in _PROCESS.session.watchers


class about:  # a class, because a generator costs three times as much
    """`with about("blocks.3"):` every call that this thread begins inside is about that: `call.about`, for watchers."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None:
        self.before, _HERE.about = _HERE.about, self.what

    def __exit__(self, *error: object) -> None:
        _HERE.about = self.before


def watched(operation: Callable) -> Callable:
    """Decorator: the operation, seen by whoever watches. CALLS has a description under its name.

    Raises ValueError for the group None, which is what new_group gives to a rank that is no member: torch takes it for
    the world, and those who are members would wait for ever.
    """
    describe = CALLS[operation.__name__]

    @functools.wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group", ...) is None:
            raise ValueError(f"{operation.__name__}: this rank is no member of the group; let only members call it")
        session = _HERE.session or _PROCESS.session  # a part is seen by who saw its call begin
        if session is None:
            return operation(*args, **kwargs)
        return _watch(operation, describe(*args, **kwargs), session, args, kwargs)

    return call


def _watch(operation: Callable, call: Call, session: _Session, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    session.fill(call)
    for watcher in session.watchers:
        watcher.begins(call)
    with _inside(call, session):
        result = operation(*args, **kwargs)
    waits = hasattr(result, "wait")
    call.result = None if waits else result
    for watcher in session.watchers:
        watcher.launched(call)
    if waits:
        return _Handle(result, call, session)
    for watcher in session.watchers:
        watcher.ends(call)
    return result


class _inside:  # a class, as `about`
    def __init__(self, call: Call, session: _Session):
        self.call, self.session = call, session

    def __enter__(self) -> None:
        self.before = _HERE.call, _HERE.session
        _HERE.call, _HERE.session = self.call, self.session

    def __exit__(self, *error: object) -> None:
        _HERE.call, _HERE.session = self.before


class _Handle:
    """A p2p.Handle whose wait is watched. A second wait does nothing, as there."""

    def __init__(self, handle: Any, call: Call, session: _Session):
        self._handle, self._call, self._session, self._waits = handle, call, session, False

    def advance(self) -> bool:
        handle, self._handle = self._handle, None  # one that has raised does not end
        if handle is None:
            return False
        self._begin_to_wait()
        with _inside(self._call, self._session):
            follows = handle.advance()
        if follows:
            self._handle = handle
        else:
            for watcher in self._session.watchers:
                watcher.ends(self._call)
        return follows

    def wait(self) -> None:
        while self.advance():
            pass

    def _begin_to_wait(self) -> None:
        if not self._waits:
            self._waits = True
            for watcher in self._session.watchers:
                watcher.waits(self._call)
