"""What the data-parallel strategies share: replicas that begin equal, and the contract of their handle.

Equal weights and equal gradients make equal weights. So before the first step the ranks compare what they have built,
and all take over the values of the group's rank 0; afterwards only gradients travel, and buffers, which a module may
change by itself (running statistics). Cost: one broadcast a parameter, once.

PyTorch's counterpart: _verify_param_shape_across_processes, _sync_module_states and broadcast_buffers in
torch/nn/parallel/distributed.py, which broadcasts buffers before a forward and so keeps the objects it found at first;
here they are looked up anew in every step, since module code may rebind them.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm, layout


class Replica:
    """The handle of one replica of a module, whose gradients are summed over `group`; the module itself stays as it is.

    A version of data parallelism adds `finish`. buffered: the module whose buffers are kept equal, None where there are
    none. average: divide by the number of ranks. replicas: ranks of other groups over which the sums go on.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        buffered: nn.Module | None,
        group: dist.ProcessGroup,
        *,
        average: bool,
        replicas: dist.ProcessGroup | None = None,
    ):
        self.params, self.buffered, self.group = list(params), buffered, group
        self.groups = [group] if replicas is None else [replicas, group]  # one after the other they reach all ranks
        self.op = comm.AVG if average else comm.SUM
        self.syncing = True

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates: whole parameters, the same on every rank."""
        return self.params

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of a microbatch that is not the last: gradients add up, no reduction starts."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Around all microbatches of a step, in whatever order a pipeline runs them: gradients add up, and none is
        reduced before `reduce` or `finish`.
        """
        with self.no_sync():
            yield

    def finish(self) -> None:
        """Once a step. Before: each `p.grad` is this rank's own, summed over its microbatches, or on its way. After: it
        is the sum (or mean) over the group, and every buffer is that of the group's rank 0.

        A parameter that some ranks did not use counts as zero there; one that no rank used has grad None.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Around reading or writing the module's weights by hand, on all ranks alike: inside they are whole."""
        yield

    def padding(self) -> str:
        """How the parameters are cut, for a person: nothing, where none is."""
        return ""

    def after_step(self) -> None:
        """After the optimizer: nothing, every rank has updated everything."""

    def after_load(self) -> None:
        """After `parameters()` were given values by hand, frozen ones too: nothing, every rank has them all."""

    def unshard(self, module: nn.Module) -> None:
        """Parameters are whole all the time."""

    def reshard(self, module: nn.Module) -> None:
        """Parameters stay whole."""

    def reduce(self, module: nn.Module) -> None:
        """Nothing is reduced for a module by itself: a bucket when it is complete, the rest in `finish`."""

    def equalize_buffers(self) -> None:
        """Give every buffer the values of the group's rank 0, all in one broadcast of bytes, whatever their dtypes.

        Raises ValueError on every rank where a module has changed the names, shapes or dtypes of its buffers, and not
        alike on all.
        """
        for group in self.groups:
            if self.buffered is not None and group.size() > 1:
                self._equalize(dict(self.buffered.named_buffers()), group)

    def _equalize(self, named: dict[str, Tensor], group: dist.ProcessGroup) -> None:
        kinds = {name: f"{list(buffer.shape)} {_dtype_name(buffer.dtype)}" for name, buffer in named.items()}
        digest = int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:7])  # an int64, and so is its negative
        largest, smallest = self.largest([digest, -digest], [group])
        if largest != -smallest:
            _compare_tensors("buffers", kinds, group, "rebind them to the same shapes and dtypes on every rank")
        buffers = [buffer.detach() for buffer in named.values()]
        if sum(buffer.nbytes for buffer in buffers) == 0:
            return
        packed = torch.cat([_bytes(buffer) for buffer in buffers])
        comm.broadcast(packed, 0, group=group)
        if dist.get_rank(group) > 0:
            for buffer, part in zip(buffers, packed.split([buffer.nbytes for buffer in buffers]), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def largest(self, numbers: Sequence[int], groups: Sequence[dist.ProcessGroup] | None = None) -> list[int]:
        """Of each of these numbers the largest of all ranks': a decision about a collective is never one rank's own."""
        together = torch.tensor(numbers, device=self.params[0].device if self.params else None)
        for group in self.groups if groups is None else groups:
            comm.all_reduce(together, comm.MAX, group=group)
        return together.tolist()


def replicate(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    params: Sequence[nn.Parameter] | None,
    device: torch.device | None,
    **settings: object,
) -> tuple[list[nn.Parameter], nn.Module | None]:
    """Make the replicas of `module` equal. Before: any values on each rank. After: those of the group's rank 0.

    params: those to treat, default all of the module's, with its buffers. Parameters on the meta device get memory on
    `device` and no values: whoever built them so initialises them afterwards, the same on every rank. Returns the
    parameters, each once, and the module if its buffers are to be kept equal. Raises what `compared` does.
    """
    named, buffered = compared(module, group, params=params, **settings)
    buffers = buffered.buffers() if buffered else ()
    for tensor in (*named.values(), *buffers):
        if tensor.is_meta:
            layout.materialize(tensor, device or torch.device("cpu"))
        elif tensor.numel():
            # IDEA: replicas that begin equal and add equal gradients stay equal; so weights travel once, here.
            _broadcast(tensor.detach(), group)
    return list(named.values()), buffered


def compared(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    params: Sequence[nn.Parameter] | None,
    buffers: bool | None = None,
    **settings: object,
) -> tuple[dict[str, nn.Parameter], nn.Module | None]:
    """What a strategy is to treat, the same on every rank: parameters by name, each once, and the module if its buffers
    are to be kept equal.

    params: default all of the module's, with its buffers; buffers: whether those are compared. Raises ValueError on
    every rank where the models or the settings of `wrap` differ, naming the first difference, and for what cannot be
    replicated: sparse or complex gradients, buffers on the meta device or with elements that share their memory.
    """
    buffered = dict(module.named_buffers()) if buffers or (buffers is None and params is None) else {}
    names = {param: name for name, param in module.named_parameters()}
    params = dict.fromkeys(module.parameters() if params is None else params)
    named = {names.get(param, f"params[{i}]"): param for i, param in enumerate(params)}
    sparse = dict.fromkeys(_sparse(module), "with sparse gradients")
    _compare(settings, {name: _description(tensor) for name, tensor in (named | buffered).items()} | sparse, group)
    _check(module, named | buffered)
    return named, module if buffered else None


def _description(tensor: Tensor) -> str:
    order = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    where = " on meta" if tensor.is_meta else ""
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    held = getattr(tensor, "held", None)  # of a piece, which other ranks may have others of
    cut = f" at {[box.offset for box in held.boxes]} of {list(held.boxes[0].shape)}" if held and held.boxes else ""
    return f"{list(tensor.shape)} {_dtype_name(tensor.dtype)}{order}{where}{frozen}{cut}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(settings: dict[str, object], mine: dict[str, str], group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank naming the first setting or tensor in which a rank differs from the group's rank
    0.
    """
    told = ", ".join(f"{name}={value}" for name, value in settings.items())
    everyone = comm.all_gather_object(told, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, everyone, strict=True):
        if other != everyone[0]:
            raise ValueError(
                f"wrap was called with {everyone[0]} on rank {ranks[0]}, with {other} on rank {rank}; give the same "
                "on every rank"
            )
    _compare_tensors("models", mine, group, "build the same model on every rank")


def _compare_tensors(what: str, mine: dict[str, str], group: dist.ProcessGroup, remedy: str) -> None:
    everyone = comm.all_gather_object(list(mine.items()), group=group)
    ranks = dist.get_process_group_ranks(group)
    nothing = ("nothing",)
    for i in range(max(map(len, everyone))):
        first, *others = [table[i] if i < len(table) else nothing for table in everyone]
        for rank, other in zip(ranks[1:], others, strict=True):
            if other != first:
                raise ValueError(
                    f"the {what} differ: tensor {i} is {' '.join(first)} on rank {ranks[0]}, {' '.join(other)} on rank "
                    f"{rank}; {remedy}"
                )


def _check(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse what is the same on every rank and yet cannot be replicated or reduced."""
    for name, tensor in tensors.items():
        if tensor.is_meta and not isinstance(tensor, nn.Parameter):
            raise ValueError(f"buffer {name} is on the meta device: give it values before wrap, nobody will later")
        if tensor.is_complex() and isinstance(tensor, nn.Parameter):
            raise ValueError(f"{name} is complex: keep it as a real tensor with a last dimension of 2")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{name} has elements that share their memory: make it contiguous, or keep it elsewhere")
    for name in _sparse(module):
        raise ValueError(f"{name} makes sparse gradients, which have no place in a sum of dense ones: sparse=False")


def _sparse(module: nn.Module) -> list[str]:
    lookups = (nn.Embedding, nn.EmbeddingBag)
    return [name for name, part in module.named_modules() if isinstance(part, lookups) and part.sparse]


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    dense = tensor.contiguous()
    comm.broadcast(_bytes(dense), 0, group=group)
    if dense is not tensor:
        tensor.copy_(dense)


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements as bytes, in row-major order; a view of it where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
