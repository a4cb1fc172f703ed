"""What a configuration asks for either runs, or is refused with a remedy that helps: found out on random ones."""

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from collectives.runtime import Runtime
from nd_mesh import mistakes
from nd_mesh.config import Config, ConfigError, MeshConfig, ParallelConfig, layers_of_stages, names, pipeline_plan
from nd_mesh.mesh import Grid
from tests import parity
from tests.pool import Pool

# Wide ranges: of each setting what is usual more often, and what can hardly be meant.
DRAWN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("mesh.pp", "mesh.fsdp", "mesh.cp", "mesh.tp"), (1, 1, 1, 2, 3, 4)),
    **{"mesh.dp": (1, 1, 2, 3, 4), "mesh.ep": (1, 1, 2, 3, 4, 8)},
    **{"model.vocab": (256, 37, 2), "model.layers": (1, 2, 3, 4, 8), "model.width": (24, 48, 60, 10)},
    **{"model.heads": (1, 2, 4, 6, 12), "model.kv_heads": (1, 1, 2, 3, 4), "model.hidden": (8, 12, 7)},
    **{"model.dropout": (0.0, 0.1, 1.0), "model.tied": (False, True), "model.experts": (0, 0, 2, 4, 6, 8)},
    **{"model.pattern": ("m", "dm", "ddm", "d", "x"), "model.choices": (1, 2, 3), "model.expert_hidden": (8, 12, 9)},
    **{"model.shared_hidden": (0, 12, 5), "model.score": ("softmax", "sigmoid"), "model.capacity": (0.0, 0.0, 1.0, -1)},
    **{"model.balance": (0.01, 0.0), "model.bias_rate": (0.0, 0.1), "model.renormalise": (True, False)},
    **{"data.context": (12, 1, 7), "data.format": ("text", "text", "uint16"), "data.document_end": (None, None, 3)},
    **{"train.batch": (7, 1, 4), "train.microbatches": (1, 1, 2, 5), "train.prompt": ("\x01", "", "é")},
    **{
        "train.save_every": (0, 2),
        "train.dtype": ("float64", "float16", "bfloat16"),
        "train.optimizer": ("adamw", "sgd"),
    },
    **{
        "train.loss_scale": (65536.0, 1.0, 3.0),
        "train.scale_steps": (1000, 2, 0),
        "train.nonfinite": ("raise", "skip"),
    },
    "parallel.data": ("auto", "auto", "naive", "bucketed", "overlapped", "zero1", "zero2", "zero3", "fsdp"),
    **{"parallel.cap": (25 << 20, 25 << 20, 1000, 0), "parallel.reshard": (True, True, False)},
    **{"parallel.prefetch": (1, 1, 0, 2), "parallel.sequence": (False, True), "parallel.save_gathered": (False, True)},
    "parallel.attention": ("ring", "ring", "all_gather", "ulysses", "ring_ulysses"),
    **{"parallel.order": ("zigzag", "contiguous", "striped"), "parallel.ulysses": (2, 2, 1, 3, 4)},
    "parallel.schedule": ("1f1b", "1f1b", "layer_wise", "gpipe", "interleaved", "zb_h1", "zbv", "dualpipe_v"),
    "parallel.virtual": (0, 0, 0, 1, 2, 3),
    "parallel.stage_layers": ((), (), (1, 1), (2, 1), (1, 0, 2, 1), (0, 0, 1)),
    "parallel.reduce_each": (False, False, True),
    "parallel.recompute": ((), (), ("block",), ("attend", "ffn"), ("block", "ffn"), ("ffn", "ffn"), ("blok",)),
    **{"checkpoint.asynchronous": (False, True), "checkpoint.keep_last": (0, 2), "checkpoint.keep_every": (0, 0, 4)},
}


def get(config: Config, name: str) -> Any:
    table, key = name.split(".")
    return getattr(getattr(config, table), key)


