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
    last layer first; -1 is before the first.

    enter(layer) and leave(layer, backward) are called in the order of the picture; leave may find that the layer has
    been left already.
    """

    def __init__(self, layers: int, enter: Callable[[int], None], leave: Callable[[int, bool], None]):
        self.layers, self.at = layers, -1
        self._enter, self._leave = enter, leave

    def forward(self, layer: int) -> int | None:
        """This rank is about to run a layer. Where it should have run before another, that one is returned instead."""
        if self.at >= self.layers:
            self.complete()
        if layer <= self.at:
            return self.at
        self._go(layer)
        return None

    def backward(self, layer: int) -> None:
        """This rank is about to run the backward of a layer; it is through with those after it."""
        position = 2 * self.layers - 1 - layer
        if position < self.at:  # the backward of an earlier forward
            self.complete()
            self.at = self.layers - 1
        self._go(position)

    def complete(self, *, backward: bool = False) -> None:
        """Go on to the end of the forward or backward under way, with `backward` in any case to that of the backward;
        then be ready for the next. Nothing, if nothing is under way.
        """
        if self.at >= 0:
            self._go(2 * self.layers - 1 if backward or self.at >= self.layers else self.layers - 1)
            self.leave()
            self.at = -1

    def leave(self) -> None:
        """This rank is through with the layer where it is."""
        if self.at >= 0:
            backward = self.at >= self.layers
            self._leave(2 * self.layers - 1 - self.at if backward else self.at, backward)

    def _go(self, position: int) -> None:
        while self.at < position:
            self.leave()
            self.at += 1
            # IDEA: whoever comes later joins in what it has skipped, so that all ranks start the same collectives.
            self._enter(self.at if self.at < self.layers else 2 * self.layers - 1 - self.at)
