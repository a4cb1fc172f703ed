"""A small model whose blocks sleep, for the demo and for the study of cuts; its batches, its loss, and the step of one
process beside which a pipeline is judged.

A block sleeps for as long in F as in I and in W. Ranks that share the cores of one machine would otherwise show the
machine's time. Embedding and head do not sleep, unless the head is told to.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from collectives import comm, demo
from collectives.demo import Demo
from collectives.timeline import Span, Timeline
from collectives.watch import Watcher, watching
from pipeline.executor import Microbatch, Pipeline
from pipeline.picture import gathered, measured

B, T, D, HIDDEN, VOCAB, IGNORED = 4, 16, 64, 128, 211, -100
NAP = 0.02  # seconds that a block sleeps in each of F, I and W


class Sleep(torch.autograd.Function):
    """Forward: nothing; backward: sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """x itself."""
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        """Its gradient, later."""
        time.sleep(ctx.seconds)
        return dout, None


class Nap(nn.Module):
    """Adds a bias, and sleeps: in F; in I, on the way to the input; in W, on the way to the bias."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.bias, self.seconds, self.awake = nn.Parameter(torch.zeros(width)), seconds, False

    def forward(self, x: Tensor) -> Tensor:
        seconds = 0.0 if self.awake else self.seconds
        time.sleep(seconds)
        # IDEA: who sleeps needs no core, so on shared cores too a step takes as long as its schedule says.
        return Sleep.apply(x, seconds) + Sleep.apply(self.bias, seconds)


class Block(nn.Module):
    """A feed-forward layer, and a nap."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(D), nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        self.nap = Nap(D, NAP)

    def forward(self, x: Tensor) -> Tensor:
        return self.nap(x + self.down(self.up(self.norm(x)).relu()))  # [B, T, D]


def layers(blocks: int, head: float = 0.0) -> list[nn.Module]:
    """Embedding, blocks, head, the same every time. head: seconds for which the head sleeps."""
    torch.manual_seed(0)
    embedding, middle = nn.Embedding(VOCAB, D), [Block() for _ in range(blocks)]
    last = nn.Sequential(nn.RMSNorm(D), nn.Linear(D, VOCAB), Nap(VOCAB, head))
    return [layer.double() for layer in (embedding, *middle, last)]


def cut_out(model: Sequence[nn.Module], which: range) -> nn.Sequential:
    """A stage: these layers, under the names that they have in the whole."""
    return nn.Sequential(OrderedDict((str(i), model[i]) for i in which))


def batch(microbatches: int) -> list[Microbatch]:
    """Ids and labels [B, T] of each microbatch, the same on every rank; of labels some are ignored, ever more."""
    draw, found = torch.Generator().manual_seed(1), []
    for m in range(microbatches):
        ids, labels = (torch.randint(VOCAB, (B, T), generator=draw) for _ in range(2))
        labels[0, :m] = IGNORED
        found.append(Microbatch((ids,), target=labels))
    return found


def loss_over(microbatches: Sequence[Microbatch]) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a microbatch's tokens, as a share of the step's."""
    valid = sum(int((each.target != IGNORED).sum()) for each in microbatches)
    return lambda logits, labels: cross_entropy(logits.mT, labels, ignore_index=IGNORED, reduction="sum") / valid


class Paced(NamedTuple):
    """A step that all ranks began together."""

    spans: list[Span]  # what they computed, all ranks
    sent: int | None  # bytes that this rank wrote to sockets, None where they cannot be counted


def paced(pipe: Pipeline, microbatches: Sequence[Microbatch], *watchers: Watcher) -> Paced:
    """Run a step. Collective."""
    pipe.timeline = Timeline()
    comm.barrier(group=pipe.group)
    before = demo.bytes_written()
    with watching(pipe.timeline, *watchers):
        pipe.step(microbatches)
    sent = demo.bytes_since(before)
    return Paced(measured(gathered(pipe.timeline, pipe.group)), sent)


# -- beside one process ------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What one process has after a step."""

    losses: list[Tensor]  # of each microbatch
    gradients: dict[str, Tensor]  # by name


def alone(model: Sequence[nn.Module], microbatches: Sequence[Microbatch]) -> Reference:
    """All layers in one process, awake, one microbatch after the other."""
    whole, loss_of, losses = cut_out(model, range(len(model))), loss_over(microbatches), []
    keep_awake(model)
    for each in microbatches:
        loss = loss_of(whole(*each.args), each.target)
        loss.backward()
        losses.append(loss.detach())
    return Reference(losses, {name: param.grad for name, param in whole.named_parameters()})


def keep_awake(modules: Iterable[nn.Module], awake: bool = True) -> None:
    """From now on none of their naps sleeps, or each does again."""
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, Nap):
            part.awake = awake


def parity(show: Demo, pipe: Pipeline, losses: Sequence[Tensor], reference: Reference) -> None:
    """Claim that this step has the reference's losses and, all ranks together, its gradients. Collective.

    Where there are two copies of a parameter, its gradient is the sum of theirs.
    """
    ours: dict[str, Tensor] = {}
    plan, stages = pipe.plan, pipe.stages
    mine = [(name, param.grad) for stage in stages.values() for name, param in stage.named_parameters()]
    for name, grad in (pair for of_rank in comm.all_gather_object(mine, group=pipe.group) for pair in of_rank):
        ours[name] = ours[name] + grad if name in ours else grad
    show.parity("gradients", max(worst(ours.get(name), grad) for name, grad in reference.gradients.items()), 1e-12)
    last = [m for stage in stages if plan.after(stage) is None for m in plan.through(stage)]
    expected = [reference.losses[m] for m in last]
    show.parity("losses", max(map(worst, losses, expected), default=0.0), 1e-12)


def worst(ours: Tensor | None, expected: Tensor) -> float:
    """The largest error as a share of the largest entry; infinite if it is missing or not a number."""
    error = math.nan if ours is None else float((ours - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf
