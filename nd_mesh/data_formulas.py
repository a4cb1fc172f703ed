"""What the data strategies send in a step, and what of each gradient they leave to a rank. See formulas.py.

n: the bytes of a rank's weights, with what the strategy pads; k: microbatches, in a pipeline 1, where gradients are
reduced once. Besides, all agree on which parameters have a gradient: a number each.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from collectives.flat import deal
from fsdp.cut import Cut
from fsdp.slots import row
from nd_mesh.part import Group, Part, expert, layer_of
from nd_mesh.terms import Term, all_gather, all_reduce, broadcast, reduce_scatter
from pipeline.events import events
from zero.partition import Partition

ALIGN = 64  # bytes, between the parameters of a flat row
WHOLE = 1 << 62  # bytes of a bucket that holds all of a layer

Weights = dict[str, nn.Parameter]


def data(part: Part) -> Iterator[Term]:
    """That of the configuration, for dense weights over all ranks with tokens of their own, for experts over those that
    have the same.
    """
    if sharded(part):
        yield from fsdp(part)
        own = [part.group(name) for name in ("expert_shard", "expert_replicas")] if part.config.mesh.ep > 1 else []
        yield from buffers(part, [part.group("shard"), part.group("dp")], own)
        return
    if part.config.mesh.ep == 1:  # a handle of some weights leaves a module's buffers alone
        yield from buffers(part, [part.group("data")])
    formula = {"naive": naive, "zero1": zero1, "zero2": zero2, "zero3": zero3}.get(part.config.parallel.data, bucketed)
    for group, weights in families(part):
        yield from formula(part, group, weights)


def sharded(part: Part) -> bool:
    """Whether the strategy is FSDP."""
    return part.config.parallel.data == "fsdp" or part.config.mesh.fsdp > 1


def families(part: Part) -> list[tuple[Group, Weights]]:
    """Weights with the group over which their gradients are summed; experts by themselves where ranks share them."""
    shared = part.config.mesh.ep > 1
    dense = {name: weight for name, weight in part.weights.items() if not (shared and expert(name))}
    rest = {name: weight for name, weight in part.weights.items() if name not in dense}
    return [(part.group("data"), dense), *([(part.group("expert_data"), rest)] if rest else [])]


def summed(part: Part, weights: Weights) -> int:
    """n of gradients, without padding."""
    return part.g * sum(weight.numel() for weight in weights.values())


def turns(part: Part, units: Mapping[int, Sequence[str]]) -> Counter[tuple[str, str]]:
    """How often a pipeline asks for the weights of each unit, and for the reduction of its gradient: (verb, unit).
    units: those of each stage.
    """
    parallel = part.config.parallel
    words = {"open": "action" if parallel.reshard else "step", "reduce": "action" if parallel.reduce_each else "step"}
    around = events(part.plan.actions[part.place["pp"]], units, **words)
    return Counter((event.verb, event.unit) for each in around for event in (*each.before, *each.after))


def buffers(part: Part, groups: Sequence[Group], without: Sequence[Group] = ()) -> Iterator[Term]:
    """The biases of routers are made equal over each group: n(P-1)/P, and two numbers to compare what they are; these
    also over the groups of units that have none.
    """
    biased = part.config.model.bias_rate > 0
    n = part.g * part.config.model.experts * len(list(filter(part.mixes, part.layers))) * biased
    yield from (broadcast(group, n, "buffers") for group in groups)
    yield from (all_reduce(group, 16 * (n > 0), "buffers") for group in (*groups, *without))


# -- copies ------------------------------------------------------------------------------------------------------------


def naive(part: Part, group: Group, weights: Weights) -> Iterator[Term]:
    """2n(P-1)/P, and 8 bytes a parameter."""
    yield all_reduce(group, summed(part, weights), "gradients")
    yield all_reduce(group, 8 * len(weights), "used parameters")


def bucketed(part: Part, group: Group, weights: Weights) -> Iterator[Term]:
    """2n(P-1)/P, overlapped or not; two numbers a parameter ride on the last bucket."""
    yield all_reduce(group, summed(part, weights), "gradients")
    yield all_reduce(group, 2 * part.g * len(weights), "used parameters")


# -- ZeRO --------------------------------------------------------------------------------------------------------------


def zero1(part: Part, group: Group, weights: Weights, *, times: int = 1) -> Iterator[Term]:
    """2n(P-1)/P: gradients to their owners, and after the update weights to all."""
    rows = [flat_row(part, group, bucket) for bucket in buckets(part, weights, part.config.parallel.cap)]
    n = sum(row.padded for row in rows)
    yield reduce_scatter(group, times * part.g * n, "gradients")
    yield all_gather(group, part.e * n, "weights")
    yield all_reduce(group, 8 * (len(weights) + len(rows)), "used parameters")


def zero2(part: Part, group: Group, weights: Weights) -> Iterator[Term]:
    """(k+1)n(P-1)/P: gradients in each microbatch."""
    yield from zero1(part, group, weights, times=1 if part.plan else len(part.rows))


def zero3(part: Part, group: Group, weights: Weights) -> Iterator[Term]:
    """3kn(P-1)/P: weights in each forward and backward, gradients in each microbatch. In a pipeline weights whenever a
    rank turns to another stage. A weight of two layers stays whole, as with ZeRO-2.
    """
    k, inside, kept = len(part.rows), *layers(part, weights)
    told = turns(part, stages_of(part, inside)) if part.plan else {}
    count = 0
    for name, members in inside.items():
        rows = [flat_row(part, group, bucket) for bucket in buckets(part, members, WHOLE)]
        n, count = sum(row.padded for row in rows), count + len(rows)
        yield all_gather(group, (told["unshard", name] if part.plan else 2 * k) * part.e * n, "weights")
        yield reduce_scatter(group, (told["reduce", name] if part.plan else k) * part.g * n, "gradients")
    *most, _ = zero2(part, group, kept)
    yield from most
    count += len(buckets(part, kept, part.config.parallel.cap))
    yield all_reduce(group, 8 * (len(weights) + count), "used parameters")


def layers(part: Part, weights: Weights) -> tuple[dict[str, Weights], Weights]:
    """The weights of each layer, and those that two layers have: a tied one, where both ends are here."""
    both = part.config.model.tied and {0, part.last_stage} <= part.stages.keys()
    kept = {name: weight for name, weight in weights.items() if both and name == "embed.weight"}
    inside: dict[str, Weights] = defaultdict(dict)
    for name, weight in weights.items():
        if name not in kept:
            inside[layer_of(name)][name] = weight
    return dict(inside), kept


def stages_of(part: Part, inside: Mapping[str, Weights]) -> dict[int, list[str]]:
    """The layers of each stage."""
    own = {
        stage: [*(f"blocks.{layer}" for layer in layers), *map(layer_of, part.ends(stage))]
        for stage, layers in part.stages.items()
    }
    return {stage: [name for name in names if name in inside] for stage, names in own.items()}


def buckets(part: Part, weights: Weights, cap: int) -> list[Weights]:
    """Weights of which the same ranks have copies, last one first, until a bucket is full."""
    names, kinds = {weight: name for name, weight in weights.items()}, defaultdict(list)
    for weight, name in names.items():
        kinds[part.holders(name)].append(weight)
    return [{names[weight]: weight for weight in bucket} for kind in kinds.values() for bucket in deal(kind, cap)]


def flat_row(part: Part, group: Group, bucket: Weights) -> Partition:
    """A bucket in one row, cut evenly."""
    return Partition([weight.numel() for weight in bucket.values()], len(group), align=ALIGN // part.e)


# -- FSDP --------------------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Weights that are gathered together, and how often."""

    shards: Group
    replicas: Group
    cuts: dict[str, Cut]
    gathers: int
    reductions: int

    def slot(self, align: int) -> int:
        """Elements of a rank's pieces side by side, each as long as the longest rank's."""
        return row([cut.longest for cut in self.cuts.values()], align if len(self.shards) == 1 else 1)[1]


