"""The configuration: what is read, what is refused, and with which words."""

import pytest
import torch

from nd_mesh import __main__ as command
from nd_mesh import config, mistakes
from nd_mesh.config import Config, ConfigError
from nd_mesh.model import GPT


@pytest.fixture
def toml(tmp_path):
    """Writes a configuration and returns its path."""

    def write(text: str) -> str:
        (tmp_path / "run.toml").write_text(text)
        return str(tmp_path / "run.toml")

    return write


def test_file_and_overrides(toml):
    path = toml("[model]\nlayers = 2\ntied = true\n[train]\nlr = 1\nbetas = [0.8, 0.9]\n")
    read = config.load(
        path, {"mesh.dp": "2", "train.lr": "3e-4", "model.tied": "false", "data.path": "7", "train.out": "a b"}
    )
    assert (read.model.layers, read.train.betas, read.mesh.dp) == (2, (0.8, 0.9), 2)
    assert (read.train.lr, read.model.tied, read.data.path, read.train.out) == (3e-4, False, "7", "a b")
    assert config.load(path, {"train.betas": "[0.5, 0.6]"}).train.betas == (0.5, 0.6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nstepz = 3", "unknown setting train.stepz: did you mean train.steps?"),
        ("[trian]\nsteps = 3", "unknown setting trian: did you mean train?"),
        ("steps = 3", "unknown setting steps: did you mean train.steps?"),
        ("[train]\nsteps = 'many'", "train.steps='many': "),
        ("[train]\nsteps = 2.5", "train.steps=2.5: "),
        ("[model]\ntied = 3", "model.tied=3: "),
        ("[train]\nsteps = '3'", "train.steps='3': "),
        ("[train]\nsteps = true", "train.steps=True: "),
        ("[train]\nlr = '1'", "train.lr='1': "),
        ('[train]\n"a\\nb" = 1', "unknown setting 'train.a\\nb'"),
        ("[train]\noptimizer = 'adam'", "train.optimizer='adam': "),
        ("train = 3", "train=3: "),
        ("[train", "is not TOML"),
    ],
)
def test_refused_files(toml, text, words):
    with pytest.raises(ConfigError) as error:
        config.load(toml(text), {})
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "world", "words"),
    [
        ({"train": {"prompt": ""}}, 1, "train.prompt='' must be text"),
        ({"train": {"prompt": "é"}, "model": {"vocab": 128}}, 1, "train.prompt='é' must be text"),
        ({"mesh": {"dp": 3}}, 2, "makes 3 ranks, but 2 are started: start 3 (--nproc-per-node), or use mesh.dp=2"),
        (
            {"mesh": {"dp": 2, "tp": 4}},
            4,
            "but 4 are started: start 8 (--nproc-per-node), or use mesh.dp=1",
        ),
        ({"mesh": {"dp": 2, "tp": 4}}, 2, "but 2 are started: start 8 (--nproc-per-node), or use mesh.tp=1"),
        ({"mesh": {"tp": 3}}, 3, "mesh.tp=3 does not fit model.heads=6 and model.kv_heads=2; use a tp of 1 or 2"),
        ({"mesh": {"tp": 6}}, 6, "mesh.tp=6 does not divide model.hidden=512; use a tp of 1 or 2"),
        (
            {"mesh": {"tp": 2}, "model": {"vocab": 1, "kv_heads": 6}, "train": {"prompt": "\0"}},
            2,
            "mesh.tp=2 is more than model.vocab=1; use a tp of 1",
        ),
        (
            {"mesh": {"cp": 4}, "parallel": {"attention": "ulysses"}},
            4,
            "4 ranks of cp cannot share the 6 heads and 2 KV heads of a rank; use parallel.attention=ring, "
            "or ring_ulysses with a ulysses of 2",
        ),
        (
            {"mesh": {"cp": 2, "tp": 2}, "parallel": {"attention": "ulysses"}},
            4,
            "2 ranks of cp cannot share the 3 heads and 1 KV heads of a rank; use parallel.attention=ring",
        ),
        (
            {"mesh": {"cp": 4}, "parallel": {"attention": "ring_ulysses", "ulysses": 3}},
            4,
            "parallel.ulysses=3 does not divide mesh.cp=4; use parallel.attention=ring, "
            "or ring_ulysses with a ulysses of 2",
        ),
        (
            {"mesh": {"cp": 4}, "parallel": {"attention": "ring_ulysses", "ulysses": 4}},
            4,
            "4 ranks of cp cannot share the 6 heads and 2 KV heads of a rank; use",
        ),
        (
            {"mesh": {"cp": 2, "tp": 12}, "parallel": {"attention": "ulysses"}},
            24,
            "mesh.tp=12 does not fit model.heads=6 and model.kv_heads=2; use a tp of 1 or 2",
        ),
        ({"parallel": {"ulysses": 0}}, 1, "parallel.ulysses=0 must be positive"),
        ({"mesh": {"pp": 8}}, 8, "model.layers=4 are too few for 8 stages; use model.layers=7, or a pp of at most 5"),
        (
            {"mesh": {"pp": 2}, "parallel": {"stage_layers": [1, 1, 2]}},
            2,
            "parallel.stage_layers=[1, 1, 2] must be 2 numbers, the blocks of each stage, that make model.layers=4: "
            "leave it out, for as even as can be",
        ),
        (
            {"mesh": {"pp": 2}, "parallel": {"stage_layers": [5, -1]}},
            2,
            "parallel.stage_layers=[5, -1] must be 2 numbers",
        ),
        (
            {"mesh": {"pp": 2}, "parallel": {"schedule": "zbv", "virtual": 3}},
            2,
            "parallel.schedule=zbv: zbv has 2 stages a rank, not virtual=3: use virtual=2",
        ),
        (
            {"mesh": {"pp": 2}, "parallel": {"schedule": "gpipe", "virtual": 1000}},
            2,
            "model.layers=4 are too few for 2000 stages; use model.layers=1999, or parallel.virtual=2",
        ),
        ({"mesh": {"pp": 2}, "parallel": {"virtual": 2000}}, 2, "parallel.virtual=2000 must be less than 1024"),
        ({"model": {"layers": 10**9}}, 1, "model.layers=1000000000 must be less than 65536"),
        (
            {"mesh": {"pp": 2}, "train": {"microbatches": 10**9}},
            2,
            "2 stages of train.microbatches=1000000000 make more than 32768 actions; use train.microbatches=16384",
        ),
        (
            {"mesh": {"pp": 2}, "parallel": {"reduce_each": True}},
            2,
            "parallel.reduce_each=true is of fsdp and zero3, not of parallel.data=auto: leave it out",
        ),
        ({"parallel": {"virtual": -1}}, 1, "parallel.virtual=-1 must not be negative"),
        (
            {"mesh": {"dp": 2, "ep": 2}},
            2,
            "mesh.ep=2 shares experts, and there are none: use mesh.ep=1, or model.experts",
        ),
        (
            {"mesh": {"dp": 2, "ep": 4}},
            2,
            "mesh.ep=4 is folded out of the 2 ranks of dp · fsdp · cp, and must divide them; use an ep of 1 or 2",
        ),
        (
            {"mesh": {"dp": 4, "ep": 4}, "model": {"experts": 6}},
            4,
            "mesh.ep=4 does not divide model.experts=6; use an ep of 1 or 2",
        ),
        (
            {"mesh": {"dp": 2, "tp": 2, "ep": 2}, "model": {"experts": 6}, "parallel": {"sequence": True}},
            *(
                4,
                "mesh.ep=2 · mesh.tp=2, which sequence parallelism folds into it, does not divide model.experts=6",
            ),
        ),
        ({"model": {"experts": 2, "choices": 3}}, 1, "choose at most all, use model.choices=2"),
        (
            {"model": {"experts": 2, "pattern": "dx"}},
            1,
            "model.pattern='dx' must be of letters d, a dense layer, and m",
        ),
        ({"model": {"experts": 2, "pattern": "d"}}, 1, "model.pattern='d' leaves all 4 layers dense"),
        ({"mesh": {"tp": 2}, "model": {"experts": 2, "expert_hidden": 9}}, 2, "does not divide model.expert_hidden=9"),
        (
            {"mesh": {"fsdp": 2}, "parallel": {"data": "zero3"}},
            2,
            "mesh.dp: use parallel.data=fsdp, or mesh.dp=2",
        ),
        ({"parallel": {"recompute": ("blok",)}}, 1, "parallel.recompute has 'blok': use some of block, attend_norm"),
        ({"parallel": {"recompute": ("block", "ffn")}}, 1, "has a block and parts of it: use block alone"),
        ({"parallel": {"recompute": ("ffn", "ffn")}}, 1, "parallel.recompute=['ffn', 'ffn'] has a name twice"),
        ({"parallel": {"prefetch": -1}}, 1, "parallel.prefetch=-1 must not be negative"),
        ({"mesh": {"dp": 0}}, 1, "mesh.dp=0 must be positive"),
        ({"mesh": {"dp": -1, "tp": -1}}, 1, "mesh.dp=-1 must be positive"),
        (
            {"model": {"heads": 6, "kv_heads": 4}},
            1,
            "model.kv_heads=4 does not divide model.heads=6; use model.kv_heads=1, 2, 3 or 6",
        ),
        ({"model": {"width": 100}}, 1, "of model.heads=6: RoPE turns pairs; use model.width=96 or 108"),
        ({"model": {"dropout": 1.0}}, 1, "model.dropout=1.0 must be at least 0 and less than 1"),
        ({"train": {"betas": (0.9, 1.5)}}, 1, "train.betas=(0.9, 1.5) must be"),
        ({"train": {"lr": float("nan")}}, 1, "train.lr=nan is not a finite number"),
        ({"model": {"dropout": 0.999999}}, 1, "model.dropout=0.999999 must be"),
        ({"train": {"timeout": 1e-9}}, 1, "train.timeout=1e-09 must be at least 1 second"),
        ({"train": {"batch": 2**62}}, 1, "must be less than 2147483648"),
        ({"train": {"min_lr": 5.0}}, 1, "train.min_lr=5.0 is a share of train.lr"),
        ({"data": {"document_end": 7}}, 1, "data.document_end=7 must be an id"),
        ({"data": {"document_end": 256, "format": "uint16"}}, 1, "data.document_end=256 must be an id"),
        ({"train": {"clip": -1.0}}, 1, "train.clip=-1.0 must not be negative"),
        ({"train": {"steps": 0}}, 1, "train.steps=0 must be positive"),
        ({"data": {"validation": 0.0}}, 1, "data.validation=0.0 must be between 0 and 1"),
    ],
)
def test_refused_combinations(settings, world, words):
    with pytest.raises(ConfigError) as error:
        mistakes.check(config.validated(settings), world)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_waits_for_another_mesh_is_told():
    """The same file runs where an axis is not cut, and says what waits for it."""
    parallel = {"schedule": "zbv", "virtual": 2, "stage_layers": [4], "order": "striped", "ulysses": 4}
    parallel |= {"sequence": True, "save_gathered": True, "reduce_each": True, "reshard": False, "prefetch": 2}
    saving = {"keep_last": 2}
    alone = config.validated({"parallel": {**parallel, "data": "naive", "cap": 9}, "checkpoint": saving})
    mistakes.check(alone, 1)
    assert mistakes.without_effect(alone) == [
        "parallel.schedule=zbv wants mesh.pp",
        "parallel.virtual=2 wants mesh.pp",
        "parallel.stage_layers=[4] wants mesh.pp",
        "parallel.reduce_each=true wants mesh.pp, and parallel.data=fsdp or zero3",
        "parallel.order=striped wants mesh.cp",
        "parallel.ulysses=4 wants mesh.cp and parallel.attention=ring_ulysses",
        "parallel.sequence=true wants mesh.tp",
        "parallel.save_gathered=true wants mesh.tp and parallel.sequence=true, or mesh.cp and "
        "parallel.attention=all_gather",
        "parallel.reshard=false wants parallel.data=fsdp, or mesh.pp and parallel.data=zero3",
        "parallel.prefetch=2 wants parallel.data=fsdp and mesh.pp=1",
        "parallel.cap=9 wants buckets, not parallel.data=naive or fsdp",
        "checkpoint.keep_last=2 wants train.save_every",
    ]
    cut = {"pp": 2, "fsdp": 2, "cp": 4, "tp": 2}
    parallel |= {"attention": "ring_ulysses", "stage_layers": [1, 1, 1, 1], "prefetch": 1, "ulysses": 1}
    everything = {"mesh": cut, "parallel": parallel, "checkpoint": saving, "train": {"save_every": 1}}
    mistakes.check(config.validated(everything), 32)
    assert mistakes.without_effect(config.validated(everything)) == []
    assert mistakes.without_effect(Config()) == []


