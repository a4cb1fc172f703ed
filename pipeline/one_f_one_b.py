"""1F1B (PipeDream-Flush): a rank that has a backward to do does it first, so that activations are freed soon.

            warmup  │steady                                         │cooldown
    rank 0  F0 F1 F2 F3                   B0    F4 B1    F5 B2       B3       B4       B5
    rank 1     F0 F1 F2             B0    F3 B1    F4 B2    F5 B3       B4       B5
    rank 2        F0 F1       B0    F2 B1    F3 B2    F4 B3    F5 B4       B5
    rank 3           F0 B0    F1 B1    F2 B2    F3 B3    F4 B4    F5 B5

As idle as GPipe, (P-1)(F+B); but stage s never has more than P-s microbatches in flight, however many there are.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", 2.2.1; lecture B, "1F1B (PipeDream): 메모리도
잡기", but PipeDream itself (2018) never flushes, and keeps old weights. PyTorch's counterpart: Schedule1F1B.
"""

from pipeline.plan import B, F, Plan, check_numbers, looped, made


def one_f_one_b(ranks: int, microbatches: int, virtual: int = 1) -> Plan:
    """Any number of ranks and of microbatches, one stage a rank."""
    check_numbers("1f1b", ranks=ranks, microbatches=microbatches, virtual=virtual, fits=1)
    return made("1f1b", looped(ranks, 1), microbatches, [_of(rank, ranks, microbatches) for rank in range(ranks)])


def _of(stage: int, ranks: int, microbatches: int) -> list:
    warmup = ranks - stage - 1  # forwards until the first backward can come back
    actions = [F(stage, m) for m in range(warmup)]
    for m in range(microbatches):
        # IDEA: one forward, one backward: a new microbatch comes in only as an old one's activations go.
        actions += [F(stage, warmup + m), B(stage, m)]  # until there is no new one: cooldown
    return actions
