"""Collectives with a backward, each named FORWARD_BACKWARD, so that a line of a strategy shows both directions.

The gradient of an all_reduce has two meanings, and the call does not tell which. If all ranks go on *alike* with the
sum, to one loss that each of them computes, what arrives is the whole gradient, on every rank: backward does nothing
(Megatron-LM's g, Shoeybi et al. 2019, §3). If they go on *differently*, to losses of which the sum is meant, it is a
term: backward is an all_reduce (torch.distributed.nn.functional). So for all_gather: a slice, or a reduce_scatter.

g is the group, P its size; marks as in docs/notation.md. Backward is the dual's public function, so it can be
differentiated again, and a collective: all ranks use a result or none, and x requires a gradient on all or none.
Results are new and contiguous, but identity's is a view, of one rank x itself; one rank sends nothing. Sizes that are
not given are taken on trust: checked mode names pieces that differ. Cost: that of the call of comm.py, and copies where
dim is not the first.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import comm

Sizes = Sequence[int] | None  # all ranks' lengths along a dim; None: equal ones; ValueError for others than x has


def identity_all_reduce(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: whole → whole, nothing is done. Backward: all_reduce, `{+g}` → whole. Megatron-LM's f.

    Right for a whole value that each rank uses for its own part (its columns, its heads): what arrives is a term of the
    gradient. Without it the gradient stays partial; where all ranks go on alike, it makes it P times too large.
    """
    return _apply(x, _same, all_reduce_identity, group=group)


