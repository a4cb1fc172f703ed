"""The schedules by name, as a configuration or a demo asks for them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipeline.dualpipe import dualpipe
from pipeline.dualpipe_v import dualpipe_v
from pipeline.gpipe import gpipe
from pipeline.interleaved import interleaved
from pipeline.layer_wise import layer_wise
from pipeline.one_f_one_b import one_f_one_b
from pipeline.plan import Plan
from pipeline.zb_h1 import zb_h1
from pipeline.zbv import zbv

# IDEA: a schedule is a pure function of three numbers; whatever runs, checks, times or draws it takes any of them.
SCHEDULES: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {
        **{"layer_wise": layer_wise, "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved},
        **{"zb_h1": zb_h1, "zbv": zbv, "dualpipe": dualpipe, "dualpipe_v": dualpipe_v},
    }
)
IN_TWO = ("interleaved", "zbv", "dualpipe", "dualpipe_v")  # known for two stages a rank


def schedule(name: str, ranks: int, microbatches: int, virtual: int | None = None) -> Plan:
    """The plan of that name. virtual: stages a rank, default what the schedule is known for: 1, or 2.

    Raises ValueError for a name that there is not, and for numbers that the schedule cannot do.
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    if virtual is None:
        virtual = 2 if name in IN_TWO else 1
    return SCHEDULES[name](ranks, microbatches, virtual)
