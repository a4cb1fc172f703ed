"""Which groups leave a node, the expected cost, and what is said of it: typed by hand, and by brute force."""

import itertools
import math
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from collectives.runtime import Runtime
from nd_mesh import __main__ as command
from nd_mesh import formulas, loop, mistakes, placement
from nd_mesh.config import Config, ConfigError, MeshConfig, ModelConfig, ParallelConfig
from nd_mesh.mesh import AXES, Grid
from nd_mesh.part import Part
from tests import grid, parity
from tests.nd_mesh.test_mesh import factorisations
from tests.nd_mesh.test_traffic import RUNS

WIDE = ModelConfig(width=384, heads=24, kv_heads=24, hidden=1536)  # any tp of 2, 3, 4, 6, 8 and 12 fits
NVLINK, INFINIBAND = (3.4e-6, 450e9), (14e-6, 50e9)  # latency and bytes a second, of cost.py's table


def config(model: ModelConfig = WIDE, parallel: ParallelConfig | None = None, **mesh: int) -> Config:
    return Config(MeshConfig(**mesh), model, parallel=parallel or ParallelConfig())


# -- what leaves a node ------------------------------------------------------------------------------------------------


def test_8_ranks_on_nodes_of_4():
    grid = Grid(MeshConfig(pp=2, fsdp=2, tp=2))
    assert placement.leaving(grid.groups("pp"), 4) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert placement.leaving(grid.groups("fsdp"), 4) == placement.leaving(grid.groups("tp"), 4) == []
    assert placement.leaving(grid.groups("tp"), 3) == [(2, 3)]
    assert placement.leaving(grid.groups("fsdp"), 3) == [(1, 3), (4, 6), (5, 7)]


def test_leaving_by_brute_force():
    """There is no node that has all of its ranks."""
    nodes_of = {n: [set(range(first, first + n)) for first in range(0, 12, n)] for n in (1, 2, 3, 4, 5, 8, 12, 16)}
    for sizes, name in itertools.product(factorisations(12), ("pp", "cp", "tp", "data", "ep", "expert_data")):
        groups = Grid(sizes).groups(name)
        for per_node, nodes in nodes_of.items():
            inside = [group for group in groups if any(node.issuperset(group) for node in nodes)]
            assert placement.leaving(groups, per_node) == [group for group in groups if group not in inside]


def groups_of(order: tuple[str, ...], sizes: dict[str, int], axes: tuple[str, ...], pieces: int) -> np.ndarray:
    """With any order of axes, the groups of `pieces` ranks along some of them, the inner one first."""
    ranks = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in order])
    inner = [axis for axis in order if axis in axes]
    outer = [axis for axis in order if axis not in axes]
    return ranks.transpose([order.index(axis) for axis in (*outer, *inner)]).reshape(-1, pieces)


