"""What a rank of a run has, as sizes: its layers, rows, weights and groups. From the configuration alone, without ranks
and without memory; formulas.py says what it sends.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import nn

from context_parallel import slots
from nd_mesh.config import Config, layers_of_stages, pipeline_plan
from nd_mesh.data import deal
from nd_mesh.mesh import Grid
from nd_mesh.model import GPT
from nd_mesh.precision import Precision
from pipeline.plan import Plan
from tensor_parallel import cut

STREAM = ("attend_norm", "ffn_norm", "norm", "router")  # copies over tp; with sequences each saw some tokens


Group = tuple[int, ...]  # the ranks that communicate, ascending


class Part:
    """Rank `rank` of a run. Elements and tokens, not bytes."""

    def __init__(self, config: Config, rank: int):
        self.config, self.rank, self.grid = config, rank, Grid(config.mesh)
        self.place, mesh, train = self.grid.coordinates(rank), config.mesh, config.train
        mine = deal(range(train.batch), mesh.dp * mesh.fsdp, self.place["dp"] * mesh.fsdp + self.place["fsdp"])
        self.rows = [len(deal(mine, train.microbatches, m)) for m in range(train.microbatches)]  # a microbatch
        folded = mesh.tp if config.parallel.sequence else 1
        self.tokens = slots(config.parallel.order, config.data.context, mesh.cp, multiple=folded).shape[1]  # T/cp
        precision = Precision.of(config.train.dtype)
        self.dtype, self.mixed = precision.masters, precision.mixed
        self.e, self.g = precision.weights.itemsize, precision.masters.itemsize  # bytes: of a weight, of a gradient

    @cached_property
    def plan(self) -> Plan | None:
        """That of the pipeline."""
        return pipeline_plan(self.config) if self.config.mesh.pp > 1 else None

    # -- what it computes with -----------------------------------------------------------------------------------------

    @property
    def stream_tokens(self) -> int:
        """T/cp, with sequences T/(cp·tp): tokens of the residual stream."""
        return self.tokens // (self.config.mesh.tp if self.config.parallel.sequence else 1)

    @property
    def stream(self) -> int:
        """a: bytes of [B, T/cp, D], of all its rows."""
        return self.e * sum(self.rows) * self.tokens * self.config.model.width

    @property
    def choices(self) -> int:
        """How often its tokens choose an expert, in a layer."""
        return sum(self.rows) * self.stream_tokens * self.config.model.choices

    def keys(self, ranks: int = 1) -> int:
        """b: bytes of keys [B, T/cp, KV·K/tp]; where more ranks than heads share them, of a copy for each rank."""
        return self._heads(max(1, self.config.model.kv_heads // self.config.mesh.tp, ranks))

    def queries(self) -> int:
        """a/tp: bytes of queries [B, T/cp, D/tp]."""
        return self._heads(self.config.model.heads // self.config.mesh.tp)

    def _heads(self, heads: int) -> int:
        return self.stream // self.config.model.heads * heads

    def again(self, *names: str) -> int:
        """1 if one of these parts of a block runs forward again, or else 0."""
        return int(any(name in self.config.parallel.recompute for name in names))

    @property
    def gathers_again(self) -> int:
        """1 if sequence parallelism gathers inputs again in backward, or else 0."""
        return int(not self.config.parallel.save_gathered)

    # -- where it stands -----------------------------------------------------------------------------------------------

    def group(self, name: str) -> Group:
        """Its group of that name in mesh.py."""
        return self.grid.group_of(self.rank, name)

    @property
    def world(self) -> Group:
        """All ranks."""
        return tuple(range(self.grid.size()))

    @cached_property
    def stages(self) -> dict[int, range]:
        """The layers of each of its stages; without a pipeline all of them, as those of stage 0."""
        if self.plan is None:
            return {0: range(self.config.model.layers)}
        every = layers_of_stages(self.config, self.plan)
        return {stage: every[stage] for stage in self.plan.stages_of(self.place["pp"])}

    @property
    def layers(self) -> list[int]:
        """The layers of all its stages."""
        return [layer for layers in self.stages.values() for layer in layers]

    def mixes(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return self.config.model.mixture(layer)

    @property
    def last_stage(self) -> int:
        """The number of the last stage, here or elsewhere."""
        return 0 if self.plan is None else self.plan.stages - 1

    @property
    def ties(self) -> Group | None:
        """The two ranks with a copy of a tied weight, if it is one of them."""
        if self.plan is None or not self.config.model.tied:
            return None
        ends, pipeline = {self.plan.rank_of[0], self.plan.rank_of[-1]}, self.group("pp")
        tied = tuple(pipeline[end] for end in sorted(ends))
        return tied if len(tied) > 1 and self.rank in tied else None

    @property
    def sharers(self) -> Group:
        """The ranks of tp with the same heads of keys and values."""
        runs = cut.sharers(self.group("tp"), self.config.model.kv_heads)
        return next(run for run in runs if self.rank in run)

    # -- its weights ---------------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        """By their names in the whole model, without memory, in the order in which a module of its has them."""
        with torch.device("meta"):
            model = GPT(self.config.model, 0).to(self.dtype)
            whole = dict(model.named_parameters())
            return {
                name: nn.Parameter(torch.empty(self._local(name, whole[name].shape), dtype=self.dtype))
                for name in self._names(whole)
            }

    def _names(self, whole: dict[str, nn.Parameter]) -> list[str]:
        """A pipeline's rank has its ends, then its blocks; a tied weight has one name."""
        if self.plan is None:
            return list(whole)
        ends = [name for stage in self.stages for name in self.ends(stage)]
        blocks = [name for layer in self.layers for name in whole if name.startswith(f"blocks.{layer}.")]
        return [*dict.fromkeys(ends), *blocks]

    def ends(self, stage: int) -> Iterator[str]:
        """The weights of a stage that are in no block."""
        if stage == 0:
            yield "embed.weight"
        if stage == self.last_stage:
            yield from ("norm.weight", "embed.weight" if self.config.model.tied else "head.weight")

    def _local(self, name: str, shape: torch.Size) -> list[int]:
        """What experts and tensor parallelism leave of a weight."""
        model, mesh, sequence = self.config.model, self.config.mesh, self.config.parallel.sequence
        role, tp, local = role_of(name), mesh.tp, list(shape)
        if expert(name):
            local[0] //= mesh.ep * (tp if sequence else 1)
            local[2 if role == "down" else 1] //= 1 if sequence else tp
        elif role in ("embed", "head"):
            local[0] = len(cut.nearly_even(model.vocab, tp)[self.place["tp"]])
        elif role in ("k", "v"):
            local[0] = local[0] // model.kv_heads * max(1, model.kv_heads // tp)
        elif role in ("o", "down"):
            local[1] //= tp
        elif role not in STREAM:
            local[0] //= tp
        return local

    def sums(self, name: str) -> dict[str, Group]:
        """The groups over which a weight's gradient is still partial after the sums over data, by the reason."""
        role, found = role_of(name), {}
        if role in ("k", "v"):
            found["shared keys and values"] = self.sharers
        if role in STREAM and self.config.parallel.sequence:
            found["norms"] = self.group("tp")
        if name == "embed.weight" and self.ties:
            found["tied embedding"] = self.ties
        return found

    def holders(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Who has the same of it, beside the ranks of data: along tp, and along pp."""
        role = role_of(name)
        along_tp = self.sharers if role in ("k", "v") else self.group("tp") if role in STREAM else None
        along_pp = self.ties if name == "embed.weight" else None
        return tuple(group or (self.rank,) for group in (along_tp, along_pp))


def role_of(name: str) -> str:
    """The last part of a weight's name that says what it is: q, gate, norm, …"""
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def expert(name: str) -> bool:
    """Whether it is a stack of experts."""
    return ".experts." in name


def layer_of(name: str) -> str:
    """The layer as ZeRO-3 and FSDP see it: blocks.3, or an end's own name."""
    return ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
