"""After a crash at any moment of the protocol: nothing that was committed is lost, nothing partial is ever taken.

Each scenario runs on real ranks, which log their file operations. From the log every state is derived that the disk may
be in after a crash (crashes.py); each is laid out as a folder and loaded.
"""

import errno
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from checkpoint import Checkpoints, Keep, Saved, State, Storm, find, folder
from checkpoint.reader import Reader
from collectives.agreement import Stopped
from collectives.runtime import Runtime
from tests.checkpoint import tiny
from tests.checkpoint.crashes import Disk, Logged, Operation, Tree, crashes, lay_out, merged
from tests.checkpoint.faults import FORGOTTEN, REPLACED, planted
from tests.pool import Pool

RUN = "run"  # the folder of checkpoints, under the base
SHOWN = 2000  # states that `make test` loads; `make drill` loads them all
FOLLOWED = 40  # one state in so many is gone on from


@dataclass(frozen=True)
class Scenario:
    """Saves in order: a step, "async" for one behind training, "fails" for one that the last rank has no room for."""

    saves: tuple[tuple[int, str], ...]
    keep: Keep = Keep()  # noqa: RUF009, frozen
    storm: Storm = Storm()  # noqa: RUF009, frozen


def plain(*steps: int, **options: object) -> Scenario:
    return Scenario(tuple((step, "") for step in steps), **options)


SCENARIOS = {
    "a new folder": plain(1, 2),
    "the same step again": plain(1, 1, 1),
    "the last one": plain(1, 2, 3, keep=Keep(last=1)),
    "the last one and every second": plain(1, 2, 3, 4, keep=Keep(last=1, every=2)),
    "the last one again": plain(1, 2, 2, keep=Keep(last=1)),
    "behind training": Scenario(((1, "async"), (2, "async"), (3, "async")), keep=Keep(last=2)),
    "in turns": plain(1, 2, storm=Storm(writers=1)),
    "a failed save": Scenario(((1, ""), (2, "fails"), (2, ""))),
    "a failed save of the same step": Scenario(((1, ""), (1, "fails"), (1, ""))),
}


