"""The partition: parameters in one flat row, padded and cut into equal ranges, of which each rank owns one.

Cutting every parameter by itself would leave pieces of different sizes; cutting the row does not ask where a parameter
ends. So every rank gives and takes the same number of bytes in *every* collective, and one message carries many
parameters. The price: a parameter may straddle ranks, and what a rank owns of it is a range of its row-major elements,
a few boxes (collectives/layout.py). Padding: less than one element a rank in each row, and up to a cache line before
each parameter, which then lies as it would by itself.

Rajbhandari et al. 2019, "ZeRO", 5 and 7; DeepSpeed's counterpart: the flattened and padded partitions of
runtime/zero/stage_1_and_2.py. Left out: ranges that start at a multiple of a cache line as well.
"""

import itertools
from collections.abc import Sequence


class Partition:
    """A row of parameters with these numbers of elements, cut into `parts` equal ranges. All numbers are elements.

    align: each parameter starts at a multiple of this. starts: where they start. length: of a range. padded: of the
    row, parts · length. numel: of the parameters.
    """

    def __init__(self, sizes: Sequence[int], parts: int, align: int = 1):
        self.sizes, self.parts, self.numel = list(sizes), parts, sum(sizes)
        *self.starts, _ = itertools.accumulate((-(-size // align) * align for size in sizes), initial=0)
        ends = [start + size for start, size in zip(self.starts, self.sizes, strict=True)]
        # IDEA: the row is cut, not the parameters: all ranges are equal, whatever the sizes are.
        self.length = -(-max(ends, default=0) // parts)
        self.padded = parts * self.length

    @property
    def padding(self) -> int:
        """The elements that belong to no parameter."""
        return self.padded - self.numel

    def range(self, part: int) -> slice:
        """The elements of the row that `part` owns."""
        return slice(part * self.length, (part + 1) * self.length)

    def owned(self, part: int) -> list[range]:
        """Of each parameter the elements, counted in the parameter, that `part` owns; empty where it owns none."""
        row = self.range(part)

        def within(start: int, size: int) -> range:
            return range(min(max(row.start - start, 0), size), min(max(row.stop - start, 0), size))

        return [within(start, size) for start, size in zip(self.starts, self.sizes, strict=True)]

    def within(self, part: int) -> list[slice]:
        """Where the pieces of `owned` lie in the part's range."""
        begin = part * self.length
        owned = zip(self.starts, self.owned(part), strict=True)
        return [slice(start + piece.start - begin, start + piece.stop - begin) for start, piece in owned]
