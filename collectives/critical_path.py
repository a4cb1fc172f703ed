"""How many messages stood one after another, of all that the ranks sent to each other: counted, by a logical clock.

    with watching(path := CriticalPath()):
        ring.all_reduce(x, group=run.world)
    steps(comm.all_gather_object(path.events, group=run.world))        2(P-1)

Messages in flight together count once, so this is how often the latency of a link is paid. Counted as by Lamport 1978:
a message arrives one later than the later of its two ends was posted, and whoever waits for it is as late from then on.
Left out: the backend's own collectives, whose messages nobody here sees.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from collectives.call import Call
from collectives.watch import Watcher

End = tuple[str, int, int, bool]  # of a message: group, from, to, and whether it is the sending one
Event = tuple[int, tuple[End, ...] | None]  # an exchange of this rank, by number: what it posted; None: it is over


class CriticalPath(Watcher):
    """What this rank posted, and when it had waited for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def begins(self, call: Call) -> None:
        """An exchange is posted."""
        if call.point_to_point:
            ends = [(call.name, call.rank, part.peer, True) for part in call.sends]
            ends += [(call.name, part.peer, call.rank, False) for part in call.receives]
            call.notes[self] = len(self.events)
            self.events.append((call.notes[self], tuple(ends)))

    def ends(self, call: Call) -> None:
        """It has been waited for."""
        if call.point_to_point:
            self.events.append((call.notes[self], None))


def steps(everyone: Sequence[Sequence[Event]]) -> int:
    """The messages on the longest chain, from the events of all ranks.

    Raises ValueError if a message has one end only: not all ranks watched the same.
    """
    clocks, posted = [0] * len(everyone), defaultdict(dict)
    walks = [_walk(rank, events, clocks, posted) for rank, events in enumerate(everyone)]
    while walks:
        before = clocks.copy(), sum(map(len, posted.values()))
        going = [walk for walk in walks if next(walk, None)]
        if len(going) == len(walks) and before == (clocks, sum(map(len, posted.values()))):
            raise ValueError("a message has only one of its ends in these events: watch the same on all ranks")
        walks = going
    return max(clocks)


def _walk(rank: int, events: Sequence[Event], clocks: list[int], posted: defaultdict) -> Iterator[bool]:
    """Go through a rank's events; yields where another rank has to go on first.

    posted: (group, from, to, number among those) → when, by end.
    """
    numbers, messages = defaultdict(int), defaultdict(list)
    for exchange, ends in events:
        for end in ends or ():
            message = (*end[:3], numbers[end])
            numbers[end] += 1
            posted[message][end[3]] = clocks[rank]
            messages[exchange].append(message)
        if ends is None:
            for message in messages[exchange]:
                while len(posted[message]) < 2:
                    yield True
                clocks[rank] = max(clocks[rank], 1 + max(posted[message].values()))
