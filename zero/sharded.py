"""What the stages share: buckets, the hooks that fill them, and the contract of a data-parallel handle.

A stage says when it reduces a bucket's gradient, what it then keeps, and when weights are gathered. Here is the rest:
gradients leave autograd bucket by bucket; one reduction is under way at a time, so that no more than a bucket's memory
is; after backward the ranks agree, in one small all_reduce, on which parameters any of them used and whether a gradient
came too late for its bucket. Such a one is reduced by a second round of its bucket.

Rajbhandari et al. 2019, "ZeRO", 5; PyTorch's counterpart: ZeroRedundancyOptimizer (stage 1), fully_shard (2, 3).
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import comm
from collectives.elementwise import check_elementwise
from collectives.flat import deal
from collectives.hooks import called
from collectives.host import Pool
from collectives.p2p import Handle
from collectives.replicas import Replica, compared
from zero.bucket import Bucket
from zero.mixed import Mixed
from zero.optimizer import PieceByPiece

CAP = 25 << 20  # bytes of a bucket's weights, as PyTorch's DDP has for its gradients


class Sharded(Replica):
    """The handle of a module whose gradients are added over `group`, of which each rank owns a part."""

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        buffered: nn.Module | None,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ):
        super().__init__(params, buffered, group, average=average)
        self.buckets = list(buckets)
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self.under_way: tuple[Handle, Bucket, Tensor] | None = None  # the one reduction, and where it arrives
        self.watched: set[nn.Parameter] = set()
        self.others = set(module.parameters()) - self.bucket_of.keys()  # not ours to treat
        self._agree_on_failure(next((bucket.failure for bucket in self.buckets if bucket.failure), ""))
        self._watch()
        for part in module.modules():
            part.register_load_state_dict_post_hook(called(self._on_load))
        self.equalize_buffers()

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates: of each of the module's parameters this rank's shard, maybe empty; float32
        masters under mixed precision. Its `grad` is valid until the next backward.
        """
        shard_of = {param: shard for b in self.buckets for param, shard in zip(b.params, b.shards, strict=True)}
        return [shard_of[param] for param in self.params]

    def finish(self) -> None:
        """Once a step. Before: gradients are in buckets, or on their way. After: the `grad` of each shard is this
        rank's range of the sum (or mean) over the group; no parameter of the module has one.

        A parameter that some ranks did not use counts as zero there; if no rank used it, the grad of its shard is None.
        To drop a batch whose backward has begun, `finish`, then zero the gradients: before, `zero_grad` reaches none.
        A gradient that the optimizer did not zero is added to, as autograd does.
        """
        self.end_of_backward()
        self.wait()
        used = self._agree()
        for bucket in self.buckets:
            bucket.hand_out(used)
        self.equalize_buffers()
        self._watch()

    def end_of_backward(self) -> None:
        """Every gradient of the microbatches so far has been made. Under no_sync nothing happens, `finish` reduces."""
        if self.syncing:
            for bucket in self.buckets:
                if bucket.trained:
                    self.start(bucket)

    def start(self, bucket: Bucket) -> None:
        """Wait for the reduction that is under way, and start that of a bucket's gradient."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for the reduction that is under way, and add what it brings."""
        if self.under_way is not None:
            (work, bucket, reduced), self.under_way = self.under_way, None
            work.wait()
            bucket.add(reduced)

    @torch.no_grad()
    def finite(self) -> bool:
        """After `finish`: whether every gradient on every rank of the group is finite. The same answer on all."""
        grads = [shard.grad for shard in self.parameters() if shard.grad is not None]
        return not self.largest([int(not all(grad.isfinite().all() for grad in grads))])[0]

    def optimizer(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What to step: `inner`, made for `parameters()`, or the same in pieces where precisions are mixed or state is
        offloaded. Raises ValueError if it does not update each element by itself.
        """
        mixed, host = self.buckets[0].mixed, self.buckets[0].host
        if mixed is None and host is None:
            check_elementwise(inner)
            return inner
        return PieceByPiece(inner, moments=mixed and mixed.moments, pool=host, agree=self._agree_on_failure)

    def _agree_on_failure(self, failure: str) -> None:
        """Raise on every rank what any of them met, in making masters or in a step: no rank goes on alone."""
        ranks = dist.get_process_group_ranks(self.group)
        told = zip(ranks, comm.all_gather_object(failure, group=self.group), strict=True)
        if failures := [f"rank {rank}: {text}" for rank, text in told if text]:
            raise RuntimeError("; ".join(failures))

    def after_load(self) -> None:
        """After the shards were given values by hand, frozen ones too, on all ranks: the weights are what they say."""
        raise NotImplementedError

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Around reading or writing the module's weights by hand, on all ranks alike: inside they are whole, and what
        was written is in the masters afterwards. Not between an optimizer's step and `after_step`, which it undoes.
        """
        yield
        for bucket in self.buckets:
            bucket.take_weights(bucket.params)

    def _on_load(self, module: nn.Module) -> None:
        """A part of the module has loaded a state dict into its own parameters."""
        for param in module.parameters(recurse=False):
            if param in self.bucket_of:
                self.bucket_of[param].take_weights([param])
            elif param not in self.others:
                raise ValueError(
                    "load_state_dict(assign=True) replaces parameters that a handle knows: use assign=False"
                )

    def padding(self) -> str:
        """How the parameters are cut, for a person."""
        cuts = [bucket.partition for bucket in self.buckets]
        numel, padding = sum(cut.numel for cut in cuts), sum(cut.padding for cut in cuts)
        owned = sum(cut.length for cut in cuts)
        return f"{numel:,} parameters in {len(cuts)} buckets, {owned:,} a rank, {padding} of padding"

    def _watch(self) -> None:
        """Hook every parameter that is not frozen; a frozen one takes no hook, and may train later."""
        on_gradient = called(self._on_gradient)  # a handle that is dropped leaves no active hooks behind
        for param in self.params:
            if param.requires_grad and param not in self.watched:
                param.register_post_accumulate_grad_hook(on_gradient)
                self.watched.add(param)

    def _on_gradient(self, param: nn.Parameter) -> None:
        """Autograd has added to `p.grad`."""
        if param.grad is not None:
            self.bucket_of[param].collect(param)

    def _agree(self) -> set[nn.Parameter]:
        """The parameters that any rank used in this step. Reduces what came too late for its bucket on any rank."""
        late = [bool(b.arrived) or any(param.grad is not None for param in b.params) for b in self.buckets]
        used = [param in self.bucket_of[param].used or param.grad is not None for param in self.params]
        answers = self.largest([int(answer) for answer in (*used, *late)])
        for bucket, came_late in zip(self.buckets, answers[len(used) :], strict=True):
            if came_late:
                if not bucket.trained:  # frozen so far
                    bucket.train()
                self.start(bucket)
                self.wait()
        return {param for param, anywhere in zip(self.params, answers, strict=False) if anywhere}


def dealt(named: dict[str, nn.Parameter], cap: int) -> list[dict[str, nn.Parameter]]:
    """Parameters by name, dealt into buckets of at most `cap` bytes, in the order in which backward completes them.

    Those of which more than this group's ranks hold copies (a norm's under tensor parallelism) have buckets of their
    own: with nothing of other sizes beside them, their ranges are cut at the same places wherever they are copied.
    """
    names = {param: name for name, param in named.items()}
    kinds: dict[tuple, list[nn.Parameter]] = defaultdict(list)
    for param in sorted(named.values(), key=lambda param: not param.requires_grad):  # frozen ones last
        kinds[param.requires_grad, param.held.holders if hasattr(param, "held") else ()].append(param)
    # IDEA: one flat order, last parameter first, so that buckets fill one after the other while backward goes on.
    return [{names[param]: param for param in bucket} for kind in kinds.values() for bucket in deal(kind, cap)]


def treated(
    module: nn.Module,
    group: dist.ProcessGroup,
    params: Sequence[nn.Parameter] | None,
    cap: int,
    *,
    mixed: Mixed | None,
    host: Pool | None,
    **settings: object,
) -> tuple[dict[str, nn.Parameter], nn.Module | None]:
    """What a stage is to treat, as `compared` returns it. Raises ValueError on every rank for what it cannot."""
    if cap < 1:
        raise ValueError(f"a bucket of cap={cap} bytes holds nothing: give it at least 1")
    settings |= {"cap": cap, "mixed": mixed, "host": type(host).__name__}
    named, buffered = compared(module, group, params=params, **settings)
    whole_numbers = [name for name, param in named.items() if not param.is_floating_point()]
    if mixed is not None and whole_numbers:
        raise ValueError(f"{whole_numbers[0]} is {named[whole_numbers[0]].dtype}: no weight in mixed precision")
    return named, buffered
