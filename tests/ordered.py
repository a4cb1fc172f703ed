"""A network in this process, stricter than gloo: what NCCL would hang on is refused at once, and told why.

    report = ordered.run(4, job, *args)                     as pool.run: job(run, *args), each rank on a thread
    report = ordered.run(4, job, *args, lanes="group")      stricter still

The rule. What a rank posts at once, an `exchange` or a single send or receive, is an entry. Entries stand in queues in
the order of their posting. An entry starts when it heads all of its queues on its own rank. A message passes when the
entries at both of its ends have started; there is no buffer on the way, so a send ends when the peer receives. An entry
leaves its queues when all of its messages have passed. Between two ranks messages meet in order. There is a queue for

- each rank, group and peer with `lanes="pair"`: NCCL's rule for single operations. PyTorch gives each pair of ranks a
  communicator, and so a stream, of its own, unless the group was started with its device (`device_id=`);
- each rank and group with `lanes="group"`: NCCL's rule for batches, which p2p.py posts always, and for everything else
  on a group that was started with its device: one communicator, one stream (ProcessGroupNCCL::pointToPoint).

Buffers are where they hurt most. What is sent must hold, until the sender has waited, what it held when posted. What
receives is garbage from its posting to the wait, and nobody may write into it. Both ends of a message agree in number
of elements and dtype. Every handle is waited for. All ranks make the same groups in the same order. None of this
depends on which rank runs when, which is drawn from `seed` (threads.py).
"""

import copy
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

from collectives import p2p
from tests.in_flight import End, Entry
from tests.threads import Group, Halt, Rank, Turns


class Refused(Halt):
    """The program breaks the rule. Every rank gets it, and who called `run`."""


class Deadlock(Refused):
    """No rank can go on. The message has a line for each: what it waits for, and what stands before that."""


@dataclass(frozen=True)
class Report:
    """What came of a job. The lists are by rank."""

    results: list[Any]
    sent: list[int]  # bytes
    received: list[int]
    messages: int
    steps: int  # messages on the longest chain in which each was posted only after the one before was waited for


def run(ranks: int, job: Callable[..., Any], *args: Any, lanes: str = "pair", seed: int = 0) -> Report:
    """Run `job(run, *args)` on each of this many ranks, which get copies of `args`: p2p.py moves everything over this
    network. Raises Refused, or what a rank has raised itself.
    """
    if lanes not in ("pair", "group"):
        raise ValueError(f'lanes={lanes!r}: choose "pair" or "group"')
    network = Network(ranks, lanes, seed)
    places = [Rank(rank, ranks, network) for rank in range(ranks)]
    jobs = [functools.partial(job, place, *copy.deepcopy(args)) for place in places]
    with mock.patch.object(p2p, "exchange", exchange):  # on which all the rest of p2p.py stands
        results = network.turns.run(jobs)
    network.check_end([list(place.groups) for place in places])
    return Report(results, network.sent, network.received, network.messages, max(network.clocks))


def exchange(sends: Sequence[p2p.Message], receives: Sequence[p2p.Message], *, group: Group | None) -> p2p.Handle:
    """In the place of p2p.exchange."""
    if group is None:
        raise ValueError("exchange: this rank is no member of the group; let only members call it")
    ends = [End(group, True, *message) for message in sends if message[0].numel()]
    ends += [End(group, False, *message) for message in receives if message[0].numel()]
    return p2p.Handle([group.network.post(group, ends)] if ends else [])


class Network:
    """The queues of all ranks, and what has passed."""

    def __init__(self, ranks: int, lanes: str, seed: int):
        self.turns = Turns(ranks, seed, lambda: Deadlock("\n".join(map(self._line, range(ranks)))))
        self.lanes = lanes
        self.entries: list[list[Entry]] = [[] for _ in range(ranks)]  # all that a rank has posted
        self.queues: dict[Hashable, deque[Entry]] = defaultdict(deque)
        self.meeting: dict[Hashable, tuple[deque, deque]] = defaultdict(lambda: (deque(), deque()))  # receives, sends
        self.clocks, self.sent, self.received = [0] * ranks, [0] * ranks, [0] * ranks
        self.messages = 0

    def post(self, group: Group, ends: Sequence[End]) -> Entry:
        """Let an entry stand in its queues, and pass what now can."""
        self.turns.give_way(group.me)
        entry = Entry(group, ends, self.lanes, self.clocks[group.me])
        self.entries[group.me].append(entry)
        for lane in entry.lanes:
            self.queues[lane].append(entry)
        heads = [entry]
        while heads:
            heads += self._start(heads.pop())
        return entry

    def wait(self, entry: Entry) -> None:
        """Wait until all has passed, then let its receivers see it."""
        me = entry.group.me
        self.turns.give_way(me, entry)
        for end in entry.ends:
            self._check_untouched(end)
            if end.arrived is not None:
                end.tensor.copy_(end.arrived.reshape(end.tensor.shape))
        self.clocks[me] = max(self.clocks[me], entry.passed_at)
        entry.waited = True

    def check_end(self, groups: Sequence[Sequence[Hashable]]) -> None:
        """Nothing is left over, and all ranks have made the same groups."""
        for rank, entries in enumerate(self.entries):
            for entry in entries:
                if not entry.waited:
                    how = "has passed" if entry.done else "never passed"
                    raise Refused(f"rank {rank} has ended without waiting for {entry}, which {how}")
        if any(made != groups[0] for made in groups):
            raise Refused(f"the ranks made different groups, or in different orders: {groups}")

    def _start(self, entry: Entry) -> list[Entry]:
        """Start it if it is its turn; returns the entries that may be next."""
        if entry.started or not self._heads_its_queues(entry):
            return []
        entry.started = True
        following = []
        for end in entry.ends:
            sides = self.meeting[end.line]
            sides[end.sends].append((entry, end))
            if all(sides):
                following += self._pass(*(side.popleft() for side in sides))
        return following

    def _heads_its_queues(self, entry: Entry) -> bool:
        return all(self.queues[lane][0] is entry for lane in entry.lanes)

    def _pass(self, receiver: tuple[Entry, End], sender: tuple[Entry, End]) -> list[Entry]:
        """One message; returns the entries that may be next."""
        (taker, receive), (giver, send) = receiver, sender
        self._check_fit(send, receive)
        self._check_untouched(send)
        receive.arrived = send.tensor.clone()
        self.messages += 1
        self.sent[send.me] += send.tensor.nbytes
        self.received[receive.me] += receive.tensor.nbytes
        step = max(taker.posted_at, giver.posted_at) + 1
        for entry, end in (receiver, sender):
            entry.left.remove(end)
            entry.passed_at = max(entry.passed_at, step)
        return [head for entry in (taker, giver) if entry.done for head in self._leave(entry)]

    def _leave(self, entry: Entry) -> Iterator[Entry]:
        """Out of its queues; the new heads of them."""
        for lane in entry.lanes:
            self.queues[lane].remove(entry)
            yield from list(self.queues[lane])[:1]

    def _check_fit(self, send: End, receive: End) -> None:
        if send.size != receive.size:
            self._refuse(f"on {send.line[0]} rank {send.me} posted [{send}], and rank {receive.me} [{receive}]")

    def _check_untouched(self, end: End) -> None:
        if not end.is_untouched():
            self._refuse(f"on {end.line[0]} the tensor of rank {end.me}'s [{end}] changed while it was in flight")

    def _refuse(self, why: str) -> NoReturn:
        raise self.turns.halt(Refused(why))

    def _line(self, rank: int) -> str:
        """How a rank stands in a deadlock."""
        if rank not in self.turns.waits:
            return f"rank {rank} has ended"
        awaited = self.turns.waits[rank]
        before = ", ".join(map(str, self._before(awaited)))
        return f"rank {rank} waits for {awaited}" + (f", before which stand {before}" if before else "")

    def _before(self, entry: Entry) -> list[Entry]:
        """What has to leave before it can start, in the order of posting."""
        lanes, before = set(entry.lanes), []
        posted = self.entries[entry.group.me]
        for earlier in reversed(posted[: posted.index(entry)]):
            if earlier.left and lanes & earlier.lanes:
                lanes |= earlier.lanes
                before.insert(0, earlier)
        return before
