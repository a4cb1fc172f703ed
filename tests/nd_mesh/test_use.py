"""Text and validation loss from a checkpoint: on any mesh what the reference makes of the same weights."""

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint import manifest
from checkpoint.folder import complete
from collectives.agreement import Stopped
from collectives.runtime import Runtime
from nd_mesh import __main__ as command
from nd_mesh import data, loop
from nd_mesh.config import Config, ConfigError, DataConfig
from nd_mesh.use import tokens_of
from tests import parity
from tests.reference import rng
from tests.reference.data import IGNORED, sample, sample_count
from tests.reference.model import loss_sum, routed_forward

EXPERTS = {"experts": 4, "pattern": "dm", "expert_hidden": 12, "shared_hidden": 12, "score": "sigmoid"}
ONE = parity.config(**EXPERTS, bias_rate=1.0, capacity=1.5, kv_heads=1, dropout=0.1)
MESHES = {
    "one device": (1, []),
    "copies": (2, []),
    "tp": (2, ["--mesh.tp", "2"]),
    "pp": (2, ["--mesh.pp", "2"]),
    "cp": (2, ["--mesh.cp", "2"]),
    "fsdp": (2, ["--mesh.fsdp", "2"]),
    "ep": (2, ["--mesh.ep", "2"]),
    "zero1": (2, ["--parallel.data", "zero1"]),
    "zero3": (2, ["--parallel.data", "zero3"]),
    "pp, tp and sequences": (4, ["--mesh.pp", "2", "--mesh.tp", "2", "--parallel.sequence", "true"]),
    "cp, fsdp, ep": (4, ["--mesh.cp", "2", "--mesh.fsdp", "2", "--mesh.ep", "4", "--parallel.order", "striped"]),
}
LENGTH, TEMPERATURE = 20, 0.2  # cold, so that the weights decide


def tokens() -> np.ndarray:
    """A run's tokens; the number 36 closes each of its documents. The last third is for validation."""
    numbers = np.random.default_rng(0).integers(0, 36, 230)
    numbers[[7, 30, 31, 32, 80, 120, 150, 171, 172, 173, 190, 229]] = 36
    return numbers.astype(np.uint16)


def trained(run: Runtime, cfg: Config) -> parity.Run:
    """Three steps and their checkpoint: the weights before and after."""
    streams = data.load(cfg.data, cfg.model.vocab)
    built = loop.Trainer(cfg, *streams, run)
    before, steps = parity.weights(built), [parity.one_step(built, step) for step in range(3)]
    with built.checkpoints(Path(cfg.train.out)) as checkpoints:
        built.save(checkpoints, 3)
    return before, steps


@pytest.fixture(scope="module")
def run_of_ids(pool, tmp_path_factory):
    """The folder of a run of token ids, and its initial and last weights and last biases as the reference has them."""
    out = tmp_path_factory.mktemp("run")
    (out / "tokens").write_bytes(tokens().tobytes())
    of_ids = DataConfig(str(out / "tokens"), "uint16", document_end=36, context=parity.CONTEXT, validation=1 / 3)
    cfg = replace(ONE, data=of_ids, train=replace(ONE.train, out=str(out), sample=LENGTH))
    initial, steps = parity.together(pool.run(1, trained, cfg))
    return out, initial, steps[-1].params, steps[-1].biases


def run_command(run: Runtime, arguments: list[str]) -> str:
    """What a command prints on this rank, or the words with which every rank stops."""
    chosen = command.parsed(arguments)
    _, job = chosen.prepare(chosen, run.size)
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        try:
            job(run)
        except Stopped as stopped:
            return f"stopped: {stopped}"
    return printed.getvalue()


# -- text --------------------------------------------------------------------------------------------------------------


def logits_of(weights: dict, biases: dict, rows: list[torch.Tensor]) -> torch.Tensor:
    model = ONE.model
    shape = {"heads": model.heads, "kv_heads": model.kv_heads, "base": model.rope_base}
    experts = {name: getattr(model, name) for name in parity.OF_ROUTERS}
    return routed_forward(weights, *rows, **shape, experts=experts, biases=biases)[0]


