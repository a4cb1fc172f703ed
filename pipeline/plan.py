"""A plan: what each rank of a pipeline does, in which order. It is data, which is checked, timed, drawn and run.

The model is a chain of stages; a rank has one, or several (virtual stages). An action is one microbatch in one stage:

    F  forward
    B  backward, all of it: B = I + W
    I  the half of backward that makes the gradient of the stage's input, which the stage before waits for
    W  the half that makes the gradients of the weights, which nobody waits for before the optimizer

A rank's activations of a microbatch are live from its F to its B or W. Lectures A, "Pipeline Parallel: Layer 묶음을
Stage로 나눈다", and B, "Pipeline Parallelism: 깊이로 자르기". PyTorch's counterpart: _Action and pipeline_order of
torch/distributed/pipelining/schedules.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

NAMES = MappingProxyType({"F": "forward", "B": "backward", "I": "input", "W": "weight"})


class Action(NamedTuple):
    """A microbatch in a stage. paired: it may run at the same time as the action behind it (DualPipe's overlap of a
    forward with a backward).
    """

    kind: str  # F, B, I or W
    stage: int
    microbatch: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


def F(stage: int, microbatch: int, *, paired: bool = False) -> Action:
    """Forward."""
    return Action("F", stage, microbatch, paired)


def B(stage: int, microbatch: int, *, paired: bool = False) -> Action:
    """Backward as a whole."""
    return Action("B", stage, microbatch, paired)


def I(stage: int, microbatch: int) -> Action:  # noqa: E743, the papers' letter
    """Backward for the stage's input."""
    return Action("I", stage, microbatch)


def W(stage: int, microbatch: int) -> Action:
    """Backward for the stage's weights."""
    return Action("W", stage, microbatch)


_MADE = MappingProxyType({"F": "activation", "B": "gradient", "I": "gradient"})


class Result(NamedTuple):
    """What an action makes for others: the activation that leaves a stage, or the gradient of the one that entered."""

    kind: str  # activation or gradient
    stage: int  # that made it
    microbatch: int


@dataclass(frozen=True)
class Plan:
    """What every rank does. Ranks are those of the pipeline's group; stages count along the chain.

    copies: of the model. With two, the stages are two chains one behind the other, and a microbatch goes through one
    of them: the first half through the first.
    """

    name: str
    rank_of: tuple[int, ...]  # [S] which rank has the stage
    microbatches: int  # M
    # IDEA: a schedule is data: an order of actions on each rank, and all else follows from it.
    actions: tuple[tuple[Action, ...], ...]  # by rank
    copies: int = 1

    @property
    def stages(self) -> int:
        """S, of all copies together."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.actions)

    @property
    def length(self) -> int:
        """Stages of a chain: those of one copy."""
        return self.stages // self.copies

    def before(self, stage: int) -> int | None:
        """The stage that sends this one its inputs; None of a first stage."""
        return stage - 1 if stage % self.length else None

    def after(self, stage: int) -> int | None:
        """The stage that takes this one's outputs; None of a last stage, which has the loss."""
        return stage + 1 if (stage + 1) % self.length else None

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank has."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def through(self, stage: int) -> range:
        """The microbatches that go through a stage."""
        half = -(-self.microbatches // self.copies)
        chain = stage // self.length
        return range(chain * half, min(self.microbatches, (chain + 1) * half))

    def result(self, action: Action) -> Result | None:
        """What an action makes; a W makes nothing that another action needs."""
        return Result(_MADE[action.kind], action.stage, action.microbatch) if action.kind in _MADE else None

    def from_neighbour(self, action: Action) -> Result | None:
        """What an action needs of the stage before, or, going back, of the one behind; None at the ends, and for W."""
        source = {"F": self.before, "B": self.after, "I": self.after}.get(action.kind, lambda stage: None)(action.stage)
        return None if source is None else Result(_MADE[action.kind], source, action.microbatch)

    def needs(self, action: Action) -> list[Result]:
        """All that must be there before an action: that, and what the same stage has done before."""
        own = {"B": "activation", "I": "activation", "W": "gradient"}.get(action.kind)
        own = [Result(own, action.stage, action.microbatch)] if own else []
        return own + [need for need in (self.from_neighbour(action),) if need]

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return any(action.kind != "F" for actions in self.actions for action in actions)


def looped(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage s on rank s mod P: 0 1 2 3 0 1 2 3. With one stage a rank, the usual placement."""
    return tuple(range(ranks)) * virtual


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again: 0 1 2 3 3 2 1 0. The first rank has the first and the last stage."""
    return (*range(ranks), *reversed(range(ranks)))


def made(
    name: str, rank_of: Sequence[int], microbatches: int, actions: Iterable[Sequence[Action]], copies: int = 1
) -> Plan:
    """A plan of these actions, without those of microbatches that there are not.

    Without them it is a plan still: a microbatch depends on itself alone, and the order of the others stays. So a
    schedule that is written for so many microbatches at least, or for a multiple, serves any number.
    """
    empty = Plan(name, tuple(rank_of), microbatches, (), copies)
    kept = tuple(tuple(_kept(of_rank, empty)) for of_rank in actions)
    return replace(empty, actions=kept)


def _kept(actions: Sequence[Action], plan: Plan) -> Iterator[Action]:
    there = [*(action.microbatch in plan.through(action.stage) for action in actions), False]
    for i, action in enumerate(actions):
        if there[i]:
            yield action._replace(paired=action.paired and there[i + 1])


def check_numbers(name: str, *, virtual: int, fits: int | None, **sizes: int) -> None:
    """Raise ValueError unless ranks and microbatches (`sizes`) are positive, and so many stages a rank fit: `fits`, or
    any number if that is None.
    """
    for size, value in {**sizes, "virtual": virtual}.items():
        if value < 1:
            raise ValueError(f"{name}: {size}={value} must be positive")
    if fits is not None and virtual != fits:
        raise ValueError(f"{name} has {fits} stages a rank, not virtual={virtual}: use virtual={fits}, or interleaved")
