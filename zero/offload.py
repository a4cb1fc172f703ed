"""Offload: state and masters on the host, and a step that reads the next piece and writes the last one while it
computes.

AdamW with masters keeps 12 bytes a parameter that only the step uses. They may lie in host memory or in files
(collectives/host.py), if a step can bring them in pieces. With threads that read and write beside the computation, a
step takes as long as the slowest of the three, not their sum; on any real link that is the moving. "It fits" is not "it
is fast", so `report` prints both.

    time        0    1    2    3    4
    read       p0   p1   p2
    compute         p0   p1   p2             three pieces alive at most, whatever the model's size
    write                p0   p1   p2

Ren et al. 2021, "ZeRO-Offload", which computes on the CPU; Rajbhandari et al. 2021, "ZeRO-Infinity", for this pipeline;
lecture A, "CPU·NVMe Offload" (docs/notation.md). PyTorch's counterpart: FSDP2's CPUOffloadPolicy, which steps on the
CPU; DeepSpeed's: runtime/swap_tensor/pipelined_optimizer_swapper.py. Left out: weights and activations.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from collectives.host import Moves, Pool


class Row(NamedTuple):
    """What happens at the same time: which piece is read, which computed, which written; None for none."""

    read: int | None
    compute: int | None
    write: int | None


def rows(pieces: int) -> list[Row]:
    """The picture above, a row a time."""

    def known(piece: int) -> int | None:
        return piece if 0 <= piece < pieces else None

    return [Row(known(now), known(now - 1), known(now - 2)) for now in range(pieces + 2 if pieces else 0)]


class Offload:
    """The pipeline of a pool's device, and what its last run took: `moves`, and seconds of computing and in all."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.moves, self.computing, self.seconds = Moves(), 0.0, 0.0
        on_gpu = pool.device.type == "cuda"
        self._reading, self._writing = (torch.cuda.Stream(pool.device) if on_gpu else None for _ in range(2))

    def run(
        self,
        pieces: Sequence[Any],
        read: Callable[[Any], Any],
        compute: Callable[[Any], Any],
        write: Callable[[Any], None],
    ) -> None:
        """For each piece `write(compute(read(piece)))`, in the order of `rows`: read and write in threads of their own,
        compute in this one. A row begins when all of the last has ended.

        An error of any of the three leaves here when the other two have ended; nothing is started after it.
        """
        moves, began, self.computing = self.pool.moves, time.perf_counter(), 0.0
        staged = done = None
        with ThreadPoolExecutor(2) as threads:  # its end waits for both, after an error too
            for row in rows(len(pieces)):
                # IDEA: this row's three pieces are all that is alive of the model's masters and state.
                reading = None if row.read is None else threads.submit(_beside, self._reading, read, pieces[row.read])
                writing = None if row.write is None else threads.submit(_beside, self._writing, write, done)
                computed = None if row.compute is None else self._timed(compute, staged)
                staged = None if reading is None else reading.result()
                if writing is not None:
                    writing.result()
                done = computed
        self.moves, self.seconds = self.pool.moves - moves, time.perf_counter() - began

    def _timed(self, compute: Callable[[Any], Any], staged: Any) -> Any:
        began = time.perf_counter()
        computed = compute(staged)
        if self.pool.device.type == "cuda":  # the writer's stream knows nothing of this one
            torch.cuda.current_stream(self.pool.device).synchronize()
        self.computing += time.perf_counter() - began
        return computed

    def report(self) -> str:
        """The last run and the bytes kept, for a person."""
        moves = self.moves
        return (
            f"offload: {self.pool.host.now:,} bytes on the host, of pieces at most {self.pool.staged.peak:,} on "
            f"{self.pool.device}; last step: {moves.read:,} bytes read and {moves.written:,} written in "
            f"{moves.seconds:.3f} s, beside {self.computing:.3f} s of computing; {self.seconds:.3f} s in all"
        )


def _beside(stream: "torch.cuda.Stream | None", work: Callable[[Any], Any], argument: Any) -> Any:
    """In its thread, and on a GPU on its stream, to which then belongs what it allocates: that is freed only after the
    row in which its last user has ended.
    """
    with torch.cuda.stream(stream), torch.no_grad():
        return work(argument)
