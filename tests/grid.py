"""The grid: which meshes and options are tried, and on which other mesh each run goes on.

make parity                  any two options, in all combinations of their values
make parity ARGS=--full      and any three of the axes
"""

import functools
import itertools
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from context_parallel.ulysses import sharing
from nd_mesh.config import Config, pipeline_plan
from nd_mesh.parallelize import DATA_STRATEGIES
from tensor_parallel import cut
from tests.parity import ADAMW, KINDS, MODEL, SGD, Case, Judge, config, documents
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


def main() -> int:
    """The cases, a line each; 1 if one misses or fails."""
    pool, failed, chosen = Pool(), 0, cases(together=2, of_axes=3 if "--full" in sys.argv else 0)
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
