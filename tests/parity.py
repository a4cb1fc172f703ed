"""Parity: training steps on a mesh, judged against the independent reference in float64.

Judged in this order: the initial weights (equal bits on every rank), then of every step the number of valid tokens,
the tokens of each expert and those that were dropped, the losses, the gradient before clipping, its norm, the update,
and the routers' biases. Never per element: a tensor's error is measured against its largest entry; counts and biases
must be equal. Every run is then saved, resumed on another mesh, and judged for two more steps.
"""

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives import comm, layout
from collectives.runtime import Runtime
from nd_mesh.config import Config, DataConfig, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from nd_mesh.data import Stream
from nd_mesh.mesh import Grid
from nd_mesh.train import Trainer
from tests.pool import Pool
from tests.reference import loop

ULP = torch.finfo(torch.float64).eps
STEPS, MORE = 2, 2  # before and after the checkpoint
KINDS = ("loss", "norm", "gradient", "update")
VOCAB, CONTEXT = 37, 12
MODEL = ModelConfig(vocab=VOCAB, layers=2, width=24, heads=12, kv_heads=2, hidden=24, rope_base=50.0)
SGD = TrainConfig(
    **{"steps": 5, "batch": 3, "dtype": "float64", "seed": 3, "clip": 0.5},  # no setting has its default
    **{"optimizer": "sgd", "lr": 0.3, "warmup": 1, "min_lr": 0.3, "momentum": 0.8, "weight_decay": 0.02},
)
# At the usual eps of 1e-8 the noise of a gradient over eps is 1e-9. With either optimizer: at larger steps rounding
# grows by itself, and what five of them make of it on one process is no longer small beside what is allowed.
ADAMW = replace(SGD, optimizer="adamw", lr=0.01, betas=(0.8, 0.9), eps=1e-4)
UNCLIPPED = replace(SGD, lr=0.1, clip=0.0)  # about the same steps

OF_ROUTERS = ("choices", "score", "renormalise", "scale", "capacity", "balance", "z_loss", "bias_rate")


def config(*, train: TrainConfig = SGD, **settings: Any) -> Config:
    """A small run in float64, clipped in every step; each setting changes the one table that has it."""
    tables = Config(MeshConfig(), MODEL, DataConfig(context=CONTEXT), train, ParallelConfig())
    for name, value in settings.items():
        [table] = [t for t in ("mesh", "model", "train", "parallel") if hasattr(getattr(tables, t), name)]
        tables = replace(tables, **{table: replace(getattr(tables, table), **{name: value})})
    return tables


def documents() -> list[np.ndarray]:
    """Packed documents of uneven lengths, twelve samples, of which four steps see each. Twenty-five of a single token
    fill one without a label, and the last one is short.
    """
    lengths = [5, 33, 3, 1, 22, *[1] * 25, 19, 7, 17, 2, 4]
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, VOCAB, length).astype(np.uint8) for length in lengths]


Piece = tuple[str, tuple[layout.Box, ...], np.ndarray]  # what a rank has of a tensor: its name, boxes, and values


@dataclass(frozen=True)
class Step:
    """One step of one rank, in the reference's terms: tensors whole by name, or the rank's pieces of them."""

    loss: float
    count: int
    grad_norm: float
    grads: dict[str, Tensor] | list[Piece]
    params: dict[str, Tensor] | list[Piece]
    lr: float
    balance: dict[int, float] = field(default_factory=dict)
    z: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, Tensor] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    biases: dict[str, Tensor] | list[Piece] = field(default_factory=dict)


Run = tuple[dict[str, Tensor] | list[Piece], list[Step]]  # initial weights, and the steps that were done


def stream(documents: list[np.ndarray], context: int) -> Stream:
    """Documents as the trainer reads them."""
    return Stream(np.concatenate(documents), np.cumsum([0, *map(len, documents)])[:-1], context)


def train(
    run: Runtime, config: Config, documents: list[np.ndarray], steps: int, *, equal_bits: bool = True
) -> tuple[dict[str, Tensor], list[Step]]:
    """On each rank: its initial weights and the steps it did, whole; of its own a rank has its own. Equal boxes must
    have equal bits, unless that is not asked for.
    """
    mine = pieces(run, config, documents, steps)
    everyones = comm.all_gather_object(mine, group=run.world) if run.size > 1 else []
    return together([*everyones, mine], equal_bits)


def pieces(
    run: Runtime, config: Config, documents: list[np.ndarray], steps: int, save: Path | None = None
) -> tuple[list[Piece], list[Step]]:
    """On each rank: its pieces of the initial weights and of the steps it did, saved at the end into `save`."""
    trainer = built(run, config, documents)
    initial = weights(trainer)
    done = [one_step(trainer, step) for step in range(steps)]
    if save:
        with trainer.checkpoints(save) as checkpoints:
            trainer.save(checkpoints, steps)
    return initial, done


def go_on(run: Runtime, config: Config, documents: list[np.ndarray], steps: int, saved: Path) -> list[Step]:
    """On each rank: its pieces of as many steps more, from the latest checkpoint in `saved`."""
    trainer = built(run, config, documents)
    first = trainer.resume(saved).step
    return [one_step(trainer, step) for step in range(first, first + steps)]


