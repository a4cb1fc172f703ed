"""The data: every pair of neighbours once an epoch, the same batches on any mesh, clear words about bad files."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from context_parallel import NOWHERE
from nd_mesh import data
from nd_mesh.config import ConfigError, DataConfig
from nd_mesh.data import Stream, deal, microbatches
from nd_mesh.model import IGNORE
from tests import parity
from tests.reference import data as reference
from tests.reference import rng as reference_rng

LENGTHS = {
    "one document": [50],
    "packed": [3, 2, 1, 9, 1, 1, 4, 17, 6],
    "ends with a full sample": [8, 9, 8],
    "shorter than a sample": [2, 3],
    "single tokens": [1] * 23,
}


def documents(lengths: list[int]) -> list[np.ndarray]:
    """Documents of these lengths in which every token of the stream is another number."""
    return [part.astype(np.uint16) for part in np.split(np.arange(sum(lengths)) + 1, np.cumsum(lengths)[:-1])]


def batches(stream: Stream, *, dp: int, split: int, batch: int, step: int, seed: int = 0) -> list[data.Batch]:
    """All ranks' microbatches of a global batch, in order."""
    deal = [{"parts": dp, "part": rank, "split": split} for rank in range(dp)]
    return [micro for rank in deal for micro in microbatches(stream, seed=seed, step=step, batch=batch, **rank)]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_the_reference(lengths):
    stream = parity.stream(documents(lengths), 8)
    for step in range(5):
        [ours] = batches(stream, dp=1, split=1, batch=5, step=step, seed=7)
        ids, labels, docs, positions, numbers = reference.batch(documents(lengths), 8, 5, step, 7)
        assert torch.equal(ours.ids, ids) and torch.equal(ours.labels, labels)
        assert torch.equal(ours.where.positions, positions) and torch.equal(
            ours.where.samples, torch.as_tensor(numbers)
        )
        same = ours.where.documents[:, :, None] == ours.where.documents[:, None, :]
        assert torch.equal(same, docs[:, :, None] == docs[:, None, :])


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_pair_once_an_epoch(lengths, dp, split):
    """Over three epochs, which end inside a global batch of 4 rows."""
    stream = parity.stream(documents(lengths), 8)
    expected = Counter(pair for document in documents(lengths) for pair in pairwise(document.tolist()))
    rows, epochs = 4, 3
    steps = -(-epochs * stream.samples // rows)
    seen = [Counter() for _ in range(epochs + 2)]
    for step in range(steps):
        for micro in batches(stream, dp=dp, split=split, batch=rows, step=step):
            for number, ids, labels in zip(
                micro.where.samples.tolist(), micro.ids.tolist(), micro.labels.tolist(), strict=True
            ):
                seen[number // stream.samples].update((i, j) for i, j in zip(ids, labels, strict=True) if j != IGNORE)
    assert seen[:epochs] == [expected] * epochs


def test_batches_do_not_depend_on_the_mesh():
    stream = parity.stream(documents([100, 7, 31]), 8)
    for step in range(9):
        [whole] = batches(stream, dp=1, split=1, batch=7, step=step)
        for dp, split in ((2, 1), (3, 2), (4, 3), (8, 1)):
            parts = batches(stream, dp=dp, split=split, batch=7, step=step)
            assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
            assert torch.equal(torch.cat([part.where.samples for part in parts]), whole.where.samples)


def test_epochs_have_orders_of_their_own():
    epochs = [data.sample_order(0, torch.arange(30 * e, 30 * (e + 1)), 30).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert data.sample_order(1, torch.arange(30), 30).tolist() != epochs[0]
    assert data.sample_order(0, torch.arange(30), 30).tolist() == epochs[0]


def test_deal():
    assert [list(deal(range(7), 3, part)) for part in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(deal(range(2), 4, part)) for part in range(4)] == [[0], [1], [], []]
    assert [list(deal(range(3, 5), 2, part)) for part in range(2)] == [[3], [4]]


def test_packed_row():
    """The picture: documents [1 2 3] [4 5] [6] in samples of 8 tokens; the last three slots lie beyond the end."""
    ids, labels, documents, positions = Stream(np.array([1, 2, 3, 4, 5, 6]), np.array([0, 3, 5]), 8).rows(np.array([0]))
    assert ids.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert labels.tolist() == [[2, 3, IGNORE, 5, IGNORE, IGNORE, IGNORE, IGNORE]]
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, NOWHERE, NOWHERE]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]


def load(path, vocab=256, **settings) -> tuple[Stream, Stream]:
    return data.load(DataConfig(path=str(path), context=4, **settings), vocab)


def test_folder_of_text(tmp_path):
    texts = {"a.txt": "first file", "b/c.txt": "second, 한글", "b/empty.txt": "", ".hidden": "no", "b/.git/x.txt": "no"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    train, held_out = load(tmp_path, validation=0.3)
    whole = np.concatenate([train.tokens, held_out.tokens]).tobytes()
    assert whole in (f"{texts['a.txt']}{texts['b/c.txt']}".encode(), f"{texts['b/c.txt']}{texts['a.txt']}".encode())
    assert len(train.tokens) == round(0.7 * len(whole)) and len(train.starts) + len(held_out.starts) == 3
    train, held_out = load(tmp_path, validation=0.3, glob="a.*")
    assert (train.tokens.tobytes(), held_out.tokens.tobytes()) == (b"first f", b"ile")


def test_files_come_in_one_shuffled_order(tmp_path):
    """The files by name, shuffled by the reference's permutation: a split is the same on every machine."""
    for name in "gbadcfe":
        (tmp_path / name).write_text(name * 10)
    train, held_out = load(tmp_path, validation=0.2)
    order = [reference_rng.permutation(reference_rng.key(0, "documents"), place, 7) for place in range(7)]
    expected = "".join("abcdefg"[int(i)] * 10 for i in order)
    assert (train.tokens.tobytes() + held_out.tokens.tobytes()).decode() == expected != "".join(sorted(expected))


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_token_file(tmp_path, kind):
    tokens = np.array([5, 6, 0, 7, 0, 8, 9, 10, 0, 11], dtype=kind)
    tokens.tofile(tmp_path / "tokens.bin")
    train, held_out = load(tmp_path / "tokens.bin", vocab=12, format=kind, document_end=0, validation=0.4)
    assert isinstance(train.tokens, np.memmap)
    assert train.tokens.tolist() == [5, 6, 0, 7, 0, 8] and train.starts.tolist() == [0, 3, 5]
    assert held_out.tokens.tolist() == [9, 10, 0, 11] and held_out.starts.tolist() == [0, 3]
    _, held_out = load(tmp_path / "tokens.bin", vocab=12, format=kind, document_end=0, validation=0.5)
    assert held_out.tokens.tolist() == [8, 9, 10, 0, 11] and held_out.starts.tolist() == [0, 4]
    whole, _ = load(tmp_path / "tokens.bin", vocab=12, format=kind, validation=0.4)
    assert whole.starts.tolist() == [0]


def test_bad_data(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "zero.txt").write_bytes(b"text\0text")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "short.txt").write_text("ab")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.array([1, 2, 300, 4] * 9, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    (tmp_path / "none").mkdir()
    for name, settings, words in [
        ("missing.txt", {}, "missing.txt does not exist"),
        ("empty.txt", {}, "is empty"),
        ("zero.txt", {}, "zero.txt is not text: byte 4 is zero"),
        ("image.png", {}, "image.png is not text: byte 0 is not UTF-8"),
        (".", {}, "is not text"),
        ("short.txt", {}, "too few"),
        ("none", {}, "has no file that matches"),
        ("odd.bin", {"format": "uint16"}, "has 3 bytes: not a file of uint16"),
        ("empty.txt", {"format": "uint16"}, "has 0 bytes"),
        ("missing.bin", {"format": "uint16"}, "cannot read"),
        ("tokens.bin", {"format": "uint16"}, "token 300 at 2 is out of model.vocab=256; use 301"),
        ("tokens.bin", {"format": "uint16", "vocab": 300}, "token 300 at 2 is out of model.vocab=300; use 301"),
    ]:
        with pytest.raises(ConfigError, match=words) as error:
            load(tmp_path / name, **settings)
        assert "\n" not in str(error.value)


def test_standard_library():
    train, held_out = data.load(DataConfig(), 256)
    assert len(train.tokens) > 5e6 and len(train.starts) > 300
    assert abs(len(held_out.tokens) / (len(train.tokens) + len(held_out.tokens)) - 0.02) < 1e-4
