"""A run's configuration: TOML tables, overridden by dotted names on the command line, checked before anything is
started.

    python -m nd_mesh train configs/stdlib.toml --mesh.dp 2 --train.steps 100 --data.path PATH

The dataclasses below are the whole list of settings. Unknown keys are refused with the nearest name, values by type,
and combinations that cannot run by `check`; every rank does so for itself, with one line, before any group is made.
"""

import difflib
import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from context_parallel.ulysses import sharing
from pipeline import Plan, schedule
from pipeline.partition import even
from tensor_parallel import cut


class ConfigError(ValueError):
    """A mistake of the user's, told in one line that names the thing and the remedy."""


class _Strict:
    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012, read by pydantic: no key unknown, no "3" for 3


@dataclass(frozen=True)
class MeshConfig(_Strict):
    """Degrees of parallelism; their product (without ep) is the number of ranks."""

    pp: int = 1  # pipeline stages
    dp: int = 1  # replicas
    fsdp: int = 1  # shards of parameters, each with rows of its own
    cp: int = 1  # pieces of the sequence
    tp: int = 1  # pieces of each matrix
    ep: int = 1  # pieces of the list of experts, folded out of dp · fsdp · cp


@dataclass(frozen=True)
class ModelConfig(_Strict):
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    vocab: int = 256
    layers: int = 4
    width: int = 192  # D
    heads: int = 6  # H
    kv_heads: int = 2
    hidden: int = 512  # F
    dropout: float = 0.0
    tied: bool = False  # the head's matrix is the embedding's
    rope_base: float = 10_000.0


@dataclass(frozen=True)
class DataConfig(_Strict):
    """Where the tokens come from and how they are cut into samples."""

    path: str = "stdlib"  # a file, a folder, or "stdlib": the sources of the running Python's standard library
    format: Literal["text", "uint16", "uint32"] = "text"  # UTF-8 text read as bytes, or a file of token ids
    glob: str = "*"  # of a folder's files, at any depth
    document_end: int | None = None  # in a token file, the id that closes a document
    context: int = 128  # T, tokens a sample
    validation: float = 0.02  # the last part of the stream, kept for validation


@dataclass(frozen=True)
class TrainConfig(_Strict):
    """The optimizer, the batch, and what is written."""

    steps: int = 440
    batch: int = 16  # rows of a global batch, dealt out over dp · fsdp, then over microbatches
    microbatches: int = 1
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 2e-3
    warmup: int = 20  # steps of linear warm-up, then a cosine to min_lr · lr
    min_lr: float = 0.1
    weight_decay: float = 0.1  # on matrices only
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9  # of sgd
    clip: float = 1.0  # largest global gradient norm; 0: no limit
    dtype: Literal["float32", "float64"] = "float32"
    seed: int = 0
    timeout: float = 600.0  # seconds until a rank that waits for another gives up
    evaluate_every: int = 0  # steps; the last one is always followed by an evaluation
    out: str = "runs/stdlib"
    save_every: int = 0  # steps between checkpoints in `out`, the last step saved as well; 0: none
    resume: str = ""  # go on from this checkpoint, or from the latest complete one of this run's folder
    prompt: str = "def "
    sample: int = 400  # bytes of text generated at the end