def built(run: Runtime, config: Config, documents: list[np.ndarray]) -> Trainer:
    """A trainer on these documents."""
    tokens = stream(documents, config.data.context)
    return Trainer(config, tokens, tokens, run)


def one_step(trainer: Trainer, step: int) -> Step:
    """Do a step, in its two halves."""
    loss, count, _ = trainer.gradients(step)
    params = trainer.handle.parameters()
    grads = [(param.held.name, param.held.boxes, copied(param.grad)) for param in params]
    norm, lr = trainer.update(step, count)
    return Step(loss, count, norm, grads, weights(trainer), lr, **of_mixtures(trainer))


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    """On each rank the whole weights that the ranks compute with."""
    return whole(comm.all_gather_object(weights(trainer), group=trainer.run.world))


def weights(trainer: Trainer) -> list[Piece]:
    """A rank's pieces of the weights that it computes with."""
    with trainer.handle.whole():
        return [(param.held.name, param.held.boxes, copied(param)) for param in trainer.model.parameters()]


def of_mixtures(trainer: Trainer) -> dict[str, Any]:
    """What the trainer tells of the mixtures' step, and their biases after it."""
    observed = {
        name: {layer: getattr(seen, name) for layer, seen in trainer.observed.items()}
        for name in ("balance", "z", "tokens", "dropped")
    }
    biases = [(name, (layout.Box.whole(bias.shape),), copied(bias)) for name, bias in trainer.biases().items()]
    return observed | {"biases": biases}


def copied(values: Tensor) -> np.ndarray:
    return values.detach().cpu().clone().numpy()  # of memory that fsdp does not free


def together(ranks: list[Run], equal_bits: bool = True) -> Run:
    """A run from all ranks' pieces of it; its numbers are the last one's."""
    initial = whole([initial for initial, _ in ranks], equal_bits)
    steps = zip(*(done for _, done in ranks), strict=True)
    return initial, [whole_step(of_ranks, equal_bits) for of_ranks in steps]


def whole_step(ranks: Sequence[Step], equal_bits: bool = True) -> Step:
    """The same of one step."""
    tensors = {
        name: whole([getattr(step, name) for step in ranks], equal_bits) for name in ("grads", "params", "biases")
    }
    return replace(ranks[-1], **tensors)


def whole(ranks: Iterable[list[Piece]], equal_bits: bool = True) -> dict[str, Tensor]:
    """Whole tensors by name. Where several ranks have the same they must have equal bits, or else the last one's
    count.
    """
    found: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for name, boxes, values in itertools.chain(*ranks):
        parts = np.split(values.ravel(), np.cumsum([box.numel for box in boxes])[:-1])
        for box, part in zip(boxes, parts, strict=bool(boxes)):
            known = found.setdefault(name, np.full(box.shape, math.nan, values.dtype))
            given = filled.setdefault(name, np.zeros(box.shape, bool))
            place, ours = box.slices(layout.Box.whole(box.shape)), part.reshape(box.local)
            same = ~given[place] | (known[place] == ours)  # nan is not the same as nan
            assert same.all() or not equal_bits, f"{name}: two ranks differ in bits"
            known[place], given[place] = ours, True
    return {name: torch.from_numpy(values) for name, values in found.items()}


def reference(config: Config, weights: dict[str, Tensor], documents: list[np.ndarray], steps: int) -> list[loop.Record]:
    """The same steps by the reference, from these weights."""
    model, train = config.model, config.train
    return loop.run(
        weights,
        documents,
        steps=steps,
        **{"T": config.data.context, "B": train.batch, "seed": train.seed, "total_steps": train.steps},
        **{"heads": model.heads, "kv_heads": model.kv_heads, "tied": model.tied, "dropout": model.dropout},
        **{"optimizer": train.optimizer, "lr": train.lr, "warmup": train.warmup, "min_lr_ratio": train.min_lr},
        **{"weight_decay": train.weight_decay, "betas": train.betas, "eps": train.eps, "momentum": train.momentum},
        **{"clip": train.clip or None, "rope_base": model.rope_base},
        experts={name: getattr(model, name) for name in OF_ROUTERS} if model.experts else None,
    )


@dataclass(frozen=True)
class Case:
    """A run to be judged, and the mesh on which it is resumed."""

    name: str
    first: Config
    then: Config


