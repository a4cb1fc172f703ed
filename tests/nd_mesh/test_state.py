"""Save and resume: the same bits on the same mesh, the same values on any other, and no mixture ever."""

import json
import shutil
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from collectives import layout, rng
from collectives.layout import Box, Constant, Held
from collectives.runtime import Runtime
from nd_mesh import loop, metrics, saved, state
from nd_mesh.agreement import Stopped
from nd_mesh.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig, WatchConfig
from nd_mesh.train import Trainer, learning_rate
from tests import parity

MODEL = ModelConfig(vocab=37, layers=1, width=8, heads=2, kv_heads=1, hidden=12, dropout=0.1)
TRAIN = TrainConfig(steps=10, batch=5, microbatches=2, lr=0.01, warmup=3, sample=3, prompt="\x01", evaluate_every=3)
TIMES = ("seconds", "slowest", "median")


def config(dp: int, **train) -> Config:
    """Without a journal, which wants more room than the small disks of these tests have."""
    quiet = WatchConfig(journal=False)
    return Config(MeshConfig(dp=dp), MODEL, DataConfig(context=8), replace(TRAIN, **train), watch=quiet)


def stream() -> parity.Stream:
    """Fourteen samples: ten steps of five are several epochs."""
    numbers = np.random.default_rng(1)
    return parity.stream([numbers.integers(0, 37, n).astype(np.uint8) for n in (50, 3, 40, 1, 17)], 8)


def trainer(run: Runtime, cfg: Config) -> Trainer:
    return Trainer(cfg, stream(), stream(), run)


def everything(built: Trainer) -> dict[str, torch.Tensor]:
    """A copy of all parameters and of the whole optimizer state, scalars too."""
    found = {}
    for param in built.handle.parameters():
        found[param.held.name] = param.detach().clone()
        for kind, value in built.optimizer.state.get(param, {}).items():
            found[f"{param.held.name} {kind}"] = value.clone()
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = one.keys() == other.keys()
    return same and all(one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one)


# -- the same mesh: the same bits --------------------------------------------------------------------------------------


def in_one_go(run: Runtime, cfg: Config, at: list[int], folder: Path) -> tuple[list, dict]:
    """All steps, with checkpoints on the way: (records without times, final state)."""
    built, records = trainer(run, cfg), []
    for step in range(cfg.train.steps):
        if step in at:
            built.save(folder / str(step), step)
        records.append(replace(built.step(step), seconds=0, slowest=0, median=0))
    return records, everything(built)


def from_a_checkpoint(run: Runtime, cfg: Config, folder: Path) -> tuple[list, dict]:
    built, records = trainer(run, cfg), []
    for step in range(built.resume(folder).step, cfg.train.steps):
        records.append(replace(built.step(step), seconds=0, slowest=0, median=0))
    return records, everything(built)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_bitwise(pool, tmp_path, optimizer):
    """Saved before the first step, in and after the warm-up, in a later epoch, with dropout and accumulation."""
    at, cfg = [0, 2, 3, 7], config(3, optimizer=optimizer)
    whole = pool.run(3, in_one_go, cfg, at, tmp_path)
    again = pool.run(3, in_one_go, cfg, [], tmp_path)
    for step in at:
        resumed = pool.run(3, from_a_checkpoint, cfg, tmp_path / str(step))
        for rank in range(3):
            assert resumed[rank][0] == whole[rank][0][step:] == again[rank][0][step:]
            assert equal(resumed[rank][1], whole[rank][1]) and equal(again[rank][1], whole[rank][1])
    assert [record.lr for record in whole[0][0]] == [learning_rate(cfg.train, step) for step in range(10)]