@dataclass(frozen=True)
class ParallelConfig(_Strict):
    """Which strategy serves an axis."""

    # over dp: gradients in three steps (ddp/), or shards of optimizer state, gradients, weights (zero/); over fsdp and
    # dp: fully sharded (fsdp/). auto: overlapped where mesh.fsdp is 1, else fsdp
    data: Literal["auto", "naive", "bucketed", "overlapped", "zero1", "zero2", "zero3", "fsdp"] = "auto"
    cap: int = 25 << 20  # bytes of a bucket; naive and fsdp have none, zero3 one a layer
    reshard: bool = True  # fsdp: a block's weights are freed between its forward and its backward
    prefetch: int = 1  # fsdp: blocks whose weights are gathered in advance
    # over tp (tensor_parallel/): the residual stream is cut along the sequence, and what the layers that gather it keep
    # for backward is their piece of it, or all
    sequence: bool = False
    save_gathered: bool = False
    # over cp (context_parallel/): how queries reach the keys of other ranks, and which slots of a row each rank has.
    # ring_ulysses: so many neighbours exchange heads. save_gathered: all_gather keeps all keys and values for backward
    attention: Literal["ring", "all_gather", "ulysses", "ring_ulysses"] = "ring"
    order: Literal["zigzag", "contiguous", "striped"] = "zigzag"
    ulysses: int = 2
    # over pp (pipeline/): the schedule; stages a rank, 0 for what it is known for; blocks of each stage, by default as
    # even as can be; gradients of fsdp and zero3 reduced after each microbatch, not once a step. There reshard
    # frees a stage's weights when the rank turns to another of its stages
    schedule: Literal["layer_wise", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"] = "1f1b"
    virtual: int = 0
    stage_layers: tuple[int, ...] = ()
    reduce_each: bool = False
    recompute: tuple[str, ...] = ()  # what runs forward again in backward: "block", or some of its parts, as "attend"


@dataclass(frozen=True)
class CheckpointConfig(_Strict):
    """How checkpoints are written, and which of them stay (checkpoint/). When: train.save_every."""

    asynchronous: bool = False  # written behind the steps that follow, from a copy in host memory
    keep_last: int = 0  # how many stay; 0: all
    keep_every: int = 0  # of those that would go, the ones at a multiple of so many steps stay
    writers: int = 0  # ranks that write at a time; 0: all
    bandwidth: int = 0  # MB a second that all ranks together write at most; 0: no bound
    fallback: bool = False  # resume from an earlier checkpoint where the newest is damaged


@dataclass(frozen=True)
class WatchConfig(_Strict):
    """Who watches what the ranks say to each other (collectives/watch.py)."""

    journal: bool = True  # the last calls of each rank, in train.out/journal; read it when a run hangs
    checked: bool = False  # compare every call with the peers' before it starts: slow, for finding faults
    ledger: bool = False  # rank 0 shows its bytes by operation and group at the end


@dataclass(frozen=True)
class Config(_Strict):
    """A whole run, but for the number of ranks."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)


def names() -> dict[str, type]:
    """Every setting by its dotted name, with its type."""
    return {f"{table.name}.{f.name}": f.type for table in fields(Config) for f in fields(table.type)}


def load(path: str | Path, overrides: Mapping[str, str]) -> Config:
    """The configuration in a TOML file, dotted names overridden by text as typed; raises ConfigError, in one line."""
    if Path(path).exists() and not Path(path).is_file():
        raise ConfigError(f"the configuration {path} is not a file")
    try:
        tables = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name, text in overrides.items():
        table, key = name.split(".")
        if not isinstance(tables.setdefault(table, {}), dict):
            raise ConfigError(f"{path}: {table} must be a table, [{table}]")
        tables[table][key] = text if names()[name] is str else _toml_value(text)
    return validated(tables)


def validated(tables: Mapping[str, Any]) -> Config:
    """A Config from nested dictionaries; raises ConfigError naming each unknown key with the nearest one, and each
    value of a wrong type.
    """
    import pydantic  # noqa: PLC0415, only reading a file needs it: the trainer runs without

    try:
        # As JSON, whose arrays may be tuples and whose tables dataclasses although values are not converted otherwise.
        return pydantic.TypeAdapter(Config).validate_json(json.dumps(tables, default=str))
    except pydantic.ValidationError as invalid:
        raise ConfigError("; ".join(_explain(error) for error in invalid.errors())) from invalid


def unknown(name: str) -> str:
    """One line about a setting that does not exist: the same name in another table, or else the name most like it."""
    elsewhere = [known for known in names() if known.split(".")[1] == name.rsplit(".", 1)[-1]]
    tables = [table.name for table in fields(Config)]
    [near] = elsewhere[:1] or difflib.get_close_matches(name, [*names(), *tables], n=1, cutoff=0.0)
    return f"unknown setting {name if name.isprintable() else repr(name)}: did you mean {near}?"


def check(config: Config, world: int) -> None:
    """Raise ConfigError for what cannot run on `world` ranks: the first mistake, with its remedy."""
    mistakes = [*_out_of_range(config), *_mesh_mistakes(config.mesh, world)]
    mistakes += [*_strategy_mistakes(config), *_model_mistakes(config.model)]
    for mistake in mistakes or [*_tensor_mistakes(config), *_context_mistakes(config), *_pipeline_mistakes(config)]:
        raise ConfigError(mistake)


_POSITIVE = (
    *("mesh.pp", "mesh.dp", "mesh.fsdp", "mesh.cp", "mesh.tp", "mesh.ep"),
    *("model.vocab", "model.layers", "model.width", "model.heads", "model.kv_heads", "model.hidden", "model.rope_base"),
    *(
        "parallel.cap",
        "parallel.ulysses",
        "data.context",
        "train.steps",
        "train.batch",
        "train.microbatches",
        "train.timeout",
        "train.eps",
    ),
)
_TOO_LARGE = 2**31
RECOMPUTED = ("block", "attend_norm", "q", "k", "v", "attend", "o", "attend_drop", "ffn_norm", "ffn", "ffn_drop")
_NOT_NEGATIVE = (
    *("train.lr", "train.warmup", "train.min_lr", "train.weight_decay"),
    *(
        "train.clip",
        "train.evaluate_every",
        "train.save_every",
        "train.sample",
        "parallel.prefetch",
        "parallel.virtual",
    ),
    *("checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.writers", "checkpoint.bandwidth"),
)


def _out_of_range(config: Config) -> Iterator[str]:
    values = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in names()}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}={value} is not a finite number"
        elif name in _POSITIVE and value <= 0:
            yield f"{name}={value} must be positive"
        elif name in _NOT_NEGATIVE and value < 0:
            yield f"{name}={value} must not be negative"
        elif isinstance(value, int | float) and abs(value) >= _TOO_LARGE:
            yield f"{name}={value} must be less than {_TOO_LARGE}"
    for name in ("model.dropout", "train.momentum", "train.betas"):
        if not all(0 <= value < 1 - 2**-16 for value in np.atleast_1d(values[name])):
            yield f"{name}={values[name]} must be at least 0 and less than 1 - 2^-16"
    if config.train.min_lr > 1:
        yield f"train.min_lr={config.train.min_lr} is a share of train.lr: at most 1"
    if config.train.timeout < 1:
        yield f"train.timeout={config.train.timeout} must be at least 1 second"
    end = config.data.document_end
    if end is not None and (config.data.format == "text" or not 0 <= end < config.model.vocab):
        yield f"data.document_end={end} must be an id of the vocabulary, and data.format one of token ids"
    prompt = config.train.prompt.encode()
    if config.data.format == "text" and (not prompt or max(prompt) >= config.model.vocab):
        yield f"train.prompt={config.train.prompt!r} must be text of at least one byte, each less than model.vocab"
    if not 0 < config.data.validation < 1:
        yield f"data.validation={config.data.validation} must be between 0 and 1"


def _mesh_mistakes(mesh: MeshConfig, world: int) -> Iterator[str]:
    sizes = {axis: getattr(mesh, axis) for axis in ("pp", "dp", "fsdp", "cp", "tp")}
    if (ranks := math.prod(sizes.values())) != world:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        yield f"the mesh {product} makes {ranks} ranks, but {world} are started: change [mesh] or --nproc-per-node"
    for axis, size in {**sizes, "ep": mesh.ep}.items():
        if size > 1 and axis == "ep":
            yield f"mesh.{axis}={size}: there is no strategy for {axis} yet; use mesh.{axis}=1, or one of the others"


def _strategy_mistakes(config: Config) -> Iterator[str]:
    parallel, fsdp = config.parallel, config.mesh.fsdp
    if fsdp > 1 and parallel.data not in ("auto", "fsdp"):
        yield f"parallel.data={parallel.data} works over mesh.dp: use mesh.fsdp=1, or parallel.data=fsdp"
    gathers = parallel.sequence or (config.mesh.cp > 1 and parallel.attention == "all_gather")
    if parallel.save_gathered and not gathers:
        yield (
            "parallel.save_gathered=true is a way of parallel.sequence=true, and of parallel.attention=all_gather: "
            "without one of them nothing is gathered"
        )
    for name in parallel.recompute:
        if name not in RECOMPUTED:
            yield f"parallel.recompute has {name!r}: use some of {', '.join(RECOMPUTED)}"
    if "block" in parallel.recompute and len(parallel.recompute) > 1:
        yield "parallel.recompute has a block and parts of it: use block alone, or leave it out"
    if len(set(parallel.recompute)) < len(parallel.recompute):
        yield f"parallel.recompute={list(parallel.recompute)} has a name twice"
    if config.checkpoint.keep_every and not config.checkpoint.keep_last:
        yield "checkpoint.keep_every needs checkpoint.keep_last: without it all checkpoints stay"


def _model_mistakes(model: ModelConfig) -> Iterator[str]:
    if model.heads % model.kv_heads:
        divisors = [d for d in range(1, model.heads + 1) if model.heads % d == 0]
        yield f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; use one of {divisors}"
    if model.width % (2 * model.heads):
        yield f"model.width={model.width} is not an even multiple of model.heads={model.heads}: RoPE turns pairs"


def _tensor_mistakes(config: Config) -> Iterator[str]:
    model = config.model

    def reasons(tp: int) -> Iterator[str]:
        if tp not in cut.degrees(model.heads, model.kv_heads):
            yield f"does not fit model.heads={model.heads} and model.kv_heads={model.kv_heads}"
        if model.hidden % tp:
            yield f"does not divide model.hidden={model.hidden}"
        if model.vocab < tp:
            yield f"is more than model.vocab={model.vocab}"

    fine = [tp for tp in cut.divisors(model.heads) if not any(reasons(tp))]
    for reason in reasons(config.mesh.tp):
        yield f"mesh.tp={config.mesh.tp} {reason}; use a tp of {cut.listed(fine)}"


def _context_mistakes(config: Config) -> Iterator[str]:
    parallel, cp, tp, model = config.parallel, config.mesh.cp, config.mesh.tp, config.model
    if cp == 1 or "ulysses" not in parallel.attention:
        return
    exchange = cp if parallel.attention == "ulysses" else parallel.ulysses
    heads, kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
    fine = [size for size in cut.divisors(cp) if size in sharing(heads, kv_heads)]
    if cp % exchange:
        yield f"parallel.ulysses={exchange} does not divide mesh.cp={cp}; use a ulysses of {cut.listed(fine)}"
    elif exchange not in fine:
        yield (
            f"{exchange} ranks of cp cannot share the {heads} heads with {kv_heads} KV heads of a rank of tp: use "
            f"parallel.attention=ring, or ring_ulysses with a ulysses of {cut.listed(fine)}"
        )


def pipeline_plan(config: Config) -> Plan:
    """What each rank of a pipeline does. Raises ValueError for numbers that the schedule cannot do."""
    parallel = config.parallel
    return schedule(parallel.schedule, config.mesh.pp, config.train.microbatches, parallel.virtual or None)


def layers_of_stages(config: Config, plan: Plan) -> list[range]:
    """The blocks of each stage, by their numbers."""
    if not config.parallel.stage_layers:
        return even(config.model.layers, plan.stages)
    bounds = [0, *itertools.accumulate(config.parallel.stage_layers)]
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def _pipeline_mistakes(config: Config) -> Iterator[str]:
    parallel, pp = config.parallel, config.mesh.pp
    if pp == 1:
        for name in ("virtual", "stage_layers", "reduce_each"):
            if getattr(parallel, name):
                yield f"parallel.{name} is of a pipeline: leave it out, or use mesh.pp"
        return
    if parallel.reduce_each and parallel.data not in ("fsdp", "zero3") and config.mesh.fsdp == 1:
        yield f"parallel.reduce_each=true is of fsdp and zero3, not of parallel.data={parallel.data}: leave it out"
    layers, named = config.model.layers, list(parallel.stage_layers)
    if not named and pp * parallel.virtual > layers + 2:
        yield _too_few(layers, pp * parallel.virtual)
        return
    try:
        plan = pipeline_plan(config)
    except ValueError as error:
        yield f"parallel.schedule={parallel.schedule}: {error}"
        return
    if named and (len(named) != plan.stages or sum(named) != layers or min(named) < 0):
        yield (
            f"parallel.stage_layers={named} must be {plan.stages} numbers, the blocks of each stage, that make "
            f"model.layers={layers}"
        )
    elif not named and any(not each for each in layers_of_stages(config, plan)[1:-1]):
        yield _too_few(layers, plan.stages)


def _too_few(layers: int, stages: int) -> str:
    return f"model.layers={layers} are too few for {stages} stages; use more, or fewer stages"


def _explain(error: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown(name)
    return f"{name}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}".replace("\n", " ")


def _toml_value(text: str) -> Any:
    if "\n" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
