"""Checked mode: before a rank enters a call it writes what it is about to do into the job's store, and compares.

A mistake that would hang for ever, or give wrong numbers without a word, becomes an error on every rank that is in the
call: another order, operation, reduction, shape, dtype, root or group; a rank that never comes; a send without its
receive. A collective's launch thereby waits for all of its group, as under PyTorch's counterpart,
TORCH_DISTRIBUTED_DEBUG=DETAIL: for finding faults, not for speed.

Collectives are compared before their launch, by (group, number). Point-to-point messages are announced when posted,
under a count of their own for each pair and direction, and compared by whoever posts second, at the latest when waited
for: to wait earlier would refuse programs that are right. A part of a call names the call it belongs to, so two ranks
that wait on ordered all_reduces in another order are told apart.

Calls of the same operation, shape and dtype look the same; if all ranks have something to give (all_reduce,
reduce_scatter, all_gather, all_to_all), the line of the program from which they come must be the same, too. Two calls
from one line in exchanged order remain unseen, and so do messages of one shape that belong to no call of comm.py.
"""

import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from collectives.call import Call, Part, spelled
from collectives.runtime import Runtime
from collectives.watch import Watcher

_OF_LISTS = ("reduce_scatter", "all_gather")  # whose other tensor has a shape of its own on every rank
_SYMMETRIC = ("all_reduce", "reduce_scatter_single", "all_gather_single", "all_to_all_single", *_OF_LISTS)
_HERE = Path(__file__).parent.as_posix()
_POLL = 0.001  # seconds between two looks into the store


class Checked(Watcher):
    """Compares this rank's calls with its peers'. All ranks of the job make one at the same time, in the same order.

    timeout: seconds to wait for a peer. A call that does not fit raises RuntimeError on every rank in it, naming both
    sides; whoever waits in another call is told, too, and the job is over.
    """

    def __init__(self, run: Runtime, timeout: float = 30.0):
        # Keys of an earlier one must not answer for this one.
        count = run.store.add(f"checked by rank {run.rank}", 1)
        self._store = dist.PrefixStore(f"checked {count}", run.store)
        self._world_rank, self._timeout = run.rank, timeout
        # Counted here and not by the call's number, which begins anew where another watching begins.
        self._messages: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._collectives: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def begins(self, call: Call) -> None:
        """Announce the call; a collective waits for its group's announcements and compares."""
        if call.point_to_point:
            self._announce(call)
            posted = [self._post(call, part, True) for part in call.sends]
            posted += [self._post(call, part, False) for part in call.receives]
            # Whoever posts second sees the first, and raises before anything is sent: gloo would abort a process whose
            # buffer is too small. Whoever sees nothing yet looks again when it waits.
            call.notes[self] = [message for message in posted if not self._matched(*message)]
        elif call.outer is None:
            self._announce(call)
            self._compare(call)

    def waits(self, call: Call) -> None:
        """Hold each message of an exchange against what its peer has announced."""
        for mine, other, peer in call.notes.get(self, ()):
            if missing := self._absent({peer: other}, call):
                self._fail(f"{_told(call)}: {self._silent(missing, 'has posted no message to match')}")
            self._matched(mine, other, peer)

    def _matched(self, mine: dict, other: str, peer: int) -> bool:
        """Whether the peer's announcement is there; if so, it fits."""
        if not self._store.check([other]):
            return False
        theirs = self._get(other)
        self._store.delete_key(other)  # nobody else reads it
        if mine["message"] != theirs["message"]:
            self._fail(f"messages of ranks {self._world_rank} and {peer} differ: {mine['told']}; {theirs['told']}")
        return True

    def _compare(self, call: Call) -> None:
        number = next(self._collectives[call.name])
        keys = [f"{call.name}/{number}/{rank}" for rank in range(call.size)]
        self._store.set(keys[call.rank], json.dumps(_signature(call, self._world_rank)))
        if missing := self._absent(dict(zip(call.ranks, keys, strict=True)), call):
            there = [self._get(key) for rank, key in zip(call.ranks, keys, strict=True) if rank not in missing]
            self._fail(f"{_by_call(there)}; {self._silent(missing, 'wrote nothing')}")
        everyone = [self._get(key) for key in keys]
        if number:  # whoever has come here has read the call before
            self._store.delete_key(f"{call.name}/{number - 1}/{call.rank}")
        if any(theirs["agreed"] != everyone[0]["agreed"] for theirs in everyone):
            self._fail(f"the ranks make different calls: {_by_call(everyone)}")
        for mistake in (*_uneven_pairs(everyone), *_wrong_wholes(everyone, call)):
            self._fail(mistake)

    def _post(self, call: Call, part: Part, sending: bool) -> tuple[dict, str, int]:
        """Announce a message, and say where its peer's announcement will be."""
        source, target = (call.rank, part.peer) if sending else (part.peer, call.rank)
        side, other = ("sends", "receives") if sending else ("receives", "sends")
        direction, word = f"{call.name}/{source} to {target}", "to" if sending else "from"
        pair = f"{direction}/{next(self._messages[direction + side])}"
        what = _spelled(part.shape, part.dtype)
        told = f"rank {self._world_rank} {side} {what} {word} rank {call.ranks[part.peer]} in {_told(call)}"
        owner = [call.outer.op, call.outer.number] if call.outer else None
        mine = {"message": [list(part.shape), str(part.dtype), owner], "told": told}
        self._store.set(f"{pair}/{side}", json.dumps(mine))
        return mine, f"{pair}/{other}", call.ranks[part.peer]

    def _announce(self, call: Call) -> None:
        self._store.set(f"last/{self._world_rank}", json.dumps({"told": _told(call), "at": time.time()}))

    def _absent(self, keys: dict[int, str], call: Call) -> list[int]:
        """The ranks whose key has not come when the time is over; none when all are there."""
        deadline = time.monotonic() + self._timeout
        while missing := [rank for rank, key in keys.items() if not self._store.check([key])]:
            if self._store.check(["failed"]):
                raise RuntimeError(f"rank {self._world_rank} in {_told(call)}: {self._get('failed')}")
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
        return missing

    def _silent(self, missing: Sequence[int], what: str) -> str:
        last = []
        for rank in missing:
            seen = self._get(f"last/{rank}") if self._store.check([f"last/{rank}"]) else None
            age = f", {time.time() - seen['at']:.1f} s ago" if seen else ""
            last.append(f"rank {rank}: {seen['told'] if seen else 'none'}{age}")
        verb = f"ranks {list(missing)} {what} within {self._timeout:g} s"
        return f"{verb}; last call seen of {'; '.join(last)}"

    def _fail(self, why: str) -> NoReturn:
        self._store.set("failed", json.dumps(why))
        raise RuntimeError(f"rank {self._world_rank}: {why}")

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key))


