"""The simulator: when each action of a plan begins and ends, and what is idle and live, from times of the stages.

A rank does its actions in order, each as soon as its inputs are there; a message takes `transfer` and may always begin
at once. So what is idle comes of the plan alone. Two measures of it, for a rank:

    makespan   from the first start of any rank to the last end of any: what the step takes
    window     from the rank's own first start to its own last end

A pair of actions runs one after the other, or as one piece, whose inputs must all be there at its begin and whose
results are at its end. Nothing is measured here: measured runs are held against it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.plan import Action, Plan, Result


@dataclass(frozen=True)
class Times:
    """Of each stage the time of an F, an I and a W, in any unit; a B is the sum of the last two."""

    forward: Sequence[float]  # [S]
    input: Sequence[float]  # [S]
    weight: Sequence[float]  # [S]
    transfer: float = 0.0  # from the end of an action to when its result is on another rank

    def of(self, action: Action) -> float:
        """The time of an action."""
        halves = self.input[action.stage], self.weight[action.stage]
        return {"F": self.forward[action.stage], "B": sum(halves), "I": halves[0], "W": halves[1]}[action.kind]


def alike(stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, transfer: float = 0.0) -> Times:
    """The same times for all stages."""
    return Times([forward] * stages, [input] * stages, [weight] * stages, transfer)


@dataclass(frozen=True)
class Simulated:
    """What came of it, by rank; times count from the first start of any rank."""

    spans: Sequence[Sequence[tuple[Action, float, float]]]  # of each action: itself, its start, its end
    peak: Sequence[float]  # most that was live at once: chunks, or what `memory` counts

    @property
    def step_time(self) -> float:
        """The makespan."""
        return max(end for rank in self.spans for _, _, end in rank)

    def busy(self, rank: int) -> float:
        """Time in which the rank computes."""
        return sum(end - start for _, start, end in self.spans[rank])

    def idle(self, rank: int) -> float:
        """Idle time of the rank, of the makespan."""
        return self.step_time - self.busy(rank)

    def idle_in_window(self, rank: int) -> float:
        """Idle time of the rank between its own first start and last end."""
        return self.spans[rank][-1][2] - self.spans[rank][0][1] - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The share of all ranks' makespan in which they are idle."""
        return 1 - sum(map(self.busy, range(len(self.spans)))) / (len(self.spans) * self.step_time)


def simulate(plan: Plan, times: Times, *, memory: Sequence[float] = (), atomic: bool = False) -> Simulated:
    """Run a plan that the checker passes. memory: of each stage what a microbatch's activations take, default 1, a
    chunk. atomic: pairs are one piece.
    """
    there: dict[Result, tuple[float, int]] = {}  # when, and on which rank
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(plan.ranks)]
    queues = [_pieces(actions, atomic) for actions in plan.actions]
    heads = [next(queue, None) for queue in queues]
    while any(heads):
        # IDEA: an action begins when its rank is free and all it needs has come; nothing else decides.
        rank = next((r for r, piece in enumerate(heads) if piece and _ready(plan, piece, there)), None)
        if rank is None:
            raise ValueError(f"{plan.name} stops: see what `check` says of it")
        free = spans[rank][-1][2] if spans[rank] else 0.0
        piece = heads[rank]
        needs = [need for action in piece for need in _outer(plan, piece, action)]
        arrivals = (at + times.transfer * (owner != rank) for at, owner in map(there.__getitem__, needs))
        start = max([free, *arrivals])
        for action in piece:
            end = start + times.of(action)
            spans[rank].append((action, start, end))
            start = end
        for action in piece:
            if (result := plan.result(action)) is not None:
                there[result] = (start, rank)
        heads[rank] = next(queues[rank], None)
    return Simulated(spans, [_peak(actions, memory or [1] * plan.stages) for actions in plan.actions])


def _pieces(actions: Sequence[Action], atomic: bool) -> Iterator[list[Action]]:
    """Actions that begin together, as lists."""
    piece: list[Action] = []
    for action in actions:
        piece.append(action)
        if not (atomic and action.paired):
            yield piece
            piece = []


def _outer(plan: Plan, piece: Sequence[Action], action: Action) -> list[Result]:
    own = [plan.result(other) for other in piece]
    return [need for need in plan.needs(action) if need not in own]


def _ready(plan: Plan, piece: Sequence[Action], there: dict[Result, tuple[float, int]]) -> bool:
    return all(need in there for action in piece for need in _outer(plan, piece, action))


def _peak(actions: Sequence[Action], memory: Sequence[float]) -> float:
    """The most that is live at once: from an F to the B or W of the same microbatch and stage."""
    live = peak = 0.0
    for action in actions:
        live += memory[action.stage] * (action.kind == "F")
        peak = max(peak, live)
        live -= memory[action.stage] * (action.kind in "BW")
    return peak
