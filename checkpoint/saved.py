"""A checkpoint that is there: found by one rank for all, verified, and read by boxes.

Which checkpoint is taken is one rank's decision, and its manifest reaches the others from that rank: two ranks that
look at a slow file system may see two things. Whatever is wrong, on whichever rank, is said on all of them, and nothing
that they hold has changed.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint import folder, manifest, plain
from checkpoint.dtypes import DTYPES
from checkpoint.reader import Reader
from checkpoint.shard import Values
from collectives.agreement import Stopped, gathered, together

REMEDY = "; name an earlier checkpoint, or allow to fall back to one"


def find(path: Path, *, group: dist.ProcessGroup, verify: bool = False, fallback: bool = False) -> "Saved":
    """The checkpoint `path`, or the newest of the folder `path`, the same on every rank of `group`. Collective.

    verify: every byte of it is hashed now, each rank its share. Without, `Saved.read` verifies what it reads.
    fallback: where the newest is damaged, the one before it is taken, and so on; implies verify.
    Raises Stopped on every rank, naming the file, where there is none or where the one to be taken is damaged.
    """
    path = Path(path).absolute()
    choices = gathered(lambda: _choices(path) if group.rank() == 0 else [], group=group)[0]
    damages = []
    for choice in choices if fallback else choices[:1]:
        try:
            return _open(choice, group, verify or fallback)
        except Stopped as damage:
            damages.append(str(damage))
    raise Stopped("; ".join(damages) + ("" if fallback else REMEDY))


def _choices(path: Path) -> list[Path]:
    """What is to be tried, in this order."""
    if folder.is_checkpoint(path):
        return [path]
    found = [choice for _, choice in folder.candidates(path)]
    if not found:
        raise ValueError(f"{path} has no complete checkpoint: name another folder")
    return found


def _open(path: Path, group: dist.ProcessGroup, verify: bool) -> "Saved":
    first = group.rank() == 0
    # IDEA: one rank looks, all others are told.
    text = gathered(lambda: folder.complete(path)[1] if first else "", group=group)[0]
    saved = Saved(path, group, manifest.parse(text))
    if verify:
        reader = Reader(path, saved.manifest)
        together(lambda: _none(reader.verify_share(group.rank(), group.size())), group=group)
    return saved


def _none(wrong: list[str]) -> None:
    if wrong:
        raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, as every rank of a group sees it."""

    path: Path
    group: dist.ProcessGroup
    manifest: manifest.Manifest

    @property
    def step(self) -> int:
        """The steps that were done."""
        return self.manifest.step

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of every global tensor, by name."""
        return {name: (DTYPES[tensor.dtype], tensor.shape) for name, tensor in self.manifest.tensors.items()}

    @property
    def shared(self) -> dict[str, Any]:
        """The small state that all ranks had alike."""
        return plain.decode(self.manifest.shared)

    @property
    def own(self) -> dict[str, Any] | None:
        """The small state of this rank; None where another number of ranks saved it."""
        if self.manifest.world != self.group.size():
            return None
        return plain.decode(self.manifest.own[self.group.rank()])

    def read(self, targets: Values, *, all_names: bool = True) -> None:
        """Fill these tensors: by global name boxes, each with a tensor of its shape. Collective.

        all_names: every tensor of the checkpoint is wanted by some rank; False to take a part, such as the parameters.
        Raises Stopped on every rank, and no tensor is changed, with every difference in names, shapes and dtypes, or
        naming the damaged files.
        """
        reader = Reader(self.path, self.manifest)
        everyone = gathered(lambda: (set(targets), reader.misfits(targets)), group=self.group)
        wrong = dict.fromkeys(misfit for _, misfits in everyone for misfit in misfits)
        if all_names:
            wanted = set().union(*(names for names, _ in everyone))
            wrong |= dict.fromkeys(f"{name} is unknown here" for name in self.manifest.tensors if name not in wanted)
        if wrong:
            raise Stopped(f"the checkpoint {self.path} does not fit this run: {'; '.join(wrong)}")
        try:
            share = self.group.rank(), self.group.size()
            together(lambda: _none([*reader.verify_headers(*share), *reader.verify(targets)]), group=self.group)
        except Stopped as damage:
            raise Stopped(f"{damage}{REMEDY}") from None
        with torch.no_grad():
            reader.fill(targets)
