"""ZB-H1: backward in two halves. The next rank waits for I alone; W fills what would be idle.

    rank 0  F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Idle: (P-1)(F+I-W) instead of (P-1)(F+I+W), a third if all three take as long; for M >= P, and a W no longer than F and
I. Stage s puts off its W by s microbatches: min(P, M) are live on every stage, as on 1F1B's first.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", 2.1, figure 3 and 2.3. PyTorch's counterpart:
ScheduleInterleavedZeroBubble. Left out: ZB-H2, which goes below with twice the activations, and a postponed check of
the gradient norm.
"""

from pipeline.plan import F, I, Plan, W, check_numbers, looped, made


def zb_h1(ranks: int, microbatches: int, virtual: int = 1) -> Plan:
    """Any number of ranks and of microbatches, one stage a rank."""
    check_numbers("zb_h1", ranks=ranks, microbatches=microbatches, virtual=virtual, fits=1)
    return made("zb_h1", looped(ranks, 1), microbatches, [_of(rank, ranks, microbatches) for rank in range(ranks)])


def _of(stage: int, ranks: int, microbatches: int) -> list:
    warmup = ranks - stage - 1
    actions = [F(stage, m) for m in range(warmup)]
    for m in range(microbatches + stage):
        # IDEA: a W has no one waiting for it, so it is done when nothing else can be.
        actions += [F(stage, warmup + m), I(stage, m), W(stage, m - stage)]  # of those that there are
    return actions
