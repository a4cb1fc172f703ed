"""Demo of pipeline parallelism: every schedule on one small model, beside one process.

    python -m pipeline                                       4 local ranks
    torchrun --standalone --nproc-per-node 2 -m pipeline     the ranks of torchrun

P ranks, M = 2P microbatches, V stages a rank; 2P blocks, each of which sleeps for 20 ms in F, in I and in W, so that
all schedules compute the same. In float64. Idle time is relative to what a rank computes, as (P-1)/M is, or a share of
the step, as (P-1)/(M+P-1) is; in window: between the rank's own first start and last end. A chunk, a microbatch in a
stage, is live from its F to its B or W: counted as long as autograd keeps anything of it. b blocks keep 8b(5BTD + BT)
bytes, the last stage 8(3BTD + BT) more. A link is one direction of one boundary.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from collectives import comm, demo, timeline
from collectives.demo import Demo
from collectives.ledger import Ledger
from collectives.runtime import Runtime
from collectives.saved import Saved, saving
from collectives.timeline import Span
from pipeline import sleeping, study
from pipeline.check import check
from pipeline.executor import Microbatch, Pipeline
from pipeline.links import connect
from pipeline.partition import even
from pipeline.picture import bubble, planned, step_time
from pipeline.plan import Plan
from pipeline.schedules import SCHEDULES, schedule
from pipeline.simulate import Simulated, alike, simulate
from pipeline.sleeping import NAP, B, D, T

BTD, BT, ITEM = B * T * D, B * T, 8  # elements of what crosses a boundary, tokens; bytes of a float64


class Formula(NamedTuple):
    """As the papers write it, and its value."""

    text: str
    of: Callable[[int, int, int, int], float]  # P, M, V and the rank, s


class Formulas(NamedTuple):
    """What a schedule comes to, if F, I and W take as long and P divides M ≥ 2P."""

    idle: Formula  # of a rank, relative to what it computes
    live: Formula  # chunks at the peak
    messages: Formula  # of all ranks, a step


IN_LINE = Formula("2M(VP-1)", lambda P, M, V, s: 2 * M * (V * P - 1) if P > 1 else 0)
FOLDED = Formula("2M(2P-2)", lambda P, M, V, s: 2 * M * (2 * P - 2))
NO_VIRTUAL = Formula("(P-1)/M", lambda P, M, V, s: (P - 1) / M)
OF_A_V = Formula("(P-1)/6M", lambda P, M, V, s: (P - 1) / (6 * M))
FORMULAS: Mapping[str, Formulas] = MappingProxyType(
    {
        "layer_wise": Formulas(Formula("P-1", lambda P, M, V, s: P - 1), Formula("1", lambda P, M, V, s: 1), IN_LINE),
        "gpipe": Formulas(NO_VIRTUAL, Formula("M", lambda P, M, V, s: M), IN_LINE),
        "1f1b": Formulas(NO_VIRTUAL, Formula("min(M, P-s)", lambda P, M, V, s: min(M, P - s)), IN_LINE),
        "interleaved": Formulas(
            Formula("(P-1)/VM", lambda P, M, V, s: (P - 1) / (V * M)),
            Formula("2(P-s-1) + (V-1)P + 1", lambda P, M, V, s: 2 * (P - s - 1) + (V - 1) * P + 1),
            IN_LINE,
        ),
        "zb_h1": Formulas(
            Formula("(P-1)/3M", lambda P, M, V, s: (P - 1) / (3 * M)),
            Formula("min(M, P)", lambda P, M, V, s: min(M, P)),
            IN_LINE,
        ),
        "zbv": Formulas(OF_A_V, Formula("2P", lambda P, M, V, s: 2 * P), FOLDED),
        "dualpipe": Formulas(
            Formula("(P/2-1)/3M", lambda P, M, V, s: (P / 2 - 1) / (3 * M)),
            Formula("P+1", lambda P, M, V, s: P + 1),
            Formula("2M(P-1)", lambda P, M, V, s: 2 * M * (P - 1)),
        ),
        "dualpipe_v": Formulas(OF_A_V, Formula("2P+1", lambda P, M, V, s: 2 * P + 1), FOLDED),
    }
)


class Row(NamedTuple):
    """A schedule, simulated and run."""

    plan: Plan
    simulated: Simulated
    unit: float  # seconds of the simulated unit, an F
    run: list[Span]
    live: list[int]  # chunks at the peak, by rank

    def __str__(self) -> str:
        """A line of the table."""
        formula, shares = FORMULAS[self.plan.name].idle, (self.simulated.bubble, bubble(self.run))
        window = max(relative(self.simulated.idle_in_window, self.simulated, rank) for rank in range(self.plan.ranks))
        idle = [formula.of(*sizes(self.plan), 0), *(share / (1 - share) for share in shares), window, *shares]
        ms = [1e3 * self.simulated.step_time * self.unit, 1e3 * step_time(self.run)]
        numbers = [*(f"{each:9.3f}" for each in idle), *(f"{each:9.0f}" for each in ms)]
        return f"{self.plan.name:11} {formula.text:>10} {' '.join(numbers)}   {' '.join(map(str, self.live))}"


HEADER = f"""
{"":11} {"idle relative to computing":^50} {"idle of the step":^19} {"ms a step":^19}   chunks live
{"":11} {"formula":>10} {"":9} simulated  measured in window simulated  measured simulated  measured   at the peak"""
WIDTH = 160  # columns of a chart: a chunk's letter and number need three


def sizes(plan: Plan) -> tuple[int, int, int]:
    """P, M, V."""
    return plan.ranks, plan.microbatches, plan.stages // plan.ranks


def relative(idle: Callable[[int], float], simulated: Simulated, rank: int) -> float:
    """The rank's idle time, relative to what it computes."""
    return idle(rank) / simulated.busy(rank)


