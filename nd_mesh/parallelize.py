"""The one place where the strategies meet: a list of transformations of a plain model, in the order in which they must
apply.

The model comes in on the meta device, whole and without memory. Each transformation cuts what a rank holds or replaces
a seam of the model; the data strategy then allocates exactly what is left, and every rank initialises it in place by
its boxes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tensor_parallel
from collectives import layout, rng
from collectives.replicas import Replica
from ddp import bucketed, naive, overlapped
from fsdp import MixedPrecision, fully_shard
from fsdp.sharded import FullySharded
from nd_mesh import masters
from nd_mesh.config import Config, ParallelConfig, layers_of_stages, pipeline_plan
from nd_mesh.context import Attend, attention
from nd_mesh.experts import mixtures, share_experts
from nd_mesh.families import Families
from nd_mesh.mesh import Mesh
from nd_mesh.model import GPT, IGNORE, Where
from nd_mesh.precision import Precision
from nd_mesh.recompute import Recomputed, chosen, recompute
from nd_mesh.stages import Stages
from pipeline import Pipeline, connect
from pipeline.links import Links
from pipeline.ties import TIE, tie, tie_group
from tensor_parallel import Column, KeyValue, Row, Stream, Vocabulary, Whole, cut, vocab_parallel_cross_entropy
from zero import Mixed, stage1, stage2, stage3

COPIES = {"auto": overlapped.wrap, "naive": naive.wrap, "bucketed": bucketed.wrap, "overlapped": overlapped.wrap}
DATA_STRATEGIES = COPIES | {"zero1": stage1.wrap, "zero2": stage2.wrap, "zero3": stage3.wrap}  # over dp alone
PARTIAL = ("kv", "tp", TIE)  # labels of the sums that come after those over data, in this order


def parallelize(
    model: GPT, config: Config, mesh: Mesh, device: torch.device
) -> tuple[GPT | Stages, Replica, Recomputed]:
    """Turn a model on the meta device into this rank's part of it, initialised. Returns that part, which is the model
    itself or stages of it; the data strategy's handle; and the count of what recomputation runs again.
    """
    # 1. Every parameter gets its declaration while it is whole, under the name that it has on any mesh.
    layout.declare(model, model.init_rule, model.decay_rule)
    for param in model.parameters():
        param.held.sums = {"data": mesh.group("data")}  # each rank sees part of the tokens

    # 2. A pipeline's rank keeps its stages; what comes now sees them alone.
    links = {}
    if mesh.size("pp") > 1:
        model, links = split_stages(model, config, mesh)

    # 3. Expert parallelism: whole experts, cut along the list of them, so before anything that cuts a matrix.
    if config.model.experts:
        share_experts(model, config, mesh)

    # 4. Tensor parallelism cuts matrices, in place: a shared one stays shared. From here on a rank has a piece.
    if mesh.size("tp") > 1:
        cut_tensors(model, config, mesh)

    # 5. Context parallelism replaces the attention core: it reaches the keys of the tokens that other ranks have.
    if mesh.size("cp") > 1:
        attend = attention(config.parallel, mesh)
        for block in model.blocks.values():
            block.attend = Attend(attend)

    # 6. Who holds the same now, so that the data strategy cuts copies at the same places.
    layout.check(model.parameters(), mesh.run.world)

    # 7. Recomputation replaces the forward of modules: the data strategy's hooks then sit outside of what runs again.
    recomputed = recompute(chosen(model, config.parallel.recompute))

    # 8. The data strategy: it comes last of those that cut, since it allocates what is left; in 16 bits the weights,
    # which the model has from here on, beside the masters.
    precision = Precision.of(config.train.dtype)
    handle = data_parallel(model, config.parallel, mesh, precision, device)

    # 9. Initial values: a function of the seed, the name and the box. Each owner makes its own; then all have them.
    for param in handle.parameters():
        rng.fill(param, config.train.seed)
    handle.after_load()
    layout.check(handle.parameters(), mesh.run.world)

    # 10. The pipeline runs the stages, and asks the data strategy for their weights.
    if isinstance(model, Stages):
        model.dtype = precision.weights
        model.pipe = pipelined(model, config.parallel, mesh, handle, links)
    return model, handle, recomputed


def split_stages(model: GPT, config: Config, mesh: Mesh) -> tuple[Stages, Links]:
    """This rank's stages, and the links to its neighbours. Where a tied weight has two copies they are one sum."""
    plan, pipelines = pipeline_plan(config), mesh.grid.groups("pp")
    links = connect(plan, pipelines, mesh.run.new_group)
    stages = Stages(model, plan, mesh.rank("pp"), layers_of_stages(config, plan))
    group = tie_group(plan, pipelines, mesh.run.new_group) if config.model.tied else None
    if group is not None:
        tie(model.embed.weight, group)
    return stages, links


