"""The executor: it runs the program of a rank (program.py), whatever the schedule.

    pipe = Pipeline(plan, {stage: module, ...}, connect(plan, [range(P)], run.new_group), group, loss=loss)
    losses = pipe.step([Microbatch(args, kwargs, target), ...])

A stage is any module, called with the tensors that the stage before returned. What lives of a microbatch, from its F to
its B or W, is what autograd saved and the stage's inputs; an output goes when it has been sent, since its place in the
graph is enough for backward. A rank's weights may be in shards: they are asked for and given back through the handle of
the data strategy (`unshard`, `reshard`, `reduce`).

Cost: a message a microbatch, boundary and direction; a collective of two numbers a step, in which the ranks tell each
other their shapes and mistakes. PyTorch's counterpart: PipelineStage and _PipelineScheduleRuntime of
torch/distributed/pipelining. Left out: communication of a pair of actions hidden behind each other's compute.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from collectives import comm
from collectives.agreement import together
from collectives.replicas import Replica
from collectives.timeline import Timeline
from pipeline.backward import Root, Weights, backward_input
from pipeline.check import check
from pipeline.entry import Entry
from pipeline.events import Around, Event, events
from pipeline.forward_only import forward_only
from pipeline.links import Incoming, Kinds, Links, Outgoing, described, gradients_of, of_message
from pipeline.plan import Action, Plan, Result
from pipeline.program import Message, Step, joined, program

NAMES = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


@dataclass
class Microbatch:
    """A rank's own part of a microbatch: each rank gives what its stages need."""

    args: tuple = ()  # of a first stage
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of every stage
    target: Any = None  # of the loss, at a last stage


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
        together(self._check, group=group)
        plans = comm.all_gather_object((plan.name, plan.microbatches, zlib.crc32(repr(plan).encode())), group=group)
        if len(set(plans)) > 1:
            told = ", ".join(f"{name} of {microbatches} microbatches" for name, microbatches, _ in plans)
            raise ValueError(f"the ranks have different plans: {told}; make the same on every rank")
        self.handle, self.open, self.reduce = handle, open, reduce
        self.units = units or {number: [stage] for number, stage in self.stages.items()}
        self.entries = {number: Entry(stage) for number, stage in self.stages.items() if plan.before(number) is None}
        self.prepared: dict[Plan, tuple[list[Step], list[Around]]] = {plan: self._prepare(plan)}
        self.known: dict[tuple, dict[Result, Kinds]] = {}  # what messages are, by what the step was given

    def _check(self) -> None:
        check(self.plan)
        if self.plan.ranks != self.group.size():
            raise ValueError(f"{self.plan.name} is for {self.plan.ranks} ranks, the group has {self.group.size()}")
        if sorted(self.stages) != self.plan.stages_of(self.rank):
            raise ValueError(
                f"given stages {sorted(self.stages)}; in {self.plan.name} this rank has "
                f"{self.plan.stages_of(self.rank)}"
            )

    def _prepare(self, plan: Plan) -> tuple[list[Step], list[Around]]:
        plan, units = joined(plan), self.units if self.handle is not None else {}
        return program(plan, self.rank), events(plan.actions[self.rank], units, self.open, self.reduce)

    def step(
        self, microbatches: Sequence[Microbatch], loss: Callable[[Any, Any], Tensor] | None = None
    ) -> list[Tensor]:
        """Forward and backward of one step. Returns the loss of each microbatch that has its last stage here.

        loss: of this step, default that of the pipeline.

        After: the gradients of all microbatches have been added to each parameter's `grad`; with a handle, as after
        backward: `handle.finish()` is the caller's. Raises ValueError on every rank for what does not fit the plan.
        """
        with contextlib.nullcontext() if self.handle is None else self.handle.deferring():
            return self._run(self.plan, microbatches, loss or self.loss)

    def evaluate(
        self, microbatches: Sequence[Microbatch], loss: Callable[[Any, Any], Tensor] | None = None
    ) -> list[Any]:
        """Forward alone, of any number of microbatches, the same on every rank. Returns of each that has its last stage
        here the loss, or whatever `loss(output, target)` is; nothing of it is kept.
        """
        plan = forward_only(self.plan, len(microbatches))
        if plan not in self.prepared:
            self.prepared[plan] = self._prepare(plan)
        with torch.no_grad():
            return self._run(plan, microbatches, loss or self.loss)

    def _run(self, plan: Plan, microbatches: Sequence[Microbatch], loss: Callable | None) -> list[Any]:
        key = self._agreed(plan, microbatches, loss)
        kinds = None if self.varies else self.known.get(key)
        steps, around = self.prepared[plan]
        run = _Run(self, plan, microbatches, loss=loss, known=kinds, around=iter(around))
        for verb, what in steps:
            getattr(run, verb)(what)
        self.known[key] = run.kinds
        return [run.losses[m] for m in sorted(run.losses)]

    def _problem(self, plan: Plan, microbatches: Sequence[Microbatch], loss: Callable | None) -> str:
        """What is wrong with what this rank was given."""
        if len(microbatches) != plan.microbatches:
            told = f"{plan.name} has {plan.microbatches} microbatches, {len(microbatches)} were given"
            return f"{told}: give as many, or make another plan"
        if loss is None and plan.trains and any(plan.after(stage) is None for stage in self.stages):
            return "there is no loss, and a last stage is here: give loss="
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
            together(lambda: _raise(problem), group=self.group)
        if len(set(counts)) > 1:
            raise ValueError(f"the ranks were given {counts} microbatches: give the same number on every rank")
        return plan.name, *counts[:1], *keys


