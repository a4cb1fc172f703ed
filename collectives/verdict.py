"""What the journals of a job say, put together: who is in which call since when, and who is behind.

Collectives of a group are matched by number: its ranks all make the same ones, in the same order. So the first number
at which they differ is where the fault is, and the rank with the smallest last number is the one the others wait for.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from collectives import journal
from collectives.call import ranks_of
from collectives.journal import Record

Journals = Mapping[int, Sequence[Record]]  # rank → its records, oldest first
LAST = 4  # calls shown of each rank


def report(journals: Journals, now: float) -> str:
    """The last calls of every rank, what is in flight, and the verdict, as text. now: seconds since 1970."""
    lines = [line for rank, records in journals.items() for line in _rank_lines(rank, records, now)]
    return "\n".join([*lines, "verdict", *(f"  {line}" for line in verdict(journals, now))])


def verdict(journals: Journals, now: float) -> list[str]:
    """For each group where its ranks differ, or that they have not left; then the point-to-point calls in flight."""
    groups = {(record.group, record.ranks) for records in journals.values() for record in records}
    lines = [line for group in sorted(groups) for line in _group_lines(journals, *group, now)]
    for rank, records in journals.items():
        pending = [record for record in records if _alone(record) and _point_to_point(record) and not record.ended]
        lines += [f"rank {rank} waits in {_told(record, now)}" for record in pending]
    return lines or ["nothing is in flight, and every group's ranks have made the same calls"]


def _group_lines(journals: Journals, group: str, ranks: str, now: float) -> Iterator[str]:
    calls = {  # rank → number → record
        rank: {r.number: r for r in journals.get(rank, ()) if r.group == group and _alone(r) and not _point_to_point(r)}
        for rank in ranks_of(ranks)
    }
    if not any(calls.values()):
        return
    name = f"group {group} (ranks {ranks})"
    if differing := _first_difference(calls):
        number, by_rank = differing
        yield f"{name}: the ranks differ first in call {number}: " + "; ".join(
            f"{_who(who)} in {what}" for what, who in by_rank.items()
        )
    in_flight = sorted({number for of in calls.values() for number, record in of.items() if not record.ended})
    unknown = {rank: why for rank, of in calls.items() if not of and (why := _unknown(journals.get(rank)))}
    last = {rank: max(of, default=0) for rank, of in calls.items() if rank not in unknown}
    ahead = [rank for rank in last if last[rank] == max(last.values())]
    for rank in sorted(set(last) - set(ahead)):
        before = _told(calls[rank][last[rank]], now) if last[rank] else "it has made none"
        yield f"{name}: rank {rank} is behind, {_who(ahead)} in call {last[ahead[0]]}; its last: {before}"
    for rank, why in unknown.items() if in_flight else ():
        yield f"{name}: rank {rank} may be behind, {why}"
    # The oldest is waited for first, as a rule; all of them are held against each other.
    for number in in_flight:
        waiting = {rank: of[number] for rank, of in calls.items() if number in of and not of[number].ended}
        behind = list(_inside_lines(journals, {rank: record.sequence for rank, record in waiting.items()}))
        if behind or number in (in_flight[0], in_flight[-1]):
            yield f"{name}: {_who(list(waiting))} in {_told(next(iter(waiting.values())), now)}"
            yield from behind


def _unknown(records: Sequence[Record] | None) -> str:
    """Why it says nothing that a rank has no record of a group, or nothing."""
    if records is None:
        return "its journal is not in this folder"
    return "its journal has only later calls, of other groups" if records and records[0].sequence > 1 else ""


def _inside_lines(journals: Journals, in_call: Mapping[int, int]) -> Iterator[str]:
    """Who is behind in a call that consists of several; in_call: rank → the sequence number of its record."""
    parts = {rank: sum(r.outer == sequence for r in journals[rank]) for rank, sequence in in_call.items()}
    for rank, count in parts.items():
        if count < (most := max(parts.values())):
            yield f"  in it rank {rank} is behind: in part {count} of it, where others are in part {most}"


def _first_difference(calls: Mapping[int, Mapping[int, Record]]) -> tuple[int, dict[str, list[int]]] | None:
    """The first number whose call is not the same on all ranks that made it, and who made which."""
    for number in sorted({number for of in calls.values() for number in of}):
        by_call: dict[str, list[int]] = {}
        for rank, of in calls.items():
            if number in of:
                by_call.setdefault(_agreed(of[number]), []).append(rank)
        if len(by_call) > 1:
            return number, by_call
    return None


def _agreed(record: Record) -> str:
    """What must be the same on all ranks: not the size in an all_to_all, which may be uneven."""
    size = "" if record.op == "all_to_all_single" else f"{record.elements} "
    return f"{record.op} of {size}{record.dtype}".removesuffix(" of 0 ") + (
        f", root {record.peer}" if record.peer >= 0 else ""
    )


def _rank_lines(rank: int, records: Sequence[Record], now: float) -> Iterator[str]:
    pending = [record for record in records[:-LAST] if not record.ended]
    yield f"rank {rank}: {records[-1].sequence if records else 0} records"
    for record in (*pending, *records[-LAST:]):
        yield f"  {time.strftime('%H:%M:%S', time.localtime(record.began))}  {_told(record, now)}"


def _told(record: Record, now: float) -> str:
    size = f" of {record.elements} {record.dtype}" if record.dtype else ""
    peer = f", rank {record.peer}" if record.peer >= 0 else ""
    part = f", part of record {record.outer}" if record.outer else ""
    age = f"ended {now - record.ended:.1f} s ago" if record.ended else f"in flight for {now - record.began:.1f} s"
    return f"{record.op}{size}{peer}, call {record.number} of group {record.group} (ranks {record.ranks}){part}: {age}"


def _alone(record: Record) -> bool:
    return not record.outer


def _point_to_point(record: Record) -> bool:
    return record.op in ("send", "recv", "exchange")


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def main(arguments: Sequence[str]) -> int:
    """The command `python -m collectives.journal FOLDER`; 1 where there is no journal."""
    parser = argparse.ArgumentParser(prog="python -m collectives.journal", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the ranks' journals are")
    folder = parser.parse_args(arguments).folder
    try:
        print(report(journal.read(folder), time.time()))
    except ValueError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 1
    return 0