def run_until(run: Runtime, cfg: Config, last: int | None) -> str:
    """The whole command's work; cut off on every rank before step `last`, as by a kill, if one is given."""
    real = Trainer.step

    def step(self: Trainer, number: int):
        if number == last:
            raise KeyboardInterrupt
        return real(self, number)

    Trainer.step = step
    try:
        loop.train(cfg, stream(), stream(), run)
    except (KeyboardInterrupt, Stopped) as end:
        return str(end)
    finally:
        Trainer.step = real
    return "done"


def records(out: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in metrics.read(out)]


def values(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(checkpoint.glob("*.safetensors")) for k, v in load_file(file).items()}


def test_a_run_cut_off_goes_on_in_its_folder(pool, tmp_path):
    """Records and checkpoints end as those of a run that was left alone; what came after the checkpoint is kept."""
    whole, cut = (
        config(2, out=str(tmp_path / "whole"), save_every=4),
        config(2, out=str(tmp_path / "cut"), save_every=4),
    )
    assert pool.run(2, run_until, whole, None) == ["done"] * 2
    pool.run(2, run_until, cut, 6)
    assert saved.choose(tmp_path / "cut").step == 4
    assert pool.run(2, run_until, replace(cut, train=replace(cut.train, resume=cut.train.out)), None) == ["done"] * 2
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert [r["step"] for r in records(tmp_path / "cut") if "loss" in r] == list(range(1, 11))
    assert [r["step"] for r in metrics.read(tmp_path / "cut" / "tail.1")] == [5, 6, 6]
    for step in ("step-000004", "step-000008", "step-000010"):
        assert equal(values(tmp_path / "cut" / step), values(tmp_path / "whole" / step))

    elsewhere = replace(cut, train=replace(cut.train, resume=f"{cut.train.out}/step-000008", out=str(tmp_path / "new")))
    assert pool.run(2, run_until, elsewhere, None) == ["done"] * 2
    assert records(tmp_path / "new") == [r for r in records(tmp_path / "whole") if r["step"] > 8]
    assert len(records(tmp_path / "cut")) == len(records(tmp_path / "whole"))

    done = replace(cut, train=replace(cut.train, resume=cut.train.out))
    assert "is at step 10 of train.steps=10: raise train.steps" in pool.run(2, run_until, done, None)[1]


# -- any mesh ----------------------------------------------------------------------------------------------------------


def steps_then_save(run: Runtime, cfg: Config, steps: int, folder: Path) -> dict[str, torch.Tensor]:
    built = trainer(run, cfg)
    for step in range(steps):
        built.step(step)
    built.save(folder, steps)
    return everything(built)


def loaded(run: Runtime, cfg: Config, folder: Path) -> dict[str, torch.Tensor]:
    built = trainer(run, cfg)
    built.resume(folder)
    return everything(built)


def test_any_number_of_ranks_to_any_other(pool, tmp_path):
    """Values and moments arrive bit for bit; what is written is written once, and each rank writes its share."""
    before = pool.run(4, steps_then_save, config(4), 3, tmp_path)[0]
    for dp in (1, 2, 3, 8):
        assert all(equal(after, before) for after in pool.run(dp, loaded, config(dp), tmp_path))
    files = sorted((tmp_path / "step-000003").glob("*.safetensors"))
    written = [sum(value.numel() for value in load_file(file).values()) for file in files]
    assert sum(written) == sum(value.numel() for value in before.values() if value.dim())
    assert len(written) == 4 and max(written) <= 1.3 * min(written), written
    assert pool.run(3, steps_then_save, config(3), 0, tmp_path / "fresh")[0].keys() == {
        k for k in before if " " not in k
    }


