"""Saving as a protocol: every rank writes its share, all report, one commits.

    1. all ranks say what they hold, and each derives what it writes          (plan.py)
    2. the coordinator makes step-N.tmp                                       (folder.py)
    3. each rank writes and forces its file, and reports its hashes           (shard.py)
    4. the coordinator checks that the boxes are every tensor exactly, writes manifest.json and COMMIT, renames
    5. older checkpoints that need not be kept are deleted

A failure anywhere ends the save on every rank with the same words, and what was complete stays. `save_async` does 1
now, copies the rank's share to host memory, and leaves 2 to 5 to a thread with a process group of its own. Cost: each
byte of the run's state is written once; a gather of the reports. PyTorch's counterpart: torch.distributed.checkpoint,
`save` and `async_save`. Lecture A, "Sharded Checkpoint는 파일 묶음이 아니라 Protocol이다" (docs/notation.md).
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from checkpoint import folder, lock, manifest, plain, plan, saved, shard
from checkpoint.dtypes import DTYPES
from checkpoint.files import Files, naming
from checkpoint.folder import Keep
from checkpoint.manifest import Manifest
from checkpoint.pace import Pace, Storm
from checkpoint.plan import Holding, Share, deal
from checkpoint.saved import Saved
from checkpoint.shard import Values, Written
from checkpoint.staging import Staging
from checkpoint.state import State
from collectives import comm, watch
from collectives.agreement import Stopped, gathered, together

KEEP_ALL, NO_BOUNDS, DISK = Keep(), Storm(), Files()


@dataclass(frozen=True)
class _Job:
    """A rank's part of one save."""

    step: int
    values: Values
    own: Mapping[str, Any]
    shared: Mapping[str, Any]
    names: Collection[str]  # of every tensor that any rank has
    called: float  # when, by time.monotonic


