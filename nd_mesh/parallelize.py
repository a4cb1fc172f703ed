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
from nd_mesh.config import Config
from nd_mesh.mesh import Mesh
from nd_mesh.model import GPT
from zero import stage1, stage2, stage3

DATA_STRATEGIES = {
    **{"naive": naive.wrap, "bucketed": bucketed.wrap, "overlapped": overlapped.wrap},
    **{"zero1": stage1.wrap, "zero2": stage2.wrap, "zero3": stage3.wrap},
}


def parallelize(model: GPT, config: Config, mesh: Mesh, device: torch.device) -> Replica:
    """Turn a model on the meta device into this rank's part of it, in place, initialised; returns the data strategy's
    handle.
    """
    # 1. Every parameter gets its declaration while it is whole.
    layout.declare(model, model.init_rule, model.decay_rule)
    for param in model.parameters():
        param.held.sums["data"] = mesh.group("data")  # each rank of it sees part of the tokens

    # 2. The data strategy: it comes last of those that cut, since it allocates what is left.
    wrap = DATA_STRATEGIES[config.parallel.data]
    buckets = {"cap": config.parallel.cap} if wrap is not naive.wrap else {}
    handle = wrap(model, mesh.group("data"), average=False, device=device, **buckets)

    # 3. Initial values: a function of the seed, the name and the box. Each owner makes its own; then all have them.
    for param in handle.parameters():
        rng.fill(param, config.train.seed)
    handle.after_step()
    layout.check(handle.parameters(), mesh.run.world)
    return handle
