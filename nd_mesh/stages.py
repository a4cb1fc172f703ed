"""A GPT in stages: what a rank of a pipeline holds of it, under the names that it has in the whole model.

A stage is a GPT in which what lies elsewhere is left out, so its forward is the model's own: the first stage looks up,
each runs its blocks, the last normalises and has the head. A tied weight is one parameter where one rank has both ends,
and two copies with one name where two have.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collectives import comm
from nd_mesh.config import ModelConfig
from nd_mesh.model import GPT, Where
from pipeline import Microbatch, Pipeline, Plan


class Stage(GPT):
    """Some consecutive blocks of a GPT, and of the other parts those that `ends` has."""

    def __init__(self, config: ModelConfig, blocks: Mapping[str, nn.Module], ends: Mapping[str, nn.Module]):
        nn.Module.__init__(self)
        self.config = config
        self.embed, self.embed_drop = ends.get("embed", nn.Identity()), ends.get("embed_drop", _Pass())
        self.blocks = nn.ModuleDict(blocks)
        self.norm = ends.get("norm", nn.Identity())
        if "head" in ends:
            self.head = ends["head"]


class _Pass(nn.Module):
    """Dropout of the embedding, where there is none."""

    def forward(self, x: Tensor, where: Where) -> Tensor:
        return x


class Stages(nn.Module):
    """What a rank of a pipeline has in place of the model: blocks, and `ends`, which is what the first and the last
    stage have beside blocks. Its stages are views of these. It runs forward through all ranks of the pipeline, which
    call it alike; training goes through `pipe`.
    """

    pipe: Pipeline

    def __init__(self, model: GPT, plan: Plan, rank: int, cut: Sequence[range]):
        super().__init__()
        self.config, self.plan, self.cut = model.config, plan, {stage: cut[stage] for stage in plan.stages_of(rank)}
        self.dtype = model.embed.weight.dtype  # of what a stage returns; the data strategy may change it
        names = [name for stage in self.cut for name in self._ends_of(stage)]
        self.ends = nn.ModuleDict({name: getattr(model, name) for name in names})
        layers = [str(layer) for layers in self.cut.values() for layer in layers]
        self.blocks = nn.ModuleDict({layer: model.blocks[layer] for layer in layers})  # by their numbers in the model

    def _ends_of(self, stage: int) -> tuple[str, ...]:
        first, last = self.plan.before(stage) is None, self.plan.after(stage) is None
        return ("embed", "embed_drop") * first + ("norm", "head") * last

    @functools.cached_property
    def stages(self) -> dict[int, Stage]:
        """The stages, by number: no children, so that each weight has one place. Made when asked for first, after
        parts have been replaced.
        """
        return {
            stage: Stage(
                self.config,
                {str(layer): self.blocks[str(layer)] for layer in layers},
                {name: self.ends[name] for name in self._ends_of(stage)},
            )
            for stage, layers in self.cut.items()
        }

    @property
    def last(self) -> Stage | None:
        """The last stage, which has the head, if it is here."""
        return self.stages.get(self.plan.stages - 1)

    def forward(self, ids: Tensor, where: Where) -> Tensor:
        """What the last stage returns; elsewhere a tensor of that shape with nothing in it. Without gradients."""
        hidden = self.pipe.evaluate([Microbatch((ids,), {"where": where})], lambda output, _: output)
        shape = *ids.shape, self.config.width
        return hidden[0] if hidden else torch.empty(shape, dtype=self.dtype, device=ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, V], on every rank: the last stage's rank sends them to all."""
        if self.last is not None:
            self.pipe.handle.unshard(self.ends)
            logits = self.last.logits(hidden)
            self.pipe.handle.reshard(self.ends)
        else:
            logits = hidden.new_empty(*hidden.shape[:2], self.config.vocab)
        comm.broadcast(logits, self.plan.rank_of[-1], group=self.pipe.group)
        return logits

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """As the model's, where the last stage is."""
        return self.last.loss(hidden, labels)


def microbatches(batches: Sequence[Any]) -> list[Microbatch]:
    """A rank's batches as a pipeline takes them: every stage has the same rows, and derives from them what it needs."""
    return [Microbatch((batch.ids,), {"where": batch.where}, batch.labels) for batch in batches]