def put(config: Config, settings: dict[str, Any]) -> Config:
    """The same with other values by dotted name."""
    for name, value in settings.items():
        table, key = name.split(".")
        config = replace(config, **{table: replace(getattr(config, table), **{key: value})})
    return config


def drawn(number: int) -> tuple[Config, int]:
    """A configuration and how many ranks are started; on few settings all others are as by default."""
    draw = random.Random(number)
    share = draw.choice((0.1, 0.3, 1.0))
    chosen = {name: draw.choice(values) for name, values in DRAWN.items() if draw.random() < share}
    usual = replace(Config(), model=parity.MODEL, train=replace(parity.SGD, prompt="\x01"))
    config = put(usual, {"data.context": 12} | chosen)
    return config, Grid(config.mesh).size() if draw.random() < 0.9 else draw.choice((1, 2, 4, 6, 8))


# -- the remedies ------------------------------------------------------------------------------------------------------

Change = dict[str, Any]


def values(config: Config, name: str, text: str) -> list[Any]:
    """Those that a remedy lists for a setting."""
    if isinstance(get(config, name), tuple):
        return [tuple(re.findall(r"'(\w+)'", text) or map(int, re.findall(r"\d+", text)))]
    found = re.split(r", or |, | or ", text)
    return [type(get(config, name))(value) if get(config, name) is not None else int(value) for value in found]


def remedies(config: Config, mistake: str) -> list[Change]:
    """What a message says would work, as a person reads it: each a change of some settings."""
    known = {name.split(".")[1]: name for name in names()} | {name: name for name in names()}
    advice = re.split(r"; use |: use |, use |: start ", mistake, maxsplit=1)
    start = [{"world": int(world)} for world in re.findall(r": start (\d+) ", mistake)]
    told: list[Change] = []
    for text in re.split(r", or (?=(?:a |ring_|interleaved|mesh\.|model\.|parallel\.|leave))", "".join(advice[1:])):
        setting = r"([a-z_]+\.[a-z_]+|virtual)=((?:\[.*?\])|[^ ;]+(?:(?:, | or )[\w.]+)*)(?: and |$)"
        pairs = [(known[name], text) for name, text in re.findall(setting, text)]
        if pairs:
            each = [[(name, value) for value in values(config, name, text)] for name, text in pairs]
            told += [dict(choice) for choice in itertools.product(*each)]
        elif found := re.search(r"an? (\w+) of (?:at most )?([\d, or]+)$", text):
            more = {"parallel.attention": "ring_ulysses"} if "ring_ulysses" in text else {}
            told += [{known[found[1]]: value} | more for value in values(config, known[found[1]], found[2])]
        elif text == "interleaved":
            told.append({"parallel.schedule": "interleaved"})
        elif text.startswith("some of "):
            told += [{"parallel.recompute": (name,)} for name in text.removeprefix("some of ").split(", ")]
        elif text == "block alone":
            told.append({"parallel.recompute": ("block",)})
    if "leave it out" in mistake:
        name = re.match(r"[a-z_]+\.[a-z_]+", mistake)[0]
        told.append({name: get(Config(), name)})
    return start + told


def in_range(config: Config, mistake: str) -> Change | None:
    """Of a single value that is out of its range, which the message names, the one by default."""
    words = r"must be (positive|at least|less|text|between)|must not be|is not a finite|at most 1$"
    name = re.match(r"[a-z_]+\.[a-z_]+", mistake)
    if name and re.search(words, mistake):
        return {name[0]: "\x01" if name[0] == "train.prompt" else get(Config(), name[0])}
    return None


def told(config: Config, world: int) -> str:
    """The mistake that is found, "" if there is none."""
    try:
        mistakes.check(config, world)
    except ConfigError as mistake:
        return str(mistake)
    return ""


def kind(mistake: str) -> str:
    """A message without its values, and without its remedy."""
    return re.sub(r"=\[.*?\]|=\S+|\d+|'.*?'", "", re.split(r"; use |: use |, use |: start ", mistake)[0])


