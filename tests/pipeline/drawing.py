"""The picture of a plan as the headers of pipeline/ have it."""

from pipeline.plan import Action, Plan
from pipeline.simulate import Simulated, alike, simulate


def drawn(plan: Plan) -> list[str]:
    """A line a rank: each action from its start to its end if F, I and W take as long, B twice; three columns a unit.

    The second stage of a rank has small letters; + joins a pair.
    """
    simulated = simulate(plan, alike(plan.stages))
    return [f"rank {rank}  {_line(plan, simulated, rank)}" for rank in range(plan.ranks)]


def _line(plan: Plan, simulated: Simulated, rank: int) -> str:
    line = ""
    for action, start, _ in simulated.spans[rank]:
        line = f"{line:<{3 * int(start)}}{_label(plan, action)}"
    return line


def _label(plan: Plan, action: Action) -> str:
    second = plan.stages_of(plan.rank_of[action.stage]).index(action.stage)
    kind = action.kind.lower() if second else action.kind
    return f"{kind}{action.microbatch}" + "+" * action.paired
