"""Forward only: what evaluation does. Microbatches follow each other through the stages, and nothing is kept.

    rank 0  F0 F1 F2 F3
    rank 1     F0 F1 F2 F3

It takes any placement, so that a model that trains with a schedule is evaluated where it lies.
"""

from pipeline.plan import F, Plan, made


def forward_only(plan: Plan, microbatches: int) -> Plan:
    """The forwards of so many microbatches, on the stages of another plan."""
    actions, empty = [], made("forward_only", plan.rank_of, microbatches, [], plan.copies)
    for rank in range(plan.ranks):
        # IDEA: in the order in which microbatches arrive if all take as long: stage + microbatch is the time.
        each = [(s % plan.length + m, s, m) for s in plan.stages_of(rank) for m in empty.through(s)]
        actions.append([F(s, m) for _, s, m in sorted(each)])
    return made("forward_only", plan.rank_of, microbatches, actions, plan.copies)