def work(run: Runtime, show: Demo) -> None:
    """Every schedule that is for so many ranks, a plan that is refused, two cuts."""
    microbatches = sleeping.batch(2 * run.size)
    reference = sleeping.alone(sleeping.layers(2 * run.size), microbatches)
    rows = [follow(run, show, plan, microbatches, reference) for plan in plans(run)]
    refuse(run, show)
    cuts = study.both(run, show)
    if run.rank == 0:
        for row in rows:
            for name, spans in (("simulated", planned(row.simulated, row.unit)), ("measured", row.run)):
                print(f"\n{row.plan.name}, {name}\n{timeline.text(spans, width=WIDTH)}")
        print(HEADER, *rows, "", study.HEADER, *cuts, sep="\n")
        if show.figure:
            shown = [row for row in rows if row.plan.name != "layer_wise"]  # which is three times as long
            names = [
                f"{row.plan.name}: idle {row.simulated.bubble:.1%} as simulated, {bubble(row.run):.1%} as measured"
                for row in shown
            ]
            timeline.draw(show.figure, *(row.run for row in shown), names=names)


def plans(run: Runtime) -> list[Plan]:
    """Of every schedule, if it is for so many ranks."""
    found = []
    for name in SCHEDULES:
        try:
            found.append(schedule(name, run.size, 2 * run.size))
        except ValueError as why:
            if run.rank == 0:
                print(f"left out: {why}")
    return found


def refuse(run: Runtime, show: Demo) -> None:
    """1F1B as it is wrong: with one group for both directions of a boundary."""
    show.part, why = "1f1b, a group a pair of ranks", ""
    try:
        check(schedule("1f1b", run.size, 2 * run.size), lambda message: frozenset(message[2:]))
    except ValueError as refused:
        why = str(refused)
    show.claim("refused before it hangs", "1", run.size > 1, bool(why))
    if run.rank == 0:
        print(f"{show.part}: {why or 'nothing to send'}")


# -- a schedule --------------------------------------------------------------------------------------------------------


class Live:
    """Counts the chunks of which autograd keeps something, and its bytes."""

    def __init__(self) -> None:
        self.params: list[nn.Parameter] = []  # which are kept anyway
        self.chunks: list[Saved] = []
        self.peak = self.nbytes = 0

    def note(self, chunk: Saved) -> None:
        """A forward has ended."""
        self.chunks = [each for each in (*self.chunks, chunk) if each.tensors()]
        self.peak = max(self.peak, len(self.chunks))
        self.nbytes = max(self.nbytes, sum(each.nbytes(self.params) for each in self.chunks))


