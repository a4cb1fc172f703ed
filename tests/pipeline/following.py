"""A rank that follows its program over a network, with nothing to compute: every message has a size of its own."""

import torch

from collectives import p2p
from pipeline.plan import Plan
from pipeline.program import Message, message_to, program


def one_a_pair(message: Message) -> tuple[int, ...]:
    """One group for both directions, and for all stages, between two ranks: the planted fault."""
    return tuple(sorted((message.source_rank, message.target_rank)))


def messages(plan: Plan) -> list[Message]:
    found = [message_to(plan, action) for actions in plan.actions for action in actions]
    return sorted(message for message in found if message is not None)


def follow(run, plan: Plan, channel) -> int:
    """A job. Returns how many messages this rank has taken; each is of the size that its place in the plan gives it."""
    sizes = {message: i + 1 for i, message in enumerate(messages(plan))}
    ends = {channel(each): sorted((each.source_rank, each.target_rank)) for each in sizes}
    groups = {each: run.new_group(ends[each], str(each)) for each in sorted(ends)}
    posted, taken = {}, 0
    for verb, what in program(plan, run.rank):
        if verb == "run":
            continue
        if verb in ("send", "receive"):
            tensor, group = torch.ones(sizes[what]), groups[channel(what)]
            post = p2p.isend if verb == "send" else p2p.irecv
            posted[what] = post(tensor, 1 - group.rank(), group=group)
        else:
            posted.pop(what).wait()
            taken += verb == "wait"
    return taken
