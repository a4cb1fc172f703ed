"""What a folder holds, for people: `python -m checkpoint inspect FOLDER` and `verify FOLDER`.

FOLDER is a checkpoint or a folder of them. One process, no process group, nothing is written and no lock is taken, so
both may look at a run that is going on. `inspect` reads manifests and sizes of files; `verify` hashes every byte.
PyTorch's counterpart: none; torch.distributed.checkpoint.format_utils converts, but has nothing to verify against.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from checkpoint import folder, lock
from checkpoint.manifest import Manifest
from checkpoint.reader import Reader
from collectives.agreement import words

COMMANDS = ("inspect", "verify")
PARTS = 100  # of the progress bar
LINE = 120  # characters: what `about` says in more is divided


def main(arguments: Sequence[str]) -> int:
    """The two commands; the exit status: 1, with a line that says why, where one is damaged or none is there."""
    parser = argparse.ArgumentParser(prog="python -m checkpoint", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("inspect", help="what is in it, by its manifest").set_defaults(act=inspect)
    commands.add_parser("verify", help="hash every byte; a line for each damaged file").set_defaults(act=verify)
    for command in commands.choices.values():
        command.add_argument("folder", type=Path, help="a checkpoint, or a folder of them")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    try:
        return options.act(options.folder, console)
    except (OSError, ValueError) as error:
        print(words(error), file=sys.stderr)
        return 1


def inspect(path: Path, console: Console) -> int:
    """Print what a checkpoint consists of, or a line for each checkpoint in a folder."""
    if folder.is_checkpoint(path):
        _describe(path, folder.complete(path)[0], console)
        return 0
    wrong: list[str] = []
    rows = [(entry.name, *_condition(entry, path, wrong)) for entry in _entries(path)]
    _print(console, ("checkpoint", "is", ">step", ">ranks", ">bytes"), rows)
    for line in wrong:
        console.print(line)
    if holder := lock.holder(path):
        console.print(f"the folder belongs to {holder}")
    return 0


def verify(path: Path, console: Console) -> int:
    """Hash every byte of a checkpoint, or of all complete ones in a folder; 1 if any is damaged."""
    chosen = [path] if folder.is_checkpoint(path) else [found for _, found in folder.candidates(path)]
    if not chosen:
        raise ValueError(f"{path} has no complete checkpoint: name another folder")
    return max([_verify(one, console) for one in chosen])


def _verify(path: Path, console: Console) -> int:
    try:
        told, _ = folder.complete(path)
        wrong = damage(path, told, console)
    except (OSError, ValueError) as error:
        wrong = [words(error)]
    for line in wrong:
        console.print(line)
    if not wrong:
        console.print(f"{path}: every byte of {_total(told):,} is as it was written")
    return 1 if wrong else 0


def damage(path: Path, told: Manifest, console: Console) -> list[str]:
    """A line for each file of a checkpoint that is not as it was written."""
    reader, wrong = Reader(path, told), []
    parts = min(PARTS, max(len(told.tensors), len(told.files)))
    # IDEA: one process can judge what any number of ranks wrote: the manifest says where each byte is, and its hash.
    for part in track(range(parts), path.name, console=console, transient=True, disable=not console.is_terminal):
        wrong += reader.verify_share(part, parts)
    of_files = [[line for line in wrong if line.startswith(f"{path / file} ")] for file in told.files]
    return [lines[0] + (f", and {len(lines) - 1} more" if lines[1:] else "") for lines in of_files if lines]


# -- a folder of checkpoints -------------------------------------------------------------------------------------------


def _entries(path: Path) -> list[Path]:
    found = sorted(entry for entry in path.iterdir() if entry.name.startswith("step-") and entry.is_dir())
    if not found:
        raise ValueError(f"{path} has no checkpoint: name another folder")
    return found


def _condition(entry: Path, path: Path, wrong: list[str]) -> tuple[str, ...]:
    """What a folder called step-… is, and of a complete checkpoint its step, ranks and bytes; damage adds a line."""
    if entry.suffix == ".tmp":
        return ("being written" if lock.holder(path) else "never completed: the next job deletes it",)
    if entry.suffix == ".gone":
        return ("being deleted" if lock.holder(path) else "half deleted: the next job deletes the rest",)
    try:
        told, _ = folder.complete(entry)
    except ValueError as error:
        wrong.append(str(error))
        return ("DAMAGED",)
    aside = "complete, moved aside for a second save of its step" if entry.suffix == ".old" else "complete"
    return aside, f"{told.step:,}", f"{told.world}", f"{_total(told):,}"


# -- one checkpoint ----------------------------------------------------------------------------------------------------


def _describe(path: Path, told: Manifest, console: Console) -> None:
    console.print(f"{path}: complete, step {told.step:,}, {told.world} ranks, {_total(told):,} bytes of tensors' files")
    for key, value in told.about.items():
        text = json.dumps(value, ensure_ascii=False)
        if len(text) <= LINE or not isinstance(value, dict):
            console.print(f"{key}: {text}")
        else:  # such as a configuration, a line a table
            for name, entry in value.items():
                console.print(f"{key}.{name}: {json.dumps(entry, ensure_ascii=False)}")
    counts = dict.fromkeys(told.files, 0)
    rows = []
    for name, tensor in told.tensors.items():
        for piece in tensor.pieces:
            counts[piece.file] += 1
        boxes = [f"{list(piece.local)} at {list(piece.offset)}" for piece in tensor.pieces]
        rows.append((name, tensor.dtype, f"{list(tensor.shape)}", f"{len(boxes)}", _short("; ".join(boxes), 60)))
    files = [(file, f"{entry.bytes:,}", f"{counts[file]:,}") for file, entry in told.files.items()]
    _print(console, ("file", ">bytes", ">pieces"), files)
    _print(console, ("tensor", "dtype", "shape", ">pieces", "boxes"), rows)
    console.print(f"small state of all ranks: {_keys([told.shared])}")
    console.print(f"small state of each rank: {_keys(told.own)}")


def _total(told: Manifest) -> int:
    return sum(file.bytes for file in told.files.values())


def _keys(tables: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(key for table in tables for key in table)) or "none"


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _print(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; a column whose name begins with > is of numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
