"""The data: documents in one stream of tokens, cut into samples, in an order that is a function of the seed alone.

A sample is T+1 tokens of the stream: T inputs and, one later, T labels; samples overlap by one token, so every pair of
neighbours in a document is an (input, label) exactly once an epoch. A label across two documents is ignored, and
attention does not cross them; the last, short sample is padded and masked. The j-th sample of the run is sample
permutation(j mod n) of epoch j div n: the global batch of a step is a function of (seed, step), a rank reads only its
rows of it, and the whole state of the reader is one integer.

PyTorch's counterpart: DistributedSampler and DataLoader. Lecture A, "Distributed Sampler의 함정". Left out:
streams that grow, mixtures of sources, workers that read ahead (a sample is a slice of memory here).
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives import rng
from context_parallel import NOWHERE
from expert_parallel import Sequences
from nd_mesh.config import ConfigError, DataConfig
from nd_mesh.model import IGNORE, Where


@dataclass(frozen=True)
class Stream:
    """Tokens of documents laid end to end."""

    tokens: np.ndarray  # [N] of any unsigned type, in memory or memory-mapped
    starts: np.ndarray  # ascending index of each document's first token; the first is 0
    context: int  # T

    @property
    def samples(self) -> int:
        """N-1 pairs of neighbours, T a sample, the last one perhaps short."""
        return -(-(len(self.tokens) - 1) // self.context)

    def rows(self, samples: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For samples [B]: ids, labels, documents, positions, each int64 [B, T]. What lies beyond the end has no
        document and no label.
        """
        first = samples[:, None] * self.context
        place = first + np.arange(self.context + 1)  # [B, T+1] in the stream
        beyond, starts = len(self.starts), np.append(self.starts, len(self.tokens))
        tokens = np.where(
            place < len(self.tokens), self.tokens[np.minimum(place, len(self.tokens) - 1)].astype(np.int64), 0
        )
        document = np.searchsorted(starts, place, side="right") - 1
        labelled = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] < beyond)
        labels = np.where(labelled, tokens[:, 1:], IGNORE)
        inside = np.where(document < beyond, document, NOWHERE)
        positions = place - np.maximum(starts[document], first)
        return tuple(
            torch.from_numpy(np.ascontiguousarray(a))
            for a in (tokens[:, :-1], labels, inside[:, :-1], positions[:, :-1])
        )


@dataclass(frozen=True)
class Batch:
    """A rank's part of one microbatch; it may have no rows."""

    ids: Tensor  # [B, T]
    labels: Tensor  # [B, T], shifted already
    where: Where

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        where = replace(_moved(self.where, device), sequences=_moved(self.where.sequences, device))
        return Batch(self.ids.to(device), self.labels.to(device), where)

    def of(self, counts: Tensor, loss_scale: float) -> "Batch":
        """The same, in a global batch with these `counts` of all ranks' microbatches, whose loss has this factor."""
        _, rows, tokens = counts
        sequences = replace(self.where.sequences, rows=rows, tokens=tokens, loss_scale=loss_scale)
        return replace(self, where=replace(self.where, sequences=sequences))


def counts(batches: Sequence[Batch], *, first: bool) -> Tensor:
    """[3] of these microbatches: valid tokens, rows with one, tokens of documents. Rows are cut over ranks, of which
    this is the first or not: one of them counts them.
    """
    places = [batch.where.sequences for batch in batches]
    each = {
        "valid": [(batch.labels != IGNORE).sum() for batch in batches],
        "rows": [place.counted.sum() * first for place in places],
        "routed": [place.routed.sum() for place in places],
    }
    return torch.stack([torch.stack(numbers).sum() for numbers in each.values()])


def _moved(place: Any, device: torch.device) -> Any:
    values = {field.name: getattr(place, field.name) for field in fields(place)}
    return replace(place, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})


