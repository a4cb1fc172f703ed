"""Pictures of a step, of a plan and of a measured run: a row a rank, drawn by collectives/timeline.py.

    print(text(planned(simulate(plan, times))))
    draw(path, planned(simulated), measured(spans_of_all_ranks), names=["plan", "run"])

What a run's rank computed is in its Timeline (Pipeline(timeline=…), under `watching`). Names of spans are forward,
backward, input or weight, and stage.microbatch: f3 where there is no room for more.
"""

from collections.abc import Sequence

import torch.distributed as dist

from collectives import comm
from collectives.timeline import Span, Timeline
from pipeline.executor import NAMES
from pipeline.simulate import Simulated


def planned(simulated: Simulated, unit: float = 1e-3) -> list[Span]:
    """A simulated step. unit: seconds of one unit of its times; by default it is shown as a millisecond."""
    return [
        Span(_lane(rank), f"{NAMES[action.kind]} {action.stage}.{action.microbatch}", start * unit, end * unit)
        for rank, spans in enumerate(simulated.spans)
        for action, start, end in spans
    ]


def measured(spans: Sequence[Sequence[Span]]) -> list[Span]:
    """A run, from the spans of each rank's timeline. Time counts from the first start of any rank, as in a plan."""
    # IDEA: clocks of the ranks of one machine agree, so their spans lie side by side as those of a plan do.
    computed = [(_lane(rank), span) for rank, own in enumerate(spans) for span in own if span.lane == "compute"]
    first = min((span.start for _, span in computed), default=0.0)
    return [Span(lane, span.name, span.start - first, span.stop - first) for lane, span in computed]


def gathered(timeline: Timeline, group: dist.ProcessGroup) -> list[list[Span]]:
    """The spans of all ranks' timelines, on every rank. Collective."""
    return comm.all_gather_object(timeline.spans, group=group)


def step_time(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last end."""
    return max(span.stop for span in spans) - min(span.start for span in spans)


def bubble(spans: Sequence[Span]) -> float:
    """The share of all ranks' step time in which they compute nothing."""
    ranks = len({span.lane for span in spans})
    return 1 - sum(span.stop - span.start for span in spans) / (ranks * step_time(spans))


def _lane(rank: int) -> str:
    return f"rank {rank:>2}"