def _raise(problem: str) -> None:
    if problem:
        raise ValueError(problem)


@dataclass
class _Live:
    """What is kept of a microbatch in a stage between its forward and its backward."""

    inputs: list[Tensor]  # those that want a gradient
    outputs: list[GradientEdge]  # those that get one
    grads: list[Tensor] | None  # a loss's; None where they come from the next stage
    entered: list[GradientEdge]  # where a first stage's backward is split
    weights: Weights | None = None  # between I and W


class _Run:
    """A step under way. Its methods are the verbs of a program."""

    def __init__(
        self,
        pipe: Pipeline,
        plan: Plan,
        microbatches: Sequence[Microbatch],
        *,
        loss: Callable[[Any, Any], Any] | None,
        known: dict[Result, Kinds] | None,
        around: Iterator[Around],
    ):
        self.pipe, self.plan, self.microbatches, self.loss = pipe, plan, microbatches, loss
        self.known, self.around = known, around
        self.kinds: dict[Result, Kinds] = {}  # of the activations sent and received in this step
        self.here: dict[Result, list[Tensor]] = {}  # results that an action of this rank will take
        self.live: dict[tuple[int, int], _Live] = {}
        self.incoming: dict[Message, Incoming] = {}
        self.outgoing: dict[Message, Outgoing] = {}
        self.losses: dict[int, Any] = {}

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Have memory for a message, and post its receive."""
        result, kinds = message.result, None
        if result.kind == "gradient":
            kinds = gradients_of(self.kinds[Result("activation", message.target, result.microbatch)])
        elif self.known is not None:
            kinds = self.known[result]
        self.incoming[message] = Incoming(kinds, of_message(message, self.pipe.links), self.pipe.device)

    def wait(self, message: Message) -> None:
        """Take a message."""
        incoming = self.incoming.pop(message)
        self.here[message.result] = incoming.wait()
        if message.result.kind == "activation":
            self.kinds[message.result] = incoming.kinds

    def run(self, action: Action) -> None:
        """Run an action, between the events of the data strategy."""
        stage, timeline, around = action.stage, self.pipe.timeline, next(self.around)
        self._tell(around.before)
        name = f"{NAMES[action.kind]} {stage}.{action.microbatch}"
        with timeline.span("compute", name) if timeline else contextlib.nullcontext():
            getattr(self, f"_{NAMES[action.kind]}")(stage, action.microbatch)
        self._tell(around.after)

    def _tell(self, told: Sequence[Event]) -> None:
        for verb, unit in told:
            getattr(self.pipe.handle, verb)(unit)

    def send(self, message: Message) -> None:
        """Post the send of a result."""
        result = message.result
        told = None
        if result.kind == "activation" and self.known is None:
            told = self.kinds[result]
        tensors = self.here.pop(result)
        self.outgoing[message] = Outgoing(tensors, of_message(message, self.pipe.links), told)

    def settle(self, message: Message) -> None:
        """A message has left: free it."""
        self.outgoing.pop(message).settle()

    # -- actions -------------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, m: int) -> None:
        batch, before, inputs = self.microbatches[m], self.plan.before(stage), []
        args = batch.args
        if before is not None:
            source = Result("activation", before, m)
            args = self.here.pop(source)
            for tensor, kind in zip(args, self.kinds[source], strict=True):
                if kind.grad:
                    inputs.append(tensor.requires_grad_())
        entry = self.pipe.entries.get(stage)
        with entry or contextlib.nullcontext():
            output = self.pipe.stages[stage](*args, **batch.kwargs)
        if self.plan.after(stage) is None:
            outputs, grads = self._end(output, batch.target, m)
        else:
            outputs, grads = list(_tensors(output, stage)), None
            self._hand_on(stage, m, outputs)
        if self.plan.trains:
            leaving = [get_gradient_edge(output) for output in outputs if output.requires_grad]
            self.live[stage, m] = _Live(inputs, leaving, grads, entry.taken() if entry else [])

    def _end(self, output: Any, target: Any, m: int) -> tuple[list[Tensor], list[Tensor]]:
        """The last stage has run. Returns the loss and its gradient, if there is a backward."""
        result = output if self.loss is None else self.loss(output, target)
        self.losses[m] = tree_map_only(Tensor, Tensor.detach, result)
        if not self.plan.trains:
            return [], []
        return [result], [torch.ones_like(result)] * result.requires_grad

    def _hand_on(self, stage: int, m: int, outputs: list[Tensor]) -> None:
        result = Result("activation", stage, m)
        self.kinds[result] = described(outputs)
        if self.known is not None and self.kinds[result] != self.known[result]:
            raise RuntimeError(
                f"stage {stage} returned {self.kinds[result]} for microbatch {m}, and {self.known[result]} before, for "
                "inputs of the same shapes: use varies=True"
            )
        # IDEA: the output itself goes to the next stage; its place in the graph is all that backward needs.
        self.here[result] = [output.detach() for output in outputs]

    def _backward(self, stage: int, m: int) -> None:
        live = self.live.pop((stage, m))
        grads = self._gradients(live, stage, m)
        if live.outputs:
            torch.autograd.backward(live.outputs, grads)
        self._hand_back(stage, m, live, [tensor.grad for tensor in live.inputs])

    def _input(self, stage: int, m: int) -> None:
        live = self.live[stage, m]
        grads = self._gradients(live, stage, m)
        ends = [get_gradient_edge(tensor) for tensor in live.inputs] or live.entered
        found, live.weights = backward_input(list(map(Root, live.outputs, grads)), ends)
        self._hand_back(stage, m, live, found)
        live.inputs, live.outputs, live.entered = [], [], []

    def _weight(self, stage: int, m: int) -> None:
        self.live.pop((stage, m)).weights.run()

    def _gradients(self, live: _Live, stage: int, m: int) -> list[Tensor]:
        if live.grads is not None:
            return live.grads
        return self.here.pop(Result("gradient", self.plan.after(stage), m))

    def _hand_back(self, stage: int, m: int, live: _Live, grads: Sequence[Tensor | None]) -> None:
        """Of an input on which nothing depends the gradient is zero: the stage before waits for one."""
        if self.plan.before(stage) is not None:
            pairs = zip(live.inputs, grads, strict=True)
            self.here[Result("gradient", stage, m)] = [torch.zeros_like(x) if g is None else g for x, g in pairs]


def _tensors(output: Any, stage: int) -> Sequence[Tensor]:
    """What a stage hands on. Raises TypeError for anything but tensors."""
    outputs = output if isinstance(output, tuple | list) else (output,)
    for each in outputs:
        if not isinstance(each, Tensor):
            raise TypeError(f"stage {stage} returned a {type(each).__name__}: return a tensor, or a tuple of tensors")
    return outputs
