"""Loads, seen: a router that begins with a few experts, trained as it is and with each remedy.

    python -m expert_parallel.loads                       4 local ranks
    python -m expert_parallel.loads --figure loads.png    as a picture too; needs matplotlib

Tokens are of 24 kinds, frequent and rare ones; a row has four of them. The task is to turn the signs of a token's
channels, others for each kind. Twelve experts are shared by all ranks, and the router's first weights favour three, all
of rank 0. The coefficients are larger than a model's, since there are 40 steps to see them work. What a rank computes
is of the last ten, and so is its processor's time, the median of forward and backward of the layer. Lecture A, "Expert
Parallel": "특정 expert에 token이 몰리면 capacity overflow와 straggler가 생깁니다".
"""

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collectives import comm, demo
from collectives.demo import Demo
from collectives.runtime import Runtime
from expert_parallel.balance import follow_load
from expert_parallel.moe import Losses, MoE
from expert_parallel.observe import Observation, observe
from expert_parallel.sequences import Sequences

D, F, E, CHOICES = 64, 512, 12, 2
KINDS, FAVOURED, FAVOUR = 24, 3, 1.5
ROWS, T = 16, 64  # of a step, all ranks together
STEPS, LAST, RATE = 40, 10, 0.005
COEFFICIENT, BIAS_RATE, CAPACITY = 0.3, 0.02, 1.25
FIGURE = "the loads of experts by step, and the work of ranks,"


FAIR = ROWS * T * CHOICES / E  # choices of an expert in a step, if all have as many


class Course(NamedTuple):
    """A training."""

    name: str
    chosen: list[Observation]  # of each step
    computed: list[list[int]]  # [steps][E] rows, what was dropped is not among them
    errors: list[float]  # mean squares; 1 is what the answers are
    seconds: list[float]  # of each rank's processor, the median of the last steps

    def busiest(self) -> float:
        """Rows of the rank with most, over a fair share, in the last steps."""
        mine = E // len(self.seconds)
        experts = [sum(step[e] for step in self.computed[-LAST:]) for e in range(E)]
        return max(sum(experts[first : first + mine]) for first in range(0, E, mine)) / (LAST * FAIR * mine)

    def __str__(self) -> str:
        """A line of the table."""
        last, mean = self.chosen[-LAST:], statistics.mean
        chosen = [self.chosen[0].imbalance, mean(step.imbalance for step in last), self.busiest()]
        # IDEA: all ranks wait for the one with most to compute, so what counts is not the mean but max over mean.
        times = [max(self.seconds), mean(self.seconds)]
        numbers = "".join(f"{each:9.2f}" for each in chosen) + "".join(f"{1e3 * each:9.1f}" for each in times)
        router = f"{mean(step.overflow for step in last):9.1%}{mean(step.entropy for step in last):9.2f}"
        return f"{self.name:16}{numbers}{times[0] / times[1]:9.2f}{router}{mean(self.errors[-LAST:]):9.3f}"


HEADER = f"""
{"":16}{"chosen, max/mean":>18}{"busiest":>9}{"processor, ms":>18}{"max /":>9}{"":>9}{"entropy":>9}
{"":16}{"first":>9}{"last":>9}{"rank":>9}{"busiest":>9}{"mean":>9}{"mean":>9}{"dropped":>9}{"nats":>9}{"error":>9}"""


def work(run: Runtime, show: Demo) -> None:
    """All of it."""
    found = courses(run, show)
    if run.rank == 0:
        tell(found, show.figure)


def methods(run: Runtime) -> dict[str, Mapping[str, Any]]:
    """Settings of the layer."""
    nothing = {"losses": Losses(balance=0.0)}
    return {
        "nothing": nothing,
        "sequence loss": {"losses": Losses(balance=COEFFICIENT)},
        "batch loss": {"losses": Losses(balance=COEFFICIENT, over="batch", statistics=run.world)},
        "loss-free bias": {**nothing, "biased": True},
        f"capacity {CAPACITY}": {**nothing, "capacity": CAPACITY},
    }


def courses(run: Runtime, show: Demo) -> list[Course]:
    """Each method from the same beginning, on the same tokens. Collective."""
    torch.set_num_threads(1)  # on any number of ranks: their processors' times are compared
    found = [train(run, name, settings) for name, settings in methods(run).items()]
    for course in found:
        show.part = f"loads, {course.name}"
        dropped = sum(step.dropped for step in course.chosen)
        show.claim(
            "rows computed", "BTk - dropped", STEPS * ROWS * T * CHOICES - dropped, sum(map(sum, course.computed))
        )
    most = max(max(step) for step in found[-1].computed)
    room = ROWS * math.ceil(CAPACITY * CHOICES * T / E)
    show.claim("rows of an expert beyond ⌈ckT/E⌉ a row", "0", 0, max(0, most - room))
    return found


# -- the task ----------------------------------------------------------------------------------------------------------


