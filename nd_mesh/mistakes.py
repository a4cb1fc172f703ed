"""What a configuration asks for and cannot run: each mistake in one line that names the values, the reason and the
nearest that works.

Every rank looks for itself, before any group is made, so all of them say the same and none waits for another. A
configuration runs on any mesh, so a setting of an axis that is not cut is no mistake: it waits, and a run says so.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from context_parallel.ulysses import sharing
from nd_mesh.config import (
    Config,
    ConfigError,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    layers_of_stages,
    names,
    pipeline_plan,
)
from nd_mesh.precision import LARGEST_SCALE
from pipeline.schedules import IN_TWO
from tensor_parallel import cut

RECOMPUTED = ("block", "attend_norm", "q", "k", "v", "attend", "o", "attend_drop", "ffn_norm", "ffn", "ffn_drop")
_POSITIVE = (
    *("mesh.pp", "mesh.dp", "mesh.fsdp", "mesh.cp", "mesh.tp", "mesh.ep"),
    *("model.vocab", "model.layers", "model.width", "model.heads", "model.kv_heads", "model.hidden", "model.rope_base"),
    *("model.choices", "model.expert_hidden", "model.scale"),
    *("parallel.cap", "parallel.ulysses", "data.context"),
    *("train.steps", "train.batch", "train.microbatches", "train.timeout", "train.eps"),
)
_NOT_NEGATIVE = (
    *("train.lr", "train.warmup", "train.min_lr", "train.weight_decay", "train.clip"),
    *("model.experts", "model.shared_hidden", "model.capacity", "model.balance", "model.z_loss", "model.bias_rate"),
    *("train.evaluate_every", "train.save_every", "train.sample", "parallel.prefetch", "parallel.virtual"),
    *("checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.writers", "checkpoint.bandwidth"),
)
_TOO_LARGE = {name: 2**31 for name in names()} | {  # what is counted through here has closer bounds
    **{"model.layers": 2**16, "model.heads": 2**16, "parallel.virtual": 2**10}
}
_ACTIONS = 2**15  # of a pipeline's plan, which every rank makes whole


def check(config: Config, world: int) -> None:
    """Raise ConfigError for what cannot run on `world` ranks: the first mistake, with its remedy."""
    for mistake in _mistakes(config, world):
        raise ConfigError(mistake)


def _mistakes(config: Config, world: int) -> Iterator[str]:
    """Those of each kind can count on there being none of the kinds before it."""
    yield from _out_of_range(config)
    yield from _mesh_mistakes(config.mesh, world)
    yield from _strategy_mistakes(config)
    yield from _model_mistakes(config.model)
    yield from _tensor_mistakes(config)
    yield from _expert_mistakes(config)
    yield from _context_mistakes(config)
    yield from _pipeline_mistakes(config)
    yield from _precision_mistakes(config.train)


def _out_of_range(config: Config) -> Iterator[str]:
    values = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in names()}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}={value} is not a finite number"
        elif name in _POSITIVE and value <= 0:
            yield f"{name}={value} must be positive"
        elif name in _NOT_NEGATIVE and value < 0:
            yield f"{name}={value} must not be negative"
        elif isinstance(value, int | float) and abs(value) >= _TOO_LARGE[name]:
            yield f"{name}={value} must be less than {_TOO_LARGE[name]}"
    for name in ("model.dropout", "train.momentum", "train.betas"):
        if not all(0 <= value < 1 - 2**-16 for value in np.atleast_1d(values[name])):
            yield f"{name}={values[name]} must be at least 0 and less than 1 - 2^-16"
    if config.train.min_lr > 1:
        yield f"train.min_lr={config.train.min_lr} is a share of train.lr: at most 1"
    if config.train.timeout < 1:
        yield f"train.timeout={config.train.timeout} must be at least 1 second"
    end = config.data.document_end
    if end is not None and (config.data.format == "text" or not 0 <= end < config.model.vocab):
        yield (
            f"data.document_end={end} must be an id less than model.vocab={config.model.vocab}, and data.format="
            f"{config.data.format} one of token ids: leave it out, or use data.format=uint16"
        )
    prompt = config.train.prompt.encode()
    if config.data.format == "text" and (not prompt or max(prompt) >= config.model.vocab):
        yield f"train.prompt={config.train.prompt!r} must be text of at least one byte, each less than model.vocab"
    if not 0 < config.data.validation < 1:
        yield f"data.validation={config.data.validation} must be between 0 and 1"


def _mesh_mistakes(mesh: MeshConfig, world: int) -> Iterator[str]:
    sizes = {axis: getattr(mesh, axis) for axis in ("pp", "dp", "fsdp", "cp", "tp")}
    if (ranks := math.prod(sizes.values())) != world:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        told = f"the mesh {product} makes {ranks} ranks, but {world} are started: start {ranks} (--nproc-per-node)"
        fine = [axis for axis in ("dp", "fsdp", "cp", "tp", "pp") if sizes[axis] * world % ranks == 0]
        yield told + (f", or use mesh.{fine[0]}={sizes[fine[0]] * world // ranks}" if fine else "")
    if (data := mesh.dp * mesh.fsdp * mesh.cp) % mesh.ep:
        fine = f"use an ep of {cut.listed(cut.divisors(data))}"
        yield f"mesh.ep={mesh.ep} is folded out of the {data} ranks of dp · fsdp · cp, and must divide them; {fine}"


def _strategy_mistakes(config: Config) -> Iterator[str]:
    parallel, mesh = config.parallel, config.mesh
    if mesh.fsdp > 1 and parallel.data not in ("auto", "fsdp"):
        yield (
            f"parallel.data={parallel.data} works over mesh.dp: use parallel.data=fsdp, or "
            f"mesh.dp={mesh.dp * mesh.fsdp} and mesh.fsdp=1"
        )
    for name in parallel.recompute:
        if name not in RECOMPUTED:
            yield f"parallel.recompute has {name!r}: use some of {', '.join(RECOMPUTED)}"
    if "block" in parallel.recompute and len(parallel.recompute) > 1:
        yield "parallel.recompute has a block and parts of it: use block alone, or leave it out"
    if len(set(parallel.recompute)) < len(parallel.recompute):
        once = list(dict.fromkeys(parallel.recompute))
        yield f"parallel.recompute={list(parallel.recompute)} has a name twice: use parallel.recompute={once}"


def _model_mistakes(model: ModelConfig) -> Iterator[str]:
    if not model.pattern or set(model.pattern) - {"d", "m"}:
        yield (
            f"model.pattern={model.pattern!r} must be of letters d, a dense layer, and m, a mixture of experts: "
            "use model.pattern=m"
        )
    if model.heads % model.kv_heads:
        fine = cut.listed(cut.divisors(model.heads))
        yield f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; use model.kv_heads={fine}"
    if rest := model.width % (2 * model.heads):
        below, above = model.width - rest, model.width - rest + 2 * model.heads
        yield (
            f"model.width={model.width} is not an even multiple of model.heads={model.heads}: RoPE turns pairs; "
            f"use model.width={cut.listed([size for size in (below, above) if size])}"
        )


def _tensor_mistakes(config: Config) -> Iterator[str]:
    model = config.model
    mixed = [model.mixture(layer) for layer in range(model.layers)]
    hiddens = {"hidden": model.hidden} if not all(mixed) else {}
    if any(mixed):
        hiddens |= {"shared_hidden": model.shared_hidden}
        hiddens |= {} if config.parallel.sequence else {"expert_hidden": model.expert_hidden}

    def reasons(tp: int) -> Iterator[str]:
        if tp not in cut.degrees(model.heads, model.kv_heads):
            yield f"does not fit model.heads={model.heads} and model.kv_heads={model.kv_heads}"
        for name, hidden in hiddens.items():
            if hidden % tp:
                yield f"does not divide model.{name}={hidden}"
        if model.vocab < tp:
            yield f"is more than model.vocab={model.vocab}"

    fine = [tp for tp in cut.divisors(model.heads) if not any(reasons(tp))]
    for reason in reasons(config.mesh.tp):
        yield f"mesh.tp={config.mesh.tp} {reason}; use a tp of {cut.listed(fine)}"


def _expert_mistakes(config: Config) -> Iterator[str]:
    model, mesh = config.model, config.mesh
    folded = mesh.tp if config.parallel.sequence else 1
    shares = mesh.ep * folded
    if model.experts == 0 and mesh.ep > 1:
        yield f"mesh.ep={mesh.ep} shares experts, and there are none: use mesh.ep=1, or model.experts={shares}"
    if model.experts == 0:
        return
    if not any(model.mixture(layer) for layer in range(model.layers)):
        dense = f"model.pattern={model.pattern!r} leaves all {model.layers} layers dense"
        yield f"{dense}: have an m in it, use model.pattern=m, or model.experts=0"
    if model.choices > model.experts:
        most = f"use model.choices={model.experts}"
        yield f"model.choices={model.choices} of model.experts={model.experts}: choose at most all, {most}"
    if model.experts % shares:
        how = f" · mesh.tp={folded}, which sequence parallelism folds into it," if folded > 1 else ""
        fine = [ep for ep in cut.divisors(mesh.dp * mesh.fsdp * mesh.cp) if model.experts % (ep * folded) == 0]
        more = -(-model.experts // shares) * shares
        remedy = f"use an ep of {cut.listed(fine)}" if fine else f"use model.experts={more}"
        yield f"mesh.ep={mesh.ep}{how} does not divide model.experts={model.experts}; {remedy}"


def _context_mistakes(config: Config) -> Iterator[str]:
    parallel, cp, tp, model = config.parallel, config.mesh.cp, config.mesh.tp, config.model
    if cp == 1 or "ulysses" not in parallel.attention:
        return
    exchange = cp if parallel.attention == "ulysses" else parallel.ulysses
    heads, kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
    fine = [size for size in cut.divisors(cp)[1:] if size in sharing(heads, kv_heads)]
    remedy = "use parallel.attention=ring" + (f", or ring_ulysses with a ulysses of {cut.listed(fine)}" if fine else "")
    if cp % exchange:
        yield f"parallel.ulysses={exchange} does not divide mesh.cp={cp}; {remedy}"
    elif exchange not in sharing(heads, kv_heads):
        yield f"{exchange} ranks of cp cannot share the {heads} heads and {kv_heads} KV heads of a rank; {remedy}"


def _pipeline_mistakes(config: Config) -> Iterator[str]:
    parallel, pp, layers = config.parallel, config.mesh.pp, config.model.layers
    if pp == 1:
        return
    if parallel.reduce_each and parallel.data not in ("fsdp", "zero3") and config.mesh.fsdp == 1:
        yield f"parallel.reduce_each=true is of fsdp and zero3, not of parallel.data={parallel.data}: leave it out"
    each, named = parallel.virtual or (2 if parallel.schedule in IN_TWO else 1), list(parallel.stage_layers)
    stages, microbatches = pp * each, config.train.microbatches
    if not named and stages > layers + 2:
        yield _too_few(layers, pp, each, parallel)
        return
    if stages * microbatches > _ACTIONS:
        fewer = f"use train.microbatches={max(1, _ACTIONS // stages)}"
        yield f"{stages} stages of train.microbatches={microbatches} make more than {_ACTIONS} actions; {fewer}"
        return
    try:
        plan = pipeline_plan(config)
    except ValueError as error:
        yield f"parallel.schedule={parallel.schedule}: {error}"
        return
    if named and (len(named) != plan.stages or sum(named) != layers or min(named) < 0):
        yield (
            f"parallel.stage_layers={named} must be {plan.stages} numbers, the blocks of each stage, that make "
            f"model.layers={layers}: leave it out, for as even as can be"
        )
    elif not named and any(not each for each in layers_of_stages(config, plan)[1:-1]):
        yield _too_few(layers, pp, each, parallel)


def _precision_mistakes(train: TrainConfig) -> Iterator[str]:
    if not 1 <= train.loss_scale <= LARGEST_SCALE or math.frexp(train.loss_scale)[0] != 0.5:
        inside = min(max(1.0, train.loss_scale), LARGEST_SCALE)
        yield (
            f"train.loss_scale={train.loss_scale} must be a power of two from 1 to 2^30, for others round gradients: "
            f"use train.loss_scale={2.0 ** round(math.log2(inside))}"
        )
    if train.scale_steps < 1:
        yield f"train.scale_steps={train.scale_steps} must be positive"


def _too_few(layers: int, pp: int, each: int, parallel: ParallelConfig) -> str:
    """The last stage may have the head alone, the others have a block."""
    remedy = f"use model.layers={pp * each - 1}"
    if parallel.virtual > 1 and (fewer := (layers + 1) // pp) > 0:
        remedy += f", or parallel.virtual={fewer}"
    elif (fewer := (layers + 1) // each) > 1:
        remedy += f", or a pp of at most {fewer}"
    return f"model.layers={layers} are too few for {pp * each} stages; {remedy}"


def without_effect(config: Config) -> list[str]:
    """What is not as by default and changes nothing on this mesh, with what it waits for: no loss would show it."""
    usual, waiting = Config(), []
    for name, (effective, needed) in _effects(config).items():
        table, key = name.split(".")
        value, default = (getattr(getattr(side, table), key) for side in (config, usual))
        if value != default and not effective:
            waiting.append(f"{name}={_told(value)} wants {needed}")
    return waiting


def _effects(config: Config) -> dict[str, tuple[bool, str]]:
    """Of settings by name, whether they have an effect here, and what they want for it."""
    parallel, mesh, saves = config.parallel, config.mesh, config.train.save_every > 0
    pipeline, context = mesh.pp > 1, mesh.cp > 1
    sharded = mesh.fsdp > 1 or parallel.data == "fsdp"
    gathered = sharded or parallel.data == "zero3"
    keys = context and parallel.attention == "all_gather"
    of_pipeline = ("parallel.schedule", "parallel.virtual", "parallel.stage_layers")
    of_context = ("parallel.attention", "parallel.order")
    of_saving = ("checkpoint.asynchronous", "checkpoint.keep_last", "checkpoint.writers", "checkpoint.bandwidth")
    return {
        **dict.fromkeys(of_pipeline, (pipeline, "mesh.pp")),
        "parallel.reduce_each": (pipeline and gathered, "mesh.pp, and parallel.data=fsdp or zero3"),
        **dict.fromkeys(of_context, (context, "mesh.cp")),
        "parallel.ulysses": (
            context and parallel.attention == "ring_ulysses",
            "mesh.cp and parallel.attention=ring_ulysses",
        ),
        "parallel.sequence": (mesh.tp > 1, "mesh.tp"),
        "parallel.save_gathered": (
            (parallel.sequence and mesh.tp > 1) or keys,
            "mesh.tp and parallel.sequence=true, or mesh.cp and parallel.attention=all_gather",
        ),
        "parallel.reshard": (
            sharded or (pipeline and gathered),
            "parallel.data=fsdp, or mesh.pp and parallel.data=zero3",
        ),
        "parallel.prefetch": (sharded and not pipeline, "parallel.data=fsdp and mesh.pp=1"),
        "parallel.cap": (
            not sharded and parallel.data != "naive",
            "buckets, not parallel.data=naive or fsdp",
        ),
        **dict.fromkeys(of_saving, (saves, "train.save_every")),
        "checkpoint.keep_every": (config.checkpoint.keep_last > 0, "checkpoint.keep_last"),
    }


def _told(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)
