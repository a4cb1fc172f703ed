"""DualPipeV: the V of ZBV, in which a forward of one stage and a backward of the other run as a pair, so that each
hides the other's communication.

    rank 0  F0 F1 F2 f0 i0 w0 f1 F3+b1    f2+B0    b2    f3+   B1    b3    I2 W2 I3 W3
    rank 1     F0 f0 F1 f1 F2 b0    f2+B0    F3+b1    f3+B1    b2    B2    i3 I3 w3 W3

Small letters are of a rank's second stage, + joins a pair. Idle, if F, I and W take as long: P-1 of the makespan with
the parts of a pair in turn, as in ZBV, 2(P-1) if it is one piece, whose results are there at its end. At most 2P+1 half
stages are live. The pair is for expert parallelism, whose all-to-all is as long as its compute.

DeepSeek-AI 2024, "DeepSeek-V3", 3.2.1, "cut in half" (Qi). PyTorch's counterpart: ScheduleDualPipeV. Left out: kernels
that share a GPU between the two parts, which run in turn here.
"""

from pipeline.plan import Action, B, F, I, Plan, W, check_numbers, made, v_shaped


def dualpipe_v(ranks: int, microbatches: int, virtual: int = 2) -> Plan:
    """Any number of ranks and of microbatches, two stages a rank."""
    check_numbers("dualpipe_v", ranks=ranks, microbatches=microbatches, virtual=virtual, fits=2)
    full = max(microbatches, 2 * ranks)
    actions = [Sides((rank, 2 * ranks - 1 - rank)).actions(rank, ranks, full) for rank in range(ranks)]
    return made("dualpipe_v", v_shaped(ranks), microbatches, actions)


class Sides:
    """What a rank does on its two sides, 0 and 1, each with a stage and microbatches of its own, in order."""

    def __init__(self, stages: tuple[int, int], first: tuple[int, int] = (0, 0)):
        self.stages = stages
        self.forwards, self.backwards = list(first), list(first)  # the next microbatch of each side
        self.postponed: list[Action] = []
        self.done: list[Action] = []

    def actions(self, place: int, depth: int, microbatches: int) -> list[Action]:
        """The eight phases of the rank at `place` of `depth`, the deepest last. microbatches: of each side."""
        ahead = depth - place - 1  # ranks between this one and the deepest
        for _ in range(2 * ahead):
            self.forward(0)
        for _ in range(place + 1):
            self.forward(0)
            self.forward(1)
        for _ in range(ahead):
            self.split_backward(1)
            self.weights()
            self.forward(1)
        for i in range(microbatches - 2 * depth + place + 1):
            # IDEA: a forward of one side together with a backward of the other, and then the other way round.
            self.pair(0, 1, apart=i == 0 and ahead == 0)
            self.pair(1, 0)
        for _ in range(ahead):
            self.backward(1)
            self.pair(1, 0)
        for i in range(2 * (place + 1)):  # from the middle on, W is put off
            (self.split_backward if i > place else self.backward)(1 - i % 2)
        for _ in range(ahead):
            self.weights()
            self.split_backward(0)
        while self.postponed:
            self.weights()
        return self.done

    def forward(self, side: int, *, paired: bool = False) -> None:
        """The next forward of a side."""
        self.done.append(F(self.stages[side], self.forwards[side], paired=paired))
        self.forwards[side] += 1

    def backward(self, side: int) -> None:
        """The next backward, whole."""
        self.done.append(B(self.stages[side], self.backwards[side]))
        self.backwards[side] += 1

    def split_backward(self, side: int) -> None:
        """The next backward for the input; that for the weights is put off."""
        self.done.append(I(self.stages[side], self.backwards[side]))
        self.postponed.append(W(self.stages[side], self.backwards[side]))
        self.backwards[side] += 1

    def weights(self) -> None:
        """The W that has been put off longest."""
        self.done.append(self.postponed.pop(0))

    def pair(self, forward: int, backward: int, *, apart: bool = False) -> None:
        """A forward of one side with a backward of the other."""
        self.forward(forward, paired=not apart)
        self.backward(backward)