def text_by_reference(weights: dict, biases: dict, prompt: list[int]) -> str:
    """One token after the other, each drawn by its number."""
    found, key = list(prompt), rng.key(ONE.train.seed, "sample")
    for draw in rng.uniform(key, np.arange(LENGTH)).tolist():
        window = torch.tensor([found[-parity.CONTEXT :]])
        place = torch.arange(window.shape[1])[None]
        chances = (logits_of(weights, biases, [window, torch.zeros_like(window), place])[0, -1] / TEMPERATURE).softmax(
            0
        )
        found.append(next(token for token in range(37) if float(chances[: token + 1].sum()) >= draw))
    return " ".join(map(str, found)) + "\n"


@pytest.mark.parametrize("name", MESHES)
def test_text_on_any_mesh_is_the_references(pool, run_of_ids, name):
    out, initial, weights, biases = run_of_ids
    ranks, mesh = MESHES[name]
    arguments = ["sample", str(out), "--prompt", "1 2", "--temperature", str(TEMPERATURE), *mesh]
    printed = pool.run(ranks, run_command, arguments)
    assert printed == [text_by_reference(weights, biases, [1, 2]), *[""] * (ranks - 1)]
    # So it must: other weights, no biases, make another text.
    assert len({printed[0], text_by_reference(initial, biases, [1, 2]), text_by_reference(weights, {}, [1, 2])}) == 3


def test_length_and_seed(pool, run_of_ids):
    arguments = ["sample", str(run_of_ids[0] / "step-000003"), "--prompt", "5", "--temperature", "2"]
    texts = [
        pool.run(1, run_command, [*arguments, "--length", length, "--seed", seed])[0].split()
        for length, seed in [("0", "3"), ("5", "3"), ("9", "3"), ("9", "4")]
    ]
    assert texts[0] == ["5"] and texts[2][:6] == texts[1] and len(texts[2]) == 10 and texts[3] != texts[2]


# -- validation loss ---------------------------------------------------------------------------------------------------


def loss_by_reference(weights: dict, biases: dict) -> float:
    """Over all samples of the last third of the stream, one after the other."""
    mine = tokens()[round(len(tokens()) * 2 / 3) :].tolist()
    owners = np.cumsum([0, *(token == 36 for token in mine[:-1])]).tolist()
    total, count = 0.0, 0
    for number in range(sample_count(mine, parity.CONTEXT)):
        ids, labels, docs, positions = torch.tensor(sample(mine, owners, parity.CONTEXT, number))[:, None]
        total += loss_sum(logits_of(weights, biases, [ids, docs, positions]), labels).item()
        count += int((labels != IGNORED).sum())
    return total / count


@pytest.mark.parametrize("name", ["one device", "pp", "cp, fsdp, ep"])
def test_validation_loss_is_the_references(pool, run_of_ids, name):
    out, initial, weights, biases = run_of_ids
    ranks, mesh = MESHES[name]
    printed = pool.run(ranks, run_command, ["evaluate", str(out), *mesh])
    right = loss_by_reference(weights, biases)
    assert printed == [f"validation loss {right:.6f} nats a token, of 7 samples\n", *[""] * (ranks - 1)]
    assert not math.isclose(right, loss_by_reference(initial, biases), abs_tol=1e-4)


def test_other_data_is_refused(pool, run_of_ids, tmp_path):
    other = tokens()
    other[3] += 1
    (tmp_path / "tokens").write_bytes(other.tobytes())
    arguments = ["evaluate", str(run_of_ids[0]), "--data.path", str(tmp_path / "tokens")]
    for told in pool.run(2, run_command, arguments):
        assert "is of another run: the data's hash was " in told


# -- what is read ------------------------------------------------------------------------------------------------------


def flip(checkpoint: Path, of: tuple[str, ...]) -> None:
    """Damage a byte of each tensor of these kinds."""
    for name, tensor in complete(checkpoint)[0].tensors.items():
        for piece in tensor.pieces if name.split("/")[0] in of else ():
            with (checkpoint / piece.file).open("r+b") as file:
                file.seek(piece.at)
                byte = file.read(1)[0]
                file.seek(piece.at)
                file.write(bytes([byte ^ 1]))