SHAPES = {"matrix": (7, 5), "cube": (3, 4, 2), "vector": (11,), "number": (), "few": (2,)}
CUTS = {
    "copies": lambda shape, rank, size: [Box.whole(shape)],
    "rows": lambda shape, rank, size: [Box.whole(shape).cut(0, *share(shape[0], rank, size))],
    "columns": lambda shape, rank, size: [Box.whole(shape).cut(len(shape) - 1, *share(shape[-1], rank, size))],
    "flat": lambda shape, rank, size: layout.flat_range(shape, *flat_share(shape, rank, size)),
    "pairs": lambda shape, rank, size: [Box.whole(shape).cut(0, *share(shape[0], rank // 2, size // 2))],
}


def share(length: int, rank: int, size: int) -> tuple[int, int]:
    """(start, length), uneven: the last rank takes what is left."""
    each = length // size
    return rank * each, each if rank < size - 1 else length - rank * each


def flat_share(shape: tuple[int, ...], rank: int, size: int) -> tuple[int, int]:
    start, length = share(int(np.prod(shape)), rank, size)
    return start, start + length


def cut_params(run: Runtime, cut: str) -> list[nn.Parameter]:
    """Parameters of which this rank holds the boxes of that cut; a number cannot be cut."""
    params = []
    for name, shape in SHAPES.items():
        boxes = CUTS[cut](shape, run.rank, run.size) if shape else [Box.whole(shape)]
        boxes = [box for box in boxes if box.numel]
        local = boxes[0].local if len(boxes) == 1 else (sum(box.numel for box in boxes),)
        param = nn.Parameter(torch.zeros(local))
        param.held = Held(name, tuple(boxes), Constant(0.0), decay=False)
        params.append(param)
    layout.check(params, run.world)
    return params


def numbers(held: Held, salt: str, shape: torch.Size) -> torch.Tensor:
    """A number for every element that tells tensor, kind and place."""
    index = torch.cat([torch.empty(0, dtype=torch.int64), *(box.index().flatten() for box in held.boxes)])
    return rng.uniform(rng.key(0, held.name, salt), index).float().view(shape)


ABOUT = {"step": 5, "data_cursor": 5, "data": "same", "config": json.loads(json.dumps(asdict(config(1))))}
KINDS = ("parameter", "exp_avg", "exp_avg_sq")


def save_cut(run: Runtime, cut: str, folder: Path) -> None:
    params = cut_params(run, cut)
    optimizer = torch.optim.AdamW(params)
    for param in params:
        value, mean, square = (numbers(param.held, kind, param.shape) for kind in KINDS)
        param.data.copy_(value)
        optimizer.state[param] = {"step": torch.tensor(5.0), "exp_avg": mean, "exp_avg_sq": square}
    state.save(folder, params, optimizer, ABOUT, run)


def load_cut(run: Runtime, cut: str, folder: Path) -> None:
    params = cut_params(run, cut)
    optimizer = torch.optim.AdamW(params)
    state.resume(folder, params, optimizer, ABOUT, run)
    for param in params:
        if not param.held.boxes:
            continue  # fewer elements than ranks: this one has none
        found = {"parameter": param.detach(), **optimizer.state[param]}
        assert found.pop("step") == 5
        for kind in KINDS:
            assert torch.equal(found[kind], numbers(param.held, kind, param.shape)), (param.held.name, kind)


@pytest.mark.parametrize("cut", CUTS)
def test_boxes_of_any_cut_to_any_other(pool, tmp_path, cut):
    """As tensor parallel, fsdp, zero and hybrid sharding will leave them."""
    pool.run(4, save_cut, cut, tmp_path)
    count = Counter(key for file in (tmp_path / "step-000005").glob("*.safetensors") for key in load_file(file))
    assert max(count.values()) == 1
    for other, ranks in zip(CUTS, (1, 3, 2, 3, 4), strict=True):
        pool.run(ranks, load_cut, other, tmp_path)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(run: Runtime, cfg: Config, folder: Path) -> tuple[str, bool]:
    """The words with which a resume is refused, and whether the trainer is as it was."""
    built = trainer(run, cfg)
    before = everything(built)
    with pytest.raises(Stopped) as error:
        built.resume(folder)
    return str(error.value), equal(everything(built), before)


@pytest.fixture(scope="module")
def checkpoint(pool, tmp_path_factory):
    """Two steps of AdamW on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    pool.run(2, steps_then_save, config(2), 2, folder)
    return folder / "step-000002"


def rewrite(file: Path, change) -> None:
    """Change the tensors of a file, and its size in state.json."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index = json.loads((file.parent / "state.json").read_text())
    index["files"][file.name] = file.stat().st_size
    (file.parent / "state.json").write_text(json.dumps(index))


def reindex(folder: Path, change) -> None:
    index = json.loads((folder / "state.json").read_text())
    change(index["tensors"])
    (folder / "state.json").write_text(json.dumps(index))


Q = "blocks.0.q.weight"
FAULTS = {
    "key gone": (
        lambda f: rewrite(f / "rank-0.safetensors", lambda t: t.pop(f"{Q}/parameter/0,0")),
        [f"lacks {Q}/par"],
    ),
    "key more": (
        lambda f: rewrite(f / "rank-1.safetensors", lambda t: t.update(x=torch.ones(2))),
        ["rank-1.safetensors has x, which state.json lacks"],
    ),
    "shape": (
        lambda f: rewrite(f / "rank-1.safetensors", lambda t: t.update({f"{Q}/exp_avg/4,0": torch.ones(8, 4)})),
        [f"{Q}/exp_avg/4,0 has shape [8, 4], state.json says [4, 8]"],
    ),
    "dtype": (
        lambda f: rewrite(f / "rank-1.safetensors", lambda t: t.update({k: v.half() for k, v in t.items() if Q in k})),
        [f"{Q}/parameter/4,0 is float16, state.json says float32", f"{Q}/exp_avg/4,0 is float16"],
    ),
    "name gone": (lambda f: reindex(f, lambda t: t.pop("norm.weight")), ["norm.weight is missing"]),
    "name more": (lambda f: reindex(f, lambda t: t.update({"new": t["norm.weight"]})), ["new is unknown here"]),
    "moment gone": (lambda f: reindex(f, lambda t: t[Q].pop("exp_avg")), [f"{Q} has no exp_avg, others have"]),
    "piece gone": (
        lambda f: reindex(f, lambda t: t[Q]["exp_avg"]["pieces"].pop()),
        [f"{Q} (exp_avg): the pieces do not hold [8, 8] at [0, 0] exactly once"],
    ),
    "piece twice": (
        lambda f: reindex(f, lambda t: t[Q]["exp_avg"]["pieces"].__setitem__(1, t[Q]["exp_avg"]["pieces"][0])),
        [f"{Q} (exp_avg): the pieces do not hold [8, 8] at [0, 0] exactly once"],
    ),
    "global shape": (
        lambda f: reindex(f, lambda t: t[Q]["parameter"].update(shape=[8, 9])),
        ["has shape [8, 9], here"],
    ),
    "file gone": (lambda f: (f / "rank-1.safetensors").unlink(), ["rank-1.safetensors: No such file"]),
    "file short": (
        lambda f: (f / "rank-1.safetensors").write_bytes((f / "rank-1.safetensors").read_bytes()[:-1]),
        ["rank-1.safetensors: not the size it was written"],
    ),
    "no state": (lambda f: (f / "state.json").unlink(), ["state.json: No such file"]),
    "half a state": (lambda f: (f / "state.json").write_text('{"step": 2'), ["state.json cannot be read"]),
    "less of a state": (
        lambda f: (f / "state.json").write_text('{"files": {}, "config": {}}'),
        ["is not one of ours: state.json lacks step, data, tensors, scalars"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit(pool, tmp_path, checkpoint, fault):
    """Refused with all differences, in one line, on every rank of another mesh, before anything is changed."""
    change, words = FAULTS[fault]
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    change(tmp_path / checkpoint.name)
    ranks = pool.run(3, refused, config(3), tmp_path / checkpoint.name)
    assert all(told == ranks[0][0] and untouched for told, untouched in ranks)
    assert all(word in ranks[0][0] for word in words) and "\n" not in ranks[0][0], ranks[0][0]


OTHERS = {
    "model.width was 8, is 16": replace(config(3), model=replace(MODEL, width=16)),
    "model.dropout was 0.1, is 0.2": replace(config(3), model=replace(MODEL, dropout=0.2)),
    "train.seed was 0, is 1": config(3, seed=1),
    "train.batch was 5, is 6; train.optimizer was adamw, is sgd": config(3, batch=6, optimizer="sgd"),
    "train.dtype was float32, is float64": config(3, dtype="float64"),
    "data.context was 8, is 9": replace(config(3), data=DataConfig(context=9)),
}


@pytest.mark.parametrize("words", OTHERS)
def test_another_run(pool, checkpoint, words):
    ranks = pool.run(3, refused, OTHERS[words], checkpoint)
    assert all(f"is of another run: {words}" in told and untouched for told, untouched in ranks)


def refused_other_data(run: Runtime, folder: Path) -> str:
    texts = stream()
    texts.tokens[7] += 1
    with pytest.raises(Stopped) as error:
        Trainer(config(run.size), texts, stream(), run).resume(folder)
    return str(error.value)


def test_other_data(pool, checkpoint):
    assert all(
        "is of another run: the data's hash was " in told for told in pool.run(2, refused_other_data, checkpoint)
    )


def test_what_may_change(pool, checkpoint):
    """Mesh, microbatches, the number of steps, rate, clipping, momentum, decay, and what is written."""
    train = {"microbatches": 1, "steps": 50, "lr": 0.1, "warmup": 0, "clip": 0.0, "weight_decay": 0.0, "out": "other"}
    assert len(pool.run(3, loaded, config(3, **train), checkpoint)) == 3


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "is not a folder"),
        ("", "has no complete checkpoint"),
        ("step-000001.tmp", "is a save that did not end"),
    ],
)
def test_nothing_to_resume(pool, tmp_path, path, words):
    (tmp_path / "step-000001.tmp").mkdir()
    assert all(words in told for told, _ in pool.run(2, refused, config(2), tmp_path / path))


def rank_zero_alone_looks(run: Runtime, folder: Path) -> int:
    """The other ranks would find nothing."""
    if run.rank:
        state.saved = None
    built = trainer(run, config(run.size))
    try:
        return built.resume(folder).step
    finally:
        state.saved = saved


def test_rank_zero_decides(pool, checkpoint):
    assert pool.run(3, rank_zero_alone_looks, checkpoint) == [2, 2, 2]


# -- saves that fail ---------------------------------------------------------------------------------------------------


def failing_save(run: Runtime, folder: Path, rank: int) -> str:
    """A save in which one rank's disk is full, then one that is well: the words of the first."""
    built, real = trainer(run, config(run.size)), state.save_file

    def full(tensors: dict, path: Path) -> None:
        real(tensors, path)
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    built.save(folder, 0)
    state.save_file = full if run.rank == rank else real
    try:
        with pytest.raises(Stopped) as error:
            built.save(folder, 1)
    finally:
        state.save_file = real
    if run.rank == 0:
        assert [path.name for path in folder.iterdir()] == ["step-000000"]
        assert saved.choose(folder).step == 0
    built.save(folder, 1)
    return str(error.value)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_write_that_fails_on_one_rank(pool, tmp_path, rank):
    told = pool.run(3, failing_save, tmp_path, rank)
    path = tmp_path / "step-000001.tmp" / f"rank-{rank}.safetensors"
    assert told == [f"rank {rank}: {path}: I/O error: No space left on device (os error 28)"] * 3
    assert saved.choose(tmp_path).step == 1


def test_a_file_is_what_any_reader_of_safetensors_reads(checkpoint):
    with safe_open(checkpoint / "rank-0.safetensors", "np") as file:
        assert file.get_tensor(f"{Q}/exp_avg_sq/0,0").shape == (4, 8)
