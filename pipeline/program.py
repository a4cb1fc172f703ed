"""The program of a rank: its actions, and between them what it sends, receives and waits for. The executor runs it, and
the checker proves that it ends.

    receive X    post the receive, one action ahead, so that X travels while the rank computes
    wait X       until X is here
    run A
    send X       post the send; the rank goes on
    settle X     until X has left, so that its memory is free

A send ends when the peer has it, and a backend need not tell. But what a peer makes after it took X is a receipt for X:
a settle comes right after the first such message, where nothing is left to wait for, or else at the end.

Channels: the messages of one direction of one boundary between two stages have a group of their own, on which one rank
only sends and the other only receives. On one group for both, a send stands behind a receive that cannot come.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from pipeline.plan import Action, Plan, Result


class Message(NamedTuple):
    """A result on its way to the stage that needs it, on another rank."""

    result: Result
    target: int  # stage
    source_rank: int
    target_rank: int

    def __str__(self) -> str:
        return f"the {self.result.kind} of microbatch {self.result.microbatch} from stage {self.result.stage}"


class Step(NamedTuple):
    """One thing that a rank does."""

    verb: str  # receive, wait, run, send or settle
    what: Message | Action


Channel = tuple[str, int]  # activation or gradient, and the stage before the boundary


def one_a_direction(message: Message) -> Channel:
    """The channel of a message."""
    return message.result.kind, min(message.result.stage, message.target)


def message_to(plan: Plan, action: Action) -> Message | None:
    """The message that an action needs; None where what it needs is on the same rank, or nothing."""
    need = plan.from_neighbour(action)
    if need is None or plan.rank_of[need.stage] == plan.rank_of[action.stage]:
        return None
    return Message(need, action.stage, plan.rank_of[need.stage], plan.rank_of[action.stage])


def program(plan: Plan, rank: int) -> list[Step]:
    """All that a rank does in a step."""
    return list(_program(plan, rank))


def joined(plan: Plan) -> Plan:
    """The plan with I and W of a first stage as one B where W follows at once: no stage waits for that I, and B takes
    less time than its halves.
    """
    return replace(plan, actions=tuple(tuple(_joined(actions, plan)) for actions in plan.actions))


def _joined(actions: Sequence[Action], plan: Plan) -> Iterator[Action]:
    alone = {action for action in actions if action.kind == "I" and plan.before(action.stage) is None}
    joint = {inputs for inputs, after in pairwise(actions) if inputs in alone and after == inputs._replace(kind="W")}
    for action in actions:
        if action in joint:
            yield action._replace(kind="B")
        elif action._replace(kind="I") not in joint or action.kind == "F":
            yield action


def _program(plan: Plan, rank: int) -> Iterator[Step]:
    made_at, used_at, outgoing = _messages(plan)
    actions = plan.actions[rank]
    posted: set[Message] = set()
    unsettled: dict[int, list[Message]] = defaultdict(list)  # by peer
    for i, action in enumerate(actions):
        for ahead in actions[i : i + 2]:
            message = message_to(plan, ahead)
            # what a gradient looks like is known from its own forward on
            ready = ahead == action or ahead[1:3] != action[1:3]
            if message is not None and message not in posted and ready:
                posted.add(message)
                yield Step("receive", message)
        if (message := message_to(plan, action)) is not None:
            yield Step("wait", message)
            sent = unsettled[message.source_rank]
            # IDEA: what the peer made after it had taken our message is a receipt: waiting for that one costs nothing.
            for receipted in [other for other in sent if used_at[other] <= made_at[message]]:
                sent.remove(receipted)
                yield Step("settle", receipted)
        yield Step("run", action)
        if (message := outgoing.get(action)) is not None:
            unsettled[message.target_rank].append(message)
            yield Step("send", message)
    for sent in unsettled.values():
        yield from (Step("settle", message) for message in sent)


def _messages(plan: Plan) -> tuple[dict[Message, int], dict[Message, int], dict[Action, Message]]:
    """Of each message the place, in its rank's order, of the action that makes it and of the one that uses it; and the
    message that an action makes.
    """
    makers = {plan.result(action): (i, action) for actions in plan.actions for i, action in enumerate(actions)}
    made_at, used_at, outgoing = {}, {}, {}
    for actions in plan.actions:
        for i, action in enumerate(actions):
            if (message := message_to(plan, action)) is not None:
                made_at[message], maker = makers[message.result]
                used_at[message], outgoing[maker] = i, message
    return made_at, used_at, outgoing
