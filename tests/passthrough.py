"""Bare torch.distributed in the place of collectives/comm.py and p2p.py: whatever a strategy does, it carries it.

Every public function of the two files that moves something has its counterpart here, of the same name and parameters,
which hands the call on: the backend's own algorithm whatever is asked for (`ordered` is ignored, so sums differ by
rounding from one buffer layout to another). A handle holds torch's own Work and no more. A tensor with gaps or, where
pieces are meant, one that is not contiguous is refused; gloo would silently work on other elements.

    pool.run(4, passthrough.run, job, *args)     the job with these in their place
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from collectives import comm, p2p
from collectives.runtime import Runtime

SUM = comm.SUM
# torch 2.13 renamed these two.
_ALL_GATHER: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor, op=SUM, *, group, async_op=False, ordered=False):
    return handle(dist.all_reduce(dense(tensor), op, group=group, async_op=async_op))


def reduce_scatter_single(output, input, op=SUM, *, group, async_op=False, ordered=False):
    return handle(_REDUCE_SCATTER(flat(output), flat(input), op, group=group, async_op=async_op))


def all_gather_single(output, input, *, group, async_op=False):
    return handle(_ALL_GATHER(flat(output), flat(input), group=group, async_op=async_op))


def reduce_scatter(output, inputs, op=SUM, *, group, async_op=False, ordered=False):
    pieces = [flat(piece) for piece in inputs]
    return handle(dist.reduce_scatter(flat(output), pieces, op, group=group, async_op=async_op))


def all_gather(outputs, input, *, group, async_op=False):
    """gloo's own takes equal pieces only, so everyone broadcasts."""
    outputs[group.rank()].copy_(input)
    for source, piece in enumerate(outputs):
        dist.broadcast(flat(piece), group=group, group_src=source)
    return p2p.Handle([]) if async_op else None


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, *, group, async_op=False):
    sizes = [None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes)]
    return handle(dist.all_to_all_single(whole(output), whole(input), *sizes, group=group, async_op=async_op))


def broadcast(tensor, group_src, *, group, async_op=False):
    return handle(dist.broadcast(dense(tensor), group=group, async_op=async_op, group_src=group_src))


def reduce(tensor, group_dst, op=SUM, *, group, async_op=False):
    return handle(dist.reduce(dense(tensor), op=op, group=group, async_op=async_op, group_dst=group_dst))


def gather(output, input, group_dst, *, group):
    pieces = None if output is None else list(flat(output).tensor_split(dist.get_world_size(group)))
    dist.gather(flat(input), pieces, group=group, group_dst=group_dst)


def scatter(output, input, group_src, *, group):
    pieces = None if input is None else list(flat(input).tensor_split(dist.get_world_size(group)))
    dist.scatter(flat(output), pieces, group=group, group_src=group_src)


def barrier(*, group):
    dist.barrier(group=group)


def all_gather_object(value, *, group):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def exchange(sends, receives, *, group):
    batch = [dist.P2POp(dist.irecv, whole(x), group=group, group_peer=peer) for x, peer in receives if x.numel()]
    batch += [dist.P2POp(dist.isend, whole(x), group=group, group_peer=peer) for x, peer in sends if x.numel()]
    return p2p.Handle(dist.batch_isend_irecv(batch) if batch else [])


def isend(tensor, dst, *, group):
    return exchange([(tensor, dst)], [], group=group)


def irecv(tensor, src, *, group):
    return exchange([], [(tensor, src)], group=group)


def send(tensor, dst, *, group):
    dist.send(whole(tensor), group=group, group_dst=dst)


def recv(tensor, src, *, group):
    dist.recv(whole(tensor), group=group, group_src=src)


def handle(work: dist.Work | None) -> p2p.Handle | None:
    """What a strategy may do with the handles of comm and p2p, it may do with this one."""
    return None if work is None else p2p.Handle([work])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """For what is done element by element the order in memory does not matter, if it is the same on all ranks."""
    assert torch.empty_like(tensor, device="meta").stride() == tensor.stride(), f"has gaps: strides {tensor.stride()}"
    return tensor.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.is_contiguous(), f"is not contiguous: {tuple(tensor.shape)} with strides {tensor.stride()}"
    return tensor.detach()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return whole(tensor).view(-1)


def moving(module: ModuleType) -> dict[str, Callable]:
    """The public functions of comm or p2p that move something, by name."""
    functions = {
        name: f for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__
    }
    return {
        name: f
        for name, f in functions.items()
        if not name.startswith("_") and "group" in inspect.signature(f).parameters
    }


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Inside, comm and p2p hand everything on to torch.distributed; their constants and types stay."""
    with contextlib.ExitStack() as patches:
        for module in (comm, p2p):
            patches.enter_context(mock.patch.multiple(module, **{name: globals()[name] for name in moving(module)}))
        yield


def run(runtime: Runtime, job: Callable[..., Any], *args: Any) -> Any:
    """The job of a pool's rank, over bare torch.distributed."""
    with in_place():
        return job(runtime, *args)
