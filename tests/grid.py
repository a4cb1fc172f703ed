"""The grid: which meshes and options are tried, and on which other mesh each run goes on.

make parity                            every mesh of up to 8 ranks, at least five times; any three of the axes, the data
                                       strategy and the schedule, and any two options, in all combinations of values
make parity ARGS='--seed 1'            other choices
make parity ARGS=--full                and any three options of where a run is computed
"""

import argparse
import functools
import itertools
import math
import random
import sys
import time
from collections import Counter
from dataclasses import replace

from context_parallel.ulysses import sharing
from nd_mesh.config import Config, pipeline_plan
from nd_mesh.parallelize import DATA_STRATEGIES
from pipeline import schedule
from tensor_parallel import cut
from tests.covering import Choice, Space, cover
from tests.parity import ADAMW, KINDS, MODEL, SGD, UNCLIPPED, Case, Judge, config, documents
from tests.pool import Pool

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
# Where a run is computed: it may change when a run is resumed. A new axis or option is one line.
WHERE = {
    **{axis: (1, 2, 3, 4) for axis in ("pp", "dp", "fsdp", "cp", "tp")},
    "ep": (1, 2, 3, 4, 6, 8),
    "sequence": (False, True),
    "save_gathered": (False, True),
    "schedule": ("1f1b", "layer_wise", "gpipe", "interleaved", "zb_h1", "zbv", "dualpipe_v"),
    "virtual": (0, 1, 2, 3),
    "attention": ("ring", "all_gather", "ulysses", "ring_ulysses"),
    "order": ("zigzag", "striped", "contiguous"),
    "data": (*(name for name in DATA_STRATEGIES if name != "auto"), "fsdp"),
    "cap": (25 << 20, 1000),
    "reshard": (True, False),
    "prefetch": (1, 0, 2),
    "reduce_each": (False, True),
    "recompute": ((), ("block",), ("attend", "ffn"), ("k", "ffn")),
    "microbatches": (1, 2, 4),
}
# What is computed.
WHAT = {
    "dropout": (0.0, 0.1),
    "tied": (False, True),
    "kv_heads": (2, 6, 1),
    "train": (SGD, ADAMW, UNCLIPPED),
    "mixture": tuple(MIXTURES),
}
AXES = ("pp", "dp", "fsdp", "cp", "tp")
STRONG = (*AXES, "ep", "data", "schedule")  # any three of these are tried together
TOGETHER = (("cp", "attention", "kv_heads"),)  # these too: ranks that exchange heads share KV heads, or copy them
FREE = ("recompute", "microbatches", "dropout", "tied", "train")  # whatever the others are
TIMES, RUNS = 5, 1000  # how often each mesh is tried at least, and how many runs there are at least
RANKS = 8


# -- what is possible --------------------------------------------------------------------------------------------------


@functools.cache
def space(ranks: int) -> Space:
    """All possible choices on at most so many ranks; no two of them are the same run."""
    return Space(bases(ranks), [pipelines, contexts, data_strategies], {name: (WHERE | WHAT)[name] for name in FREE})


def bases(ranks: int) -> list[Choice]:
    """Meshes, and what of a model and of the ways to cut it depends on them. The first is one rank."""
    shapes = [shape for shape in itertools.product(*(WHERE[axis] for axis in AXES)) if math.prod(shape) <= ranks]
    others = ("ep", "sequence", "kv_heads", "mixture")
    values = [*itertools.product(*((WHERE | WHAT)[name] for name in others))]
    found = [dict(zip((*AXES, *others), shape + value, strict=True)) for shape in shapes for value in values]
    return [base for base in found if possible(base)]


def possible(base: Choice) -> bool:
    """Whether heads and experts can be shared so."""
    tp, experts = base["tp"], MIXTURES[base["mixture"]].get("experts", 1)
    folded = base["ep"] * (tp if base["sequence"] and experts > 1 else 1)
    return (
        tp in cut.degrees(MODEL.heads, base["kv_heads"])
        and (tp > 1 or not base["sequence"])
        and base["dp"] * base["fsdp"] * base["cp"] % base["ep"] == 0
        and experts % folded == 0
    )


