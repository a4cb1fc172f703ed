"""Random plans, and what decides without the checker whether a plan can run."""

import random
from collections import defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from pipeline.plan import Action, B, F, I, Plan, W
from pipeline.program import message_to, one_a_direction


def random_plan(seed: int, ranks: int | None = None, virtual: int = 3, microbatches: int | None = None) -> Plan:
    """A plan that runs: stages on any ranks, a B or an I and a W, in some order in which one could do it all alone.

    virtual: stages a rank, on average, at most. Default: P of 1 to 4, M of 1 to 9.
    """
    draw = random.Random(seed)
    ranks = ranks or draw.randint(1, 4)
    stages = draw.randint(ranks, ranks * virtual)
    rank_of = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(rank_of)
    plan = Plan(f"random {seed}", tuple(rank_of), microbatches or draw.randint(1, 9), ())
    order = one_after_the_other(plan, draw)
    return replace(plan, actions=tuple(tuple(a for a in order if rank_of[a.stage] == rank) for rank in range(ranks)))


def one_after_the_other(plan: Plan, draw: random.Random) -> list[Action]:
    """The actions of all ranks, each after what it needs."""
    left = [*_forwards(plan, draw), *_backwards(plan, draw)]
    likes = {kind: draw.choice((0, 0, 0.5, 2)) for kind in "FBIW"}  # depth first, breadth first, and between
    there, done = set(), []
    while left:
        ready = [chain for chain in left if there.issuperset(plan.needs(chain[0]))]
        chain = max(ready, key=lambda chain: likes[chain[0].kind] + draw.random())
        action = chain.pop(0)
        done.append(action)
        there.add(plan.result(action))
        left += [[W(action.stage, action.microbatch)]] * (action.kind == "I")
        left = [chain for chain in left if chain]
    return done


def _forwards(plan: Plan, draw: random.Random) -> list[list[Action]]:
    """Of each stage its forwards in order: across ranks as they come, within a rank anyhow."""
    chains, order = [], list(range(plan.microbatches))
    for stage, rank in enumerate(plan.rank_of):
        if stage == 0 or rank == plan.rank_of[stage - 1]:
            draw.shuffle(order)
        chains.append([F(stage, m) for m in order])
    return chains


def _backwards(plan: Plan, draw: random.Random) -> list[list[Action]]:
    chains, order = [], list(range(plan.microbatches))
    for stage, rank in reversed(list(enumerate(plan.rank_of))):
        if stage == plan.stages - 1 or rank == plan.rank_of[stage + 1]:
            draw.shuffle(order)
        chains.append([draw.choice((B, I))(stage, m) for m in order])
    return chains


def disturbed(plan: Plan, seed: int) -> Plan:
    """The same actions on the same ranks, some of them moved as far as what the rank's own stages need allows."""
    draw, orders = random.Random(seed), [list(actions) for actions in plan.actions]
    for _ in range(draw.randint(1, 4)):
        order = draw.choice(orders)
        action = order.pop(draw.randrange(len(order)))
        lowest = max((i + 1 for i, other in enumerate(order) if plan.result(other) in plan.needs(action)), default=0)
        highest = min((i for i, o in enumerate(order) if plan.result(action) in plan.needs(o)), default=len(order))
        order.insert(draw.randint(lowest, highest), action)
    return replace(plan, name=f"{plan.name}, disturbed", actions=tuple(map(tuple, orders)))


def can_run(plan: Plan) -> bool:
    """Whether no action waits for itself by way of needs and of its rank's order, and whether on every channel messages
    are taken in the order in which they are made. No more is needed, since nothing else waits.
    """
    makers = {plan.result(action): action for actions in plan.actions for action in actions}
    before, made, taken = defaultdict(set), defaultdict(list), defaultdict(list)
    users = defaultdict(list)
    for actions in plan.actions:
        for earlier, later in pairwise(actions):
            before[later].add(earlier)
        for action in actions:
            before[action].update(makers[need] for need in plan.needs(action))
            if (message := message_to(plan, action)) is not None:
                taken[one_a_direction(message)].append(message.result)
                users[message.result].append(one_a_direction(message))
    for actions in plan.actions:
        for result in map(plan.result, actions):
            for channel in users[result] if result is not None else ():
                made[channel].append(result)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return made == taken
