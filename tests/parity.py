"""Parity: training steps on a mesh, judged against the independent reference in float64.

Judged in this order: the initial weights (equal bits on every rank), then of every step the number of valid tokens,
the tokens of each expert and those that were dropped, the losses, the gradient before clipping, its norm, the update,
and the routers' biases. Never per element: a tensor's error is measured against its largest entry; counts and biases
must be equal. Every run is then saved, resumed on another mesh, and judged for two more steps.
"""

import functools
import itertools
import math
import random
import sys
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
from context_parallel.ulysses import sharing
from nd_mesh.config import Config, DataConfig, MeshConfig, ModelConfig, ParallelConfig, TrainConfig, pipeline_plan
from nd_mesh.data import Stream
from nd_mesh.mesh import Grid
from nd_mesh.parallelize import DATA_STRATEGIES
from nd_mesh.train import Trainer
from tensor_parallel import cut
from tests.pool import Pool
from tests.reference import loop

ULP = torch.finfo(torch.float64).eps
STEPS, MORE = 3, 2  # before and after the checkpoint
KINDS = ("loss", "norm", "gradient", "update")
VOCAB, CONTEXT = 37, 12
MODEL = ModelConfig(vocab=VOCAB, layers=3, width=24, heads=12, kv_heads=2, hidden=24, rope_base=50.0)
SGD = TrainConfig(
    **{"steps": 6, "batch": 7, "dtype": "float64", "seed": 3, "clip": 0.5},  # no setting has its default
    **{"optimizer": "sgd", "lr": 0.5, "warmup": 1, "min_lr": 0.3, "momentum": 0.8, "weight_decay": 0.02},
)
# At the usual eps of 1e-8 the noise of a gradient over eps is 1e-9; at larger steps rounding grows by itself, and what
# five of them make of it on one process is no longer small beside what is allowed.
ADAMW = replace(SGD, optimizer="adamw", lr=0.01, betas=(0.8, 0.9), eps=1e-4)

# Mixtures of experts. 12 of them are shared by up to 6 ranks, 8 by 8; some have less to do than there are microbatches.
# A top 1 is not renormalised: its weight would be 1, and the router have no gradient.
SOFTMAX = {"expert_hidden": 12, "balance": 0.05, "z_loss": 0.02}
SIGMOID = {"expert_hidden": 12, "score": "sigmoid", "balance": 0.02, "bias_rate": 0.05, "scale": 1.5}
MIXTURES = {
    "dense": {},
    "softmax 2 of 12": {"experts": 12, **SOFTMAX},
    "sigmoid 3 of 12, bias, shared": {"experts": 12, "choices": 3, "pattern": "dm", "shared_hidden": 12, **SIGMOID},
    "softmax 1 of 8, capacity": {"experts": 8, "choices": 1, "renormalise": False, "capacity": 1.0, **SOFTMAX},
    "sigmoid 2 of 4, bias, capacity": {"experts": 4, "pattern": "mmd", "capacity": 0.75, "z_loss": 0.01, **SIGMOID},
}
OF_ROUTERS = ("choices", "score", "renormalise", "scale", "capacity", "balance", "z_loss", "bias_rate")


def config(*, train: TrainConfig = SGD, **settings: Any) -> Config:
    """A small run in float64, clipped in every step; each setting changes the one table that has it."""
    tables = Config(MeshConfig(), MODEL, DataConfig(context=CONTEXT), train, ParallelConfig())
    for name, value in settings.items():
        [table] = [t for t in ("mesh", "model", "train", "parallel") if hasattr(getattr(tables, t), name)]
        tables = replace(tables, **{table: replace(getattr(tables, table), **{name: value})})
    return tables


# Where a run is computed: it may change when a run is resumed. A new axis or option is one line.
WHERE = {
    "pipeline": (
        *("1 1f1b", "2 1f1b", "4 1f1b", "3 layer_wise", "2 gpipe 2", "2 interleaved 3"),
        *("2 zb_h1", "4 zb_h1", "2 zbv", "3 zbv", "2 dualpipe_v"),
    ),
    "reduce_each": (False, True),
    "context": (
        *("1 ring zigzag", "2 ring zigzag", "3 ring striped", "4 ring contiguous"),
        *("2 all_gather contiguous", "2 ulysses zigzag", "3 ulysses striped", "4 ring_ulysses zigzag"),
    ),
    "dp": (1, 2, 3, 4, 8),
    "fsdp": (1, 2, 3, 4),
    "tp": (1, 2, 3, 4),
    "ep": (1, 2, 3, 4, 8),
    "sequence": (False, True),
    "save_gathered": (False, True),
    "data": (*DATA_STRATEGIES, "fsdp"),
    "cap": (25 << 20, 1000),
    "reshard": (True, False),
    "prefetch": (1, 0, 2),
    "recompute": ((), ("block",), ("attend", "ffn"), ("k", "ffn")),
    "microbatches": (1, 3, 8),
}
# What is computed.
WHAT = {
    "dropout": (0.0, 0.1),
    "tied": (False, True),
    "kv_heads": (2, 6, 1),
    "train": (SGD, ADAMW),
    "mixture": tuple(MIXTURES),
}
AXES = ("pipeline", "context", "fsdp", "tp", "ep", "data")  # more of these are tried together
FREE = ("recompute", "microbatches", "dropout", "tied", "train", "mixture")  # whatever the others are; but for `shared`