def all_reduce_identity(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: all_reduce, `{+g}` → whole. Backward: whole → whole, nothing is done. Megatron-LM's g.

    Right if all ranks go on alike: the gradient of a sum is that of each of its terms, and every rank has it already.
    If they go on differently, it stays partial; take all_reduce_all_reduce.
    """
    return _apply(x, _all_reduce, identity_all_reduce, group=group)


def all_reduce_all_reduce(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: all_reduce, `{+g}` → whole. Backward: all_reduce, `{+g}` → whole.

    Right if the ranks go on differently, to losses that are meant to be added: each of them depends on every x. If all
    go on alike, the one loss is counted P times, and so is its gradient; take all_reduce_identity.
    """
    return _apply(x, _all_reduce, all_reduce_all_reduce, group=group)


def all_gather_reduce_scatter(x: Tensor, dim: int, sizes: Sizes = None, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: all_gather, `/g` → whole along dim. Backward: reduce_scatter, `{+g}` → `/g`.

    Right if the ranks go on differently with the whole: each has a term of its gradient. If all go on alike, the
    gradient is P times too large; take all_gather_split. sizes None: all pieces are as long as this one.
    """
    sizes = _piece_sizes(x, dim, sizes, group)
    return _apply(x, _all_gather, reduce_scatter_all_gather, dim, sizes, group=group)


def all_gather_split(x: Tensor, dim: int, sizes: Sizes = None, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: all_gather, `/g` → whole along dim. Backward: this rank's slice, whole → `/g`; nothing is sent.

    Right if all ranks go on alike with the whole: each has its whole gradient. If they go on differently, the others'
    terms are lost; take all_gather_reduce_scatter. sizes None: all pieces are as long as this one.
    """
    sizes = _piece_sizes(x, dim, sizes, group)
    return _apply(x, _all_gather, split_all_gather, dim, sizes, group=group)


def split_all_gather(x: Tensor, dim: int, sizes: Sizes = None, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: this rank's slice, whole → `/g` along dim; nothing is sent. Backward: all_gather, `/g` → whole.

    Right for what all ranks have made alike: its gradient is whole on each. If x comes from identity_all_reduce, which
    adds, that is P times too large; take a plain slice, with zeros elsewhere. sizes None: dim must divide.
    """
    sizes = _whole_sizes(x, dim, sizes, group)
    return _apply(x, _split, all_gather_split, dim, sizes, group=group)


def reduce_scatter_all_gather(x: Tensor, dim: int, sizes: Sizes = None, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: reduce_scatter, `{+g}` → `/g` along dim. Backward: all_gather, `/g` → whole.

    Right for a partial sum, of which each rank goes on with its piece (in place of g, Korthikanti et al. 2022). Of a
    copy on every rank the sum would be P times too large; take split_all_gather. sizes None: dim must divide.
    """
    sizes = _whole_sizes(x, dim, sizes, group)
    return _apply(x, _reduce_scatter, all_gather_reduce_scatter, dim, sizes, group=group)


def all_to_all(
    x: Tensor,
    split_dim: int,
    cat_dim: int,
    split_sizes: Sizes = None,
    cat_sizes: Sizes = None,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Forward: all_to_all, `[S, C/g]` → `[S/g, C]`, S at split_dim and C at cat_dim. Backward: back, the dims swapped.

    Right however the ranks go on: an element is on one of them only, so nothing is to be added. A copy on every rank
    would come out P times; split it. Sizes None: split_dim must divide, all ranks' cat_dim are as long as this one.
    """
    split_sizes = _whole_sizes(x, split_dim, split_sizes, group, "split_sizes")
    cat_sizes = _piece_sizes(x, cat_dim, cat_sizes, group, "cat_sizes")
    split_dim, cat_dim = split_dim % x.dim(), cat_dim % x.dim()
    if split_dim == cat_dim:
        raise ValueError(f"split_dim and cat_dim are both {cat_dim}: rows that stay rows move by all_to_all_rows")
    back = cat_dim, split_dim, cat_sizes, split_sizes
    return _apply(x, _all_to_all, all_to_all, split_dim, cat_dim, split_sizes, cat_sizes, back=back, group=group)


def all_to_all_rows(x: Tensor, gives: Sequence[int], takes: Sequence[int], *, group: dist.ProcessGroup) -> Tensor:
    """Forward: all_to_all of the rows of dim 0: gives[0] of them to rank 0, the next gives[1] to rank 1, …; the result
    has takes[0] from rank 0, then takes[1] from rank 1, …. Backward: the rows go back, gives and takes swapped.

    Right however the ranks go on: a row is on one of them only. A row that is sent to several is a copy in x, whose
    own backward adds. takes[p] is what rank p has as gives for this one.
    """
    size, rank, gives, takes = _size(group), group.rank(), list(gives), list(takes)
    fits = len(gives) == len(takes) == size and gives[rank] == takes[rank] and sum(gives) == x.size(0)
    if not fits or min(*gives, *takes) < 0:
        need = f"{size} numbers each, equal at {rank}, this rank, and gives to add up to the {x.size(0)} rows"
        raise ValueError(f"gives={gives}, takes={takes}: need {need}")
    return _apply(x, _all_to_all_rows, all_to_all_rows, gives, takes, back=(takes, gives), group=group)


def broadcast_reduce(x: Tensor, group_src: int, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: broadcast, rank group_src's x → whole; of the others' only shape, dtype and requires_grad count.
    Backward: reduce, `{+g}` → the sum on rank group_src, zeros on the others.

    Right if the ranks go on differently. If all go on alike, the gradient is P times too large.
    """
    _check_root(group_src, group)
    return _apply(x, _broadcast, reduce_broadcast, group_src, group=group)


def reduce_broadcast(x: Tensor, group_dst: int, *, group: dist.ProcessGroup) -> Tensor:
    """Forward: reduce, `{+g}` → the sum on rank group_dst, zeros on the others. Backward: broadcast, rank group_dst's
    gradient → whole; that of the zeros is ignored.

    Right if rank group_dst alone goes on with the sum: its loss is the loss, and the others start backward from their
    zeros, or the broadcast waits for them. If all go on with it, take one of the two all_reduces.
    """
    _check_root(group_dst, group)
    return _apply(x, _reduce, broadcast_reduce, group_dst, group=group)


class _Dual(torch.autograd.Function):
    """forward: a collective; backward: its dual, because the mark of a gradient follows from that of its tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dout), None, None


def _apply(
    x: Tensor, forward: Callable, dual: Callable, *args: Any, back: Sequence[Any] = (), group: dist.ProcessGroup
) -> Tensor:
    """forward(x, *args); its backward is dual(dout, *back), with the same args if no others are given."""
    if _size(group) == 1:
        return x if forward is _same else x.clone(memory_format=torch.contiguous_format)
    return _Dual.apply(
        x, lambda x: forward(x, *args, group=group), lambda dout: dual(dout, *(back or args), group=group)
    )


def _same(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    return x


def _all_reduce(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    comm.all_reduce(total := x.clone(memory_format=torch.contiguous_format), group=group)
    return total


def _all_gather(x: Tensor, dim: int, sizes: list[int], *, group: dist.ProcessGroup) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    whole = x.new_empty(sum(sizes), *rows.shape[1:])
    if len(set(sizes)) == 1:
        comm.all_gather_single(whole, rows, group=group)
    else:
        comm.all_gather(whole.split(sizes), rows, group=group)
    return whole.movedim(0, dim).contiguous().data  # no view, which could not be changed in place


def _split(x: Tensor, dim: int, sizes: list[int], *, group: dist.ProcessGroup) -> Tensor:
    return x.split(sizes, dim)[group.rank()].clone(memory_format=torch.contiguous_format)  # a view keeps all of x alive


def _reduce_scatter(x: Tensor, dim: int, sizes: list[int], *, group: dist.ProcessGroup) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    piece = x.new_empty(sizes[group.rank()], *rows.shape[1:])
    if len(set(sizes)) == 1:
        comm.reduce_scatter_single(piece, rows, group=group)
    else:
        comm.reduce_scatter(piece, rows.split(sizes), group=group)
    return piece.movedim(0, dim).contiguous().data  # as above


def _all_to_all(
    x: Tensor, split_dim: int, cat_dim: int, split_sizes: list[int], cat_sizes: list[int], *, group: dist.ProcessGroup
) -> Tensor:
    pieces = x.split(split_sizes, split_dim)
    mine = pieces[group.rank()].shape
    before, after = mine[:cat_dim], mine[cat_dim + 1 :]
    gives, takes = [p.numel() for p in pieces], [math.prod((*before, *after)) * length for length in cat_sizes]
    given = x.flatten() if math.prod(x.shape[:split_dim]) == 1 else torch.cat([piece.flatten() for piece in pieces])
    taken = _all_to_all_rows(given, gives, takes, group=group)
    if math.prod(before) == 1:
        return taken.view(*before, sum(cat_sizes), *after).data  # as above
    parts = zip(taken.split(takes), cat_sizes, strict=True)
    return torch.cat([part.view(*before, length, *after) for part, length in parts], cat_dim)


def _all_to_all_rows(x: Tensor, gives: list[int], takes: list[int], *, group: dist.ProcessGroup) -> Tensor:
    comm.all_to_all_single(taken := x.new_empty(sum(takes), *x.shape[1:]), x.contiguous(), takes, gives, group=group)
    return taken


def _broadcast(x: Tensor, src: int, *, group: dist.ProcessGroup) -> Tensor:
    comm.broadcast(whole := x.clone(memory_format=torch.contiguous_format), src, group=group)
    return whole


def _reduce(x: Tensor, dst: int, *, group: dist.ProcessGroup) -> Tensor:
    comm.reduce(total := x.clone(memory_format=torch.contiguous_format), dst, group=group)
    return total if group.rank() == dst else total.zero_()  # what reduce leaves elsewhere is undefined


def _size(group: dist.ProcessGroup | None) -> int:
    if group is None:
        raise ValueError("this rank is no member of the group; let only members call it")
    return group.size()


def _check_root(root: int, group: dist.ProcessGroup) -> None:
    if not 0 <= root < _size(group):
        raise ValueError(f"root {root} is not in a group of {group.size()} ranks, which count from 0 in it")


def _piece_sizes(x: Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup, name: str = "sizes") -> list[int]:
    """The lengths along dim of all ranks' pieces, of which x is one."""
    length, size = x.size(dim), _size(group)
    sizes = size * [length] if sizes is None else list(sizes)
    if len(sizes) != size or sizes[group.rank()] != length or min(sizes) < 0:
        raise ValueError(f"{name}={sizes}: give {size} lengths along dim {dim}, {length} for rank {group.rank()}")
    return sizes


def _whole_sizes(x: Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup, name: str = "sizes") -> list[int]:
    """The lengths along dim of the pieces into which x is to be cut."""
    length, size = x.size(dim), _size(group)
    if sizes is None and length % size:
        nearly = [(length + size - 1 - rank) // size for rank in range(size)]
        raise ValueError(f"{size} ranks do not divide dim {dim} of length {length}; give {name}=, as {nearly}")
    sizes = size * [length // size] if sizes is None else list(sizes)
    if len(sizes) != size or sum(sizes) != length or min(sizes) < 0:
        raise ValueError(f"{name}={sizes}: give {size} lengths that add up to dim {dim}'s {length}")
    return sizes