def pipelined(stages: Stages, parallel: ParallelConfig, mesh: Mesh, handle: Replica, links: Links) -> Pipeline:
    """The pipeline through this rank's stages."""
    ends = (0, stages.plan.stages - 1)
    # FSDP has what is no block in a unit of its own, since a tied weight is in both ends.
    more = [stages.ends] if isinstance(handle, FullySharded) else []
    units = {number: [stage, *(more if number in ends else [])] for number, stage in stages.stages.items()}
    words = {"open": "action" if parallel.reshard else "step", "reduce": "action" if parallel.reduce_each else "step"}
    settings = {"handle": handle, "units": units, "device": mesh.run.device, **words}
    return Pipeline(stages.plan, stages.stages, links, mesh.group("pp"), **settings)


def plan(model: GPT | Stages, kv_group: dist.ProcessGroup | None) -> Mapping[str, tensor_parallel.Role]:
    """Which module has which role: columns, and the row that closes their region, in the order in which they run."""
    config = model.config
    keys = KeyValue(config.kv_heads, config.heads, kv_group)
    block = {
        "attend_norm": Stream(),
        **{"q": Column((config.heads,)), "k": keys, "v": keys, "o": Row()},
        "ffn_norm": Stream(),
    }
    network = {"gate": Column(), "up": Column(), "down": Row()}
    dense = {f"ffn.{name}": role for name, role in network.items()}
    mixture = {"ffn.router": Stream(), "ffn.experts": Whole()}  # experts are cut already
    if config.shared_hidden:
        mixture |= {f"ffn.shared.{name}": role for name, role in network.items()}
    blocks = {
        f"blocks.{layer}.{name}": role
        for layer in model.blocks
        for name, role in (block | (mixture if config.mixture(int(layer)) else dense)).items()
    }
    ends = {"embed": Vocabulary(), "norm": Stream(), "head": Vocabulary()}
    if isinstance(model, Stages):
        ends = {f"ends.{name}": role for name, role in ends.items() if name in model.ends}
    return blocks | ends


def cut_tensors(model: GPT | Stages, config: Config, mesh: Mesh) -> None:
    """Each rank of tp keeps its heads, its channels of the feed-forward network, its part of the vocabulary; with
    sequence parallelism its tokens of the residual stream too.
    """
    group, parallel = mesh.group("tp"), config.parallel
    kept = parallel.sequence and parallel.save_gathered  # which may be meant for the attention over cp alone
    modes = {"sequence_parallel": parallel.sequence, "save_gathered": kept}
    tensor_parallel.parallelize(model, plan(model, kv_group(model, mesh)), group, **modes)
    parts = model.stages.values() if isinstance(model, Stages) else [model]
    for part in parts:
        if parallel.sequence:
            part.register_forward_pre_hook(narrow_stream(group), with_kwargs=True)
        if hasattr(part, "head"):
            _cut_loss(part, group)


def _cut_loss(model: GPT, group: dist.ProcessGroup) -> None:
    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(hidden)  # [B, T, V/tp]
        vocab, ignored = model.config.vocab, {"ignore_index": IGNORE}
        return vocab_parallel_cross_entropy(logits, labels, vocab, group=group, **ignored).sum()

    model.loss = loss
    model.logits = lambda hidden: model.head.gather(model.head(hidden))  # [B, T, V]