class Faulty(Logged):
    """Has no room for this rank's file while `full`, and does not force what matches `forgets`: "PATH after PATH"."""

    full, forgets = False, ""

    def write(self, path, chunks):
        if self.full and path.suffix == ".safetensors":
            data = b"".join(bytes(chunk) for chunk in chunks)
            super().write(path, [data[: len(data) // 2]])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().write(path, chunks)

    def sync(self, path):
        last = next((operation for operation in reversed(self.log) if operation.kind != "mark"), None)
        after = last and (last.to or last.path)
        if not (self.forgets and re.search(self.forgets, f"{path.relative_to(self.base)} after {after}")):
            super().sync(path)


@dataclass(frozen=True)
class Start:
    """What a job finds: a folder, and how often each step was saved."""

    base: Path
    tree: Tree = field(default_factory=dict)
    versions: Mapping[int, int] = field(default_factory=dict)


def record(run: Runtime, start: Start, scenario: Scenario, fault: str = "") -> list[Operation]:
    """Run a scenario; returns this rank's log."""
    if run.rank == 0:
        lay_out(start.tree, start.base)
    files, versions, latest = Faulty(start.base), dict(start.versions), {}

    def durable(line: str) -> None:
        if told := re.match(r"step (\d+) is durable", line):
            files.mark(f"durable {told[1]} {latest[int(told[1])]}")

    options = {
        "writer_group": run.new_group(range(run.size), "writers"),
        "keep": scenario.keep,
        "storm": scenario.storm,
    }
    with (
        planted(fault) as files.forgets,
        Checkpoints(start.base / RUN, run.world, **options, log=durable, files=files) as saves,
    ):
        for step, how in scenario.saves:
            latest[step] = versions[step] = versions.get(step, -1) + 1
            files.full = how == "fails" and run.rank == run.size - 1
            files.mark(f"begun {step} {latest[step]}")
            save(saves, step, how, tiny.state(run.rank, run.size, step, latest[step]))
            if not how:
                files.mark(f"durable {step} {latest[step]}")
    return files.log


def save(saves: Checkpoints, step: int, how: str, state: State) -> None:
    if how == "async":
        saves.save_async(step, state)
    elif how == "fails":
        with pytest.raises(Stopped, match="No space left"):
            saves.save(step, state)
    else:
        saves.save(step, state)


def record_each(run: Runtime, starts: list[Start], scenario: Scenario, fault: str = "") -> list[list[Operation]]:
    return [record(run, start, scenario, fault) for start in starts]


# -- a state after a crash ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crash:
    """A disk after a crash, and what the run had been promised."""

    tree: Tree
    durable: tuple[tuple[int, int], ...]  # (step, version) of the saves that had returned
    begun: tuple[tuple[int, int], ...]
    keep: Keep

    @property
    def key(self) -> tuple:
        return tuple(sorted(self.tree.items())), self.durable, self.begun


def marks(log: Sequence[Operation], word: str) -> tuple[tuple[int, int], ...]:
    found = [operation.path.split()[1:] for operation in log if operation.kind == "mark" and word in operation.path]
    return tuple(dict.fromkeys((int(step), int(version)) for step, version in found))


def states(
    log: Sequence[Operation], keep: Keep, draw: random.Random, disk: Disk | None = None, start: int = 0
) -> list[Crash]:
    """Every different state after a crash of this log, from `start` operations on."""
    found = {}
    for ended, tree in crashes(log, disk or Disk(), draw, start):
        crash = Crash(tree, marks(log[:ended], "durable"), marks(log[:ended], "begun"), keep)
        found.setdefault(crash.key, crash)
    return list(found.values())


def judge(crash: Crash, path: Path, run: Runtime) -> str:
    """What is wrong with what is found in a folder after a crash; "" if nothing is."""
    newest = max((step for step, _ in crash.durable), default=-1)
    try:
        saved = find(path, group=alone(run))
    except Stopped as stopped:
        return f"step {newest} is lost: {stopped}" if newest >= 0 else ""
    if saved.step < newest:
        return f"step {newest} was durable, step {saved.step} is found"
    if wrong := _wrong(saved, crash):
        return wrong
    if not tiny.right(saved):
        return f"step {saved.step} has other values"
    names = folder.candidates(path)
    kept = stays({step for step, _ in crash.durable} | {saved.step}, crash.keep) & {step for step, _ in crash.durable}
    if gone := kept - {step for step, _ in names}:
        return f"steps {sorted(gone)} are gone"
    others = [Saved(place, alone(run), folder.complete(place)[0]) for _, place in names]
    return "; ".join(filter(None, [_wrong(other, crash) for other in others]))


def _wrong(saved: Saved, crash: Crash) -> str:
    """What is wrong with a checkpoint that may be taken."""
    if damage := Reader(saved.path, saved.manifest).verify_share(0, 1):
        return f"partial: {damage}"
    version = saved.shared["version"]
    if (saved.step, version) not in crash.begun:
        return f"version {version} of step {saved.step} was never saved"
    if version < max((durable for step, durable in crash.durable if step == saved.step), default=0):
        return f"version {version} of step {saved.step} is not the newest"
    return ""


def stays(steps: set[int], keep: Keep) -> set[int]:
    if not keep.last:
        return steps
    return set(sorted(steps)[-keep.last :]) | {step for step in steps if keep.every and step % keep.every == 0}


def follow(path: Path, run: Runtime) -> str:
    """Go on from a state: the next save must work and leave a clean folder. Returns what is wrong."""
    before = [step for step, _ in folder.candidates(path)] if path.exists() else []
    step = max(before, default=0) + 1
    with Checkpoints(path, alone(run)) as saves:
        for version in (0, 1):  # the step is new, then it is there
            saves.save(step, tiny.state(0, 1, step, version))
    names = {folder.name(each) for each in [*before, step]} | {"LOCK"}
    if (found := {entry.name for entry in path.iterdir()}) != names:
        return f"after the next save there are {sorted(found)}, expected {sorted(names)}"
    saved = find(path, group=alone(run), verify=True)
    return "" if (saved.step, saved.shared["version"]) == (step, 1) and tiny.right(saved) else "the next save is lost"


def alone(run: Runtime):
    """The group of this rank; made by all for all when first asked for."""
    groups = [run.new_group([rank]) for rank in range(run.size)]
    return groups[run.rank]


def load(run: Runtime, base: Path, found: list[Crash], most: int) -> list[str]:
    """Lay out and load this rank's share of the states, until so many are wrong; returns what is wrong with them."""
    alone(run)
    wrong = []
    for number in range(run.rank, len(found), run.size):
        place = base / f"{number}"
        lay_out(found[number].tree, place)
        try:
            fault = judge(found[number], place / RUN, run)
            if not fault and number % FOLLOWED < run.size:
                fault = follow(place / RUN, run) or judge_after(found[number], place / RUN, run)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            wrong.append(f"{fault} in {sorted(found[number].tree)}")
        shutil.rmtree(place)
        if len(wrong) == most:
            break
    return wrong


def judge_after(crash: Crash, path: Path, run: Runtime) -> str:
    """What was there before must be there after the next save too."""
    for step, place in folder.candidates(path)[1:]:
        saved = Saved(place, alone(run), folder.complete(place)[0])
        if wrong := _wrong(saved, crash):
            return f"after the next save, step {step}: {wrong}"
    return ""


def faults(pool: Pool, memory: Path, found: list[Crash], most: int = 10) -> list[str]:
    ranks = pool.run(2, load, memory / "states", found, most, timeout=900.0)
    return [fault for rank in ranks for fault in rank]


def logs(pool: Pool, memory: Path, sizes: Sequence[int]) -> Iterator[tuple[int, Scenario, list[Operation]]]:
    """The log of every scenario on so many ranks."""
    for ranks in sizes:
        for name, scenario in SCENARIOS.items():
            yield ranks, scenario, merged(pool.run(ranks, record, Start(memory / f"{ranks} ranks, {name}"), scenario))


def restarts(
    pool: Pool, base: Path, ranks: int, scenario: Scenario, log: list[Operation], *, most: int, fault: str = ""
) -> Iterator[Crash]:
    """The job is killed, or the machine crashes; it starts again, saves a step that is there once more and another one,
    and crashes again: the states after that.
    """
    draw, starts, disks = random.Random(2), [], []
    for number, ended in enumerate(draw.sample(range(len(log)), min(most, len(log)))):
        disk = replayed(log[:ended])
        everything = range(len(disk.changes)), dict.fromkeys(disk.dirty, "kept")
        if number % 2:  # the machine: what the disk has now is all there is
            disk = Disk.holding(disk.crashed(*draw.choice([((), {}), (everything[0][1:], {}), everything])))
        tree = disk.crashed(range(len(disk.changes)), everything[1])
        disks.append((disk, ended))
        starts.append(Start(base / f"{number}", tree, dict(marks(log[:ended], "begun"))))
    again = replace(scenario, saves=((1, ""), (2, "")))
    recorded = pool.run(ranks, record_each, starts, again, fault, timeout=60.0)
    for (disk, ended), *by_rank in zip(disks, *recorded, strict=True):
        before = [operation for operation in log[:ended] if operation.kind == "mark"]
        yield from states([*before, *merged(by_rank)], scenario.keep, draw, disk, len(before))


def replayed(log: Sequence[Operation]) -> Disk:
    disk = Disk()
    for operation in log:
        disk.do(operation)
    return disk


def every_state(pool: Pool, memory: Path, sizes: Sequence[int], most: int) -> list[Crash]:
    """The states of all scenarios, and of restarts from so many moments of each."""
    found = []
    for ranks, scenario, log in logs(pool, memory, sizes):
        found += states(log, scenario.keep, random.Random(0))
        found += restarts(pool, memory / f"restarts {len(found)}", ranks, scenario, log, most=most)
    return found


def test_nothing_durable_is_lost_and_nothing_partial_is_taken(pool, memory):
    found = every_state(pool, memory, (1, 2, 3), most=2)
    print(f"{SHOWN} of {len(found)} states after a crash")
    assert faults(pool, memory, random.Random(1).sample(found, SHOWN)) == []


@pytest.mark.drill
def test_every_state_after_a_crash(pool, memory):
    found = every_state(pool, memory, (1, 2, 3), most=8)
    print(f"{len(found)} states after a crash")
    assert faults(pool, memory, found) == []


@pytest.mark.parametrize("name", ["the last one again", "behind training", "a failed save"])
def test_only_the_first_rank_changes_names(pool, memory, name):
    _, log = pool.run(2, record, Start(memory / "base"), SCENARIOS[name])
    done = {(operation.kind, Path(operation.path).name) for operation in log if operation.kind != "mark"}
    assert done == {("write", "rank-1.safetensors"), ("sync", "rank-1.safetensors")}


SHOWS = {  # a fault → where it shows
    **dict.fromkeys(FORGOTTEN, "a new folder"),
    **dict.fromkeys(REPLACED, "the last one"),
    "the taking of a name is not forced": "the last one",
    "the old one is deleted before the new one has its name": "the same step again",
}


@pytest.mark.parametrize("fault", [*FORGOTTEN, *REPLACED])
def test_a_fault_of_the_protocol_is_caught(pool, memory, fault):
    scenario = SCENARIOS[SHOWS[fault]]
    log = merged(pool.run(2, record, Start(memory / "base"), scenario, fault))
    found = states(log, scenario.keep, random.Random(0))
    if fault == "what was moved aside is deleted":
        found = list(restarts(pool, memory / "again", 2, SCENARIOS["the same step again"], log, most=20, fault=fault))
    random.Random(1).shuffle(found)
    caught = faults(pool, memory, found, most=1)
    print(caught[:1])
    assert caught