@dataclass(frozen=True)
class Case:
    """A run to be judged, and the mesh on which it is resumed."""

    name: str
    first: Config
    then: Config


def cases(together: int, of_axes: int = 0, ranks: int = 8) -> list[Case]:
    """Meshes of at most so many ranks, and options, chosen so that any `together` of the options, and any `of_axes` of
    AXES, occur with all combinations of their values; and some of more ranks than rows, or with all that cuts at once.
    """
    chosen = [case(ranks, **some) for some in covering(WHERE | WHAT, together, of_axes, ranks)]
    all_at_once = {"pipeline": "2 zbv", "fsdp": 2, "tp": 2, "sequence": True, "data": "fsdp", "tied": True}
    all_at_once |= {"ep": 2, "mixture": "sigmoid 3 of 12, bias, shared"}
    more = [
        {"dp": 4, "microbatches": 2, "dropout": 0.1, "batch": 2},
        {"dp": 8, "dropout": 0.1, "batch": 3, "train": ADAMW},
        all_at_once | {"dropout": 0.1, "recompute": ("attend", "ffn"), "microbatches": 5},
        all_at_once | {"pipeline": "1 1f1b", "context": "2 ring zigzag", "dropout": 0.1, "recompute": ("block",)},
    ]
    return [*chosen, *(case(**some) for some in more)]


def possible(choice: dict[str, Any], ranks: int = 8) -> bool:
    """Whether there is such a run, on at most so many ranks, and no other choice is the same run."""
    sharded = choice["data"] == "fsdp"
    pp, tp, kv_heads = ranks_of(choice, "pipeline"), choice["tp"], choice["kv_heads"]
    cp, method, _ = choice["context"].split()
    return (
        (pp > 1 or usual(choice, "reduce_each"))
        and (pp == 1 or usual(choice, "prefetch"))
        and tp in cut.degrees(MODEL.heads, kv_heads)
        and (tp > 1 or usual(choice, "sequence"))
        and (choice["sequence"] or (cp != "1" and method == "all_gather") or usual(choice, "save_gathered"))
        and (sharded or usual(choice, "fsdp"))
        and (sharded or pp > 1 or usual(choice, "reshard"))
        and sensible(choice)
        and fits(int(cp), method, MODEL.heads // tp, max(1, kv_heads // tp))
        and any(shared(mixture, choice) for mixture in MIXTURES)
        and data_ranks(choice) % choice["ep"] == 0
        and size(choice) <= ranks
    )


def sensible(choice: dict[str, Any]) -> bool:
    """Whether each setting of the data strategy is one that it has, whatever the mesh."""
    data = choice["data"]
    return (
        data != "auto"
        and (usual(choice, "reduce_each") or data in ("zero3", "fsdp"))
        and (usual(choice, "prefetch") or data == "fsdp")
        and (usual(choice, "reshard") or data in ("zero3", "fsdp"))
        and (usual(choice, "cap") or data not in ("naive", "zero3", "fsdp"))
    )


def usual(choice: dict[str, Any], name: str) -> bool:
    """Whether an option of WHERE is as it is where nobody asks for another."""
    usual = WHERE[name][0]
    return choice.get(name, usual) == usual


def ranks_of(choice: dict[str, Any], option: str) -> int:
    """Of the options "pipeline" and "context" the first word."""
    return int(choice[option].split()[0])


def size(choice: dict[str, Any]) -> int:
    """The number of ranks."""
    lengths = [choice[axis] for axis in ("dp", "fsdp", "tp")]
    return math.prod([ranks_of(choice, "pipeline"), ranks_of(choice, "context"), *lengths])


def data_ranks(choice: dict[str, Any]) -> int:
    """Those with tokens of their own, out of which ep is folded."""
    return choice["dp"] * choice["fsdp"] * ranks_of(choice, "context")


def shared(mixture: str, choice: dict[str, Any]) -> bool:
    """Whether the ranks can share its experts, each as many. A dense model has none."""
    ranks = choice["ep"] * (choice["tp"] if choice["sequence"] else 1)
    experts = MIXTURES[mixture].get("experts")
    return experts % ranks == 0 if experts else choice["ep"] == 1


def fits(cp: int, method: str, heads: int, kv_heads: int) -> bool:
    """Whether the ranks that exchange heads can share them."""
    exchanging = {"ulysses": cp, "ring_ulysses": 2}.get(method, 1)
    return exchanging in sharing(heads, kv_heads)


@functools.cache
def rows(ranks: int) -> list[dict[str, Any]]:
    """All possible choices of the options that depend on each other."""
    options = {name: values for name, values in (WHERE | WHAT).items() if name not in FREE}
    axes = ("pipeline", "context", "dp", "fsdp", "tp", "ep")
    meshes = [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*(options[axis] for axis in axes))]
    fitting = [mesh for mesh in meshes if size(mesh) <= ranks and data_ranks(mesh) % mesh["ep"] == 0]
    others = [name for name in options if name not in axes]
    rest = [dict(zip(others, values, strict=True)) for values in itertools.product(*(options[name] for name in others))]
    rest = [other for other in rest if sensible(other)]
    return [mesh | other for mesh in fitting for other in rest if possible(mesh | other, ranks)]