def kv_group(model: GPT | Stages, mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks of tp that hold the same keys and values as this one; None where there are enough heads for all."""
    if mesh.size("tp") <= model.config.kv_heads:
        return None
    runs = [run for ranks in mesh.grid.groups("tp") for run in cut.sharers(ranks, model.config.kv_heads)]
    [mine] = filter(None, [mesh.run.new_group(run) for run in runs])  # all ranks make all of them, in one order
    return mine


def narrow_stream(group: dist.ProcessGroup) -> Any:
    """A hook before the model's forward: this rank's tokens are a part of the residual stream, for dropout's sake."""

    def narrow(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Where]) -> Any:
        where, ranks = kwargs["where"], group.size()
        stream = where.stream.tensor_split(ranks)[group.rank()]  # [T/tp]
        everyones = where.slots[None] if where.sequences.slots is None else where.sequences.slots  # [cp, T/cp]
        routed = where.sequences.routed.tensor_split(ranks, 1)[group.rank()]  # [B, T/(cp·tp)]
        sequences = replace(where.sequences, routed=routed, slots=everyones.reshape(-1, everyones.shape[1] // ranks))
        return args, kwargs | {"where": replace(where, stream=stream, sequences=sequences)}

    return narrow


def data_parallel(
    model: GPT | Stages, parallel: ParallelConfig, mesh: Mesh, precision: Precision, device: torch.device
) -> Replica:
    """The strategy that sums gradients over dp, fsdp and cp; those of experts over the ranks that have the same."""
    if parallel.data == "fsdp" or mesh.size("fsdp") > 1:
        return sharded(model, parallel, mesh, precision, device)
    wrap = copies_or_shards(parallel.data, precision)
    settings = {"average": False, "device": device} | ({"cap": parallel.cap} if parallel.data != "naive" else {})
    families = {family: [p for p in model.parameters() if p.held.family == family] for family in ("dense", "expert")}
    if mesh.size("ep") == 1 or not families["expert"]:
        return wrap(model, mesh.group("data"), **settings)
    groups = {"dense": mesh.group("data"), "expert": mesh.group("expert_data")}
    return Families([wrap(model, groups[family], params=params, **settings) for family, params in families.items()])


def copies_or_shards(data: str, precision: Precision) -> Callable[..., Replica]:
    """The `wrap` of a strategy over dp alone, in this precision; gradients of 16 bits are added and travel in 32."""
    wrap = DATA_STRATEGIES[data]
    if not precision.mixed:
        return wrap
    if data in COPIES:
        return partial(masters.wrap, wrap, weights=precision.weights)
    return partial(wrap, mixed=Mixed(precision.weights, gradients=precision.masters))


def sharded(
    model: GPT | Stages, parallel: ParallelConfig, mesh: Mesh, precision: Precision, device: torch.device
) -> Replica:
    """Each block a unit, the experts in it another, over their own groups; and the model with what is left, which is
    kept until its backward: the loss reads the head.
    """
    settings = {
        **{"replicate_group": mesh.group("dp"), "average": False, "device": device, "prefetch": parallel.prefetch},
        "reshard_after_forward": None if parallel.reshard else False,
        "mixed_precision": MixedPrecision(precision.weights, reduce=precision.masters) if precision.mixed else None,
    }
    if mesh.size("ep") > 1:
        group = mesh.group("expert_shard")
        own = {"replicate_group": mesh.group("expert_replicas"), "shard_dim": partial(_divided, group.size())}
        for mixture in mixtures(model).values():
            fully_shard(mixture.experts, group, **settings | own)
    for block in model.blocks.values():
        fully_shard(block, mesh.group("shard"), **settings)
    if isinstance(model, Stages) and model.ends:
        fully_shard(model.ends, mesh.group("shard"), **settings)
    return fully_shard(model, mesh.group("shard"), **settings)


def _divided(ranks: int, name: str, param: Tensor) -> int:
    """The first dimension that so many ranks divide: they may be more than the experts that one of them has."""
    return next((dim for dim, size in enumerate(param.shape) if size % ranks == 0), 0)
