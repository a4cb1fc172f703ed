"""DualPipe: two copies of the model on the same ranks, one from the first rank down, one from the last rank up, with
half of the microbatches each. Each rank has the s-th stage of one copy and the s-th from the end of the other.

    P = 4: the first copy's stages 0 1 2 3 on ranks 0 1 2 3, the second's on ranks 3 2 1 0

Both ends fill the pipeline at once, and a forward of one copy pairs with a backward of the other. Idle: (P/2 - 1)(F&B +
B - 3W), with F&B the time of a pair; P+1 stages live; the parameters twice. DualPipeV is this, folded at the middle,
with one copy and half the ranks.

DeepSeek-AI 2024, "DeepSeek-V3", 3.2.1, table 2 and figure 5. Left out: the sum of the two copies' gradients, which is
an all_reduce between ranks r and P-1-r (collectives/partials.py).
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
