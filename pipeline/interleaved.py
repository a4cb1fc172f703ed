"""Interleaved 1F1B: V small stages a rank instead of a large one. The pipeline fills in smaller steps.

    P = 2, V = 2, M = 4; F0 is of a rank's first stage, f0 of its second
    rank 0  F0 F1 f0 f1 F2    b0    F3 b1    f2 B0    f3 B1       b2       b3    B2    B3
    rank 1     F0 F1 f0 b0    f1 b1    F2 B0    F3 B1    f2 b2    f3 b3    B2    B3

Idle: (P-1)(F+B)/V, so (P-1)/(V·M) relative to the work, if P divides M; V times the messages; at most
2(P-s-1) + (V-1)P + 1 chunks of a V-th live on rank s.

Microbatches go through a rank in groups of P: P of them through its first stage, the same P through its second, and so
on. Narayanan et al. 2021, 2.2.2; lecture B, "Interleaved 1F1B". PyTorch's counterpart: ScheduleInterleaved1F1B;
Megatron-LM's: core/pipeline_parallel/schedules.py.
"""

from pipeline.plan import B, F, Plan, check_numbers, looped, made


def interleaved(ranks: int, microbatches: int, virtual: int = 2) -> Plan:
    """Any number of ranks, of stages a rank and of microbatches; a last group that is not full leaves gaps."""
    check_numbers("interleaved", ranks=ranks, microbatches=microbatches, virtual=virtual, fits=None)
    groups = -(-microbatches // ranks)
    # IDEA: the k-th forward is of one microbatch on all ranks, in the same one of their stages; backward mirrors it.
    order = [(v, g * ranks + i) for g in range(groups) for v in range(virtual) for i in range(ranks)]
    actions = []
    for rank in range(ranks):
        forwards = [F(v * ranks + rank, m) for v, m in order]
        backwards = [B((virtual - 1 - v) * ranks + rank, m) for v, m in order]
        warmup = min(len(order), 2 * (ranks - rank - 1) + (virtual - 1) * ranks)
        steady = zip(forwards[warmup:], backwards, strict=False)
        rest = backwards[len(order) - warmup :]
        actions.append([*forwards[:warmup], *(action for both in steady for action in both), *rest])
    return made("interleaved", looped(ranks, virtual), microbatches, actions)
