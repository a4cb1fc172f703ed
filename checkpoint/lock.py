"""Whose folder it is: a lock with its owner's name, which a job that dies lets go of.

The lock is the system's (flock), so nobody has to guess whether its owner lives: when a process ends, however it ends,
its locks are gone. What the file LOCK says is for people. On storage without locks the file's word is all there is:
then an owner on this machine is looked up, and one elsewhere is believed.
"""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from checkpoint.files import naming

NAME = "LOCK"


class Locked(ValueError):
    """Another job has the folder."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Meanwhile this process alone writes into `folder`, wherever it is moved. Raises Locked, naming the owner, if
    another does.
    """
    path = folder / NAME
    with naming(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        owner = _owner(descriptor)
        try:
            # IDEA: the system lets go of a lock when its owner ends, however it ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(f"{folder} belongs to {_told(owner)}: wait for it, or name another folder") from None
        except OSError:  # no locks on this storage
            if owner and _may_live(owner):
                raise Locked(f"{folder} belongs to {_told(owner)}: if that job is dead, delete {path}") from None
        with naming(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_ourselves()).encode(), 0)
        yield
        with naming(path):
            os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # no locks on this storage
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also what a process that was forked meanwhile has of it
    finally:
        os.close(descriptor)


def holder(folder: Path) -> str:
    """Whose the folder is now, in words; "" if nobody's. For people: only `held` decides."""
    path = folder / NAME
    if not path.exists():
        return ""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        owner = _owner(descriptor)
    finally:
        os.close(descriptor)
    return _told(owner) if owner and _may_live(owner) else ""


def _ourselves() -> dict:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "since": now}


def _owner(descriptor: int) -> dict:
    """Who says to hold it; empty when nobody does."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
        return owner if owner.keys() >= {"host", "pid", "started", "since"} else {}
    except (ValueError, AttributeError):
        return {}


def _told(owner: dict) -> str:
    if not owner:
        return "another job"
    return f"a job that has not ended, process {owner['pid']} on {owner['host']} since {owner['since']}"


def _may_live(owner: dict) -> bool:
    return owner["host"] != socket.gethostname() or _started(owner["pid"]) == owner["started"]


def _started(pid: int) -> str:
    """When a process began, in the kernel's count, which tells it from a later one of the same number; "" if it has
    ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