def case(ranks: int = 8, /, **options: Any) -> Case:
    """The case of these options. It is resumed elsewhere, with another tp and as many other options as can be."""
    first = {name: options.get(name, values[0]) for name, values in WHERE.items()}
    draw = random.Random(told(options))
    kv_heads, mixture = (options.get(name, WHAT[name][0]) for name in ("kv_heads", "mixture"))
    others = elsewhere(ranks, first["tp"], kv_heads, mixture)
    drawn = [{name: row.get(name, draw.choice(WHERE[name])) for name in WHERE} for row in draw.choices(others, k=100)]
    then = max(drawn, key=lambda choice: sum(choice[name] != first[name] for name in WHERE))
    name = f"{told(options)}, {options.get('train', SGD).optimizer}; then {told(then)}"
    return Case(name, run_of(options), run_of({**options, **then}))


@functools.cache
def elsewhere(ranks: int, tp: int, kv_heads: int, mixture: str) -> list[dict[str, Any]]:
    """All choices of such a model, with another tp."""
    others = [row for row in rows(ranks) if row["tp"] != tp and row["kv_heads"] == kv_heads]
    return [row for row in others if shared(mixture, row)]


def run_of(options: dict[str, Any]) -> Config:
    """The run of these options. In a pipeline the few blocks are strewn over the stages: some have none, maybe the
    first or the last.
    """
    settings = {name: value for name, value in options.items() if name not in ("pipeline", "context", "mixture")}
    settings |= MIXTURES[options.get("mixture", "dense")]
    pp, name, *virtual = options.get("pipeline", "1 1f1b").split()
    cp, method, order = options.get("context", "1 ring zigzag").split()
    settings |= {"pp": int(pp), "schedule": name, "virtual": int(*virtual)}
    cfg = config(cp=int(cp), attention=method, order=order, **settings)
    if cfg.mesh.pp == 1:
        return cfg
    stages = pipeline_plan(cfg).stages
    places = [(2 * layer + stages // 3) % stages for layer in range(cfg.model.layers)]
    layers = tuple(places.count(stage) for stage in range(stages))
    return replace(cfg, parallel=replace(cfg.parallel, stage_layers=layers))


def told(options: dict[str, Any]) -> str:
    """Options in a few words, those that are usual left out."""
    usual = {name: values[0] for name, values in (WHERE | WHAT).items()}
    chosen = {name: value for name, value in options.items() if name in ("dp", "data") or value != usual.get(name)}
    return ", ".join(f"{name} {value}" for name, value in chosen.items() if name != "train")


def covering(options: dict[str, Sequence[Any]], together: int, of_axes: int, ranks: int) -> list[dict[str, Any]]:
    """A short list of choices in which any `together` options, and any `of_axes` of AXES, occur with all combinations
    of their values that there are on so many ranks.

    Greedy: for the first combination that has not occurred, some choices that have it are drawn, and the one is taken
    with most combinations that have not occurred.
    """
    draw, all_rows = random.Random(0), rows(ranks)
    having = {
        name: {value: {i for i, row in enumerate(all_rows) if row[name] == value} for value in values}
        for name, values in options.items()
        if name not in FREE
    }  # the numbers of rows
    having["mixture"] = {mixture: {i for i, row in enumerate(all_rows) if shared(mixture, row)} for mixture in MIXTURES}
    missing = {names: occurring(options, names, all_rows) for names in combinations(options, together, of_axes)}
    taken = []
    while missing:
        names, values = next((names, next(iter(left))) for names, left in missing.items())
        wanted = dict(zip(names, values, strict=True))
        fitting = [having[name][value] for name, value in wanted.items() if name in having]
        numbers = sorted(set.intersection(*fitting)) if fitting else range(len(all_rows))
        drawn = []
        for i in draw.choices(numbers, k=20):
            free = options | {"mixture": [mixture for mixture in options["mixture"] if i in having["mixture"][mixture]]}
            known = all_rows[i] | {name: draw.choice(free[name]) for name in FREE} | wanted
            drawn.append({name: known[name] for name in options})
        taken.append(max(drawn, key=lambda choice: sum(_of(choice, names) in left for names, left in missing.items())))
        for names, left in list(missing.items()):
            left.pop(_of(taken[-1], names), None)
            if not left:
                del missing[names]
    return taken


def occurring(options: dict[str, Sequence[Any]], names: Iterable[str], all_rows: list[dict[str, Any]]) -> dict:
    """All combinations of values that these options have together, in order."""
    limited, free = [[name for name in names if (name in FREE) == kind] for kind in (False, True)]
    needed = [*limited, *(("ep", "tp", "sequence") if "mixture" in free else ())]
    found = {}
    for values in dict.fromkeys(_of(row, needed) for row in all_rows):
        for others in itertools.product(*(options[name] for name in free)):
            known = dict(zip([*needed, *free], [*values, *others], strict=True))
            if "mixture" not in known or shared(known["mixture"], known):
                found[_of(known, names)] = None
    return found


def _of(choice: dict[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    return tuple([choice[name] for name in names])


def combinations(options: Iterable[str], together: int, of_axes: int) -> list[tuple[str, ...]]:
    """Those that count, each once."""
    axes = [name for name in options if name in AXES]
    return list(dict.fromkeys([*itertools.combinations(options, together), *itertools.combinations(axes, of_axes)]))


def documents() -> list[np.ndarray]:
    """Packed documents of uneven lengths; forty of a single token fill two samples without one label."""
    lengths = [5, 40, 3, 1, 22, *[1] * 40, 19, 16, 17, 33, 2, 60, 7]
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
    for name, boxes, values in itertools.chain(*ranks):
        parts = np.split(values.ravel(), np.cumsum([box.numel for box in boxes])[:-1])
        for box, part in zip(boxes, parts, strict=bool(boxes)):
            known = found.setdefault(name, np.full(box.shape, math.nan, values.dtype))
            place, ours = box.slices(layout.Box.whole(box.shape)), part.reshape(box.local)
            same = np.isnan(known[place]) | (known[place] == ours)
            assert same.all() or not equal_bits, f"{name}: two ranks differ in bits"
            known[place] = ours
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


class Judge:
    """Runs cases on the ranks of a pool and judges them. What does not depend on the mesh is trained once by the
    reference, for all cases that compute it.
    """

    def __init__(self, pool: Pool, texts: list[np.ndarray]):
        self.pool, self.texts = pool, texts
        self.known: dict[Config, tuple[dict[str, Tensor], list[loop.Record]]] = {}

    def judge(self, case: Case) -> dict[str, float]:
        """Train on the case's mesh, save, go on on its other one; judge every rank of both by one run of the reference.

        The worst share of each kind, and as "resumed" the worst of any kind after it.
        """
        with tempfile.TemporaryDirectory() as folder:
            ranks = self._run(pieces, case.first, STEPS, Path(folder))
            resumed = self._run(go_on, case.then, MORE, Path(folder))
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
        assert step.grads.keys() == expected.grads.keys()
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
    assert step.count == expected.count and step.lr == expected.lr, (step.count, expected.count, step.lr, expected.lr)
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


def main() -> int:
    """`make parity`: all cases, a line each; 1 if one misses or fails."""
    pool, failed, chosen = Pool(), 0, cases(together=2, of_axes=3)
    judge = Judge(pool, documents())
    width = max(len(each.name) for each in chosen)
    print(f"{'share of the error that is allowed':<{width}}{''.join(f'{kind:>10}' for kind in (*KINDS, 'resumed'))}")
    for each in chosen:
        try:
            worst = judge.judge(each)
        except Exception as failure:  # the others still run
            failed += 1
            print(f"{each.name:<{width}}  failed: {str(failure).strip().splitlines()[-1]}", flush=True)
            continue
        missed = max(worst.values()) > 1
        failed += missed
        figures = "".join(f"{worst[kind]:>10.4f}" for kind in (*KINDS, "resumed"))
        print(f"{each.name:<{width}}{figures}{'  MISSED' if missed else ''}", flush=True)
    pool.close()
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
