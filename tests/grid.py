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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NoReturn

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
FREE = ("recompute", "dropout", "tied", "train")  # whatever the others are
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
    """Schedules of so many ranks, the stages that a rank may have, and microbatches: a pipeline wants more."""
    return _pipelines(base["pp"])


@functools.cache
def _pipelines(pp: int) -> list[Choice]:
    pairs = [*itertools.product(WHERE["schedule"], WHERE["virtual"][1:])] if pp > 1 else [("1f1b", 0)]
    return [
        {"schedule": name, "virtual": virtual, "microbatches": microbatches}
        for name, virtual in pairs
        if virtual == 0 or _has(name, virtual)
        for microbatches in WHERE["microbatches"]
        if microbatches < 4 or pp > 1
    ]


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
    for axes in shapes:
        chosen += options.draw(draw, dict(zip(AXES, axes, strict=True)), max(0, TIMES - times[axes]))
        times[axes] = max(TIMES, times[axes])
    while len(chosen) < RUNS:  # more of those that take less
        axes = min(shapes, key=lambda axes: times[axes] * math.prod(axes))
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
    """About how long a run takes: each rank computes little, so it goes by their number; mixtures take longer."""
    return (1 + math.prod(shape(choice))) * (1 if choice["mixture"] == "dense" else 1.25)


def case(choice: Choice, draw: random.Random, ranks: int = RANKS) -> Case:
    """The case of this choice, resumed on a mesh of another shape, with as many other options as can be."""
    known = {name: choice.get(name, values[0]) for name, values in (WHERE | WHAT).items()}
    same = {name: known[name] for name in ("kv_heads", "mixture")}
    others = [other for other in space(ranks).draw(draw, same, 60) if shape(other) != shape(known)]
    sizes = sorted({math.prod(shape(other)) for other in others})
    [size] = draw.choices(sizes, [1 / size for size in sizes])  # what takes less, more often
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
    with ThreadPoolExecutor(1) as comparing:  # one case is compared while the next one runs
        for each, worst in zip(tried, _judged(judge, tried, comparing), strict=True):
            figures = worst if isinstance(worst, str) else "".join(f"{share:>10.4f}" for share in worst.values())
            missed = isinstance(worst, str) or max(worst.values()) > 1
            failed += missed
            print(f"{figures}  {'MISSED ' if missed else ''}{each.name}", flush=True)
    pool.close()
    print(f"{len(tried) - failed} passed, {failed} failed, in {(time.perf_counter() - began) / 60:.0f} minutes")
    return 1 if failed else 0


def _judged(judge: Judge, tried: list[Case], comparing: ThreadPoolExecutor) -> Iterator[dict[str, float] | str]:
    """Of each case what the judge says, or what went wrong; in order, each when the next one has run."""
    before = None
    for each in [*tried, None]:
        try:
            now = comparing.submit(judge.compare, each, *judge.run(each)) if each else None
        except Exception as failure:  # the others still run
            now = comparing.submit(_raise, failure)
        if before is not None:
            failure = before.exception()
            yield (str(failure).strip() or repr(failure)).splitlines()[-1] if failure else before.result()
        before = now


def _raise(failure: Exception) -> NoReturn:
    raise failure


if __name__ == "__main__":
    sys.exit(main())