def fsdp(part: Part) -> Iterator[Term]:
    """n_b(2k+1)(s-1)/s of the blocks, n_r(k+1)(s-1)/s of the root, and 2(n/s)(r-1)/r over the replicas."""
    for unit in units(part):
        slot = unit.slot(1 if part.mixed else ALIGN // part.e)
        yield all_gather(unit.shards, unit.gathers * len(unit.shards) * part.e * slot, "weights")
        yield reduce_scatter(unit.shards, unit.reductions * len(unit.shards) * part.g * slot, "gradients")
        yield all_reduce(unit.replicas, unit.reductions * part.g * slot, "gradients of replicas")
        for group in (unit.shards, unit.replicas):
            yield all_reduce(group, 8 * (len(unit.cuts) + 1), "used parameters")


def units(part: Part) -> list[Unit]:
    """Each block, the experts in it by themselves where ranks share them, and all that is in no block."""
    inside: dict[str, Weights] = defaultdict(dict)
    for name, weight in part.weights.items():
        block = layer_of(name) if name.startswith("blocks.") else "rest"
        inside[block + " experts" * (expert(name) and part.config.mesh.ep > 1)][name] = weight
    return [_unit(part, name, weights, _times(part, inside)) for name, weights in inside.items()]


def _unit(part: Part, name: str, weights: Weights, times: Mapping[str, tuple[int, int]]) -> Unit:
    own = name.endswith("experts")
    shards, replicas = (part.group(g) for g in (("expert_shard", "expert_replicas") if own else ("shard", "dp")))
    dims = {n: _divided(w, len(shards)) if own else 0 for n, w in weights.items()}
    return Unit(shards, replicas, {n: Cut(w.shape, dims[n], len(shards)) for n, w in weights.items()}, *times[name])


def _divided(weight: nn.Parameter, ranks: int) -> int:
    """Experts are cut along a dimension that divides."""
    return next((dim for dim, size in enumerate(weight.shape) if size % ranks == 0), 0)


def _times(part: Part, inside: Mapping[str, Weights]) -> dict[str, tuple[int, int]]:
    """Gathers and reductions of each unit."""
    if part.plan is None:
        k, both = len(part.rows), 2 if part.config.parallel.reshard else 1
        return {name: (k if name == "rest" else both * k, 1) for name in inside}
    ends = (0, part.last_stage)
    of_stages = {
        stage: [
            name
            for name in inside
            if name.split()[0] in (*(f"blocks.{i}" for i in blocks), *["rest"] * (stage in ends))
        ]
        for stage, blocks in part.stages.items()
    }
    told = turns(part, of_stages)
    return {name: (told["unshard", name], told["reduce", name]) for name in inside}


# -- what is left ------------------------------------------------------------------------------------------------------


def pieces(part: Part) -> dict[str, int]:
    """Of each weight the elements of its gradient that are left to this rank: all, a range, or rows."""
    strategy = part.config.parallel.data
    if sharded(part):
        cuts = [(unit.shards.index(part.rank), unit.cuts) for unit in units(part)]
        return {name: cut.local(rank).numel() for rank, of_unit in cuts for name, cut in of_unit.items()}
    if not strategy.startswith("zero"):
        return {name: weight.numel() for name, weight in part.weights.items()}
    found: dict[str, int] = {}
    for group, weights in families(part):
        inside, kept = layers(part, weights) if strategy == "zero3" else ({}, weights)
        dealt = [bucket for members in inside.values() for bucket in buckets(part, members, WHOLE)]
        for bucket in (*dealt, *buckets(part, kept, part.config.parallel.cap)):
            owned = flat_row(part, group, bucket).owned(group.index(part.rank))
            found |= {name: len(piece) for name, piece in zip(bucket, owned, strict=True)}
    return found
