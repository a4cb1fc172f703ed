"""What a rank holds: boxes of named global tensors, one declaration a parameter, and the check that all ranks together
hold each exactly.

A box is a rectangular piece of a global tensor: the global shape, the offset, the local shape. Every strategy describes
what it leaves on a rank by boxes and nothing else, so whatever must work on any mesh (initial weights, gradient norms,
checkpoints, resharding) needs only them. The declaration `p.held` travels with the parameter: the function that cuts a
parameter edits it, everything else reads it.

PyTorch's counterpart: DTensor's (DeviceMesh, placements), which names a cut by mesh axes; a box names the result, so
uneven pieces, pieces of fused tensors and flat ranges (ZeRO) need no further kinds. Reference: the box of a chunk in
torch.distributed.checkpoint's metadata.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm


@dataclass(frozen=True)
class Box:
    """A piece of a global tensor. All three have one entry a dimension; a scalar's are empty."""

    shape: tuple[int, ...]  # of the global tensor
    offset: tuple[int, ...]
    local: tuple[int, ...]  # shape of the piece

    @classmethod
    def whole(cls, shape: Iterable[int]) -> "Box":
        """The box that is the entire tensor."""
        shape = tuple(shape)
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """The number of elements of the piece."""
        return math.prod(self.local)

    def cut(self, dim: int, start: int, length: int) -> "Box":
        """The piece of this piece that starts at local index `start` of `dim`."""
        if not 0 <= start <= start + length <= self.local[dim]:
            raise ValueError(f"cannot cut {start}:{start + length} out of dim {dim} of {self}")
        offset, local = list(self.offset), list(self.local)
        offset[dim] += start
        local[dim] = length
        return replace(self, offset=tuple(offset), local=tuple(local))

    def intersect(self, other: "Box") -> "Box | None":
        """What both hold, or None: the only question that resharding asks."""
        if self.shape != other.shape:
            raise ValueError(f"{self} and {other} are pieces of tensors of different shape")
        first = tuple(map(max, self.offset, other.offset))
        last = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.local, other.offset, other.local, strict=True)
        )
        local = tuple(b - a for a, b in zip(first, last, strict=True))
        return replace(self, offset=first, local=local) if all(n > 0 for n in local) else None

    def slices(self, within: "Box") -> tuple[slice, ...]:
        """Where this box lies in the local tensor of `within`, which contains it."""
        starts = [a - b for a, b in zip(self.offset, within.offset, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(starts, self.local, strict=True))

    def index(self) -> Tensor:
        """The row-major global index of every element, int64, in the box's local shape."""
        index = torch.zeros((), dtype=torch.int64)
        for size, offset, local in zip(self.shape, self.offset, self.local, strict=True):
            index = index.unsqueeze(-1) * size + torch.arange(offset, offset + local)
        return index


def flat_range(shape: Iterable[int], start: int, stop: int) -> list[Box]:
    """The row-major elements start … stop-1 of a tensor as boxes, in order: at most 2d - 1 of them for d dimensions.

    A ragged first row, the full rows between, a ragged last row; the ragged ones are ranges of a tensor with one
    dimension less.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start}:{stop} are not in a tensor of shape {shape}")
    return list(flat_cut([Box.whole(shape)], start, stop))


def flat_cut(boxes: Iterable[Box], start: int, stop: int) -> Iterator[Box]:
    """The elements start … stop-1 of the storage that these boxes make up one after the other, each row-major."""
    before = 0
    for box in boxes:
        first, last = max(start, before), min(stop, before + box.numel)
        if first < last:
            yield from _ranges(box, 0, first - before, last - before)
        before += box.numel


def _ranges(box: Box, dim: int, start: int, stop: int) -> Iterator[Box]:
    if start == 0 and stop == box.numel:
        yield box
        return
    row = box.numel // box.local[dim]
    first, last = -(-start // row), stop // row  # the full rows first … last-1
    if first > last:  # within one row
        yield from _ranges(box.cut(dim, last, 1), dim + 1, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _ranges(box.cut(dim, first - 1, 1), dim + 1, start - (first - 1) * row, row)
    if last > first:
        yield box.cut(dim, first, last - first)
    if stop > last * row:
        yield from _ranges(box.cut(dim, last, 1), dim + 1, 0, stop - last * row)


@dataclass(frozen=True)
class Normal:
    """Initialised with independent normals of this standard deviation."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initialised with one value."""

    value: float


@dataclass
class Held:
    """A parameter's one declaration, its attribute `held`: everything that reduction, norm, initialisation and saving
    need to know.

    `sums` has a group for each reason why this rank's gradient is only a partial sum: it saw part of the tokens, heads,
    vocabulary or experts. `copies`, `copy` and `holders` are not declared but derived from equal boxes by `check`: how
    many ranks hold the same, which of them we are, and who they are.
    """

    name: str  # of the global tensor
    boxes: tuple[Box, ...]  # the local storage is these, one after the other
    init: Normal | Constant | None  # None: whoever made it gave it values
    decay: bool  # weight decay applies
    sums: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    family: str = "dense"  # or "expert"
    copies: int | None = None
    copy: int | None = None
    holders: tuple[int, ...] = ()  # ranks of the group that was checked


def declare(module: nn.Module, init: Callable[[str], Normal | Constant], decay: Callable[[str], bool]) -> None:
    """Give every parameter of a whole, uncut module its declaration, by rules on its global name. A shared parameter
    keeps its first name.
    """
    for name, param in module.named_parameters():
        param.held = Held(name, (Box.whole(param.shape),), init(name), decay(name))


def cut(param: nn.Parameter, dim: int, start: int, length: int) -> None:
    """Narrow a declared parameter to a piece of itself, in place: the object, and so its sharing, stays. One with
    values keeps those of the piece, and lets go of the rest.

    A parameter of several boxes is cut along dim 0, in which they follow one another.
    """
    held = param.held
    stacked = param.dim() > 0 and all(box.local[1:] == param.shape[1:] for box in held.boxes)
    if len(held.boxes) == 1 and held.boxes[0].local == param.shape:
        boxes = [held.boxes[0].cut(dim, start, length)]
    elif dim == 0 and stacked:
        boxes = list(_cut_sequence(held.boxes, start, length))
    else:
        raise ValueError(f"{held.name} is {len(held.boxes)} boxes in a row: cut it before it is made into them")
    _narrow(param, param.data.narrow(dim, start, length), boxes)


def cut_pieces(param: nn.Parameter, dim: int, pieces: Sequence[range]) -> None:
    """Narrow a declared, whole parameter to these ranges of `dim`, one after the other, each a box; in place as `cut`.

    What several matrices in one (queries, keys and values) come to when each of them is cut: several ranges, of dim 0.
    One that has been cut so already, because two modules share it, stays; one that has been cut otherwise: ValueError.
    """
    whole = Box.whole(param.held.boxes[0].shape)
    boxes = tuple(whole.cut(dim, piece.start, len(piece)) for piece in pieces)
    if param.held.boxes == boxes:
        return
    if param.held.boxes != (whole,):
        raise ValueError(f"{param.held.name} is cut already, to {param.held.boxes}, and cannot be cut to {boxes}")
    parts = [param.data.narrow(dim, piece.start, len(piece)) for piece in pieces]
    _narrow(param, parts[0] if len(parts) == 1 else torch.cat(parts), boxes)


def _narrow(param: nn.Parameter, values: Tensor, boxes: Iterable[Box]) -> None:
    param.data = values.clone(memory_format=torch.contiguous_format)  # a view would keep all of it alive
    param.held = replace(param.held, boxes=tuple(boxes), copies=None, copy=None, holders=())


def _cut_sequence(boxes: Iterable[Box], start: int, length: int) -> Iterator[Box]:
    before = 0
    for box in boxes:
        first = max(start, before)
        last = min(start + length, before + box.local[0])
        if first < last:
            yield box.cut(0, first - before, last - first)
        before += box.local[0]


def materialize(param: nn.Parameter, device: torch.device) -> None:
    """Give a parameter on the meta device memory on `device`, uninitialised; the object, its sharing and its
    declaration stay.
    """
    point(param, torch.empty_like(param, device=device))


def point(param: nn.Parameter, memory: Tensor) -> None:
    """Make `memory` what the parameter consists of; the object, its sharing and its declaration stay. Whoever writes
    to `memory` later changes the parameter behind autograd's back.
    """
    if param.device == memory.device:
        param.data = memory
    else:  # which param.data = … refuses to change
        real = nn.Parameter(memory.data, requires_grad=param.requires_grad)
        real.__dict__.update(param.__dict__)
        try:
            torch.utils.swap_tensors(param, real)
        except RuntimeError as error:  # somebody keeps a weak reference
            raise ValueError(f"a parameter on the meta device cannot get memory, as of an LSTM: {error}") from error


def check(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Check, before the first step, that the ranks of `group` together hold every tensor exactly; set `copies`,
    `copy` and `holders` on the way.

    Collective over `group`. Raises ValueError on every rank when the boxes of a tensor overlap or leave a gap, when
    ranks disagree on its shape or family, or when the members of a sum group do not hold the same boxes (their
    gradients could not be added).
    """
    mine = {param.held.name: param.held for param in params}
    described = {name: (held.boxes, held.family, _sum_members(held)) for name, held in mine.items()}
    everyone = comm.all_gather_object(described, group=group)
    holders: dict[str, list] = defaultdict(
        list
    )  # name -> (rank in group, boxes, family, sums) of each rank that holds a part
    for rank, table in enumerate(everyone):
        for name, entry in table.items():
            holders[name].append((rank, *entry))
    members = dist.get_process_group_ranks(group)
    for name, entries in holders.items():
        _check_tensor(name, entries, members)
    rank = dist.get_rank(group)
    for name, held in mine.items():
        same = [other for other, boxes, *_ in holders[name] if boxes == held.boxes]
        held.copies, held.copy, held.holders = len(same), same.index(rank), tuple(same)


def _sum_members(held: Held) -> dict[str, tuple[int, ...]]:
    return {label: tuple(dist.get_process_group_ranks(group)) for label, group in held.sums.items()}


def _check_tensor(name: str, entries: list, members: list[int]) -> None:
    shapes = {box.shape for _, boxes, _, _ in entries for box in boxes}
    families = {family for _, _, family, _ in entries}
    if len(shapes) > 1 or len(families) > 1:
        raise ValueError(f"{name}: ranks declare different shapes {sorted(shapes)} or families {sorted(families)}")
    distinct = [
        box for boxes in {boxes for _, boxes, _, _ in entries} for box in boxes
    ]  # equal lists of boxes are copies
    for i, box in enumerate(distinct):
        for other in distinct[:i]:
            if box.intersect(other):
                raise ValueError(
                    f"{name}: ranks hold overlapping boxes without holding the same ones: {other} and {box}"
                )
    for shape in shapes:
        if (held := sum(box.numel for box in distinct)) != math.prod(shape):
            raise ValueError(f"{name}: all ranks together hold {held} of its {math.prod(shape)} elements")
    held_by = {members[rank]: boxes for rank, boxes, _, _ in entries}
    for rank, boxes, _, sums in entries:
        for label, peers in sums.items():
            if wrong := [peer for peer in peers if held_by.get(peer) != boxes]:
                raise ValueError(
                    f"{name}: rank {members[rank]} sums over {label} with ranks {wrong}, which hold other boxes"
                )


def check_copies(tensors: Iterable[tuple[Held, Tensor]], group: dist.ProcessGroup) -> None:
    """Check that equal boxes have equal bits on all ranks of `group`; for gradients after their reduction. Collective,
    for debugging.

    Raises RuntimeError on every rank naming the tensor and the ranks that differ. A small update hides an ulp in a
    parameter, so the gradient is the tensor to look at.
    """
    digests = {(held.name, held.boxes): _digest(tensor) for held, tensor in tensors}
    seen: dict[tuple, dict[int, str]] = defaultdict(dict)
    for rank, table in enumerate(comm.all_gather_object(digests, group=group)):
        for where, digest in table.items():
            seen[where][rank] = digest
    for (name, _), by_rank in seen.items():
        first = next(iter(by_rank.values()))
        if different := [rank for rank, digest in by_rank.items() if digest != first]:
            raise RuntimeError(f"{name}: ranks {different} differ in bits from rank {next(iter(by_rank))}, same boxes")


def _digest(tensor: Tensor) -> str:
    copied = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor.detach())
    data = copied.view(-1).view(torch.uint8).numpy()  # of numpy's memory nobody can change the size: fsdp would
    return hashlib.sha256(data).hexdigest()
