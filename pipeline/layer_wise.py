"""Layer-wise: the model is cut, and nothing else is done. One microbatch at a time goes down all stages and back.

    rank 0  F0                   B0    F1                   B1
    rank 1     F0          B0             F1          B1
    rank 2        F0 B0                      F1 B1

Each rank is busy 1/P of the time; a rank's activations are those of one microbatch. Lecture B, "Pipeline Parallelism:
깊이로 자르기": what a pipeline has to beat. Left out: anything that fills the time.
"""

from pipeline.plan import B, F, Plan, check_numbers, looped, made


def layer_wise(ranks: int, microbatches: int, virtual: int = 1) -> Plan:
    """Any number of ranks, of stages a rank, and of microbatches."""
    check_numbers("layer_wise", ranks=ranks, microbatches=microbatches, virtual=virtual, fits=None)
    actions = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        # IDEA: forward and backward of a microbatch are over before the next one begins.
        there_and_back = [(F, s) for s in stages] + [(B, s) for s in reversed(stages)]
        actions.append([kind(s, m) for m in range(microbatches) for kind, s in there_and_back])
    return made("layer_wise", looped(ranks, virtual), microbatches, actions)