@pytest.mark.parametrize("ranks", [6, 8])
def test_no_other_order_of_axes_keeps_more_inside(ranks):
    """None has fewer groups of tp leave; of those that keep all of tp inside, none has fewer of cp or of ep leave."""
    nodes = np.arange(2, ranks)[:, None]  # how many ranks each has
    better = []
    for sizes in factorisations(ranks):
        each = {axis: getattr(sizes, axis) for axis in AXES}
        wanted = {"tp": (("tp",), sizes.tp), "cp": (("cp",), sizes.cp), "ep": (("dp", "fsdp", "cp"), sizes.ep)}
        ours = {axis: [len(placement.leaving(Grid(sizes).groups(axis), n)) for n in range(2, ranks)] for axis in wanted}
        for order in itertools.permutations(AXES):
            groups = {axis: groups_of(order, each, *of) for axis, of in wanted.items()}
            leave = {axis: (g.min(1) // nodes != g.max(1) // nodes).sum(1) for axis, g in groups.items()}
            worse = (leave["cp"] < ours["cp"]) | (leave["ep"] < ours["ep"])
            if ((leave["tp"] < ours["tp"]) | (leave["tp"] == 0) & worse).any():
                better.append((sizes, order))
    assert not better


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_seconds():
    """The formulas of a ring's all_reduce, of its neighbours and of a direct all_to_all, typed by hand."""
    near, far = ((lambda nbytes, link=link: link[0] + nbytes / link[1]) for link in (NVLINK, INFINIBAND))
    fours, strewn = [(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 2, 4, 6), (1, 3, 5, 7)]
    reduced = {"all_reduce": 6e6}  # 2n(P-1)/P of n = 4e6, in 2(P-1) rounds of n/P
    assert placement.seconds(reduced, fours, 4) == pytest.approx(6 * near(1e6), rel=1e-12)
    assert placement.seconds(reduced, fours, 2) == pytest.approx(6 * far(1e6), rel=1e-12)
    assert placement.seconds(reduced, fours, 6) == pytest.approx(6 * far(1e6), rel=1e-12)  # the second leaves
    for op in ("exchange", "all_gather_single", "reduce_scatter_single"):
        assert placement.seconds({op: 6e6}, fours, 4) == pytest.approx(3 * near(2e6), rel=1e-12)
        assert placement.seconds({op: 6e6}, strewn, 4) == pytest.approx(3 * far(2e6), rel=1e-12)
    exchanged = {"all_to_all_single": 6e6}
    assert placement.seconds(exchanged, fours, 4) == pytest.approx(near(6e6), rel=1e-12)
    assert placement.seconds(exchanged, fours, 2) == pytest.approx(far(4e6), rel=1e-12)  # of three pieces two leave
    assert placement.seconds({"send": 6e6}, [(0, 1), (2, 3)], 1) == pytest.approx(far(6e6), rel=1e-12)
    both = placement.seconds(reduced, fours, 4) + placement.seconds(exchanged, fours, 4)
    assert placement.seconds(reduced | exchanged, fours, 4) == pytest.approx(both, rel=1e-12)
    assert placement.seconds(reduced, [(0,), (1,)], 1) == placement.seconds({}, fours, 1) == 0


def test_estimate():
    """16 rows of 128 tokens, width 192, six heads of 32 and two of keys; four layers, a vocabulary of 256; float32."""
    a = 16 * 128 * 192 * 4
    b = 16 * 128 * 2 * 32 * 4
    loss = 3 * 16 * 128 * 4  # of each token three numbers
    model = ModelConfig()
    assert placement.estimate(config(model)) == {}
    assert placement.estimate(config(model, tp=2)) == {"tp": {"all_reduce": 4 * 4 * a + a + a + loss}}
    assert placement.estimate(config(model, cp=4))["cp"] == {"exchange": 4 * 20 * b / 4}
    assert placement.estimate(config(model, ParallelConfig(attention="ulysses"), cp=2))["cp"] == {
        "all_to_all_single": 4 * 4 * (a + b) / 2 / 2
    }
    both = ParallelConfig(attention="ring_ulysses", ulysses=2)
    assert placement.estimate(config(model, both, cp=4))["cp"] == {
        "all_to_all_single": 4 * 4 * (a + b) / 4 / 2,
        "exchange": 4 * 8 * b / 4,
    }
    mixed = replace(model, experts=8, pattern="dm", choices=3)
    told = 2 * 8 * 8 * 3  # of two mixtures how many rows go to each of eight experts
    sent = placement.estimate(config(mixed, dp=4, ep=4))
    assert sent["ep"] == {"all_gather_single": told, "all_to_all_single": 2 * 4 * 3 / 4 * 3 * a / 4}
    assert set(sent) == {"dp", "ep"}


def test_the_stage_that_sends_most():
    """Of a pipeline of two the last, whose head sends a and the loss more than the first one's embedding: a."""
    a, loss = 16 * 128 * 192 * 4 / 2, 3 * 16 * 128 * 4 / 2
    sent = placement.estimate(config(ModelConfig(), pp=2, fsdp=2, tp=2))
    assert sent["tp"] == {"all_reduce": 2 * 4 * a + a + loss}
    assert set(sent) == {"pp", "fsdp", "tp"}
    assert placement.estimate(config(ModelConfig(), ParallelConfig(data="zero1"), dp=2, cp=2)).keys() == {"cp", "data"}


def test_experts_of_one_ep_are_shared_over_tp():
    sent = placement.estimate(config(replace(ModelConfig(), experts=8), ParallelConfig(sequence=True), tp=2))
    assert set(sent) == {"tp"} and sent["tp"]["all_to_all_single"] == 4 * 4 * 1 / 2 * 2 * 16 * 128 * 192 * 4 / 2


@pytest.mark.parametrize("name", RUNS)
def test_no_byte_of_the_formulas_is_left_out(name):
    """But for numbers. In a pipeline the stage that sends most by one axis may not be the one that does by another."""
    cfg = grid.run_of(RUNS[name])
    stages = [sent_but_numbers(cfg, rank) for rank in Grid(cfg.mesh).groups("pp")[0]]
    estimate = sum(sum(sent.values()) for sent in placement.estimate(cfg).values())
    assert max(stages) - 1e-6 <= estimate <= sum(stages) + 1e-6


def sent_but_numbers(cfg: Config, rank: int) -> float:
    numbers = sum(term.nbytes for term in formulas.numbers(Part(cfg, rank)))
    return float(sum(term.nbytes for term in formulas.expected(cfg, rank)) - numbers)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_warnings_word_for_word():
    """Of n = 4e8 bytes a rank of tp 8 sends 2n · 7/8, in 14 rounds of 5e7; over InfiniBand 14 · (14e-6 + 1e-3) s."""
    assert placement.warnings(config(dp=2, tp=8), 4, {"tp": {"all_reduce": 7e8}}) == [
        "warning: tp leaves its node in 2 of 2 groups, as in (0 1 2 … 7): expected 14.2 ms a step over InfiniBand NDR, "
        "1.6 ms over NVLink 4 (H100); mesh.tp=4 with mesh.dp=4 keeps it inside"
    ]
    assert placement.warnings(config(dp=2, cp=2, tp=4), 4, {}) == [
        "warning: cp leaves its node in 8 of 8 groups, as in (0 4): mesh.tp=2 with mesh.dp=4 keeps it inside"
    ]
    mixed = replace(WIDE, experts=8)
    assert placement.warnings(config(mixed, fsdp=8, tp=2, ep=8), 8, {"ep": {"all_to_all_single": 7e11}}) == [
        "warning: ep leaves its node in 2 of 2 groups, as in (0 2 4 … 14): expected 8 s a step over InfiniBand NDR, "
        "1.56 s over NVLink 4 (H100); mesh.ep=4 keeps it inside"
    ]
    assert placement.warnings(config(dp=4, tp=3), 8, {}) == [
        "warning: 12 ranks do not fill 2 nodes of 8: the last one has 4",
        "warning: tp leaves its node in 1 of 4 groups, as in (6 7 8): mesh.tp=2 with mesh.dp=6 keeps it inside",
    ]
    assert placement.warnings(config(cp=2), 1, {"cp": {"exchange": 1e3}}) == [
        "warning: cp leaves its node in 1 of 1 groups, as in (0 1): expected 14 µs a step over InfiniBand NDR, "
        "3.4 µs over NVLink 4 (H100); no smaller degree keeps it inside"
    ]


def test_what_is_no_reason_for_a_warning():
    """pp, dp and fsdp may leave a node, and a single node need not be full."""
    assert placement.warnings(config(pp=2, dp=2, fsdp=2, cp=2, tp=2), 4, {}) == []
    assert placement.warnings(config(dp=3, tp=2), 8, {}) == []


def test_with_sequences_experts_are_shared_over_tp_too():
    sequences, mixed = ParallelConfig(sequence=True), replace(WIDE, experts=8)
    groups = "as in (0 1 2 3): mesh.tp=1 with mesh.dp=4 keeps it inside"
    assert placement.warnings(config(mixed, sequences, dp=2, tp=2, ep=2), 2, {}) == [
        f"warning: ep leaves its node in 1 of 1 groups, {groups}"
    ]
    [of_tp] = placement.warnings(config(mixed, sequences, dp=2, tp=2), 1, {})  # where ep is 1 it is a tp, told once
    assert of_tp.startswith("warning: tp leaves its node in 2 of 2 groups, as in (0 1)")


def test_a_remedy_is_a_configuration_that_runs():
    """A tp of 6 or 3 would stay inside, and does not fit twelve heads of queries with four of keys and values."""
    [told] = placement.warnings(config(replace(WIDE, heads=12, kv_heads=4), tp=12), 6, {})
    assert told.endswith("mesh.tp=2 with mesh.dp=6 keeps it inside")


def applied(told: str, sizes: MeshConfig) -> MeshConfig:
    return replace(sizes, **{axis: int(degree) for axis, degree in re.findall(r"mesh\.(\w+)=(\d+)", told)})


def test_remedies_by_brute_force():
    """Each keeps its axis inside, with as many ranks; no larger degree of that axis does so, and runs."""
    numbers, told_of = random.Random(0), set()
    model = replace(WIDE, experts=24, expert_hidden=48)
    for _ in range(150):
        degrees = {axis: numbers.choice((1, 1, 2, 3, 4)) for axis in ("dp", "fsdp", "cp")}
        data = math.prod(degrees.values())
        ep = numbers.choice([ep for ep in (1, 2, 3, 4, 6, 8) if data % ep == 0])
        cfg, per_node = (
            config(model, **degrees, tp=numbers.choice((1, 2, 3, 4, 6, 8)), ep=ep),
            numbers.choice((4, 6, 8)),
        )
        for line in placement.warnings(cfg, per_node, {}):
            if not (axis := re.match(r"warning: (\w+) leaves", line)):
                continue
            axis, sizes = axis[1], cfg.mesh
            changed = re.search(r"mesh\.(\w+)=", line)
            told_of.add((axis, changed and changed[1]))
            if changed:
                other = applied(line, sizes)
                mistakes.check(replace(cfg, mesh=other), Grid(sizes).size())
                assert not placement.leaving(Grid(other).groups(axis), per_node)
            best = getattr(other, axis) if changed and changed[1] == axis else 1
            for degree in range(best + 1, getattr(sizes, axis)):
                dp = sizes.dp if axis == "ep" else getattr(sizes, axis) * sizes.dp // degree
                larger = replace(sizes, **{axis: degree, "dp": dp})
                try:
                    mistakes.check(replace(cfg, mesh=larger), Grid(sizes).size())
                except ConfigError:
                    continue
                assert placement.leaving(Grid(larger).groups(axis), per_node)
    assert told_of >= {("tp", "tp"), ("cp", "cp"), ("ep", "ep"), ("cp", "tp"), ("ep", "tp"), ("tp", None)}


# -- in a run, and without one -----------------------------------------------------------------------------------------


def described(run: Runtime, cfg: Config) -> list[list[str]]:
    """As torchrun places four ranks on machines of four, two and one; and without its variables."""
    trainer = parity.built(run, cfg, parity.documents())
    told = []
    for local in (4, 2, 1):
        place = {"RANK": run.rank, "WORLD_SIZE": run.size, "LOCAL_RANK": run.rank % local, "LOCAL_WORLD_SIZE": local}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        with mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
            told.append(loop.describe(trainer))
    return [*told, loop.describe(trainer)]


def test_a_run_tells_groups_and_what_leaves_a_node(pool):
    cfg = replace(parity.config(), mesh=MeshConfig(dp=2, tp=2))
    four, two, one, unknown = pool.run(4, described, cfg)[0]
    assert four[2].splitlines()[3] == "rank   3  dp 1  tp 1" and four[3:5] == ["dp  (0 2) (1 3)", "tp  (0 1) (2 3)"]
    assert four == two == unknown and not any("warning" in line for line in four)
    [warning] = [line for line in one if line not in four]
    assert re.fullmatch(
        r"warning: tp leaves its node in 2 of 2 groups, as in \(0 1\): expected [\d.]+ µs a step over InfiniBand NDR, "
        r"[\d.]+ µs over NVLink 4 \(H100\); no smaller degree keeps it inside",
        warning,
    )


COMMAND = """\
8 ranks on 2 nodes of 4, mesh pp 2 × dp 1 × fsdp 2 × cp 1 × tp 2
rank   0  pp 0  fsdp 0  tp 0  ep 0
rank   1  pp 0  fsdp 0  tp 1  ep 0
rank   2  pp 0  fsdp 1  tp 0  ep 1
rank   3  pp 0  fsdp 1  tp 1  ep 1
rank   4  pp 1  fsdp 0  tp 0  ep 0
rank   5  pp 1  fsdp 0  tp 1  ep 0
rank   6  pp 1  fsdp 1  tp 0  ep 1
rank   7  pp 1  fsdp 1  tp 1  ep 1
dense view
  pp                        (0 4) (1 5) (2 6) (3 7)
  fsdp, batch, shard, data  (0 2) (1 3) (4 6) (5 7)
  tp, row                   (0 1) (2 3) (4 5) (6 7)
  tokens                    (0 2 4 6) (1 3 5 7)
expert view
  ep     (0 2) (1 3) (4 6) (5 7)
  ep_tp  (0 1 2 3) (4 5 6 7)
                    groups  leave a node  a rank sends a step  expected   inside
pp                  4 of 2             4        786,490 bytes   43.7 µs  8.55 µs
fsdp                4 of 2             0        501,656 bytes   14.7 µs  14.7 µs
tp                  4 of 2             0     10,235,904 bytes   29.5 µs  29.5 µs
ep                  4 of 2             0      6,291,520 bytes   20.8 µs  20.8 µs
"""
EIGHT = ["--mesh.pp", "2", "--mesh.fsdp", "2", "--mesh.tp", "2", "--mesh.ep", "2", "--model.experts", "4"]


@pytest.fixture
def toml(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text("")
    return str(tmp_path / "run.toml")


def test_command(toml, tmp_path, capsys):
    assert command.main(["mesh", toml, *EIGHT, "--per-node", "4"]) == 0
    assert capsys.readouterr().out == COMMAND
    assert COMMAND in Path("nd_mesh/README.md").read_text()  # of the main job, whose sizes are the usual ones
    assert command.main(["mesh", toml, "--mesh.dp", "500", "--mesh.tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1000 ranks on 125 nodes of 8,") and lines[5] == "rank 999  dp 499  tp 1"
    assert len(lines) == 12 and max(map(len, lines)) < 100


def test_command_draws(toml, tmp_path):
    pytest.importorskip("matplotlib")
    assert command.main(["mesh", toml, "--mesh.tp", "2", "--out", str(tmp_path / "new" / "mesh.png")]) == 0
    assert (tmp_path / "new" / "mesh.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh.tp", "3"], "mesh.tp=3 does not fit model.heads=6 and model.kv_heads=2; use a tp of 1 or 2"),
        (["--mesh.dp", "0"], "mesh.dp=0 must be positive"),
        (["--mesh.dp", "131073"], "a mesh of 131073 ranks is more than can be shown: at most 131072"),
        (["--per-node", "0"], "--per-node=0 must be positive"),
        (["--per-node", "many"], "argument --per-node: invalid int value: 'many'"),
        (["--out", "mesh.png"], "a picture of 1 ranks shows nothing: draw a mesh of 2 to 1024"),
        (["--mesh.dq", "2"], "unknown setting mesh.dq: did you mean mesh.dp?"),
    ],
)
def test_mistakes_of_the_command(toml, capsys, arguments, words):
    assert command.main(["mesh", toml, *arguments]) == 2
    assert capsys.readouterr().err == f"error: {words}\n"
