"""GPipe: all forwards, then all backwards.

    rank 0  F0 F1 F2 F3                            B0    B1    B2    B3
    rank 1     F0 F1 F2 F3                   B0    B1    B2    B3
    rank 2        F0 F1 F2 F3          B0    B1    B2    B3
    rank 3           F0 F1 F2 F3 B0    B1    B2    B3

Idle: (P-1)(F+B) of a rank, (P-1)/M relative to its work, (P-1)/(M+P-1) of the whole; activations of all M microbatches.
With V stages a rank and M >= P the bubble is a V-th, as in interleaved, and activations are V·M: "breadth first".

Huang et al. 2018, "GPipe", 2.3; Lamy-Poirier 2023 (V > 1); lectures A, "왜 Microbatch가 필요한가", and B. PyTorch's
counterpart: ScheduleGPipe, ScheduleLoopedBFS.
"""

from pipeline.plan import B, F, Plan, check_numbers, looped, made


def gpipe(ranks: int, microbatches: int, virtual: int = 1) -> Plan:
    """Any number of ranks, of stages a rank, and of microbatches."""
    check_numbers("gpipe", ranks=ranks, microbatches=microbatches, virtual=virtual, fits=None)
    actions = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        # IDEA: microbatches follow each other closely, so that ranks work at different ones at the same time.
        forwards = [F(s, m) for s in stages for m in range(microbatches)]
        actions.append(forwards + [B(s, m) for s in reversed(stages) for m in range(microbatches)])
    return made("gpipe", looped(ranks, virtual), microbatches, actions)
