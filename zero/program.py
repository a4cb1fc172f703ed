"""The program of stage 3: one order of collectives, which every rank goes through whatever its rows make it skip.

    forward    enter 0, leave 0, enter 1, leave 1, …
    backward   … enter 1, leave 1, enter 0, leave 0

To enter a layer is to gather its weights; to leave it is to free them and, in backward, to reduce its gradient. All of
that is collective, and a rank that waits for one which another never starts waits for ever. So a rank does not follow
its own forward: that only says where it has come to (`forward`, `backward`), and on the way there it enters and leaves
what it has skipped.

Pure bookkeeping, without a message of its own. DeepSpeed's counterpart: the recorded trace of runtime/zero/
partitioned_param_coordinator.py, which is what this rank happened to run. Left out: programs learned from a first step.
"""

from collections.abc import Callable


class Program:
    """Where a rank has come to, in L layers. Positions 0 … L-1 are the layers in forward, L … 2L-1 those in backward,
    last layer first; -1 is before the first, None where nothing is under way.

    enter(layer) and leave(layer, backward) are called in the order of the picture; leave may find that the layer has
    been left already. owed: forwards that a backward will follow, and none has yet.
    """

    def __init__(self, layers: int, enter: Callable[[int], None], leave: Callable[[int, bool], None]):
        self.layers, self.at, self.owed = layers, None, 0
        self._enter, self._leave = enter, leave

    def begin(self, differentiated: bool) -> None:
        """A forward begins; whether a backward will follow."""
        self.complete()
        self.at = -1
        self.owed += differentiated

    def forward(self, layer: int, differentiated: bool) -> int | None:
        """This rank is about to run a layer. Where it should have run before another, that one is returned instead."""
        if self.at is None or self.at >= self.layers:
            self.begin(differentiated)
        if layer <= self.at:
            return self.at
        self._go(layer)
        return None

    def backward(self, layer: int) -> None:
        """This rank is about to run the backward of a layer; it is through with those after it."""
        position = 2 * self.layers - 1 - layer
        if self.at is None or not self.layers <= self.at <= position:
            self._begin_backward()
        self._go(position)

    def complete(self) -> None:
        """Go on to the end of the forward or backward under way, if one is."""
        if self.at is not None:
            self._go(self.layers - 1 if self.at < self.layers else 2 * self.layers - 1)
            self.leave()
            self.at = None

    def complete_all(self) -> None:
        """Go on to the end of what is under way, and through every backward that is owed and this rank has not had."""
        self.complete()
        while self.owed:
            self._begin_backward()
            self.complete()

    def leave(self) -> None:
        """This rank is through with the layer where it is."""
        if self.at is not None and self.at >= 0:
            self._leave(self._layer(), self.at >= self.layers)

    def _begin_backward(self) -> None:
        self.complete()
        self.at = self.layers - 1
        self.owed = max(0, self.owed - 1)
        if self.layers:
            self._go(self.layers)

    def _go(self, position: int) -> None:
        while self.at < position:
            self.leave()
            self.at += 1
            # IDEA: whoever comes later joins in what it has skipped, so that all ranks start the same collectives.
            self._enter(self._layer())

    def _layer(self) -> int:
        return self.at if self.at < self.layers else 2 * self.layers - 1 - self.at
