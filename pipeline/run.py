"""A step under way: each verb of a program is a method, and each kind of action.

What lives of a microbatch, from its F to its B or W, is what autograd saved and the stage's inputs. An output goes when
it has been sent: its place in the graph is enough for backward. An input on which nothing depends has a gradient of
zeros, since the stage before waits for one; of inputs that want none, such as token ids or masks, nothing goes back.

Megatron-LM's counterpart: deallocate_output_tensor and custom_backward of core/pipeline_parallel/schedules.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from collectives.watch import about
from pipeline.backward import Root, Weights, backward_input
from pipeline.events import Around, Event
from pipeline.links import Incoming, Kinds, Outgoing, described, gradients_of, of_message
from pipeline.plan import NAMES, Action, Plan, Result
from pipeline.program import Message

if TYPE_CHECKING:
    from pipeline.executor import Pipeline


@dataclass
class Microbatch:
    """A rank's own part of a microbatch: each rank gives what its stages need."""

    args: tuple = ()  # of a first stage
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of every stage
    target: Any = None  # of the loss, at a last stage


@dataclass
class _Live:
    """What is kept of a microbatch in a stage between its forward and its backward."""

    inputs: list[Tensor]  # those that want a gradient
    outputs: list[GradientEdge]  # those that get one
    grads: list[Tensor] | None  # a loss's; None where they come from the next stage
    weights: Weights | None = None  # between I and W


class Run:
    """A step under way on this rank."""

    def __init__(
        self,
        pipe: "Pipeline",
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
        with about(str(message)):
            self.incoming[message] = Incoming(kinds, of_message(message, self.pipe.links), self.pipe.device)

    def wait(self, message: Message) -> None:
        """Take a message."""
        incoming = self.incoming.pop(message)
        with about(str(message)):
            self.here[message.result] = incoming.wait()
        if message.result.kind == "activation":
            self.kinds[message.result] = incoming.kinds

    def run(self, action: Action) -> None:
        """Run an action, between the events of the data strategy."""
        around, kind = next(self.around), self._kind(action)
        self._tell(around.before)
        if kind:
            name, timeline = NAMES[kind], self.pipe.timeline
            span = timeline.span("compute", f"{name} {action.stage}.{action.microbatch}") if timeline else None
            with span or contextlib.nullcontext():
                getattr(self, f"_{name}")(action.stage, action.microbatch)
        self._tell(around.after)

    def _kind(self, action: Action) -> str:
        """What is done: no stage waits for the I of a first one, so its backward is one, which takes the place of W."""
        halves = {"I": "", "W": "B"} if self.plan.before(action.stage) is None else {}
        return halves.get(action.kind, action.kind)

    def _tell(self, told: Sequence[Event]) -> None:
        for verb, unit in told:
            getattr(self.pipe.handle, verb)(unit)

    def send(self, message: Message) -> None:
        """Post the send of a result."""
        result = message.result
        told = self.kinds[result] if result.kind == "activation" and self.known is None else None
        tensors = self.here.pop(result)
        with about(str(message)):
            self.outgoing[message] = Outgoing(tensors, of_message(message, self.pipe.links), self.pipe.device, told)

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
        output = self.pipe.stages[stage](*args, **batch.kwargs)
        if self.plan.after(stage) is None:
            outputs, grads = self._end(output, batch.target, m)
        else:
            outputs, grads = list(_tensors(output, stage)), None
            self._hand_on(stage, m, args, outputs)
        if self.plan.trains:
            leaving = [get_gradient_edge(output) for output in outputs if output.requires_grad]
            self.live[stage, m] = _Live(inputs, leaving, grads)

    def _end(self, output: Any, target: Any, m: int) -> tuple[list[Tensor], list[Tensor]]:
        """The last stage has run. Returns the loss and its gradient, if there is a backward."""
        result = output if self.loss is None else self.loss(output, target)
        if self.plan.trains and result.dim() > 0:
            raise ValueError(f"the loss of microbatch {m} has the shape {list(result.shape)}: return a scalar")
        self.losses[m] = tree_map_only(Tensor, Tensor.detach, result)
        if not self.plan.trains:
            return [], []
        return [result], [torch.ones_like(result)] * result.requires_grad

    def _hand_on(self, stage: int, m: int, args: Sequence[Any], outputs: list[Tensor]) -> None:
        result = Result("activation", stage, m)
        self.kinds[result] = described(outputs)
        if self.known is not None and self.kinds[result] != self.known[result]:
            raise RuntimeError(
                f"stage {stage} returned {self.kinds[result]} for microbatch {m}, and {self.known[result]} before, for "
                "inputs of the same shapes: use varies=True"
            )
        # IDEA: the output itself goes to the next stage; its place in the graph is all that backward needs.
        self.here[result] = [output.detach() for output in outputs]
        for i, output in enumerate(outputs):
            if output.grad_fn is None and not any(output is arg for arg in args):
                self.here[result][i] = output.detach().clone()  # a buffer may change before it has left

    def _backward(self, stage: int, m: int) -> None:
        live = self.live.pop((stage, m))
        grads = self._gradients(live, stage, m)
        if live.outputs:
            torch.autograd.backward(live.outputs, grads)
        self._hand_back(stage, m, live, [tensor.grad for tensor in live.inputs])

    def _input(self, stage: int, m: int) -> None:
        live = self.live[stage, m]
        grads = self._gradients(live, stage, m)
        found, live.weights = backward_input(list(map(Root, live.outputs, grads)), live.inputs)
        self._hand_back(stage, m, live, found)
        live.inputs, live.outputs = [], []

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
