"""The events of a data strategy in a step: when a rank's weights must be whole, may be cut again, and are reduced.

                     F0:0 F0:1   F2:0 F2:1 B2:0   B0:0 B2:1 …     stage:microbatch, of a rank with stages 0 and 2
    open="step"     ▲0          ▲2                                a gather a stage and step; all weights of the rank
    open="action"   ▲0        ▼0▲2           ▼2▲0   ▼0▲2 …        whenever the stage changes; the weights of one stage

With reduce="action" gradients are reduced after each B or W instead of once: M times the bytes, and no whole gradient
of the stage between. They are data as the actions are: a plan's events are known before it runs.

Lecture A, "FSDP: Module 실행 수명에 맞춘 Sharding". PyTorch's counterpart: UNSHARD, RESHARD and REDUCE_GRAD of
_ComputationType in torch/distributed/pipelining/schedules.py.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from pipeline.plan import Action


class Event(NamedTuple):
    """Something that the handle of a data strategy is told of a unit."""

    verb: str  # unshard, reshard or reduce
    unit: Hashable


class Around(NamedTuple):
    """The events before an action, and those after it."""

    before: list[Event]
    after: list[Event]


def events(
    actions: Sequence[Action], units: Mapping[int, Sequence[Hashable]], open: str = "step", reduce: str = "step"
) -> list[Around]:
    """Of each of a rank's actions the events around it. units: of each stage what it needs; several may need the same.

    Raises ValueError for a word that is neither "step" nor "action".
    """
    for name, word in (("open", open), ("reduce", reduce)):
        if word not in ("step", "action"):
            raise ValueError(f'{name}={word!r}: use "step" or "action"')
    around = [Around([], []) for _ in actions]
    for unit in dict.fromkeys(unit for several in units.values() for unit in several):
        uses = [i for i, action in enumerate(actions) if unit in units[action.stage]]
        for i in uses:
            # IDEA: weights are open from the first use to the last, of a step or of a run of actions in a row.
            if i == uses[0] or (open == "action" and i - 1 not in uses):
                around[i].before.append(Event("unshard", unit))
            if i == uses[-1] or (open == "action" and i + 1 not in uses):
                around[i].after.append(Event("reshard", unit))
        complete = [i for i in uses if actions[i].kind in "BW"]
        for i in complete if reduce == "action" else complete[-1:]:
            around[i].after.append(Event("reduce", unit))
    return around
