"""DualPipe: two copies of the model on the same ranks, one from the first rank down, one from the last rank up, with
half of the microbatches each. Each rank has the s-th stage of one copy and the s-th from the end of the other.

    rank 0  F0 F1 F2 f4 i4 w4 f5 F3+b5    f6+B0    b6    f7+   B1    b7    I2 W2 I3 W3
    rank 1     F0 f4 F1 f5 F2 b4    f6+B0    F3+b5    f7+B1    b6    B2    i7 I3 w7 W3
    rank 2     f4 F0 f5 F1 f6 B0    F2+b4    f7+B1    F3+b5    B2    b6    I3 i7 W3 w7
    rank 3  f4 f5 f6 F0 I0 W0 F1 f7+B1    F2+b4    B2    F3+   b5    B3    i6 w6 i7 w7

Small letters are of a rank's second stage, + joins a pair. Idle: (P/2 - 1)(F&B + B - 3W), if M >= 2P and F, I and W
take as long; F&B is the time of a pair, one piece. P+1 stages live, the parameters twice. DualPipeV is this, folded.

DeepSeek-AI 2024, "DeepSeek-V3", 3.2.1. Left out: the sum of the copies' gradients, over ranks r and P-1-r.
"""

from pipeline.dualpipe_v import Sides
from pipeline.plan import Plan, check_numbers, made


def dualpipe(ranks: int, microbatches: int, virtual: int = 2) -> Plan:
    """An even number of ranks, any even number of microbatches; two stages a rank, one of each copy.

    Raises ValueError for others.
    """
    check_numbers("dualpipe", ranks=ranks, microbatches=microbatches, virtual=virtual, fits=2)
    if ranks % 2 or microbatches % 2:
        raise ValueError(
            f"dualpipe halves ranks and microbatches: ranks={ranks}, microbatches={microbatches} must be even; "
            "use dualpipe_v"
        )
    half = microbatches // 2
    full = max(half, ranks)
    actions = []
    for rank in range(ranks):
        mirrored = ranks - 1 - rank
        # IDEA: the second half of the ranks does what the first half does, with the two copies exchanged.
        near, far = (rank, ranks + mirrored) if rank < mirrored else (ranks + mirrored, rank)
        sides = Sides((near, far), (0, half) if rank < mirrored else (half, 0))
        actions.append(sides.actions(min(rank, mirrored), ranks // 2, full))
    return made("dualpipe", (*range(ranks), *reversed(range(ranks))), microbatches, actions, copies=2)
