"""The one place where the strategies meet: a list of transformations of a plain model, in the order in which they must
apply.

The model comes in on the meta device, whole and without memory. Each transformation cuts what a rank holds or replaces
a seam of the model; the data strategy then allocates exactly what is left, and every rank initialises it in place by
its boxes.
"""

import torch

from collectives import layout, rng
from collectives.replicas import Replica
from ddp import bucketed, naive, overlapped
from fsdp import fully_shard
from nd_mesh.config import Config, ParallelConfig
from nd_mesh.mesh import Mesh
from nd_mesh.model import GPT
from nd_mesh.recompute import Recomputed, chosen, recompute
from zero import stage1, stage2, stage3

DATA_STRATEGIES = {  # over dp alone
    **{"auto": overlapped.wrap, "naive": naive.wrap, "bucketed": bucketed.wrap, "overlapped": overlapped.wrap},
    **{"zero1": stage1.wrap, "zero2": stage2.wrap, "zero3": stage3.wrap},
}


def parallelize(model: GPT, config: Config, mesh: Mesh, device: torch.device) -> tuple[Replica, Recomputed]:
    """Turn a model on the meta device into this rank's part of it, in place, initialised; returns the data strategy's
    handle, and the count of what recomputation runs again.
    """
    # 1. Every parameter gets its declaration while it is whole.
    layout.declare(model, model.init_rule, model.decay_rule)
    for param in model.parameters():
        param.held.sums = {axis: mesh.group(axis) for axis in ("dp", "fsdp", "cp")}  # each rank sees part of the tokens

    # 2. Recomputation replaces the forward of modules: the data strategy's hooks then sit outside of what runs again.
    recomputed = recompute(chosen(model, config.parallel.recompute))

    # 3. The data strategy: it comes last of those that cut, since it allocates what is left.
    handle = data_parallel(model, config.parallel, mesh, device)

    # 4. Initial values: a function of the seed, the name and the box. Each owner makes its own; then all have them.
    for param in handle.parameters():
        rng.fill(param, config.train.seed)
    handle.after_load()
    layout.check(handle.parameters(), mesh.run.world)
    return handle, recomputed


def data_parallel(model: GPT, parallel: ParallelConfig, mesh: Mesh, device: torch.device) -> Replica:
    """The strategy that sums gradients over dp and fsdp."""
    if parallel.data == "fsdp" or mesh.size("fsdp") > 1:
        return sharded(model, parallel, mesh, device)
    wrap = DATA_STRATEGIES[parallel.data]
    buckets = {"cap": parallel.cap} if wrap is not naive.wrap else {}
    return wrap(model, mesh.group("data"), average=False, device=device, **buckets)


def sharded(model: GPT, parallel: ParallelConfig, mesh: Mesh, device: torch.device) -> Replica:
    """Each block a unit, and the model with what is left, which is kept until its backward: the loss reads the head."""
    settings = {
        **{"replicate_group": mesh.group("dp"), "average": False, "device": device, "prefetch": parallel.prefetch},
        "reshard_after_forward": None if parallel.reshard else False,
    }
    for block in model.blocks.values():
        fully_shard(block, mesh.group("fsdp"), **settings)
    return fully_shard(model, mesh.group("fsdp"), **settings)
