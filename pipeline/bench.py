"""A training step of every schedule, beside the same one of torch.distributed.pipelining: time, bytes, peak memory.

    python -m pipeline.bench                        2 and 4 ranks
    python -m pipeline.bench --ranks 2 --repeat 5   five whole runs, and the median of their ratios

nd_mesh's GPT with 3.6 million parameters in eight layers, float32, 8 microbatches of a row of 256 tokens; forward and
backward, the gradients in memory that is new in every step. Both have the same stages, with the layers cut evenly, and
the same rows. PyTorch's are not asked for outputs, nor to divide the gradients, which ours do not do either. Peaks are
those of two steps from before the first one, so that what is kept from step to step counts.

InterleavedZeroBubble beside zb_h1 has one stage a rank; with two, which zb_h1 does not do, it stands beside zbv.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
)

from collectives import allocated, comparison, layout, rng
from collectives.runtime import Runtime
from collectives.turns import Case
from nd_mesh.config import ModelConfig
from nd_mesh.model import GPT, Where
from pipeline import Microbatch, Pipeline, connect, schedule
from pipeline.plan import looped, v_shaped

MODEL = ModelConfig(layers=8, width=192, heads=6, kv_heads=6, hidden=512)
SMALL = ModelConfig(layers=8, width=16, heads=2, kv_heads=2, hidden=32)
MICROBATCHES, CONTEXT = 8, 256


class Stage(nn.Module):
    """Consecutive layers of the model, with the embedding before its first and the head after its last."""

    def __init__(self, model: GPT, number: int, stages: int):
        super().__init__()
        size = len(model.blocks) // stages
        self.embed = model.embed if number == 0 else nn.Identity()
        self.blocks = nn.ModuleList(list(model.blocks.values())[number * size :][:size])
        self.end = nn.Sequential(model.norm, model.head) if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # [B, T] or [B, T, D] -> [B, T, D] or [B, T, V]
        x, where = self.embed(x), one_document(x.device)
        for block in self.blocks:
            x = block(x, where)
        return self.end(x)


def one_document(device: torch.device) -> Where:
    """The place of every row's tokens."""
    slots = torch.arange(CONTEXT, device=device)
    return Where(0, slots[:1], slots, slots, CONTEXT, slots[None], torch.zeros_like(slots)[None])


class Step(NamedTuple):
    """This rank's stages, and what runs a step with them: it returns the losses of the microbatches at the last one."""

    stages: dict[int, Stage]
    run: Callable[[], list[Tensor]]

    def clear(self) -> None:
        """Drop the gradients."""
        for stage in self.stages.values():
            stage.zero_grad()


Way = Callable[[Runtime, ModelConfig], Step]


def cut(run: Runtime, config: ModelConfig, rank_of: tuple[int, ...]) -> dict[int, Stage]:
    """This rank's stages of a model that is the same on every rank."""
    model = GPT(config, 0)
    layout.declare(model, model.init_rule, model.decay_rule)
    for param in model.parameters():
        rng.fill(param, 0)
    mine = [number for number, rank in enumerate(rank_of) if rank == run.rank]
    return {number: Stage(model, number, len(rank_of)).to(run.device) for number in mine}


def rows(run: Runtime) -> tuple[Tensor, Tensor]:
    """The rows of a step and their labels, one a microbatch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (MICROBATCHES, CONTEXT + 1), generator=generator).to(run.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A microbatch's part of the mean over the tokens of a step."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / MICROBATCHES


def ours(run: Runtime, config: ModelConfig, name: str) -> Step:
    """pipeline/."""
    plan = schedule(name, run.size, MICROBATCHES)
    stages = cut(run, config, plan.rank_of)
    pipe = Pipeline(plan, stages, connect(plan, [range(run.size)], run.new_group), run.world, loss=loss)
    given = [Microbatch((ids,), target=labels) for ids, labels in zip(*(t.split(1) for t in rows(run)), strict=True)]
    return Step(stages, partial(pipe.step, given))


def theirs(run: Runtime, config: ModelConfig, kind: type, rank_of: tuple[int, ...]) -> Step:
    """torch.distributed.pipelining."""
    stages = cut(run, config, rank_of)
    ids, labels = rows(run)
    parts = [PipelineStage(part, i, len(rank_of), run.device, group=run.world) for i, part in stages.items()]
    one = issubclass(kind, PipelineScheduleSingle)
    pipe = kind(parts[0] if one else parts, MICROBATCHES, loss_fn=loss, scale_grads=False)

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        pipe.step(*[ids] * (0 in stages), target=labels, losses=losses, return_outputs=False)
        return losses

    return Step(stages, step)


def pairs(ranks: int) -> Mapping[str, Mapping[str, Way]]:
    """Of each schedule ours and PyTorch's."""
    one, two, folded = looped(ranks, 1), looped(ranks, 2), v_shaped(ranks)
    return {
        "gpipe": {"ScheduleGPipe": partial(theirs, kind=ScheduleGPipe, rank_of=one)},
        "1f1b": {"Schedule1F1B": partial(theirs, kind=Schedule1F1B, rank_of=one)},
        "interleaved": {"ScheduleInterleaved1F1B": partial(theirs, kind=ScheduleInterleaved1F1B, rank_of=two)},
        "zb_h1": {"ScheduleInterleavedZeroBubble": partial(theirs, kind=ScheduleInterleavedZeroBubble, rank_of=one)},
        "zbv": {
            "ScheduleZBVZeroBubble": partial(theirs, kind=ScheduleZBVZeroBubble, rank_of=folded),
            "ScheduleInterleavedZeroBubble, V = 2": partial(theirs, kind=ScheduleInterleavedZeroBubble, rank_of=two),
        },
        "dualpipe_v": {"ScheduleDualPipeV": partial(theirs, kind=ScheduleDualPipeV, rank_of=folded)},
    }


def step(run: Runtime, name: str, config: ModelConfig = MODEL) -> Case:
    """A step of everyone's."""
    ways = {f"pipeline, {name}": partial(ours, name=name), **pairs(run.size)[name]}
    steps = {who: way(run, config) for who, way in ways.items()}

    def clear() -> None:
        for made in steps.values():
            made.clear()

    calls = {who: made.run for who, made in steps.items()}
    return Case(name, calls, prepare=clear, peaks={who: partial(peak, run, config, way) for who, way in ways.items()})


def peak(run: Runtime, config: ModelConfig, way: Way) -> int:
    """The most bytes beside the weights in the first two steps."""
    made: list[Step] = []

    def build() -> None:
        made[:] = [way(run, config)]

    def two_steps() -> None:
        made[0].run()
        made[0].clear()
        made[0].run()

    return allocated.peak_bytes(two_steps, run.device, prepare=build)


def cases(run: Runtime) -> list[Case]:
    """What is measured on this many ranks."""
    return [step(run, name) for name in pairs(run.size)]


if __name__ == "__main__":
    sys.exit(comparison.main(cases, ranks=(2, 4)))
