"""What a disk may hold after a crash: every state that a log of file operations leaves possible.

A file system promises little until fsync returns: the names in a folder and the bytes of a file reach the disk on their
own, in any order, or not at all; a rename is one act. So after a crash at some moment of a log each operation on a name
that was not forced may have happened or not, and bytes that were not forced may be lost, half there, zeros or there.
Pillai et al. 2014, "All File Systems Are Not Created Equal" (OSDI), section 3.
"""

import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.files import Bytes, Files

Tree = Mapping[str, bytes | None]  # by path, parents first: a file's bytes, None for a folder


@dataclass(frozen=True)
class Operation:
    """A file operation that has ended, or a `mark`: what the run says of its saves."""

    at: float  # when it ended, by the clock that all processes of a machine share
    kind: str
    path: str
    to: str = ""
    data: bytes = b""


class Logged(Files):
    """Does and logs every operation; paths relative to `base`."""

    def __init__(self, base: Path):
        self.base, self.log = base, []

    def mark(self, words: str) -> None:
        """Say something at this moment."""
        self.log.append(Operation(time.monotonic(), "mark", words))

    def _logged(self, kind: str, path: Path, to: Path | None = None, data: bytes = b"") -> None:
        names = [str(each.relative_to(self.base)) if each else "" for each in (path, to)]
        self.log.append(Operation(time.monotonic(), kind, *names, data))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._logged("make_folder", path)

    def write(self, path: Path, chunks: Iterable[Bytes]) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        super().write(path, [data])
        self._logged("write", path, data=data)

    def sync(self, path: Path) -> None:
        super().sync(path)
        self._logged("sync", path)

    def rename(self, path: Path, to: Path) -> None:
        super().rename(path, to)
        self._logged("rename", path, to)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._logged("unlink", path)

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self._logged("remove_folder", path)


@dataclass(frozen=True)
class Change:
    """One act on the names of a folder: a file or folder loses a name there, gets one, or both."""

    folder: int
    inode: int
    loses: str = ""
    gets: str = ""


@dataclass
class Disk:
    """Folders and files by number. What is forced is there after a crash, what is pending may be."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})  # of each folder, as the processes see it
    forced_names: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    content: dict[int, bytes] = field(default_factory=dict)  # of each file, as the processes see it
    forced_content: dict[int, bytes] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)  # pending, in order
    dirty: dict[int, None] = field(default_factory=dict)  # files with pending bytes

    @classmethod
    def holding(cls, tree: Tree) -> "Disk":
        """A disk on which all this is forced."""
        disk = cls()
        for path, content in tree.items():
            disk.do(Operation(0.0, "make_folder" if content is None else "write", path, data=content or b""))
        for path in ("", *tree):
            disk.do(Operation(0.0, "sync", path))
        return disk

    def find(self, path: str) -> int:
        """The number of what has this path now; 0 is the base."""
        inode = 0
        for part in Path(path).parts:
            inode = self.names[inode][part]
        return inode

    def do(self, operation: Operation) -> None:
        """One more operation."""
        path = Path(operation.path)
        match operation.kind:
            case "make_folder" | "write":
                self._make(path, operation.data if operation.kind == "write" else None)
            case "sync":
                self._sync(self.find(operation.path))
            case "rename":
                to = Path(operation.to)
                self._change(Change(self.find(str(path.parent)), self.find(operation.path), path.name, to.name))
            case "unlink" | "remove_folder":
                self._change(Change(self.find(str(path.parent)), self.find(operation.path), path.name))

    def _make(self, path: Path, data: bytes | None) -> None:
        folder = self.find(str(path.parent))
        inode = self.names[folder].get(path.name)
        if inode is None:
            inode = len(self.names) + len(self.content)
            self._change(Change(folder, inode, gets=path.name))
        if data is None:
            self.names[inode], self.forced_names[inode] = {}, {}
        else:
            self.content[inode] = data
            self.dirty[inode] = None

    def _change(self, change: Change) -> None:
        apply(change, self.names)
        self.changes.append(change)

    def _sync(self, inode: int) -> None:
        if inode in self.content:
            self.dirty.pop(inode, None)
            self.forced_content[inode] = self.content[inode]
            return
        for change in self.changes:
            if change.folder == inode:
                apply(change, self.forced_names)
        self.changes = [change for change in self.changes if change.folder != inode]

    def crashed(self, kept: Collection[int], fates: Mapping[int, str]) -> Tree:
        """What is there after a crash at which these of the pending changes had happened, and such was the fate of each
        file's pending bytes.
        """
        names = {folder: dict(entries) for folder, entries in self.forced_names.items()}
        for number in sorted(kept):
            apply(self.changes[number], names)
        tree: dict[str, bytes | None] = {}
        self._walk(names, 0, "", fates, tree)
        return tree

    def _walk(
        self, names: Mapping[int, Mapping[str, int]], folder: int, at: str, fates: Mapping[int, str], tree: dict
    ) -> None:
        for name, inode in sorted(names[folder].items()):
            if inode in names:
                tree[at + name] = None
                self._walk(names, inode, f"{at}{name}/", fates, tree)
            else:
                tree[at + name] = self._content(inode, fates.get(inode, "lost"))

    def _content(self, inode: int, fate: str) -> bytes:
        if inode not in self.dirty:
            return self.content[inode]
        now = self.content[inode]
        return {
            "lost": self.forced_content.get(inode, b""),
            "half": now[: len(now) // 2],
            "zeros": bytes(len(now)),  # the size reached the disk, the bytes did not
            "kept": now,
        }[fate]


FATES = ("lost", "half", "zeros", "kept")


def apply(change: Change, names: dict[int, dict[str, int]]) -> None:
    """Do it to these names."""
    entries = names[change.folder]
    if change.loses and entries.get(change.loses) == change.inode:
        del entries[change.loses]
    if change.gets:
        entries[change.gets] = change.inode


def survivors(count: int, draw: random.Random) -> Iterator[tuple[int, ...]]:
    """Which of so many pending changes have happened: none, all, each alone, all but each, each suffix, some."""
    everything = tuple(range(count))
    yield from ((), everything)
    for i in everything:
        yield from ((i,), everything[:i] + everything[i + 1 :], everything[i:])
    for _ in range(min(8, 2**count)):
        yield tuple(i for i in everything if draw.random() < 0.5)


def crashes(log: Sequence[Operation], disk: Disk, draw: random.Random, start: int = 0) -> Iterator[tuple[int, Tree]]:
    """Every state that a crash may leave, with the number of operations that had ended: from `start` of them on."""
    for ended in range(len(log) + 1):
        if ended:
            disk.do(log[ended - 1])
        if ended < start:
            continue
        for kept in dict.fromkeys(survivors(len(disk.changes), draw)):
            for fate in FATES if disk.dirty else ("kept",):
                yield ended, disk.crashed(kept, dict.fromkeys(disk.dirty, fate))
            if len(disk.dirty) > 1:
                yield ended, disk.crashed(kept, {inode: draw.choice(FATES) for inode in disk.dirty})


def lay_out(tree: Tree, base: Path) -> None:
    """Make a folder that holds it."""
    base.mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(content)


def merged(logs: Iterable[Sequence[Operation]]) -> list[Operation]:
    """One log of all ranks' logs."""
    return sorted((operation for log in logs for operation in log), key=lambda operation: operation.at)