def test_weights_alone_are_read_and_nothing_is_written(pool, run_of_ids, tmp_path):
    """What the optimizer keeps may be damaged, weights may not."""
    out = tmp_path / "step-000003"
    out.mkdir()
    for file in (run_of_ids[0] / "step-000003").iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    kinds = {name.split("/")[0] for name in complete(out)[0].tensors}
    flip(out, tuple(kinds - {"parameter", "bias"}))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    arguments = [str(tmp_path), "--mesh.tp", "2"]
    whole = pool.run(1, run_command, ["sample", str(run_of_ids[0]), "--prompt", "7"])[0]
    assert pool.run(2, run_command, ["sample", *arguments, "--prompt", "7"]) == [whole, ""]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert kinds > {"parameter", "bias"}
    flip(out, ("bias",))
    for told in pool.run(2, run_command, ["sample", *arguments, "--prompt", "7"]):
        assert told.startswith("stopped: ") and "rank-0.safetensors is damaged" in told


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], "--prompt is empty: give one token at least"),
        (["--prompt", "def"], "--prompt='def' must be token ids, as '5 17': the run has no text"),
        (["--prompt", "1 37"], "--prompt='1 37' has token 37: all must be less than model.vocab=37"),
        (["--prompt", "-1"], "--prompt='-1' has token -1"),
        (["--prompt", " 1" * 13], "--prompt has 13 tokens, and the model sees data.context=12: use the last 12"),
        (["--prompt", "1", "--length", "-1"], "--length=-1 must be 0 or more, and less than 2147483648"),
        (["--prompt", "1", "--length", str(2**31)], "--length=2147483648 must be 0 or more, and less than 2147483648"),
        (["5"], "unexpected argument '5': one checkpoint, then options"),
        (["--prompt", "1", "--length", "x"], "argument --length: invalid int value: 'x'"),
        (["--prompt", "1", "--temperature", "0"], "--temperature=0.0 must be positive"),
        (["--prompt", "1", "--temperature", "nan"], "--temperature=nan must be positive"),
        (["--prompt", "1", "--mesh.tp", "2"], "makes 2 ranks, but 1 are started"),
        (["--prompt", "1", "--mesh.tp", "0"], "mesh.tp=0 must be positive"),
        (["--prompt", "1", "--model.width", "8"], "model.width is what it was in the run"),
        (["--prompt", "1", "--mesh.pt", "8"], "unknown setting mesh.pt: did you mean mesh.tp?"),
    ],
)
def test_refused_in_one_line(run_of_ids, capsys, arguments, words):
    assert command.main(["sample", str(run_of_ids[0]), *arguments]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_prompts_of_text():
    text = replace(parity.config(), data=DataConfig(context=4))
    assert tokens_of("\x01é", replace(text, model=replace(text.model, vocab=256))) == [1, 0xC3, 0xA9]
    with pytest.raises(ConfigError, match=r"--prompt='é' has token 195: all must be less than model.vocab=37"):
        tokens_of("é", text)


@pytest.mark.parametrize("command_name", ["sample", "evaluate"])
def test_no_checkpoint(tmp_path, capsys, command_name):
    (tmp_path / "step-000001.tmp").mkdir()
    for path, words in [("", "has no complete checkpoint"), ("nowhere", "is not a folder")]:
        assert command.main([command_name, str(tmp_path / path)]) == 2
        printed = capsys.readouterr()
        assert words in printed.err and printed.err.count("\n") == 1


def test_a_checkpoint_of_something_else(run_of_ids, tmp_path, capsys):
    """One that does not say of which run it is."""
    out = tmp_path / "step-000003"
    out.mkdir()
    told = complete(run_of_ids[0] / "step-000003")[0]
    anonymous = replace(told, about={}, files={})
    text = anonymous.text()
    (out / "manifest.json").write_text(text)
    (out / "COMMIT").write_text(manifest.commitment(text))
    assert json.loads(text)["about"] == {}
    assert command.main(["sample", str(out)]) == 2
    assert "is not of a run: it does not tell its config" in capsys.readouterr().err