class Task:
    """Tokens [B, T, D] and what is asked for, [B, T, D]."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.common = torch.randn(D, generator=draw) / 3  # what all tokens share: by it a router can favour experts
        self.centres = 0.75 * torch.randn(KINDS, D, generator=draw)
        self.signs = torch.randint(2, (KINDS, D), generator=draw) * 2.0 - 1.0
        self.frequency = 1 / torch.arange(1, KINDS + 1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Of all ranks: the same on each of them."""
        draw = torch.Generator().manual_seed(step)
        about = torch.multinomial(self.frequency.expand(ROWS, -1), 4, generator=draw)  # [B, 4]
        kinds = about.gather(1, torch.randint(4, (ROWS, T), generator=draw))  # [B, T]
        x = self.common + self.centres[kinds] + 0.3 * torch.randn(ROWS, T, D, generator=draw)
        return x, self.signs[kinds] * x


def made(run: Runtime, task: Task, settings: Mapping[str, Any]) -> MoE:
    """The layer, which favours some experts."""
    torch.manual_seed(0)
    layer = MoE(D, F, E, choices=CHOICES, **settings)
    with torch.no_grad():
        layer.router.weight[:FAVOURED] += FAVOUR * task.common / task.common.square().sum()
    layer.distribute(run.world)
    return layer


# -- training ----------------------------------------------------------------------------------------------------------


def train(run: Runtime, name: str, settings: Mapping[str, Any]) -> Course:
    """A layer on all ranks. Collective."""
    task = Task()
    layer = made(run, task, settings)
    optimizer = torch.optim.AdamW(layer.parameters(), RATE)
    seen, computed, errors, seconds = [], [], [], []
    layer.experts.register_forward_pre_hook(lambda _, args: computed.append(list(args[1])))
    for step in range(STEPS):
        x, answer = (each.tensor_split(run.size)[run.rank] for each in task.batch(step))
        before = time.process_time()
        errors.append(squares(layer, x, answer))
        seconds.append(time.process_time() - before)
        comm.all_reduce(layer.router.weight.grad, group=run.world)  # experts have seen the tokens of all ranks
        seen += observe([layer.record], run.device, group=run.world)
        if layer.router.bias is not None:
            follow_load(layer.router.bias, seen[-1].tokens, BIAS_RATE)
        optimizer.step()
        optimizer.zero_grad()
    everyones = comm.all_gather_object((computed, errors, statistics.median(seconds[-LAST:])), group=run.world)
    by_rank, terms, seconds = zip(*everyones, strict=True)
    rows = [[count for mine in step for count in mine] for step in zip(*by_rank, strict=True)]
    return Course(name, seen, rows, [sum(each) for each in zip(*terms, strict=True)], list(seconds))


def squares(layer: MoE, x: Tensor, answer: Tensor) -> float:
    """Forward and backward; this rank's part of the error."""
    sequences = replace(Sequences.whole(x), rows=torch.tensor(ROWS), tokens=torch.tensor(ROWS * T))
    loss = (layer(x, sequences) - answer).square().sum() / (ROWS * T * D)
    loss.backward()
    return loss.item()


# -- for a person ------------------------------------------------------------------------------------------------------


def shade(load: float) -> str:
    """A letter for a load relative to a fair share."""
    return " ░▒▓█"[sum(load >= limit for limit in (0.25, 0.75, 1.5, 3.0))]


def tell(found: Sequence[Course], figure: Path | None) -> None:
    """Maps side by side, the table, the picture."""
    width = STEPS // 2 + 2
    print("\nrows that an expert computes, by step; of a fair share: ░ a quarter, ▒ 3/4, ▓ 3/2, █ 3 times, or more")
    print(f"{'':11}" + "".join(f"{course.name:{width}}" for course in found))
    for e in range(E):
        maps = ("".join(shade(step[e] / FAIR) for step in course.computed[::2]) for course in found)
        print(f"expert {e:2}  " + "".join(f"|{each}|" for each in maps))
    print(HEADER, *found, sep="\n")
    if figure:
        draw(figure, found)


def draw(path: Path, found: Sequence[Course]) -> None:
    """The maps, and below each the processor time of ranks; needs matplotlib."""
    import matplotlib  # noqa: PLC0415, an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    shape = {"figsize": (12, 5), "layout": "constrained", "height_ratios": (3, 1), "sharey": "row"}
    picture, panels = plt.subplots(2, len(found), squeeze=False, **shape)
    for course, (upper, lower) in zip(found, panels.T, strict=True):
        loads = [[step[e] / FAIR for step in course.computed] for e in range(E)]
        colours = upper.imshow(loads, aspect="auto", cmap="magma_r", vmin=0, vmax=4)
        upper.set(title=course.name, xlabel="step")
        ranks = range(len(course.seconds))
        lower.bar(ranks, [1e3 * each for each in course.seconds], color="slategrey")
        lower.set(xlabel="rank", xticks=ranks)
    panels[0, 0].set_ylabel("expert")
    panels[1, 0].set_ylabel("processor, ms")
    picture.colorbar(colours, ax=panels[0], label="rows, of a fair share", pad=0.01)
    picture.savefig(path, dpi=100)
    plt.close(picture)


if __name__ == "__main__":
    sys.exit(demo.main(work, figure=FIGURE))