class Counted(nn.Sequential):
    """A stage whose chunks are counted."""

    def __init__(self, stage: nn.Sequential, live: Live) -> None:
        super().__init__(OrderedDict(stage.named_children()))
        self.live = live
        live.params += self.parameters()

    def forward(self, x: Tensor) -> Tensor:
        with saving() as saved:
            x = super().forward(x)
        self.live.note(saved)
        return x


def follow(
    run: Runtime, show: Demo, plan: Plan, microbatches: Sequence[Microbatch], reference: sleeping.Reference
) -> Row:
    """A step that is awake, for the numbers; then one that sleeps, for bytes, chunks and time."""
    show.part, live = plan.name, Live()
    stages = {stage: Counted(stage_of(plan, stage), live) for stage in plan.stages_of(run.rank)}
    links, loss = connect(plan, [range(run.size)], run.new_group), sleeping.loss_over(microbatches)
    pipe = Pipeline(plan, stages, links, run.world, loss=loss)
    sleeping.keep_awake(stages.values())
    sleeping.parity(show, pipe, pipe.step(microbatches), reference)
    sleeping.keep_awake(stages.values(), False)
    step = sleeping.paced(pipe, microbatches, book := Ledger())
    traffic(run, show, plan, book, step.sent)
    simulated = simulate(plan, alike(plan.stages))
    shape(run, show, plan, simulated, live)
    unit = NAP * 2 * plan.ranks / plan.length
    return Row(plan, simulated, unit, step.spans, comm.all_gather_object(live.peak, group=run.world))


def stage_of(plan: Plan, stage: int) -> nn.Sequential:
    """As many blocks as the others have; the first has the embedding too, the last the head."""
    model = sleeping.layers(2 * plan.ranks)
    blocks = even(2 * plan.ranks, plan.length)[stage % plan.length]
    first = blocks.start + (plan.before(stage) is not None)
    return sleeping.cut_out(model, range(first, blocks.stop + 1 + (plan.after(stage) is None)))


def bytes_kept(plan: Plan, stage: int) -> int:
    """Of a chunk: the inputs of a block's norm, that divided, of its two matrices; the token's norm. The first stage
    has ids as well, the last one what a norm and a matrix keep.
    """
    blocks = 2 * plan.ranks // plan.length
    ends = BT * (plan.before(stage) is None) + (3 * BTD + BT) * (plan.after(stage) is None)
    return ITEM * (blocks * (5 * BTD + BT) + ends)


def traffic(run: Runtime, show: Demo, plan: Plan, book: Ledger, sent: int | None) -> None:
    """Messages, what each link carries, and bytes."""
    links = [row for row in book.rows() if row.op == "send"]
    formula = FORMULAS[plan.name].messages
    messages = sum(comm.all_gather_object(sum(row.calls for row in links), group=run.world))
    show.claim("messages, all ranks", formula.text, formula.of(*sizes(plan), run.rank), messages)
    each = plan.microbatches // plan.copies * BTD
    text = "M·BTD" if plan.copies == 1 else "(M/2)·BTD"
    worst = max((row.algorithm / ITEM for row in links), key=lambda elements: abs(elements - each), default=each)
    show.claim("elements, each link", text, each, worst)
    calls = sum(row.calls for row in book.rows())
    show.traffic("bytes on sockets", f"8·{text} a link", ITEM * each * len(links), sent, calls=calls)


def shape(run: Runtime, show: Demo, plan: Plan, simulated: Simulated, live: Live) -> None:
    """Idle time and live chunks, by the formula, simulated, and counted; and their bytes."""
    formulas = FORMULAS[plan.name]
    idle = relative(simulated.idle, simulated, run.rank)
    show.claim("idle, simulated", formulas.idle.text, formulas.idle.of(*sizes(plan), run.rank), idle, allowed=1e-9)
    expected = formulas.live.of(*sizes(plan), run.rank)
    show.claim("live, simulated", formulas.live.text, expected, simulated.peak[run.rank])
    show.claim("live, counted", formulas.live.text, expected, live.peak)
    memory = [bytes_kept(plan, stage) for stage in range(plan.stages)]
    kept = simulate(plan, alike(plan.stages), memory=memory).peak[run.rank]
    show.claim("bytes kept at the peak", "8·live·b(5BTD + BT)", kept, live.nbytes)


if __name__ == "__main__":
    sys.exit(demo.main(work, figure="a measured step of every schedule"))
