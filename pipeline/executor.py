"""The executor: it runs the program of a rank (program.py), whatever the schedule.

    pipe = Pipeline(plan, {stage: module, ...}, connect(plan, [range(P)], run.new_group), group, loss=loss)
    losses = pipe.step([Microbatch(args, kwargs, target), ...])

A stage is any module, called with the tensors that the stage before returned (run.py). Weights may be in shards: they
are asked for and given back through the handle of the data strategy (`unshard`, `reshard`, `reduce`; events.py).

Cost: a message a microbatch, boundary and direction; a collective of two numbers a step, in which the ranks tell each
other their shapes and mistakes. PyTorch's counterpart: PipelineStage and _PipelineScheduleRuntime of
torch/distributed/pipelining. Left out: communication of a pair of actions hidden behind each other's compute.
"""

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from collectives import comm
from collectives.agreement import agree, together
from collectives.replicas import Replica
from collectives.timeline import Timeline
from pipeline.check import check
from pipeline.events import Around, events
from pipeline.forward_only import forward_only
from pipeline.links import Kinds, Links, channels
from pipeline.plan import Plan, Result
from pipeline.program import Step, program
from pipeline.run import Microbatch, Run

REMEMBERED = 64  # kinds of steps whose messages are known


class Prepared(NamedTuple):
    """A plan, what this rank does in it, and the events around its actions."""

    plan: Plan
    steps: list[Step]
    around: list[Around]


