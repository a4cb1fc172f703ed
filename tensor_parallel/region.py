"""A region: what lies between a column cut and the row cut that closes it. One input, one output, two collectives.

                     enter            columns       row            leave
    tensor parallel  x [T, D]        [T, F/tp]    [T, D] {+tp}    all_reduce      → [T, D]
    with sequences   gather [T/tp, D] → [T, D]    …               reduce_scatter  → [T/tp, D]

Backward: the duals, and at `enter` once for all columns that share x. Elements sent, of the n = B·T·D of x: 4n(P-1)/P
forward and backward, either way; 5n(P-1)/P if x, which the gradients of weights need whole, is kept as a piece and
gathered again (`save_gathered=False`).

Shoeybi et al. 2019, "Megatron-LM", §3; Korthikanti et al. 2022, §4.2; lecture B, "Tensor Parallelism", "Sequence
Parallelism". Megatron-LM's counterpart: the functions of core/tensor_parallel/mappings.py.
"""

import torch.distributed as dist
from torch import Tensor, nn

from collectives.differentiable import all_reduce_identity, reduce_scatter_all_gather
from collectives.hooks import called
from tensor_parallel.entrance import Entrance, check_has_tokens


class Region:
    """Shared by the layers that lie in it: the column layers, which `enter` it with one input, and the row layer, which
    lets its output `leave`.

    sequence_parallel: outside of the region each rank has T/tp tokens, not copies of all. save_gathered: what the
    columns keep for backward is their whole input, not this rank's piece, which is then gathered again. Tokens are the
    last dim but one.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool = False, save_gathered: bool = False):
        if group is None:
            raise ValueError("this rank is no member of the group; let only members call it")
        if save_gathered and not sequence_parallel:
            raise ValueError("save_gathered=True is a mode of sequence_parallel=True: without it nothing is gathered")
        self.group, self.sequence_parallel, self.save_gathered = group, sequence_parallel, save_gathered
        self.columns: list[nn.Module] = []
        self._entrance: Entrance | None = None

    def enter(self, x: Tensor, column: nn.Module) -> Entrance:
        """x: a copy [..., T, D] on every rank, or with sequence parallelism this rank's [..., T/tp, D], equally many
        tokens on all (as split_all_gather cuts them). The column layers that are called with the same tensor enter
        together.
        """
        # IDEA: layers that are called with one tensor share its collectives, so a region sends once, not once a matrix.
        if self._entrance is None or not self._entrance.admits(x, column):
            modes = {"sequence_parallel": self.sequence_parallel, "save_gathered": self.save_gathered}
            self._entrance = Entrance(x, self.columns, self.group, forget=called(self._forget), **modes)
        entrance = self._entrance
        entrance.awaited.discard(column)
        if not entrance.awaited:
            self._forget()  # all have entered: what only they need goes
        return entrance

    def _forget(self) -> None:
        self._entrance = None

    def leave(self, y: Tensor) -> Tensor:
        """y [..., T, D] {+tp} → the sum, whole on every rank, or with sequence parallelism this rank's tokens of it.

        Raises ValueError on every rank where the tokens do not divide.
        """
        self._forget()
        if not self.sequence_parallel:
            return all_reduce_identity(y, group=self.group)  # [..., T, D]
        check_has_tokens(y)
        ranks, tokens = self.group.size(), y.size(-2)
        if tokens % ranks:
            padded = -(-tokens // ranks) * ranks
            raise ValueError(
                f"sequence parallelism: tp={ranks} does not divide the {tokens} tokens of a row; "
                f"pad rows to {padded}, and mask what is added, or choose a tp that divides"
            )
        return reduce_scatter_all_gather(y, -2, group=self.group)  # [..., T/tp, D]