def _signature(call: Call, world_rank: int) -> dict[str, Any]:
    agreed = [call.op, list(call.shape), str(call.dtype), str(call.reduction), call.ordered, call.root]
    other = _spelled(*call.other) if call.other else None
    if call.op in _SYMMETRIC:
        agreed += [other, _line()]
    numbers = [math.prod(call.other[0]), str(call.other[1])] if call.other else None
    told = {"other": other, "numbers": numbers, "rank": world_rank, "told": _told(call)}
    return {"agreed": agreed, "gives": call.gives, "takes": call.takes, **told}


def _uneven_pairs(everyone: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Of an all_to_all, each pair of which one gives what the other does not expect."""
    for (i, giver), (j, taker) in itertools.product(enumerate(everyone), enumerate(everyone)):
        if giver["gives"] and giver["gives"][j] != taker["takes"][i]:
            yield (
                f"rank {giver['rank']} gives rank {taker['rank']} {giver['gives'][j]} rows, which expects "
                f"{taker['takes'][i]}: rank {giver['rank']} {giver['told']}; rank {taker['rank']} {taker['told']}"
            )


def _wrong_wholes(everyone: Sequence[dict[str, Any]], call: Call) -> Iterator[str]:
    """Of a gather or scatter, each rank whose whole is not what it must be: all pieces at the root, nothing elsewhere.

    That rank alone would raise, and the others wait for it.
    """
    if call.op not in ("gather", "scatter"):
        return
    side, all_pieces = {"gather": "output", "scatter": "input"}[call.op], [call.size * call.elements, str(call.dtype)]
    for rank, theirs in enumerate(everyone):
        due = all_pieces if rank == call.root else None
        if theirs["numbers"] != due:
            what = f"{due[0]} numbers of {due[1].removeprefix('torch.')}" if due else "None"
            yield f"rank {theirs['rank']} {theirs['told']}: its {side} is {theirs['other']}, and must be {what}"


def _told(call: Call) -> str:
    reduction = f" {str(call.reduction).rpartition('.')[2]}" if call.reduction is not None else ""
    ordered = " ordered" if call.ordered else ""
    root = f" root {call.ranks[call.root]}" if call.root is not None else ""
    splits = f" gives {list(call.gives)} takes {list(call.takes)}" if call.gives is not None else ""
    return f"{call}{_beside(call)}{reduction}{ordered}{root}{splits} at {_line()}"


def _beside(call: Call) -> str:
    if not call.other or call.op not in _SYMMETRIC:
        return ""
    shape, dtype = call.other
    return f" beside {_name(dtype)}" if call.op in _OF_LISTS else f" into {_spelled(shape, dtype)}"


def _line() -> str:
    """Where the program called: the innermost line outside of this folder's files, else its outermost."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _by_call(everyone: Sequence[dict[str, Any]]) -> str:
    ranks: dict[str, list[int]] = {}
    for signature in everyone:
        ranks.setdefault(signature["told"], []).append(signature["rank"])
    return "; ".join(f"rank {spelled(who)} {told}" for told, who in ranks.items())


def _spelled(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