class Pipeline:
    """One rank of a pipeline. Building it is collective over `group`, and so is every method.

    plan: checked here. stages: this rank's modules, by stage. links: of `connect`. group: the pipeline's ranks, in the
    order of the plan. loss(output, target): of a last stage's output, a scalar. handle: the data strategy's, which has
    been given all of this rank's stages. units: of each stage the modules whose weights it needs, default itself.
    open: "step" keeps a stage's weights from its first action to its last, one gather a step; "action" frees them when
    an action of another stage follows, up to 2M gathers, 3M with I and W. reduce: gradients after the last B
    or W of a stage ("step": the stage's whole gradient has memory until then) or after each ("action": M times the
    traffic). varies: a stage's outputs depend on more than the shapes of inputs, so that each is described.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        links: Links,
        group: dist.ProcessGroup,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        handle: Replica | None = None,
        units: Mapping[int, Sequence[nn.Module]] | None = None,
        open: str = "step",
        reduce: str = "step",
        device: torch.device | None = None,
        timeline: Timeline | None = None,
        varies: bool = False,
    ):
        self.plan, self.stages, self.links, self.group = plan, dict(stages), links, group
        self.loss, self.timeline, self.varies, self.rank = loss, timeline, varies, group.rank()
        self.params = [param for stage in self.stages.values() for param in stage.parameters()]
        self.device = device or next((param.device for param in self.params), torch.device("cpu"))
        self.handle, self.open, self.reduce = handle, open, reduce
        self.units = units or {number: [stage] for number, stage in self.stages.items()}
        self.training = together(self._checked, group=group)
        self._compare()
        self.evaluations: dict[int, Prepared] = {}  # by the number of microbatches
        self.known: dict[tuple, dict[Result, Kinds]] = {}  # what messages are, by what the step was given

    def _checked(self) -> Prepared:
        """What this rank does in a step. Raises ValueError for what it was given and cannot do."""
        check(self.plan)
        if self.plan.ranks != self.group.size():
            raise ValueError(f"{self.plan.name} is for {self.plan.ranks} ranks, the group has {self.group.size()}")
        if sorted(self.stages) != self.plan.stages_of(self.rank):
            raise ValueError(
                f"given stages {sorted(self.stages)}; in {self.plan.name} this rank has "
                f"{self.plan.stages_of(self.rank)}"
            )
        for channel, ends in channels(self.plan).items():
            if self.rank in ends and channel not in self.links:
                kind, stage = channel
                raise ValueError(f"links have no group for the {kind}s behind stage {stage}: `connect` this very plan")
        return self._prepare(self.plan)

    def _compare(self) -> None:
        """Raise ValueError on every rank unless all were given the same."""
        plan, settings = self.plan, f"open={self.open}, reduce={self.reduce}, varies={self.varies}"
        mine = f"{plan.name} of {plan.microbatches} microbatches, {settings}", zlib.crc32(repr(plan).encode())
        everyone = comm.all_gather_object(mine, group=self.group)
        if len(set(everyone)) > 1:
            told = "; ".join(words for words, _ in everyone)
            raise ValueError(f"the ranks have different plans or settings: {told}. Give the same on every rank")

    def _prepare(self, plan: Plan) -> Prepared:
        units = self.units if self.handle is not None else {}
        return Prepared(plan, program(plan, self.rank), events(plan.actions[self.rank], units, self.open, self.reduce))

    def step(
        self, microbatches: Sequence[Microbatch], loss: Callable[[Any, Any], Tensor] | None = None
    ) -> list[Tensor]:
        """Forward and backward of one step. Returns the loss of each microbatch that has its last stage here.

        loss: of this step, default that of the pipeline.

        After: the gradients of all microbatches have been added to each parameter's `grad`; with a handle, as after
        backward: `handle.finish()` is the caller's. Raises ValueError on every rank for what does not fit the plan.
        """
        with contextlib.nullcontext() if self.handle is None else self.handle.deferring():
            return self._run(self.training, microbatches, loss or self.loss)

    def evaluate(
        self, microbatches: Sequence[Microbatch], loss: Callable[[Any, Any], Tensor] | None = None
    ) -> list[Any]:
        """Forward alone, of any number of microbatches, the same on every rank. Returns of each that has its last stage
        here the loss, or whatever `loss(output, target)` is; nothing of it is kept.
        """
        count = len(microbatches)
        if count not in self.evaluations:
            self.evaluations[count] = self._prepare(forward_only(self.plan, count))
        with torch.no_grad():
            return self._run(self.evaluations[count], microbatches, loss or self.loss)

    def _run(self, prepared: Prepared, microbatches: Sequence[Microbatch], loss: Callable | None) -> list[Any]:
        plan, steps, around = prepared
        key = self._agreed(plan, microbatches, loss)
        run = Run(self, plan, microbatches, loss=loss, known=self.known.get(key), around=iter(around))
        # IDEA: whatever the schedule, a step is a list of verbs, and to run it is to do them one after the other.
        for verb, what in steps:
            getattr(run, verb)(what)
        if not self.varies:
            self.known[key] = run.kinds
        if len(self.known) > REMEMBERED:
            del self.known[next(iter(self.known))]  # the oldest, on every rank alike
        return [run.losses[m] for m in sorted(run.losses)]

    def _problem(self, plan: Plan, microbatches: Sequence[Microbatch], loss: Callable | None) -> str:
        """What is wrong with what this rank was given."""
        if len(microbatches) != plan.microbatches:
            told = f"{plan.name} has {plan.microbatches} microbatches, {len(microbatches)} were given"
            return f"{told}: give as many, or make another plan"
        if loss is None and plan.trains and any(plan.after(stage) is None for stage in self.stages):
            return "there is no loss, and a last stage is here: give loss="
        if plan.trains and not torch.is_grad_enabled():
            return "gradients are off: call `step` outside of torch.no_grad(), or `evaluate`"
        for m, each in enumerate(microbatches):
            if not isinstance(each.args, tuple | list) or not isinstance(each.kwargs, Mapping):
                return f"microbatch {m} has args or kwargs that are none: give Microbatch((x, …), {{…}}, target)"
        firsts = [stage for stage in self.stages if plan.before(stage) is None]
        without = [m for stage in firsts for m in plan.through(stage) if not microbatches[m].args]
        return f"microbatch {without[0]} has no args, and a first stage is here" if without else ""

    def _agreed(self, plan: Plan, microbatches: Sequence[Microbatch], loss: Callable | None) -> tuple:
        """What the shapes of a step's messages depend on, of all ranks. Raises ValueError on every rank if any of them
        was given what cannot run.
        """
        problem = self._problem(plan, microbatches, loss)
        leaves = [leaf for each in microbatches for leaf in tree_leaves((each.args, each.kwargs, each.target))]
        shapes = [(leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)]
        modes = [param.requires_grad for param in self.params], torch.is_autocast_enabled(self.device.type)
        count = -1 if problem else len(microbatches)
        mine = torch.tensor([count, hash((str(shapes), str(modes)))], device=self.device)
        everyone = torch.empty(self.group.size() * 2, dtype=torch.int64, device=self.device)
        comm.all_gather_single(everyone, mine, group=self.group)
        counts, keys = everyone.view(-1, 2).T.tolist()
        if -1 in counts:
            agree(problem, self.device, group=self.group)
        if len(set(counts)) > 1:
            raise ValueError(f"the ranks were given {counts} microbatches: give the same number on every rank")
        return plan.name, *counts[:1], *keys
