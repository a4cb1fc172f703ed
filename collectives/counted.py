"""How many collectives a step starts, by name, whoever starts them: ours, or PyTorch's wrappers in a bench.

Ours are the calls of comm.py, each of which is one of NCCL's; PyTorch's are its own operators, seen as they are
dispatched. What ranks agree on are integers, counted apart. PyTorch's counterpart: CommDebugMode.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collectives.call import Call
from collectives.watch import Watcher, watching


def collectives(step: Callable[[], object]) -> Counter[str]:
    """The collectives that this rank starts in `step()`, a count by name."""
    with watching(calls := _Calls()), calls:
        step()
    return calls.ours or calls.theirs


class _Calls(Watcher, TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ours: Counter[str] = Counter()
        self.theirs: Counter[str] = Counter()

    def ends(self, call: Call) -> None:
        if call.outer is None:
            self.ours[call.op if call.dtype.is_floating_point else "agreement"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a subclass takes it apart first: DTensor, into local work and collectives
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.theirs[name] += 1
        return func(*args, **(kwargs or {}))
