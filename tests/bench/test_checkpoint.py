"""Saving and loading beside torch.distributed.checkpoint, and that both bring back what was saved."""

import contextlib
import errno
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from checkpoint import Checkpoints, State, bench, find
from checkpoint.files import Bytes, Files
from collectives.agreement import Stopped
from collectives.layout import Box
from collectives.runtime import Runtime
from tests.bench import ranks

ROUNDS = {"100 MB": 11, "400 MB": 7, "1 GB": 5}
LOADS = {"rows": ("rows", "rows"), "columns": ("columns", "rows"), "copies": ("copies", "copies")}
CASES = {
    **{f"save-{cut}": (bench.save, cut) for cut in ("rows", "copies")},
    **{case.__name__: (case, "rows") for case in (bench.stand_still, bench.durable)},
    **{f"load-{name}": (bench.load, *cuts) for name, cuts in LOADS.items()},
    "load-cold": (bench.load, "rows", "rows", True),
}


EVERYWHERE = [("100 MB", case) for case in CASES if case != "load-cold"]
EVERYWHERE += [("400 MB", case) for case in CASES if case != "save-copies"]
EVERYWHERE += [pytest.param("1 GB", case, marks=pytest.mark.drill) for case in CASES]


@pytest.mark.benchmark(timer=ranks.clock)
@pytest.mark.parametrize(("nbytes", "case"), EVERYWHERE)
@pytest.mark.parametrize("size", [2, 4])
def test_checkpoint(pool, benchmark, size, nbytes, case):
    build, *how = CASES[case]
    small = benchmark.disabled
    if small and nbytes != ("400 MB" if case == "load-cold" else "100 MB"):
        pytest.skip("when nothing is measured all sizes are one small state")
    ranks.record(benchmark, pool, size, build, "1 MB" if small else nbytes, *how, rounds=ROUNDS[nbytes])
    if not small:
        benchmark.extra_info["resident_bytes"] = pool.run(size, resident, build, nbytes, *how)[0]


def resident(run, build, *how):
    """How far one call raises the memory of a rank."""
    return bench.resident(run, build(run, *how))


@pytest.mark.parametrize(("cut", "saved_as"), [*LOADS.values(), ("rows", "copies"), ("copies", "columns")])
@pytest.mark.parametrize("size", [2, 4])
def test_both_bring_back_what_was_saved(pool, size, cut, saved_as):
    for filled in pool.run(size, brought_back, cut, saved_as):
        assert filled == {"checkpoint": [], "DCP": []}


def brought_back(run, cut, saved_as):
    """By competitor the names of the tensors that it did not fill with what was saved."""
    _, part, calls = bench.loads(run, "1 MB", cut, saved_as)
    expected, wrong = bench.Part.new(run, "1 MB", cut), {}
    for who in ("checkpoint", "DCP"):
        for tensor in part.tensors:
            tensor.zero_()
        calls[who]()
        wrong[who] = [n for n, (_, tensor) in expected.boxes.items() if not torch.equal(tensor, part.boxes[n][1])]
    return wrong


@pytest.mark.parametrize("cut", ["rows", "copies"])
def test_both_store_every_byte_once(pool, cut):
    payload, on_disk = pool.run(2, stored, cut)[0]
    assert payload <= on_disk["step-000001"] <= 1.3 * payload  # half a megabyte a rank, in 150 tensors
    assert payload <= on_disk["dcp"] <= 1.6 * payload


def stored(run, cut):
    """The bytes of the state, and of both checkpoints."""
    place, part, _ = bench.loads(run, "1 MB", cut, cut)
    return sum(4 * torch.Size(box.shape).numel() for box, _ in part.boxes.values()), place.nbytes()


# -- what theirs does not notice ---------------------------------------------------------------------------------------


def flipped(run: Runtime, path: Path, flips: int) -> dict[str, Counter]:
    """One byte of the tensors' file is changed, again and again: by competitor, how often the load refused, gave other
    values, or the right ones. Prints it.
    """
    state = {f"t{i}": torch.arange(1000.0) + i for i in range(4)}
    boxes = {name: [(Box.whole((1000,)), tensor)] for name, tensor in state.items()}
    with Checkpoints(path / "ours", run.world) as checkpoints:
        ours = checkpoints.save(1, State(boxes))
    dcp.save(state, checkpoint_id=path / "theirs")
    files = {"checkpoint": ours / "rank-0.safetensors", "DCP": path / "theirs" / "__0_0.distcp"}
    random, told = Random(0), {who: Counter() for who in files}
    for _ in range(flips):
        for who, file in files.items():
            found = {name: torch.full((1000,), -1.0) for name in state}
            with changed(file, random):
                try:
                    if who == "DCP":
                        dcp.load(found, checkpoint_id=path / "theirs")
                    else:
                        find(ours, group=run.world).read({n: [(Box.whole((1000,)), t)] for n, t in found.items()})
                except BaseException:  # theirs is no Exception
                    told[who]["refused"] += 1
                else:
                    right = all(torch.equal(found[name], state[name]) for name in state)
                    told[who]["right" if right else "wrong, silently"] += 1
    print({who: dict(counts) for who, counts in told.items()})
    return told


@contextlib.contextmanager
def changed(file: Path, random: Random) -> Iterator[None]:
    """Meanwhile one of its bytes is another."""
    before = file.read_bytes()
    data = bytearray(before)
    data[random.randrange(len(data))] ^= random.randrange(1, 256)
    file.write_bytes(data)
    try:
        yield
    finally:
        file.write_bytes(before)


def test_a_changed_byte(pool, tmp_path):
    told = pool.run(1, flipped, tmp_path, 300)[0]
    assert told["checkpoint"] == {"refused": 300}
    assert told["DCP"]["wrong, silently"] > 100


def stopped(run: Runtime, path: Path) -> dict[str, bool]:
    """A second save into the same place finds the disk full at its third tensor: by competitor, whether the first can
    still be loaded.
    """
    state = {f"t{i}": torch.arange(1000.0) + i for i in range(4)}
    boxes = {name: [(Box.whole((1000,)), tensor)] for name, tensor in state.items()}
    files, there = Failing(), {}
    with Checkpoints(path / "ours", run.world, files=files) as checkpoints:
        checkpoints.save(1, State(boxes))
        files.left = 3
        with pytest.raises(Stopped, match="No space left"):
            checkpoints.save(1, State(boxes))
    there["checkpoint"] = not find(path / "ours", group=run.world, verify=True).read(boxes)
    dcp.save(state, checkpoint_id=path / "theirs")
    real, left = filesystem._write_item, iter(range(2))

    def full(*args, **kwargs):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    filesystem._write_item = full
    try:
        with pytest.raises(BaseException, match="No space left"):
            dcp.save(state, checkpoint_id=path / "theirs")
    finally:
        filesystem._write_item = real
    try:
        dcp.load(state, checkpoint_id=path / "theirs")
        there["DCP"] = True
    except BaseException:
        there["DCP"] = False
    return there


class Failing(Files):
    """Storage that is full after so many chunks of a file, header included."""

    left = sys.maxsize

    def write(self, path: Path, chunks: Iterable[Bytes]) -> None:
        super().write(path, map(self._room, chunks))

    def _room(self, chunk: Bytes) -> Bytes:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return chunk


def test_a_second_save_that_finds_the_disk_full(pool, tmp_path):
    assert pool.run(1, stopped, tmp_path)[0] == {"checkpoint": True, "DCP": False}