def sample_order(seed: int, numbers: Tensor, samples: int) -> Tensor:
    """Which of the stream's samples are the given numbers (counted over the whole run) to be: each epoch is another
    permutation.
    """
    order = torch.empty_like(numbers)
    for epoch in (numbers // samples).unique().tolist():
        now = numbers // samples == epoch
        order[now] = rng.permutation(rng.key(seed, "data order", epoch), numbers[now] % samples, samples)
    return order


def deal(rows: range, parts: int, part: int) -> range:
    """This part's share of consecutive rows: as even as can be, the first parts take one more; a share may be empty."""
    least, more = divmod(len(rows), parts)
    start = rows.start + part * least + min(part, more)
    return range(start, start + least + (part < more))


def microbatches(
    stream: Stream, *, seed: int, step: int, batch: int, parts: int, part: int, split: int
) -> Iterator[Batch]:
    """Global batch `step`, of `batch` rows: the `split` microbatches of the `part`-th of `parts` ranks that have rows
    of their own.
    """
    mine = deal(range(batch), parts, part)
    for micro in range(split):
        numbers = step * batch + torch.tensor(deal(mine, split, micro), dtype=torch.int64)
        yield make_batch(stream, step, numbers, sample_order(seed, numbers, stream.samples))


def make_batch(stream: Stream, step: int, numbers: Tensor, samples: Tensor) -> Batch:
    """The rows of these samples, whose numbers in the run are `numbers`."""
    ids, labels, documents, positions = stream.rows(samples.numpy())
    slots = torch.arange(stream.context)
    where = Where(step, numbers, slots, slots, stream.context, positions, documents)
    return Batch(ids, labels, replace(where, sequences=Sequences.of(documents != NOWHERE, (labels != IGNORE).any(1))))


def load(config: DataConfig, vocab: int) -> tuple[Stream, Stream]:
    """The training and the validation stream. Raises ConfigError, in one line, for data that is missing, empty, not
    text or out of range.
    """
    tokens, starts = _read_text(config) if config.format == "text" else _read_tokens(config)
    if len(tokens) and (largest := int(tokens.max())) >= vocab:
        where = int(np.argmax(tokens == largest))
        raise ConfigError(f"{config.path}: token {largest} at {where} is out of model.vocab={vocab}; use {largest + 1}")
    cut = round(len(tokens) * (1 - config.validation))
    if cut < 2 or len(tokens) - cut < 2:
        raise ConfigError(
            f"{config.path} has {len(tokens)} tokens: too few for training and data.validation={config.validation}"
        )
    after = np.searchsorted(starts, cut)
    train = Stream(tokens[:cut], starts[:after], config.context)
    return train, Stream(tokens[cut:], np.unique(np.append(0, starts[after:] - cut)), config.context)


def _read_tokens(config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    path, width = Path(config.path), np.dtype(config.format).itemsize
    try:
        size = path.stat().st_size
        if size == 0 or size % width:
            raise ConfigError(
                f"{path} has {size} bytes: not a file of {config.format} tokens of {width} bytes each; see data.format"
            )
        tokens = np.memmap(path, dtype=config.format, mode="r")
    except OSError as error:
        raise ConfigError(f"cannot read the tokens of data.path={path}: {error.strerror}") from error
    ends = (
        np.flatnonzero(tokens == config.document_end) + 1
        if config.document_end is not None
        else np.array([], dtype=np.int64)
    )
    return tokens, np.append(0, ends[ends < len(tokens)])


def _read_text(config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Each file is a document, its bytes are the tokens. Files come in a fixed shuffled order, so that the last ones
    are like the first.
    """
    contents = [content for path in _text_files(config) if (content := _text(path))]
    if not contents:
        raise ConfigError(f"data.path={config.path} holds no text: it is empty")
    order = rng.permutation(rng.key(0, "documents"), torch.arange(len(contents)), len(contents)).tolist()
    contents = [contents[i] for i in order]
    starts = np.cumsum([0, *map(len, contents)])[:-1]
    return np.frombuffer(b"".join(contents), dtype=np.uint8), starts


def _text_files(config: DataConfig) -> list[Path]:
    if config.path == "stdlib":
        return _stdlib_sources()
    root = Path(config.path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigError(f"data.path={root} does not exist")
    try:
        files = [path for path in root.rglob(config.glob) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"data.glob={config.glob!r} is not a pattern: {error}") from error
    visible = sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(root).parts))
    if not visible:
        raise ConfigError(f"data.path={root} has no file that matches data.glob={config.glob!r}")
    return visible


def _stdlib_sources() -> list[Path]:
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    sources = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        sources += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(sources)


def _text(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        content.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not text: byte {error.start} is not UTF-8; leave it out with data.glob, or convert it"
        ) from error
    if 0 in content:
        raise ConfigError(
            f"{path} is not text: byte {content.index(0)} is zero; leave it out with data.glob, or convert it"
        )
    return content
