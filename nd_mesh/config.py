"""A run's configuration: TOML tables, overridden by dotted names on the command line.

    python -m nd_mesh train configs/stdlib.toml --mesh.dp 2 --train.steps 100 --data.path PATH

The dataclasses below are the whole list of settings. Unknown keys are refused with the nearest name, and values by
type; what is readable and still cannot run is in mistakes.py.
"""

import difflib
import itertools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pipeline import Plan, schedule
from pipeline.partition import even


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
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU or mixtures of it."""

    vocab: int = 256
    layers: int = 4
    width: int = 192  # D
    heads: int = 6  # H
    kv_heads: int = 2
    hidden: int = 512  # F
    dropout: float = 0.0
    tied: bool = False  # the head's matrix is the embedding's
    rope_base: float = 10_000.0
    # mixtures of experts (expert_parallel/) in place of feed-forward networks: in the layers that are m in the pattern,
    # which is repeated, and not in those that are d
    experts: int = 0  # E of each; 0: every layer is dense
    pattern: str = "m"
    choices: int = 2  # k experts a token
    expert_hidden: int = 128  # F of an expert
    shared_hidden: int = 0  # F of the expert through which every token goes; 0: there is none
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # the weights of a token's experts make 1
    scale: float = 1.0  # their factor
    capacity: float = 0.0  # an expert takes at most so many times its fair share of a row's tokens; 0: all
    balance: float = 0.01  # coefficient of the balance loss of each row
    z_loss: float = 0.0
    bias_rate: float = 0.0  # by how much a step moves the bias that follows the load; 0: there is no bias

    def mixture(self, layer: int) -> bool:
        """Whether that layer is one."""
        return self.experts > 0 and self.pattern[layer % len(self.pattern)] == "m"


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
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"  # 16 bits have masters in float32
    # what all ranks do where any has a gradient that is inf or nan. float16 leaves the step out and halves the loss's
    # factor, which begins as loss_scale and is doubled after so many good steps in a row, and does this where it is 1
    nonfinite: Literal["raise", "skip"] = "raise"
    loss_scale: float = 2.0**16
    scale_steps: int = 2000
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
    return overridden(tables, overrides, path)


def overridden(tables: dict[str, Any], overrides: Mapping[str, str], where: str | Path) -> Config:
    """A Config from these tables, of the file `where`, dotted names overridden; raises ConfigError, in one line."""
    for name, text in overrides.items():
        table, key = name.split(".")
        if not isinstance(tables.setdefault(table, {}), dict):
            raise ConfigError(f"{where}: {table} must be a table, [{table}]")
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
