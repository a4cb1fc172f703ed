"""Against a storm: how many ranks write at a time, and how many bytes a second they write together.

All ranks of a job that write at once are a burst which slows down everything else on the storage, the next batch of
this job included. A save behind training has time: its ranks can take turns, and each can write slowly. The price is
that the checkpoint is durable later. Lecture A, "Checkpoint Storm" (docs/notation.md).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Storm:
    """Bounds on the writing of all ranks together; 0: none."""

    writers: int = 0  # ranks that write at a time
    bandwidth: int = 0  # bytes a second, of all ranks together

    def __post_init__(self) -> None:
        if self.writers < 0 or self.bandwidth < 0:
            raise ValueError(f"writers={self.writers} and bandwidth={self.bandwidth} must be at least 1, or 0 for none")

    def turns(self, size: int) -> Iterator[range]:
        """The ranks that write together, turn by turn."""
        # IDEA: what need not be fast takes turns.
        writers = self.writers or size
        return (range(first, min(first + writers, size)) for first in range(0, size, writers))

    def pace(self, size: int) -> "Pace":
        """For one rank's file: its part of the bandwidth."""
        return Pace(self.bandwidth / min(self.writers or size, size))


@dataclass
class Pace:
    """Lets so many bytes a second pass, from the first on; 0: all. No credit is saved up in a pause."""

    bandwidth: float = 0.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    free: float = field(default=0.0, init=False)  # when the next byte may pass

    def wait(self, nbytes: int) -> None:
        """Returns when so many bytes may follow."""
        if not self.bandwidth:
            return
        now = self.clock()
        self.sleep(max(0.0, self.free - now))
        self.free = max(self.free, now) + nbytes / self.bandwidth
