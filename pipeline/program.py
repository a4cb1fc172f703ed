"""The program of a rank: its actions, and between them what it sends, receives and waits for. The executor runs it, and
the checker proves that it ends.

    receive X    post the receive, one action ahead, so that X travels while the rank computes
    wait X       until X is here
    run A
    send X       post the send; the rank goes on
    settle X     until X has left, so that its memory is free

What a peer makes after it took X is a receipt for X: a settle comes after the first such message, where nothing is left
to wait for, or else at the end. A channel is one direction of one boundary, with a group of its own: on one group for
both, a send stands behind a receive that cannot come.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    return list(_program(plan.actions[rank], plan, _messages(plan)))


def programs(plan: Plan) -> list[list[Step]]:
    """Those of all ranks."""
    messages = _messages(plan)
    return [list(_program(actions, plan, messages)) for actions in plan.actions]


class _Messages(NamedTuple):
    """All messages of a step. Places are those of actions in their rank's order."""

    made_at: dict[Message, int]
    used_at: dict[Message, int]
    outgoing: dict[Action, Message]  # what an action makes for another rank


def _program(actions: Sequence[Action], plan: Plan, messages: _Messages) -> Iterator[Step]:
    made_at, used_at, outgoing = messages
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


def _messages(plan: Plan) -> _Messages:
    makers = {plan.result(action): (i, action) for actions in plan.actions for i, action in enumerate(actions)}
    made_at, used_at, outgoing = {}, {}, {}
    for actions in plan.actions:
        for i, action in enumerate(actions):
            if (message := message_to(plan, action)) is not None:
                made_at[message], maker = makers[message.result]
                used_at[message], outgoing[maker] = i, message
    return _Messages(made_at, used_at, outgoing)