def pipelines(base: Choice) -> list[Choice]:
    """Schedules of so many ranks, and the stages that a rank may have."""
    return _pipelines(base["pp"])


@functools.cache
def _pipelines(pp: int) -> list[Choice]:
    if pp == 1:
        return [{"schedule": "1f1b", "virtual": 0}]
    pairs = itertools.product(WHERE["schedule"], WHERE["virtual"][1:])
    return [{"schedule": name, "virtual": virtual} for name, virtual in pairs if _has(name, virtual)]


def _has(name: str, virtual: int) -> bool:
    try:
        schedule(name, 2, 1, virtual)
    except ValueError:
        return False
    return True


def contexts(base: Choice) -> list[Choice]:
    """Methods and orders of attention over cp, and what is kept of what is gathered."""
    tp = base["tp"]
    return _contexts(base["cp"], MODEL.heads // tp, max(1, base["kv_heads"] // tp), base["sequence"])


@functools.cache
def _contexts(cp: int, heads: int, kv_heads: int, sequence: bool) -> list[Choice]:
    methods = {"ring": 1, "all_gather": 1, "ulysses": cp, "ring_ulysses": 2}  # ranks that exchange heads
    fitting = [name for name, size in methods.items() if cp % size == 0 and size in sharing(heads, kv_heads)]
    ways = itertools.product(fitting, WHERE["order"]) if cp > 1 else [("ring", "zigzag")]
    return [
        {"attention": method, "order": order, "save_gathered": kept}
        for method, order in ways
        for kept in (False, True)
        if not kept or sequence or (cp > 1 and method == "all_gather")
    ]


def data_strategies(base: Choice) -> list[Choice]:
    """Data strategies and their settings."""
    return _data_strategies(base["fsdp"] > 1, base["pp"] > 1)


@functools.cache
def _data_strategies(sharded: bool, piped: bool) -> list[Choice]:
    names = ("data", "cap", "reshard", "prefetch", "reduce_each")
    found = [dict(zip(names, values, strict=True)) for values in itertools.product(*(WHERE[name] for name in names))]
    return [choice for choice in found if _sensible(choice, sharded, piped)]


def _sensible(choice: Choice, sharded: bool, piped: bool) -> bool:
    """Whether each setting is the usual one, or one that makes a difference."""
    data = choice["data"]
    usual = {name: choice[name] == WHERE[name][0] for name in choice}
    return (
        (data == "fsdp" or not sharded)
        and (usual["cap"] or data not in ("naive", "zero3", "fsdp"))
        and (usual["reshard"] or data == "fsdp" or (data == "zero3" and piped))
        and (usual["prefetch"] or (data == "fsdp" and not piped))
        and (usual["reduce_each"] or (data in ("zero3", "fsdp") and piped))
    )


# -- what is tried -----------------------------------------------------------------------------------------------------


def cases(seed: int = 0, ranks: int = RANKS, *, full: bool = False) -> list[Case]:
    """The whole grid; full: with any three options of WHERE too."""
    draw, options = random.Random(seed), space(ranks)
    three = WHERE if full else STRONG
    groups = [*itertools.combinations(three, 3), *itertools.combinations(options.names, 2), *TOGETHER]
    chosen = [*cover(options, dict.fromkeys(groups), cost, draw)]
    shapes = sorted({shape(base) for base in options.bases})
    times = Counter(map(shape, chosen))
    for round_ in itertools.count(1):
        if round_ > TIMES and len(chosen) >= RUNS:
            break
        for axes in shapes:
            if times[axes] < round_ and (round_ <= TIMES or len(chosen) < RUNS):
                chosen += options.draw(draw, dict(zip(AXES, axes, strict=True)), 1)
                times[axes] += 1
    return [case(choice, draw, ranks) for choice in chosen]


def subset(ranks: int, together: int, seed: int = 0) -> list[Case]:
    """Cases on at most so many ranks in which any `together` options occur in all combinations of their values, and
    those of TOGETHER where it is more than one.
    """
    draw, options = random.Random(seed), space(ranks)
    groups = [*itertools.combinations(options.names, together), *(TOGETHER if together > 1 else ())]
    return [case(choice, draw, ranks) for choice in cover(options, groups, cost, draw)]


def shape(choice: Choice) -> tuple[int, ...]:
    """The mesh."""
    return tuple(choice[axis] for axis in AXES)


def cost(choice: Choice) -> float:
    """About how long a run takes: what each rank computes is little, so it goes by their number."""
    return 1 + math.prod(shape(choice))


def case(choice: Choice, draw: random.Random, ranks: int = RANKS) -> Case:
    """The case of this choice, resumed on a mesh of another shape, with as many other options as can be."""
    known = {name: choice.get(name, values[0]) for name, values in (WHERE | WHAT).items()}
    same = {name: known[name] for name in ("kv_heads", "mixture")}
    others = [other for other in space(ranks).draw(draw, same, 60) if shape(other) != shape(known)]
    size = draw.choice(sorted({math.prod(shape(other)) for other in others}))
    fitting = [other for other in others if math.prod(shape(other)) == size]
    then = max(fitting, key=lambda other: sum(other[name] != known[name] for name in WHERE))
    then = known | {name: then[name] for name in WHERE}
    name = f"{told(known)}; then {told({name: then[name] for name in WHERE})}"
    return Case(name, run_of(known), run_of(then))


def run_of(choice: Choice) -> Config:
    """The run of a choice, what it does not name as usual. In a pipeline the few blocks are strewn over the stages:
    some have none, maybe the first or the last.
    """
    settings = {name: value for name, value in choice.items() if name != "mixture"}
    cfg = config(**settings, **MIXTURES[choice.get("mixture", "dense")])
    if cfg.mesh.pp == 1:
        return cfg
    stages = pipeline_plan(cfg).stages
    places = [(2 * layer + stages // 3) % stages for layer in range(cfg.model.layers)]
    layers = tuple(places.count(stage) for stage in range(stages))
    return replace(cfg, parallel=replace(cfg.parallel, stage_layers=layers))


def told(choice: Choice) -> str:
    """A choice in a few words, what is usual left out."""
    usual = {name: values[0] for name, values in (WHERE | WHAT).items()}
    words = {name: value for name, value in choice.items() if name == "data" or value != usual[name]}
    if "train" in words:
        words["train"] = words["train"].optimizer if words["train"].clip else "unclipped"
    return ", ".join(f"{name} {value}" for name, value in words.items())


# -- the table ---------------------------------------------------------------------------------------------------------


def main() -> int:
    """The cases, a line each; 1 if one misses or fails."""
    parser = argparse.ArgumentParser(prog="make parity", description="ARGS of make parity")
    parser.add_argument("--seed", type=int, default=0, help="of the choices")
    parser.add_argument("--full", action="store_true", help="any three options of where a run is computed, too")
    chosen = parser.parse_args()
    tried = cases(chosen.seed, full=chosen.full)
    pool, failed, began = Pool(), 0, time.perf_counter()
    judge = Judge(pool, documents())
    shapes = Counter(tuple(getattr(each.first.mesh, axis) for axis in AXES) for each in tried)
    print(f"seed {chosen.seed}: {len(tried)} runs, {len(shapes)} meshes, each {min(shapes.values())} times or more")
    print("".join(f"{kind:>10}" for kind in (*KINDS, "resumed")) + "  as a share of the error that is allowed, of")
    for each in tried:
        try:
            worst = judge.judge(each)
        except Exception as failure:  # the others still run
            failed += 1
            print(f"{'failed':>50}  {each.name}: {str(failure).strip().splitlines()[-1]}", flush=True)
            continue
        missed = max(worst.values()) > 1
        failed += missed
        figures = "".join(f"{worst[kind]:>10.4f}" for kind in (*KINDS, "resumed"))
        print(f"{figures}  {'MISSED ' if missed else ''}{each.name}", flush=True)
    pool.close()
    print(f"{len(tried) - failed} passed, {failed} failed, in {(time.perf_counter() - began) / 60:.0f} minutes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
