"""What one call of comm.py or p2p.py is about, for whoever watches it: its operation, its group, its message.

A call holds numbers, never tensors, so watching keeps no buffer alive. CALLS has one function for each operation that
is watched, with the operation's own arguments; it says which tensor counts as the message of n bytes, and which shape
all ranks of the group must agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class Part:
    """A message of an exchange. `peer` is a rank in the group."""

    peer: int
    shape: Sequence[int]
    dtype: torch.dtype
    nbytes: int


@dataclass(slots=True)
class Call:
    """A call, from its begin to its end. The fields from `name` on are filled in by watch.py."""

    op: str
    group: dist.ProcessGroup
    shape: Sequence[int] = ()  # what all ranks of a collective must agree on; of point-to-point the first message's
    dtype: torch.dtype | None = None
    elements: int = 0  # of the message, whose bytes are the n of the formulas
    nbytes: int = 0
    reduction: Any = None
    ordered: bool = False
    root: int | None = None  # source or destination, a rank in the group
    other: tuple[Sequence[int], torch.dtype] | None = None  # shape and dtype of the other tensor, if it has one
    gives: Sequence[int] | None = None  # all_to_all: rows for each rank, and from each
    takes: Sequence[int] | None = None
    sends: Sequence[Part] = ()  # point-to-point only
    receives: Sequence[Part] = ()

    name: str = ""  # of the group
    ranks: tuple[int, ...] = ()  # of the group, counted in the world
    rank: int = 0  # this one, in the group
    number: int = 0  # of this rank's collectives in the group, from 1; point-to-point counts apart
    about: str = ""  # what the program says it is for: a module's name, say
    began: float = 0.0  # time.time()
    outer: Call | None = None  # the call that this one is part of
    parts: list[Call] = field(default_factory=list)  # the calls of which this one consists, if it is not the backend's
    result: Any = None  # of a call that returns values
    notes: dict[Any, Any] = field(default_factory=dict)  # what a watcher keeps of this call, under itself

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @property
    def point_to_point(self) -> bool:
        """Whether only the ranks that are named take part, and not the whole group."""
        return self.op in ("send", "recv", "exchange")

    def __str__(self) -> str:
        what = f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}" if self.dtype else ""
        about = f", of {self.about}" if self.about else ""
        where = f"call {self.number} of group {self.name} (ranks {spelled(self.ranks)})"
        inside = f", in {self.outer.op} {self.outer.number}" if self.outer else ""
        return " ".join(filter(None, [self.op, what])) + f"{about}, {where}{inside}"


def spelled(ranks: Sequence[int]) -> str:
    """Ranks in few characters: 0…3 for four in a row, 0,2…6 for four at equal distances, else 0,1,4."""
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}…{ranks[-1]}" if step == 1 else f"{ranks[0]},{ranks[1]}…{ranks[-1]}"
    return ",".join(map(str, ranks))


def ranks_of(text: str) -> list[int]:
    """The ranks that `spelled` wrote; of a longer list that was cut, with a + at its end, those that are there."""
    if "…" not in text:
        return [int(rank) for rank in text.split(",") if rank not in ("", "+")]
    start, last = text.split("…")
    first, _, second = start.partition(",")
    return list(range(int(first), int(last) + 1, int(second) - int(first) if second else 1))


def _of(op: str, group: dist.ProcessGroup, message: Tensor, agreed: Tensor | None = None, **more: Any) -> Call:
    shape = (message if agreed is None else agreed).shape
    return Call(op, group, shape, message.dtype, message.numel(), message.nbytes, **more)


def _kind(tensor: Tensor | None) -> tuple[Sequence[int], torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, ordered: bool = False, **_: Any) -> Call:
    """n: the tensor."""
    return _of("all_reduce", group, tensor, reduction=op, ordered=ordered)


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, ordered: bool = False, **_: Any
) -> Call:
    """n: the whole, a rank's input."""
    return _of("reduce_scatter_single", group, input, reduction=op, ordered=ordered, other=_kind(output))


def all_gather_single(output: Tensor, input: Tensor, *, group: Any, **_: Any) -> Call:
    """n: the whole, a rank's output; the pieces must agree."""
    return _of("all_gather_single", group, output, input, other=_kind(output))


