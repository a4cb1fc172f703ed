"""Slowed links: every call takes as long as on a link of this latency and bandwidth, so that overlap can be seen.

On one machine messages arrive at once, and what runs beside them gains nothing. Here a call ends no earlier than
latency + bytes · seconds_per_byte after this rank's link is free; calls queue on it in the order of their launches. The
time is spent asleep in `wait()`, so what is computed between launch and wait runs beside it, as beside a real transfer;
a synchronous call takes that long. Left out: the peer's link, and that two calls could share one.
"""

import threading
import time

from collectives.call import Call
from collectives.ledger import wire_bytes
from collectives.watch import Watcher


class Slow(Watcher):
    """One link of this rank, both directions at once. Bytes count without headers."""

    def __init__(self, latency: float, seconds_per_byte: float):
        self.latency, self.seconds_per_byte = latency, seconds_per_byte
        self._free = 0.0  # when the link is, on the clock of time.monotonic
        self._lock = threading.Lock()

    def launched(self, call: Call) -> None:
        """Queue the call on the link. One that consists of others takes the time of those."""
        if call.parts or call.size == 1:
            return
        with self._lock:
            began = max(self._free, time.monotonic() - (time.time() - call.began))
            self._free = began + self.latency + _bytes(call) * self.seconds_per_byte
            call.notes[self] = began, self._free

    def ends(self, call: Call) -> None:
        """Sleep until the call may end."""
        _, free = call.notes.get(self, (0.0, 0.0))
        time.sleep(max(0.0, free - time.monotonic()))


def on_the_link(call: Call) -> list[tuple[float, float]]:
    """From when to when a slowed link carries the call, part by part, on time.monotonic; nothing if none is slowed."""
    own = [times for watcher, times in call.notes.items() if isinstance(watcher, Slow)]
    return own + [times for part in call.parts for times in on_the_link(part)]


def _bytes(call: Call) -> float:
    """What keeps the link busy: of an exchange the larger direction, otherwise what this rank sends."""
    return max(wire_bytes(call), sum(part.nbytes for part in call.receives))
