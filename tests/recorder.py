"""What a test sees of a step: its collectives, in the order of their launches, as text."""

import contextlib
from collections.abc import Iterator

from collectives.call import Call
from collectives.watch import Watcher, watching

SHORT = {"all_gather_single": "gather", "reduce_scatter_single": "reduce", "all_reduce": "sum"}


class Recorder(Watcher):
    """The collectives, in the order of their launches; a test may add marks of its own."""

    def __init__(self) -> None:
        self.calls: list[Call | str] = []

    def begins(self, call: Call) -> None:
        if call.outer is None:
            self.calls.append(call)

    def told(self, sizes: dict[int, object]) -> str:
        """As text: marks, and the collectives whose number of elements is in `sizes`, by what it stands for there."""
        calls = [call for call in self.calls if isinstance(call, str) or call.elements in sizes]
        words = [
            call if isinstance(call, str) else f"{SHORT.get(call.op, call.op)} {sizes[call.elements]}" for call in calls
        ]
        return ", ".join(words)

    def told_by_name(self) -> str:
        """As text: marks, and the collectives that say what they are about."""
        calls = [call for call in self.calls if isinstance(call, str) or call.about]
        words = [call if isinstance(call, str) else f"{SHORT.get(call.op, call.op)} {call.about}" for call in calls]
        return ", ".join(words)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Everything that this rank calls meanwhile."""
    recorder = Recorder()
    with watching(recorder):
        yield recorder
