"""Where to cut, measured: a model whose layers are not alike, cut evenly and cut for the slowest stage.

    python -m pipeline.study                     4 local ranks
    python -m pipeline.study --figure cut.png    both steps as a picture too; needs matplotlib

2P blocks that take as long as each other, an embedding that takes nothing, a head that takes three blocks' time, and
1F1B of M = 2P microbatches. Layers are measured, cut, and run on P ranks. Losses and gradients are judged beside one
process; a time is shown. Lecture A, "Stage Balance", and its mistake 6, "Pipeline Stage에 Layer 수만 같으면 균형이다".
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from collectives import comm, demo, timeline
from collectives.demo import Demo
from collectives.runtime import Runtime
from collectives.timeline import Span
from pipeline import sleeping
from pipeline.executor import Microbatch, Pipeline
from pipeline.links import connect
from pipeline.partition import Cost, even, measure, partition
from pipeline.picture import planned, step_time
from pipeline.plan import Plan
from pipeline.schedules import schedule
from pipeline.simulate import Simulated, Times, simulate

HEAD = 3  # blocks' time of the head


class Cut(NamedTuple):
    """A cut, and a step of it."""

    name: str
    layers: list[range]  # of each stage
    slowest: float  # seconds of the slowest stage, forward and backward
    simulated: Simulated
    run: list[Span]

    def __str__(self) -> str:
        """A line of the table."""
        layers = " ".join(str(len(each)) for each in self.layers)
        ms = [f"{1e3 * each:10.0f}" for each in (self.slowest, self.simulated.step_time, step_time(self.run))]
        return f"{self.name:>8} {layers:>16} {' '.join(ms)}"


HEADER = f"{'cut':>8} {'layers a stage':>16} {'slowest':>10} {'simulated':>10} {'measured':>10}   ms"


def work(run: Runtime, show: Demo) -> None:
    """Both cuts, their lines and their charts."""
    cuts = both(run, show)
    if run.rank == 0:
        print(HEADER, *cuts, sep="\n")
        charts = {f"{cut.name} cut, {word}": spans for cut in cuts for word, spans in pictures(cut).items()}
        for name, spans in charts.items():
            print(f"\n{name}\n{timeline.text(spans, width=120)}")
        if show.figure:
            title = f"1F1B of a model whose head takes {HEAD} blocks' time"
            timeline.draw(show.figure, *charts.values(), names=list(charts), title=title)


def pictures(cut: Cut) -> dict[str, list[Span]]:
    """What was simulated, and what was run."""
    return {"simulated": planned(cut.simulated, 1.0), "measured": cut.run}


def both(run: Runtime, show: Demo) -> list[Cut]:
    """Measure the layers, cut them in two ways, run both. Collective."""
    microbatches, model = sleeping.batch(2 * run.size), uneven(run.size)
    measured = measure(model, microbatches[0].args[0], repeats=3) if run.rank == 0 else []
    [costs, *_] = comm.all_gather_object(measured, group=run.world)  # one cut for all
    reference = sleeping.alone(model, microbatches)
    cuts = {"even": even(len(model), run.size), "optimal": partition(costs, run.size)}
    found = []
    for name, cut in cuts.items():
        show.part = f"{name} cut"
        pipe = piped(run, cut, microbatches)
        sleeping.keep_awake(pipe.stages.values())
        sleeping.parity(show, pipe, pipe.step(microbatches), reference)
        sleeping.keep_awake(pipe.stages.values(), False)
        spans = sleeping.paced(pipe, microbatches).spans
        found.append(Cut(name, cut, *predicted(pipe.plan, cut, costs), spans))
    return found


def uneven(ranks: int) -> list[nn.Module]:
    """2P blocks and a long head."""
    return sleeping.layers(2 * ranks, head=HEAD * sleeping.NAP)


def piped(run: Runtime, cut: Sequence[range], microbatches: Sequence[Microbatch]) -> Pipeline:
    """This rank of the pipeline that has these layers on its stages."""
    plan = schedule("1f1b", run.size, len(microbatches))
    stages = {run.rank: sleeping.cut_out(uneven(run.size), cut[run.rank])}
    links = connect(plan, [range(run.size)], run.new_group)
    return Pipeline(plan, stages, links, run.world, loss=sleeping.loss_over(microbatches))


def predicted(plan: Plan, cut: Sequence[range], costs: Sequence[Cost]) -> tuple[float, Simulated]:
    """The time of the slowest stage, and the step."""
    forward = [sum(costs[i].forward for i in stage) for stage in cut]
    backward = [sum(costs[i].backward for i in stage) for stage in cut]
    # IDEA: a step is about M - 1 times the slowest stage and all of them once, so the slowest is what a cut is for.
    slowest = max(map(sum, zip(forward, backward, strict=True)))
    return slowest, simulate(plan, Times(forward, backward, [0.0] * len(cut)))


if __name__ == "__main__":
    sys.exit(demo.main(work, figure="a step of both cuts, simulated and measured,"))
