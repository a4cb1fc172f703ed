"""Run what the documents show: `python -m tests.demos [FOLDER]`, which is `make demo`.

First every folder's demo, `python -m FOLDER` (nd_mesh has a command instead), then every fenced block marked `sh run`
in README.md, docs/ and the folders' READMEs, from the root of the repository, with the `python` and `torchrun` of
this interpreter. A command too long to wait for has a short form, which runs in its place:

    ```sh run short="make train ARGS='--train.steps 3'"

A demo passes when it exits with 0 within the time limit. What it started and left behind is killed.
"""

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 300.0  # seconds an item
SHOWN = 40  # lines of a failed item's output
MARK = "NDPARALLEL_DEMO"  # a variable by which the processes of an item are found, in whatever session they are


@dataclass(frozen=True)
class Item:
    """Something to run: its name as printed, and its command."""

    name: str
    command: tuple[str, ...]


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line number, shell text) of every block whose info string starts with `sh run`; its short form where it has one.

    A fence is three or more ` or ~, indented or not, and is closed by at least as many of the same: inside a longer
    fence a shorter one is text. The body loses the indentation of its fence. Raises ValueError for a fence without an
    end and for an option that is not known.
    """
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        opening = re.match(r"( *)(`{3,}(?=[^`]*$)|~{3,})(.*)", line)
        if not opening:
            continue
        indent, fence, info = opening.groups()
        closing = re.compile(rf" *{fence[0]}{{{len(fence)},}} *")
        body = []
        for _, inner in lines:
            if closing.fullmatch(inner):
                break
            body.append(re.sub(rf"^ {{0,{len(indent)}}}", "", inner))
        else:
            raise ValueError(f"line {number}: the fence {fence} has no end")
        if re.match(r"sh run\b", info.strip()):
            yield number, _short_form(number, info) or "\n".join(body)


def _short_form(number: int, info: str) -> str:
    """The value of short="..." in an info string, "" without one."""
    short = ""
    for option in shlex.split(info)[2:]:
        key, _, short = option.partition("=")
        if key != "short" or not short:
            raise ValueError(f'line {number}: {option!r} in a fence; `sh run` takes short="command" and nothing else')
    return short


def items(root: Path, folder: str = "") -> list[Item]:
    """The demos, then the blocks; with a folder, only that folder's."""
    entries = sorted(root.glob(f"{folder or '*'}/__main__.py"))
    demos = [path.parent.name for path in entries if path.parent.name != "nd_mesh"]
    found = [Item(f"python -m {name}", (sys.executable, "-m", name)) for name in demos]
    everywhere = ["README.md", "docs/*.md", "*/README.md"]
    patterns = [f"{folder}/{'*' if folder == 'docs' else 'README'}.md"] if folder else everywhere
    documents = dict.fromkeys(path for pattern in patterns for path in sorted(root.glob(pattern)))
    for document in (path.relative_to(root) for path in documents):
        if document.parts[0].startswith("."):
            continue
        try:
            shown = list(blocks((root / document).read_text("utf-8")))
        except ValueError as failure:
            raise ValueError(f"{document}: {failure}") from None
        for line, text in shown:
            command = ("bash", "-euo", "pipefail", "-c", text)
            found.append(Item(f"{document}:{line}: {text.strip().splitlines()[0]}", command))
    return found


def environment(mark: str) -> dict[str, str]:
    """This process's environment with our `python` first, without what a `make` above us would pass to one below."""
    set_by_make = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL"}
    set_by_make |= {word.partition("=")[0] for word in shlex.split(os.environ.get("MAKEFLAGS", ""))}  # FOLDER=ddp
    own = {name: value for name, value in os.environ.items() if name not in set_by_make}
    path = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', os.defpath)}"
    return {**own, "PATH": path, MARK: mark}


def run(item: Item, root: Path, limit: float) -> tuple[int | None, str]:
    """(exit status, None when the time limit cut it; its output). Nothing it started is left alive."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile() as log:  # a pipe would keep us waiting for whatever holds its other end
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(item.command, cwd=root, env=environment(mark), start_new_session=True, **streams)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            while left := marked(mark):  # torchrun's workers have sessions of their own
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
        log.seek(0)
        return status, log.read().decode(errors="replace")


def marked(mark: str) -> list[int]:
    """The live processes that carry this mark in their environment. (Linux; elsewhere none is found.)"""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def run_all(chosen: list[Item], root: Path = ROOT, limit: float = TIME_LIMIT) -> int:
    """Run the items one after the other and print how each went; 0 when all passed, else 1."""
    failed = 0
    for item in chosen:
        print(item.name, end=" ", flush=True)
        start = time.monotonic()
        status, output = run(item, root, limit)
        print(f"{'✓' if status == 0 else '✗'} {time.monotonic() - start:.1f} s", flush=True)
        if status != 0:
            failed += 1
            reason = f"cut after {limit:g} s" if status is None else f"exit status {status}"
            for line in [*output.splitlines()[-SHOWN:], f"({reason})"]:
                print(f"    {line}")
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.demos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", default="", help="only the demo and the README of this folder")
    folder = parser.parse_args().folder.rstrip("/")
    if not (ROOT / folder).is_dir():
        parser.error(f"there is no folder {folder}; leave it out to run all")
    try:
        chosen = items(ROOT, folder)
    except ValueError as failure:
        parser.error(str(failure))
    return run_all(chosen)


if __name__ == "__main__":
    sys.exit(main())
