"""The program of a step: one order of gathers and reductions, which every rank goes through whatever its rows make it
skip, and which knows what comes next.

    forward    enter root, enter 0, leave 0, enter 1, leave 1, leave root
    backward   enter root, enter 1, leave 1, enter 0, leave 0, leave root          the same, read backwards

To enter a unit is to gather its weights; to leave it is to free them and, in backward, to reduce its gradient. All of
that is collective, and a rank that waits for one which another never starts waits for ever. So a rank does not follow
its own events: they only say where it has come to, and on the way there it enters and leaves what it has skipped.

The order is first that in which the units are registered, then the one in which the first forward ran them, if all
ranks saw the same (`adopt`). A unit that runs once more, or earlier than its turn, is not in the program: it is
gathered then, on all ranks or none. Pure bookkeeping, without a message of its own. PyTorch's counterpart: the recorded
post_forward_order of FSDPCommContext, for prefetch in backward only.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

ENTER, LEAVE = "enter", "leave"
ROOT = 0  # the outermost unit


class Event(NamedTuple):
    """A unit, by its number, is entered or left."""

    kind: str
    unit: int


def nested(parents: Sequence[int | None]) -> list[Event]:
    """A forward in which each unit runs once, in order, inside of its parent: [None, 0, 0] makes the picture above.

    parents: of each unit the number of the one around it, which comes before it.
    """
    events, inside = [], []
    for unit, parent in enumerate(parents):
        while inside and inside[-1] != parent:
            events.append(Event(LEAVE, inside.pop()))
        inside.append(unit)
        events.append(Event(ENTER, unit))
    return events + [Event(LEAVE, unit) for unit in reversed(inside)]


def reverse(forward: Iterable[Event]) -> list[Event]:
    """The backward of a forward."""
    return [Event(LEAVE if kind == ENTER else ENTER, unit) for kind, unit in reversed(list(forward))]


class Program:
    """Where a rank has come to: `at` events of `events`, which is the forward or the backward under way, or None.

    enter(unit, ahead) and leave(unit, backward, last) are called in the order of the picture. ahead: the next
    `prefetch` units to be entered; last: whether the unit's gradient is complete. owed: forwards that a backward will
    follow, and none has yet.
    """

    def __init__(
        self,
        forward: Sequence[Event],
        prefetch: int,
        enter: Callable[[int, list[int]], None],
        leave: Callable[[int, bool, bool], None],
    ):
        self.prefetch, self._enter, self._leave = prefetch, enter, leave
        self._follow(forward)
        self.events: list[Event] | None = None
        self.at, self.owed = 0, 0
        self.open: set[int] = set()  # units that are entered, and not left
        self.ended: set[int] = set()  # of those the ones to be left as soon as it is their turn
        self.seen: list[Event] = []  # of the first whole forward, as this rank ran it

    def _follow(self, forward: Iterable[Event]) -> None:
        self.forward = list(forward)
        self.backward = reverse(self.forward)

    def adopt(self, order: Sequence[Event]) -> None:
        """Follow what was seen from now on, if it is a whole forward in which every unit ran. Alike on all ranks."""
        bounds = order and (order[0], order[-1]) == (Event(ENTER, ROOT), Event(LEAVE, ROOT))
        if bounds and {*order} == {*self.forward}:
            self._follow(order)

    def before_forward(self, unit: int, differentiated: bool) -> bool:
        """A unit is about to run; with the root a forward begins, which a backward will follow if it is differentiated.
        Whether that was the unit's turn.
        """
        if unit == ROOT:
            self.complete()
            self.events, self.at = self.forward, 0
            self.owed += differentiated
        self._see(Event(ENTER, unit))
        return self.events is self.forward and self._go(Event(ENTER, unit))

    def after_forward(self, unit: int) -> bool:
        """A unit has run. Whether it had been its turn."""
        self._see(Event(LEAVE, unit))
        return self.events is self.forward and unit in self.open and self._go(Event(LEAVE, unit))

    def before_backward(self, unit: int) -> None:
        """The backward of a unit is about to begin, whose forward was its turn."""
        if self.events is self.backward and unit in self.open:
            return
        if self.events is not self.backward or not self._go(Event(ENTER, unit)):
            self._begin_backward()
            self._go(Event(ENTER, unit))

    def after_backward(self, unit: int, *, inside: bool) -> None:
        """The backward of a unit has ended; inside: and that of the units inside of it, skipped ones too."""
        if self.events is self.backward and unit in self.open:
            self.ended.add(unit)
            self._run(self.events.index(Event(LEAVE, unit), self.at) + 1 if inside else self.at)

    def complete(self) -> None:
        """Go on to the end of the forward or backward under way, if one is."""
        if self.events is not None:
            self._run(len(self.events))

    def complete_all(self) -> None:
        """Go on to the end of what is under way, and through every backward that is owed and this rank has not had."""
        self.complete()
        while self.owed:
            self._begin_backward()
            self.complete()

    def _begin_backward(self) -> None:
        self.complete()
        self.events, self.at = self.backward, 0
        self.owed = max(0, self.owed - 1)

    def _go(self, event: Event) -> bool:
        """Go on to the next event of this kind, if there is one."""
        try:
            to = self.events.index(event, self.at)
        except ValueError:
            return False
        self._run(to + 1)
        return True

    def _run(self, to: int) -> None:
        while self.at < to or self._next_has_ended():
            # IDEA: whoever comes later joins in what it has skipped, so that all ranks start the same collectives.
            event, self.at = self.events[self.at], self.at + 1
            if event.kind == ENTER:
                self.open.add(event.unit)
                ahead = (unit for kind, unit in islice(self.events, self.at, None) if kind == ENTER)
                self._enter(event.unit, list(islice(ahead, self.prefetch)))
            else:
                self.open.discard(event.unit)
                self.ended.discard(event.unit)
                backward = self.events is self.backward
                self._leave(event.unit, backward, backward and event not in self.events[self.at :])
        if self.at == len(self.events):
            self.events = None

    def _next_has_ended(self) -> bool:
        kind, unit = self.events[self.at] if self.at < len(self.events) else (ENTER, ROOT)
        return kind == LEAVE and unit in self.ended

    def _see(self, event: Event) -> None:
        if self.seen[-1:] == [Event(LEAVE, ROOT)]:
            return
        if event == Event(ENTER, ROOT):  # one before has not come to its end
            self.seen.clear()
        self.seen.append(event)