def mended(config: Config, world: int, change: Change, mistake: str) -> tuple[Config, int]:
    """After a remedy. As many ranks are started as the mesh then wants, unless their number was the mistake."""
    changed = put(config, {name: value for name, value in change.items() if name != "world"})
    return changed, change.get("world", world if "ranks, but" in mistake else Grid(changed.mesh).size())


@pytest.mark.parametrize("part", range(2))
def test_what_is_refused_is_mended_as_told(part):
    """Each remedy that a message offers ends that mistake, and following them ends in what runs."""
    kinds: dict[str, int] = {}
    for number in range(part, 500, 2):
        config, world = drawn(number)
        draw = random.Random(-number)
        for _ in range(40):
            if not (mistake := told(config, world)):
                break
            assert "\n" not in mistake and len(mistake) < 300, mistake
            offered = remedies(config, mistake) or [in_range(config, mistake)]
            assert offered != [None], f"no remedy in: {mistake}"
            for change in offered:
                changed, ranks = mended(config, world, change, mistake)
                after = told(changed, ranks)
                assert (changed, ranks) != (config, world), mistake
                assert kind(after) != kind(mistake), f"{mistake}\n{change}\n{after}"
            kinds[kind(mistake)] = kinds.get(kind(mistake), 0) + 1
            config, world = mended(config, world, draw.choice(offered), mistake)
        else:
            pytest.fail(f"40 remedies do not help: {mistake}")
        check_it_can_be_built(config)
    assert len(kinds) > 15, kinds


def check_it_can_be_built(config: Config) -> None:
    """As far as it goes without ranks."""
    if config.mesh.pp > 1:
        plan = pipeline_plan(config)
        layers = layers_of_stages(config, plan)
        assert [layer for stage in layers for layer in stage] == list(range(config.model.layers))
        assert len(layers) == plan.stages and plan.ranks == config.mesh.pp
    grid = Grid(config.mesh)
    for name in ("expert_data", "expert_shard", "ep", "ep_tp"):
        assert sorted(rank for group in grid.groups(name) for rank in group) == list(range(grid.size()))


# -- what is not refused -----------------------------------------------------------------------------------------------


def that_run(first: int, last: int) -> list[Config]:
    """What becomes of the drawn ones that need at most ten remedies, in float64, on two to four ranks."""
    found = []
    for number in range(first, last):
        config, world = drawn(number)
        config, draw = (
            put(config, {"train.dtype": "float64", "model.vocab": max(37, config.model.vocab)}),
            random.Random(number),
        )
        for _ in range(10):
            if not (mistake := told(config, world)):
                break
            offered = remedies(config, mistake) or [in_range(config, mistake)]
            config, world = mended(config, world, draw.choice(offered), mistake)
        if 2 <= world <= 4 and not told(config, world):
            found.append(config)
    return found


def two_steps(run: Runtime, config: Config) -> tuple[float, float, float]:
    """Loss and norm of the second step, and the loss of an evaluation."""
    built = parity.built(run, config, parity.documents())
    parity.one_step(built, 0)
    step = parity.one_step(built, 1)
    return step.loss, step.grad_norm, built.evaluate()


def check_they_run(pool: Pool, configs: list[Config]) -> None:
    """Each trains two steps, to what one device comes to."""
    for config in configs:
        one = replace(config, mesh=MeshConfig(), parallel=ParallelConfig())
        one = put(one, {"train.microbatches": 1})
        [right], ranks = pool.run(1, two_steps, one), pool.run(Grid(config.mesh).size(), two_steps, config)
        for ours in ranks:
            assert ours == pytest.approx(right, rel=1e-10, abs=1e-13), config


def test_what_is_not_refused_runs(pool):
    chosen = that_run(0, 50)
    assert len(chosen) >= 8
    check_they_run(pool, chosen[:8])


@pytest.mark.drill
def test_more_of_what_is_not_refused_runs(pool):
    check_they_run(pool, that_run(1000, 1200))