class Judge:
    """Runs cases on the ranks of a pool and judges them. What does not depend on the mesh is trained once by the
    reference, for all cases that compute it.
    """

    def __init__(self, pool: Pool, texts: list[np.ndarray]):
        self.pool, self.texts = pool, texts
        self.known: dict[Config, tuple[dict[str, Tensor], list[loop.Record]]] = {}

    def judge(self, case: Case) -> dict[str, float]:
        """Run a case and compare it."""
        return self.compare(case, *self.run(case))

    def run(self, case: Case) -> tuple[list[Any], list[Any]]:
        """Train on the case's mesh, save, go on on its other one: what each rank of both has."""
        with tempfile.TemporaryDirectory() as folder:
            ranks = self._run(pieces, case.first, STEPS, Path(folder))
            return ranks, self._run(go_on, case.then, MORE, Path(folder))

    def compare(self, case: Case, ranks: list[Any], resumed: list[Any]) -> dict[str, float]:
        """Every rank of both against one run of the reference. The worst share of each kind, and as "resumed" the worst
        of any kind after it.
        """
        initial, done = together(ranks)
        one = replace(case.first, mesh=MeshConfig(), parallel=ParallelConfig())
        one = replace(one, train=replace(one.train, microbatches=1))
        if one not in self.known:
            self.known[one] = initial, reference(one, initial, self.texts, STEPS + MORE)
        right, expected = self.known[one]
        assert all(torch.equal(initial[name], right[name]) for name in right), "initial weights differ"
        more = [whole_step(of_ranks) for of_ranks in zip(*resumed, strict=True)]
        before = judge(initial, done, expected[:STEPS])
        after = judge(expected[STEPS - 1].params, more, expected[STEPS:])
        said = [numbers(step, right) for _, done in ranks for step, right in zip(done, expected[:STEPS], strict=True)]
        later = [numbers(step, right) for done in resumed for step, right in zip(done, expected[STEPS:], strict=True)]
        return {**worst_of([before, *said]), "resumed": max(worst_of([after, *later]).values())}

    def _run(self, job: Callable[..., Any], cfg: Config, steps: int, folder: Path) -> list[Any]:
        return self.pool.run(Grid(cfg.mesh).size(), job, cfg, self.texts, steps, folder, timeout=60)


def worst_of(shares: list[dict[str, float]]) -> dict[str, float]:
    """The largest share of each kind."""
    return {kind: max(share.get(kind, 0.0) for share in shares) for kind in KINDS}


def judge(initial: dict[str, Tensor], ours: list[Any], reference: list[Any]) -> dict[str, float]:
    """The largest error of each kind as a share of what is allowed; a miss is a share above 1. Both lists hold the same
    steps.
    """
    worst = dict.fromkeys(KINDS, 0.0)
    before, previous = initial, None
    for step, expected in zip(ours, reference, strict=True):
        assert step.grads.keys() == expected.grads.keys(), f"gradients of {list(step.grads)}"
        check_equal(step, expected, "biases")
        worst = worst_of([worst, numbers(step, expected)])
        largest = max(float(grad.abs().max()) for grad in expected.grads.values())
        for name, grad in expected.grads.items():
            allowed = 1e-12 * float(grad.abs().max()) + 1e-14 * largest
            worst["gradient"] = max(worst["gradient"], _share(step.grads[name] - grad, allowed))
            moved = float((expected.params[name] - before[name]).abs().max())
            size = float(expected.params[name].abs().max())
            assert expected.count == 0 or moved > 1e-4 * size, (
                f"{name} moves by {moved} of {size}: too little to judge its update"
            )
            if expected.count or previous is None:
                right, allowed = expected.params[name], 1e-10 * moved + 4 * ULP * size if moved else 0.0
            else:  # nothing moves, from where we are
                right, allowed = previous.params[name], 0.0
            worst["update"] = max(worst["update"], _share(step.params[name] - right, allowed))
        before, previous = expected.params, step
    return worst


def numbers(step: Any, expected: Any) -> dict[str, float]:
    """Of what any rank says of a step the share of the error of the losses, those of mixtures too, and of the norm.

    Raises AssertionError where a count or the rate is not the same.
    """
    right = f"{expected.count} tokens at a rate of {expected.lr}"
    assert step.count == expected.count and step.lr == expected.lr, f"{step.count} at {step.lr}, not {right}"
    check_equal(step, expected, "tokens")
    check_equal(step, expected, "dropped")
    losses = [(step.loss, expected.loss)]
    for name in ("balance", "z"):
        losses += [(getattr(step, name)[layer], right) for layer, right in getattr(expected, name).items()]
    shares = [_share(torch.tensor(ours - right), 1e-13 * max(right, 1)) for ours, right in losses]
    norm = torch.tensor(step.grad_norm - expected.grad_norm)
    return {"loss": max(shares), "norm": _share(norm, 1e-13 * max(expected.grad_norm, 1e-300))}


def check_equal(step: Any, expected: Any, name: str) -> None:
    """Raise AssertionError where the numbers of this name, a table of them, differ at all."""
    ours, right = getattr(step, name), getattr(expected, name)
    assert ours.keys() == right.keys(), f"{name} of {list(ours)}, not of {list(right)}"
    for which, value in right.items():
        same = torch.equal(torch.as_tensor(ours[which]).cpu(), torch.as_tensor(value))
        assert same, f"{name} of {which}: {ours[which]}, not {value}"


def _share(error: Tensor, allowed: float) -> float:
    largest = float(error.abs().max())
    if largest == 0:
        return 0.0
    return largest / allowed if allowed and math.isfinite(largest) else math.inf  # max(0.0, nan) is 0.0