def reduce_scatter(
    output: Tensor,
    inputs: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    *,
    group: Any,
    ordered: bool = False,
    **_: Any,
) -> Call:
    """n: the whole, all of a rank's inputs; the sizes of the pieces must agree."""
    return _of_pieces("reduce_scatter", group, inputs, output, reduction=op, ordered=ordered)


def all_gather(outputs: Sequence[Tensor], input: Tensor, *, group: Any, **_: Any) -> Call:
    """n: the whole, all of a rank's outputs; the sizes of the pieces must agree."""
    return _of_pieces("all_gather", group, outputs, input)


def _of_pieces(op: str, group: dist.ProcessGroup, pieces: Sequence[Tensor], piece: Tensor, **more: Any) -> Call:
    sizes = [each.numel() for each in pieces]
    nbytes = sum(each.nbytes for each in pieces)
    dtype = pieces[0].dtype if pieces else piece.dtype
    return Call(op, group, sizes, dtype, sum(sizes), nbytes, other=((), piece.dtype), **more)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    *,
    group: Any,
    **_: Any,
) -> Call:
    """n: a rank's input; the rows must agree, and how many of them pair by pair."""
    takes, gives = _rows(output, output_split_sizes, group.size()), _rows(input, input_split_sizes, group.size())
    other = output.shape[1:], output.dtype
    call = _of("all_to_all_single", group, input, gives=gives, takes=takes, other=other)
    call.shape = input.shape[1:]
    return call


def _rows(tensor: Tensor, sizes: Sequence[int] | None, size: int) -> tuple[int, ...]:
    sizes = [] if sizes is None else [int(rows) for rows in sizes]  # whatever kind of integer the operation takes
    return tuple(sizes or size * [(tensor.shape[:1] or (0,))[0] // size])


def broadcast(tensor: Tensor, group_src: int, *, group: Any, **_: Any) -> Call:
    """n: the tensor."""
    return _of("broadcast", group, tensor, root=group_src)


def reduce(tensor: Tensor, group_dst: int, op: Any = dist.ReduceOp.SUM, *, group: Any, **_: Any) -> Call:
    """n: the tensor."""
    return _of("reduce", group, tensor, root=group_dst, reduction=op)


def gather(output: Tensor | None, input: Tensor, group_dst: int, *, group: Any) -> Call:
    """n: a rank's piece."""
    return _of("gather", group, input, root=group_dst, other=_kind(output))


def scatter(output: Tensor, input: Tensor | None, group_src: int, *, group: Any) -> Call:
    """n: a rank's piece."""
    return _of("scatter", group, output, root=group_src, other=_kind(input))


def barrier(*, group: Any) -> Call:
    """Carries nothing."""
    return Call("barrier", group)


def all_gather_object(value: Any, *, group: Any) -> Call:
    """How large the values are shows in the result."""
    return Call("all_gather_object", group)


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], *, group: Any) -> Call:
    """n: all that is sent; empty messages are not, on neither side."""
    gives = [Part(peer, tensor.shape, tensor.dtype, tensor.nbytes) for tensor, peer in sends if tensor.numel()]
    takes = [Part(peer, tensor.shape, tensor.dtype, tensor.nbytes) for tensor, peer in receives if tensor.numel()]
    op = "exchange" if bool(sends) == bool(receives) else "send" if sends else "recv"
    elements = sum(tensor.numel() for tensor, _ in sends or receives)
    call = Call(op, group, elements=elements, nbytes=sum(part.nbytes for part in gives), sends=gives, receives=takes)
    for part in (*gives, *takes)[:1]:
        call.shape, call.dtype = part.shape, part.dtype
    return call


CALLS: MappingProxyType[str, Callable[..., Call]] = MappingProxyType(
    {
        describe.__name__: describe
        for describe in (
            *(all_reduce, reduce_scatter_single, reduce_scatter, all_gather_single, all_gather, all_to_all_single),
            *(broadcast, reduce, gather, scatter, barrier, all_gather_object, exchange),
        )
    }
)