def test_defaults_run():
    mistakes.check(Config(), 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": {"cp": 4}},
        {"mesh": {"cp": 2}, "parallel": {"attention": "all_gather", "save_gathered": True, "order": "contiguous"}},
        {"mesh": {"cp": 4}, "parallel": {"attention": "ring_ulysses"}},
        {"mesh": {"cp": 2}, "parallel": {"attention": "ulysses"}, "data": {"context": 127}},
        {"mesh": {"cp": 2, "tp": 2}, "parallel": {"sequence": True}, "data": {"context": 127}},
        {"mesh": {"cp": 2}, "parallel": {"data": "fsdp"}},
    ],
)
def test_what_is_cut_over_cp_runs(settings):
    """Rows need not divide."""
    cfg = config.validated(settings)
    mistakes.check(cfg, cfg.mesh.cp * cfg.mesh.tp)


def test_the_names_of_what_can_be_recomputed_are_those_of_a_block():
    with torch.device("meta"):
        [block, *_] = GPT(Config().model, 0).blocks.values()
    assert ("block", *(name for name, _ in block.named_children())) == mistakes.RECOMPUTED


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.stepz", "3"], "error: unknown setting train.stepz: did you mean train.steps?"),
        (["--lr=3"], "error: unknown setting lr: did you mean train.lr?"),
        (["--train.steps"], "error: argument --train.steps: expected one argument"),
        (["--train.steps", "many"], "error: train.steps='many': "),
        (["--mesh.dp", "2"], "makes 2 ranks, but 1 are started"),
        (["--data.path", "nowhere"], "error: data.path=nowhere does not exist"),
        (["extra"], "error: unexpected argument 'extra'"),
        (["--data.path", "/", "--data.glob", "/*"], "is not a pattern"),
        (["--train.lr", "1\nx=3"], "error: train.lr='1\\nx=3'"),
    ],
)
def test_command_line_mistakes(toml, capsys, arguments, words):
    assert command.main(["train", toml(""), *arguments]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_missing_configuration(capsys):
    assert command.main(["train", "nowhere.toml"]) == 2
    assert capsys.readouterr().err == "error: cannot read the configuration nowhere.toml: No such file or directory\n"
    assert command.main(["trian", "nowhere.toml"]) == 2
    assert command.main([]) == 2


def test_folder_of_a_run(tmp_path, toml, capsys):
    """A folder that is not a run's is never touched."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_text("mine")
    for out, words in [("notes", "is a folder of something else"), ("notes/note.txt", "is not a folder")]:
        assert command.main(["train", toml(""), "--train.out", str(tmp_path / out)]) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "notes" / "note.txt").read_text() == "mine"


def test_variables_of_a_launcher_are_missing(monkeypatch, toml, capsys):
    monkeypatch.setenv("RANK", "0")
    assert command.main(["train", toml("")]) == 2
    assert "error: WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set" in capsys.readouterr().err


def test_every_rank_tells_it(monkeypatch, toml, capsys):
    """Before any group is made: each rank finds out for itself."""
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        assert command.main(["train", toml("[train]\nstepz = 3")]) == 2
        words = f"rank {rank}: error: unknown setting train.stepz: did you mean train.steps?\n"
        assert capsys.readouterr().err == words


def test_a_folder_that_cannot_be_written(tmp_path, toml, capsys):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("mine")
    for out in ("loop", "file/x", "a\0b"):
        assert command.main(["train", toml(""), "--train.out", str(tmp_path / out)]) == 2
        assert capsys.readouterr().err.startswith("error: ")