@dataclass(frozen=True)
class _Dealt:
    """Who writes what, as long as all ranks hold what they held."""

    digests: list[bytes]  # of what each holds
    share: Share  # of this rank
    names: Collection[str]


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks of `group` share. Every method is collective.

    Use it in a `with`: the end waits for what is still being written. The first save takes the folder's lock.

    group: from the main thread. writer_group: of the same ranks, on gloo and used by nothing else, for `save_async`; a
    rank must have written its file within its time-out. about: what the run says of itself, JSON, used on rank 0. log:
    is given a line a save, on rank 0, also from another thread. Who watches communication (collectives/watch.py) ends
    to do so after a `wait`, or what is written behind would be watched in part.
    """

    def __init__(
        self,
        path: Path,
        group: dist.ProcessGroup,
        *,
        writer_group: dist.ProcessGroup | None = None,
        keep: Keep = KEEP_ALL,
        storm: Storm = NO_BOUNDS,
        about: Mapping[str, Any] | None = None,
        log: Callable[[str], object] = lambda line: None,
        files: Files = DISK,
    ):
        self.path, self.group, self.writer_group = Path(path).absolute(), group, writer_group
        self.keep, self.storm, self.about, self.log, self.files = keep, storm, about or {}, log, files
        self._first = group.rank() == 0
        self._owned = contextlib.ExitStack()  # the lock, on rank 0
        self._owning = self._ended = False
        self._dealt: _Dealt | None = None
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[Future[Path]] = []  # the oldest first; at most SLOTS, equally many on all ranks

    # -- save ----------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: State) -> Path:
        """Write the checkpoint of `step`; returns its path when it is durable. Raises Stopped on every rank when
        anything fails on any, and when an earlier asynchronous save did; then what was complete is so still.
        """
        called = time.monotonic()
        self._settle(0)
        return self._write(self._job(step, state, called), self.group)

    def save_async(self, step: int, state: State) -> None:
        """Copy this rank's share of the state to host memory, and write the checkpoint behind what follows.

        The state may be changed when this returns. It waits where two saves are under way already. A failure is raised
        by the next call, on every rank.
        """
        if self.writer_group is None:
            raise ValueError("save_async needs a process group of its own: give Checkpoints a writer_group, on gloo")
        called = time.monotonic()
        self._settle(1)
        job = together(partial(self._stage, self._job(step, state, called)), group=self.group)
        self._pending.append(self._thread.submit(self._write_behind, job))

    def poll(self) -> None:
        """Raise Stopped on every rank if a save that is under way has failed on any; else waits for none."""
        self._settle(len(self._pending))

    def wait(self) -> None:
        """Returns when every save is durable. Raises Stopped on every rank if one is not going to be."""
        self._settle(0)

    def _settle(self, most: int) -> None:
        """Wait until at most so many saves are under way. A failure that one rank knows of ends the wait of all."""
        failed = any(save.done() and save.exception() for save in self._pending)
        if self._pending and any(comm.all_gather_object(failed, group=self.group)):
            pending, self._pending = self._pending, []
            errors = [error for save in pending if (error := save.exception())]
            raise errors[0] if errors else Stopped("an asynchronous save failed on another rank")
        while len(self._pending) > most:
            self._pending.pop(0).result()

    def _job(self, step: int, state: State, called: float) -> _Job:
        """Agree on what is saved, and find this rank's share of it."""
        self.take()
        held, small, digest = together(lambda: _described(step, state), group=self.group)
        everyone = comm.all_gather_object((step, small["shared digests"], digest), group=self.group)
        _check_alike(everyone)
        digests = [digest for _, _, digest in everyone]
        if self._dealt is None or self._dealt.digests != digests:
            descriptions = comm.all_gather_object(held, group=self.group)
            shares = together(lambda: deal(descriptions), group=self.group)
            self._dealt = _Dealt(digests, shares[self.group.rank()], sorted(set().union(*descriptions)))
        values = _chosen(state.tensors, self._dealt.share)
        return _Job(step, values, small["own"], small["shared"], self._dealt.names, called)

    def _stage(self, job: _Job) -> _Job:
        """The same with values of its own."""
        values = self._staging.copy(job.values)
        if self._first:
            newest = [f"step {step}" for step, _ in folder.candidates(self.path)]
            self.log(
                f"step {job.step} staged in {time.monotonic() - job.called:.3f} s; a failure before it is durable goes "
                f"back to {[*newest, 'the start'][0]}"
            )
        return replace(job, values=values)

    def _write_behind(self, job: _Job) -> Path:
        """In the thread. A failure is told at once, and raised by the next call."""
        try:
            return self._write(job, self.writer_group)
        except Stopped as failure:
            if self._first:
                self.log(f"step {job.step} is not saved: {failure}")
            raise

    def _write(self, job: _Job, group: dist.ProcessGroup) -> Path:
        """The protocol, from a folder to a checkpoint. Collective over `group`."""
        final = self.path / folder.name(job.step)
        pace = self.storm.pace(group.size())
        try:
            with watch.about("checkpoint"):
                begin = partial(folder.begin, self.files, self.path, job.step)
                unnamed = gathered(begin if self._first else _nothing, group=group)[0]
                reports: list[tuple[Written, Mapping]] = []
                for turn in self.storm.turns(group.size()):
                    write = partial(self._write_file, unnamed, job, group, pace)
                    wrote = gathered(write if group.rank() in turn else _nothing, group=group)
                    reports += [wrote[rank] for rank in turn]
                commit = partial(self._commit, unnamed, final, job, reports)
                together(commit if self._first else _nothing, group=group)
        except Stopped:
            if self._first:  # on a full disk, the space is wanted
                with contextlib.suppress(OSError):
                    folder.recover(self.files, self.path)
            raise
        return final

    def _write_file(self, unnamed: Path, job: _Job, group: dist.ProcessGroup, pace: Pace) -> tuple[Written, Mapping]:
        path = unnamed / f"rank-{group.rank()}.safetensors"
        written = shard.write(self.files, path, job.values, pace)
        self.files.sync(path)
        return written, job.own

    def _commit(self, unnamed: Path, final: Path, job: _Job, reports: list[tuple[Written, Mapping]]) -> None:
        """On the coordinator: validate what the ranks report, publish it, and retire what is older."""
        # IDEA: all have reported before one publishes, so a folder that any rank failed in never gets its name.
        for written, _ in reports:
            path = unnamed / written.name
            with naming(path):
                size = path.stat().st_size  # of a folder that is not shared, this rank would see its own file only
            if size != written.file.bytes:
                raise ValueError(f"{path} has {size:,} bytes, its rank wrote {written.file.bytes:,}: share the folder")
        told = _assembled(job, [written for written, _ in reports], [own for _, own in reports], self.about)
        folder.publish(self.files, unnamed, final, told)
        seconds = time.monotonic() - job.called
        payload = sum(file.bytes for file in told.files.values())
        self.log(f"step {job.step} is durable {seconds:.3f} s after the call: {payload:,} bytes in {final}")
        folder.retire(self.files, self.path, self.keep, job.step)

    # -- load, and whose folder it is ----------------------------------------------------------------------------------

    def open(self, *, verify: bool = False, fallback: bool = False) -> Saved:
        """The newest checkpoint (`saved.find`), after what is under way is durable."""
        self.wait()
        return saved.find(self.path, group=self.group, verify=verify, fallback=fallback)

    def take(self) -> None:
        """Take the folder: make it, lock it, put in order what a crash left in it. Raises Stopped on every rank if
        another job has it. The first save does so too.
        """
        if self._ended:
            raise ValueError(f"the checkpoints in {self.path} have ended with their `with`: make new ones")
        if not self._owning:
            together(self._lock if self._first else _nothing, group=self.group)
            self._owning = True

    def _lock(self) -> None:
        try:
            json.dumps(self.about, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`about` cannot be JSON, give text, numbers, lists and tables: {error}") from error
        self.files.make_folders(self.path)
        with contextlib.suppress(PermissionError):  # of a parent that may be passed but not read
            self.files.sync(self.path.parent)  # whoever made the folder may not have
        self._owned.enter_context(lock.held(self.path))
        folder.recover(self.files, self.path)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._ended = True
            self._thread.submit(self._owned.close)  # after what is still being written
            # What is Stopped is so on every rank, and all end what is under way; after another error peers may be gone.
            self._thread.shutdown(wait=error is None or isinstance(error, Stopped))


def _nothing() -> None:
    """What a rank does whose turn it is not."""


def _described(step: int, state: State) -> tuple[dict[str, Holding], dict[str, Any], bytes]:
    """What a rank holds, its small state encoded, and a digest of the first."""
    if type(step) is not int or step < 0:
        raise ValueError(f"step {step!r} must be a number of steps, 0 or more")
    held = {}
    for name, boxes in state.tensors.items():
        kinds = {(tensor.dtype, box.shape) for box, tensor in boxes}
        if len(kinds) > 1:
            raise ValueError(f"{name}: its boxes are of different tensors: {sorted(map(str, kinds))}")
        for dtype, shape in kinds:
            if dtype not in DTYPES.values():
                raise ValueError(f"{name} is a tensor of {dtype}, which a checkpoint cannot hold")
            held[name] = Holding(dtype, shape, tuple(box for box, _ in boxes))
        for box, tensor in boxes:
            if tensor.is_meta or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
                raise ValueError(f"{name} has no plain memory: give a dense tensor, not on the meta device, resolved")
            if tuple(tensor.shape) != box.local:
                raise ValueError(f"{name}: the box {list(box.local)} comes with values of shape {list(tensor.shape)}")
    for what, table in (("tensors", state.tensors), ("shared", state.shared), ("own", state.own)):
        if odd := [key for key in table if not isinstance(key, str) or key.startswith("$")]:
            raise ValueError(f"{what} has the key {odd[0]!r}: give text that does not begin with $")
    shared = {key: plain.encode(value, f"shared[{key!r}]") for key, value in state.shared.items()}
    own = {key: plain.encode(value, f"own[{key!r}]") for key, value in state.own.items()}
    digests = {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for key, value in shared.items()
    }
    small = {"shared": shared, "own": own, "shared digests": digests}
    return held, small, hashlib.sha256(repr(sorted(held.items())).encode()).digest()


def _check_alike(everyone: list[tuple[int, dict[str, str], bytes]]) -> None:
    """Raise Stopped, on every rank, if the ranks save different steps or different shared state."""
    steps = [step for step, _, _ in everyone]
    if len(set(steps)) > 1:
        raise Stopped(f"the ranks save different steps: {steps}, by rank")
    keys = sorted({key for _, digests, _ in everyone for key in digests})
    if unlike := [key for key in keys if len({digests.get(key) for _, digests, _ in everyone}) > 1]:
        raise Stopped(f"the ranks differ in shared state {', '.join(unlike)}: give what is a rank's own as `own`")


def _chosen(tensors: Values, share: Share) -> Values:
    """The values of this rank's share."""
    chosen: dict[str, list] = {}
    for name, parts in share.items():
        chosen[name] = []
        for part in parts:
            within, tensor = next((box, tensor) for box, tensor in tensors[name] if plan.contains(box, part))
            chosen[name].append((part, tensor.detach()[part.slices(within)]))
    return chosen


def _assembled(job: _Job, reports: list[Written], own: list[Mapping], about: Mapping[str, Any]) -> Manifest:
    """The manifest of all ranks' files. Raises ValueError where they are not every tensor exactly."""
    tensors: dict[str, manifest.Tensor] = {}
    for written in reports:
        for name, part in written.tensors.items():
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = replace(part, pieces=(*before, *part.pieces))
    wrong = [f"{name} was written by nobody" for name in job.names if name not in tensors]
    wrong += [fault for name, tensor in tensors.items() for fault in plan.coverage(name, tensor.shape, tensor.boxes())]
    if wrong:
        raise ValueError(f"what the ranks wrote is not complete: {'; '.join(wrong)}")
    files = {written.name: written.file for written in reports}
    return Manifest(job.step, len(reports), files, tensors, job.shared, own, about)
