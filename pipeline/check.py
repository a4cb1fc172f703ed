"""The checker: whether a plan is a step, and whether it can hang. Without ranks, in milliseconds, before the first run.

A step: every microbatch goes once forward through every stage of its chain, and once backward, as B or as I and then W,
or nothing goes backward at all; each on the rank that has the stage; each after what it needs.

It cannot hang under the rule of the stricter backend, NCCL: on one group, what a rank has posted to a peer runs in
order; a message passes when it is first at both of its ends. The programs of all ranks (program.py) are run under that
rule, with no times: if they end, they end whatever the times are, since posting never waits and nothing is picked by
who comes first.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable

from pipeline.plan import Plan, Result
from pipeline.program import Message, one_a_direction, programs


def check(plan: Plan, channel: Callable[[Message], Hashable] = one_a_direction) -> None:
    """Raise ValueError, in one line, for a plan that is no step or that can hang. channel: the group of a message."""
    _check_complete(plan)
    _check_order(plan)
    _check_ends(plan, channel)


def _check_complete(plan: Plan) -> None:
    if len(plan.rank_of) % plan.copies or sorted(set(plan.rank_of)) != list(range(plan.ranks)):
        raise ValueError(f"{plan.name}: stages lie on ranks {plan.rank_of}; give each of {plan.ranks} ranks one")
    done = Counter((action.kind, action.stage, action.microbatch) for actions in plan.actions for action in actions)
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if action.kind not in ("F", "B", "I", "W"):
                raise ValueError(f"{plan.name}: {action} is no action; use F, B, I or W")
            if not 0 <= action.stage < plan.stages or action.microbatch not in plan.through(action.stage):
                raise ValueError(f"{plan.name}: rank {rank} has {action}, which there is not")
            if plan.rank_of[action.stage] != rank:
                raise ValueError(f"{plan.name}: rank {rank} has {action}, which rank {plan.rank_of[action.stage]} has")
    wanted = [{"F": 1, "B": 1}, {"F": 1, "I": 1, "W": 1}] if plan.trains else [{"F": 1}]
    for stage in range(plan.stages):
        for microbatch in plan.through(stage):
            counts = {kind: done[kind, stage, microbatch] for kind in "FBIW" if done[kind, stage, microbatch]}
            if counts not in wanted:
                told = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing"
                raise ValueError(
                    f"{plan.name}: stage {stage} does {told} of microbatch {microbatch}; it must be F once and then B, "
                    "or I and W, once"
                )


def _check_order(plan: Plan) -> None:
    for rank, actions in enumerate(plan.actions):
        before: set[Result] = set()
        for action in actions:
            for need in plan.needs(action):
                if plan.rank_of[need.stage] == rank and need not in before:
                    raise ValueError(f"{plan.name}: rank {rank} has {action} before the {need.kind} that it needs")
            before.add(plan.result(action))


def _check_ends(plan: Plan, channel: Callable[[Message], Hashable]) -> None:
    rest = [deque(steps) for steps in programs(plan)]  # of each rank's program what it has still to do
    queues: dict[tuple[Hashable, int], deque[Message]] = defaultdict(deque)  # what a rank has posted, by its channels
    passed: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(rest):
            while steps and not (steps[0].verb in ("wait", "settle") and steps[0].what not in passed):
                verb, what = steps.popleft()
                moved = True
                if verb in ("send", "receive"):
                    queues[channel(what), rank].append(what)
                    # IDEA: a message passes when it heads the queues of both its ends, and not before.
                    _pass(channel(what), what, queues, passed)
    if any(rest):
        told = "; ".join(f"rank {rank} waits for {steps[0].what}" for rank, steps in enumerate(rest) if steps)
        raise ValueError(f"{plan.name} hangs: {told}. Use a group for each direction of a boundary, or another order")


def _pass(channel: Hashable, last: Message, queues: dict, passed: set[Message]) -> None:
    """Messages between the two ranks pass as long as both ends have the same one first."""
    ends = queues[channel, last.source_rank], queues[channel, last.target_rank]
    while all(ends) and ends[0][0] == ends[1][0]:
        passed.add(ends[0].popleft())
        ends[1].popleft()
