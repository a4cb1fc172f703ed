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
            began = time.monotonic() - (time.time() - call.began)
            self._free = max(self._free, began) + self.latency + _bytes(call) * self.seconds_per_byte
            call.notes[self] = self._free

    def ends(self, call: Call) -> None:
        """Sleep until the call may end."""
        time.sleep(max(0.0, call.notes.get(self, 0.0) - time.monotonic()))


def _bytes(call: Call) -> float:
    """What keeps the link busy: of an exchange the larger direction, otherwise what this rank sends."""
    return max(wire_bytes(call), sum(part.nbytes for part in call.receives))
