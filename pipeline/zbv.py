"""ZBV: two stages a rank in the shape of a V, backward in halves: no bubble between a rank's first and last action.

    rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4
    rank 1     F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 W3 w4 W4
    rank 2        F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 w4 W3 W4

The first rank has the last stage too (f, i, w are of a rank's second). If F, I and W take as long, and M >= 2P - 1, no
rank's work has a gap; but ranks begin one after the other: P-1 of the makespan is idle, none of a rank's own window. At
most 2P half stages are live, as much as 1F1B's P whole ones.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", 4 (V-Half and V-Min are other V's), after Qi et al.
2023, ZB-V. PyTorch's counterpart: ScheduleZBVZeroBubble.
"""

from pipeline.plan import F, I, Plan, W, check_numbers, made, v_shaped


def zbv(ranks: int, microbatches: int, virtual: int = 2) -> Plan:
    """Any number of ranks and of microbatches, two stages a rank."""
    check_numbers("zbv", ranks=ranks, microbatches=microbatches, virtual=virtual, fits=2)
    full = max(microbatches, 2 * ranks - 1)
    return made("zbv", v_shaped(ranks), microbatches, [_of(rank, ranks, full) for rank in range(ranks)])


def _of(rank: int, ranks: int, n: int) -> list:
    down, up = rank, 2 * ranks - 1 - rank  # its two stages
    first = 2 * (ranks - rank) - 1  # forwards until the first microbatch has come back up here
    actions = [F(down, m) for m in range(first)]
    for m in range(rank):
        actions += [F(up, m), F(down, first + m)]
    for m in range(ranks - rank):
        # IDEA: on the way up a microbatch turns round at once, since the last stage has company of its own rank's W.
        actions += [F(up, rank + m), I(up, m), W(up, m)]
    for m in range(n - ranks):
        actions += [F(down, first + rank + m), I(down, m), W(down, m)]
        actions += [F(up, ranks + m), I(up, ranks - rank + m), W(up, ranks - rank + m)]
    for m in range(rank):
        actions += [I(down, n - ranks + m), I(up, n - rank + m)]
    for m in range(ranks - rank):
        actions += [I(down, n - ranks + rank + m), W(down, n - ranks + m)]
    return actions + [W(stage, m) for stage in (up, down) for m in range(n - rank, n)]
