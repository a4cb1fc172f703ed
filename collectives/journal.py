"""The journal: the last calls of every rank in a file each, readable from outside while a job hangs and after it died.

    python -m collectives.journal FOLDER

One ring of records of fixed size, `rank-3.journal`, mapped into memory: writing a record is a few stores, and what is
stored survives a SIGKILL, because the pages belong to the system and not to the process. A record's sequence number is
taken away first and written last, so half a record is never taken for a whole one. The time at which a call ended
stays 0 while it is in flight.

A rank that waits in a collective runs no Python, so nothing in it could tell where it is: hence a file that others
read. PyTorch's counterpart: the flight recorder (`torch/distributed/flight_recorder/`), a ring in the memory of the
process, dumped by a thread of it.
"""

import itertools
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from collectives.call import Call, spelled
from collectives.watch import Watcher

CAPACITY = 4096  # records, 184 bytes each: 750 KB a rank
_HEADER = struct.Struct("<8sQQQ32x")  # magic, capacity, rank, process id
_SEQUENCE, _ENDED = struct.Struct("<Q"), struct.Struct("<d")  # of a record, in front of its body
_RANKS = 64  # bytes for the ranks of a group
_BODY = struct.Struct(f"<dQqqQ24s24s{_RANKS}s16s")  # the fields of Record from `began` on
_SIZE = _SEQUENCE.size + _ENDED.size + _BODY.size
_MAGIC = b"journal1"


@dataclass(frozen=True)
class Record:
    """One call of one rank. Times are seconds since 1970, `ended` 0 while the call is in flight."""

    sequence: int  # of this rank's records, from 1
    ended: float
    began: float
    number: int  # of this rank's collectives in the group, from 1; sends, receives and exchanges count apart
    elements: int
    peer: int  # root, source or destination, counted in the world; -1: none, or several
    outer: int  # the sequence number of the call of which this one is part; 0: it is a call of its own
    op: str
    group: str  # torch's name of it
    ranks: str  # of the group, as `spelled` writes them
    dtype: str


class Journal(Watcher):
    """This rank's journal, `folder/rank-R.journal`, begun anew. Raises OSError where the disk has no room for it."""

    def __init__(self, folder: Path, rank: int, capacity: int = CAPACITY):
        folder.mkdir(parents=True, exist_ok=True)
        size = _HEADER.size + capacity * _SIZE
        path = folder / f"rank-{rank}.journal"
        new = path.with_suffix(".new")  # so a reader finds a whole header, and an old journal until then
        try:
            # All of its space now: a store to a mapped page for which the disk has no room is a SIGBUS.
            new.write_bytes(bytes(size))
        except OSError as error:
            new.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
        with new.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        _HEADER.pack_into(self._map, 0, _MAGIC, capacity, rank, os.getpid())
        new.replace(path)
        self._capacity, self._sequences = capacity, itertools.count(1)
        self._groups: dict[str, tuple[bytes, bytes]] = {}

    def begins(self, call: Call) -> None:
        """Write the record, its sequence number last."""
        sequence = call.notes[self] = next(self._sequences)
        outer = call.outer.notes.get(self, 0) if call.outer else 0
        op, dtype = call.op.encode(), str(call.dtype)[6:].encode() if call.dtype else b""
        names = self._groups.get(call.name) or self._groups.setdefault(call.name, _names(call))
        at = self._at(sequence)
        # IDEA: the number goes first and comes last, so a process killed at any moment leaves no record half new.
        _SEQUENCE.pack_into(self._map, at, 0)
        _ENDED.pack_into(self._map, at + 8, 0.0)
        _BODY.pack_into(
            self._map, at + 16, call.began, call.number, call.elements, _peer(call), outer, op, *names, dtype
        )
        _SEQUENCE.pack_into(self._map, at, sequence)

    def ends(self, call: Call) -> None:
        """Write the time, unless the ring has come round and the place is another record's."""
        sequence = call.notes[self]
        at = self._at(sequence)
        if _SEQUENCE.unpack_from(self._map, at)[0] == sequence:
            _ENDED.pack_into(self._map, at + 8, time.time())

    def _at(self, sequence: int) -> int:
        return _HEADER.size + sequence % self._capacity * _SIZE


def _names(call: Call) -> tuple[bytes, bytes]:
    ranks = spelled(call.ranks).encode()
    if len(ranks) > _RANKS:
        ranks = ranks[: _RANKS - 1].rpartition(b",")[0] + b",+"  # and more
    return call.name.encode(), ranks


def _peer(call: Call) -> int:
    if call.root is not None:
        return call.ranks[call.root]
    peers = {part.peer for part in (*call.sends, *call.receives)}
    return call.ranks[peers.pop()] if len(peers) == 1 else -1


def read(folder: Path) -> dict[int, list[Record]]:
    """The whole records of every rank's journal in the folder, oldest first, while the ranks write and afterwards.

    Raises ValueError for a folder without a journal and for a file that is none.
    """
    paths = sorted(folder.glob("rank-*.journal"))
    if not paths:
        raise ValueError(f"{folder} holds no rank-*.journal: name the folder that Journal was given")
    return dict(sorted(_read_rank(path) for path in paths))


def _read_rank(path: Path) -> tuple[int, list[Record]]:
    data, again = path.read_bytes(), path.read_bytes()
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is no journal of this version")
    _, capacity, rank, _ = _HEADER.unpack(data[: _HEADER.size].ljust(_HEADER.size, b"\0"))
    if min(len(data), len(again)) < _HEADER.size + max(1, capacity) * _SIZE:
        raise ValueError(f"{path} is cut off: copy the whole file")
    return rank, sorted(_records(data, again, capacity), key=lambda record: record.sequence)


def _records(data: bytes, again: bytes, capacity: int) -> Iterator[Record]:
    for at in range(_HEADER.size, _HEADER.size + capacity * _SIZE, _SIZE):
        [sequence] = _SEQUENCE.unpack_from(data, at)
        # A number that is still there was there while the body was read; one that is not was just being replaced.
        if sequence and _SEQUENCE.unpack_from(again, at)[0] == sequence:
            fields = _BODY.unpack_from(data, at + 16)
            texts = [text.rstrip(b"\0").decode(errors="replace") for text in fields[5:]]
            yield Record(sequence, *_ENDED.unpack_from(data, at + 8), *fields[:5], *texts)


if __name__ == "__main__":
    from collectives import verdict

    sys.exit(verdict.main(sys.argv[1:]))
