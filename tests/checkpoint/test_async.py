"""Written behind training: the state of the call, in two slots, and what fails is raised on every rank."""

import contextlib
import itertools
import re
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoints, State, Storm, find, restore, training
from checkpoint.files import Files
from checkpoint.pace import Pace
from collectives import comm
from collectives.agreement import Stopped
from collectives.layout import Box
from tests.checkpoint import cuts


class Watched(Files):
    """Writes of rank files take so many seconds, fail, or wait for a gate; when each began and ended is kept."""

    def __init__(self, seconds=0.0, failure=None, gate=None):
        self.seconds, self.failure, self.gate, self.times = seconds, failure, gate, []

    def write(self, path, chunks):
        if path.suffix != ".safetensors":
            return super().write(path, chunks)
        began = time.monotonic()
        if self.gate:
            assert self.gate.wait(60)
        time.sleep(self.seconds)
        if self.failure:
            raise self.failure
        super().write(path, chunks)
        self.times.append((began, time.monotonic()))


def opened(run, path, **settings):
    return Checkpoints(path, run.world, writer_group=run.new_group(range(run.size), "writer"), **settings)


def large(run, mb, value=0.0):
    """So many MB on each rank, in as many tensors."""
    shape = (run.size * 512, 512)
    box = Box.whole(shape).cut(0, run.rank * 512, 512)
    return {f"t{i}": [(box, torch.full((512, 512), float(value + i)))] for i in range(mb)}


# -- the state of the call ---------------------------------------------------------------------------------------------


FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def add(params, optimizer, value):
    """To everything in place, the counters included."""
    for param in params:
        if param.dtype in FLOATS:
            for tensor in (param.data, *optimizer.state[param].values()):
                tensor.add_(value)


def copied(params, optimizer):
    """The bits of everything."""
    tensors = {p.held.name: {"parameter": p, **optimizer.state[p]} for p in params}
    return {name: {kind: cuts.bits(value).clone() for kind, value in some.items()} for name, some in tensors.items()}


def changes(run, path, cut):
    """T120: three saves back to back; after each everything changes in place."""
    params, optimizer = cuts.filled(run, cut)
    shared, own, gate, expected = {"metrics": [0]}, {"draws": torch.zeros(3)}, threading.Event(), []
    with opened(run, path, files=Watched(gate=gate)) as checkpoints:
        for step in range(3):
            expected.append(copied(params, optimizer))
            if step == 2:
                gate.set()  # it would wait
            checkpoints.save_async(step, State(training(params, optimizer), shared, own))
            add(params, optimizer, 1000)
            shared["metrics"].append(step)
            own["draws"].add_(1)
    for step in range(3):
        found = cuts.params(run, cut)
        again = torch.optim.AdamW(found)
        saved = find(path / f"step-{step:06d}", group=run.world, verify=True)
        restore(saved, found, again)
        assert saved.shared == {"metrics": [0, 0, 1][: step + 1]} and saved.own["draws"].eq(step).all()
        for name, tensors in copied(found, again).items():
            assert tensors.keys() == expected[step][name].keys()
            assert all(torch.equal(value, expected[step][name][kind]) for kind, value in tensors.items()), (step, name)
    assert not torch.equal(expected[0]["matrix"]["step"], expected[1]["matrix"]["step"])


@pytest.mark.parametrize(("ranks", "cut"), [(1, "copies"), (2, "rows"), (3, "flat")])
def test_what_is_stored_is_the_state_of_the_call(pool, tmp_path, ranks, cut):
    pool.run(ranks, changes, tmp_path, cut)


def waits_for_a_slot(run, path):
    """Seconds of three calls on slow storage, and bytes of the slots after each."""
    seconds, kept = [], []
    gate = threading.Event()
    with opened(run, path, files=Watched(gate=gate)) as checkpoints:
        for step in range(4):
            if step == 2:
                threading.Timer(1.0, gate.set).start()
            began = time.monotonic()
            checkpoints.save_async(step, State(large(run, 2, step)))
            seconds.append(time.monotonic() - began)
            kept.append(sum(slot.nbytes for slot in checkpoints._staging._slots if slot is not None))
    for step in range(4):
        tensors = large(run, 2, -1)
        find(path / f"step-{step:06d}", group=run.world).read(tensors)
        assert all((tensor == step + i).all() for i, [(_, tensor)] in enumerate(tensors.values()))
    return seconds, kept


def test_the_third_waits_and_there_is_no_third_slot(pool, tmp_path):
    for seconds, kept in pool.run(2, waits_for_a_slot, tmp_path):
        assert seconds[2] >= 0.9 and kept == [2 << 20, 4 << 20, 4 << 20, 4 << 20]


def beside(run, path):
    """Training's collectives while the writers wait; whether all ended before a single file did."""
    gate = threading.Event()
    with opened(run, path, files=Watched(gate=gate)) as checkpoints:
        checkpoints.save_async(0, State(large(run, 1)))
        for step in range(200):
            x = torch.full((100,), float(run.rank + step))
            comm.all_reduce(x, group=run.world)
            assert x[0] == sum(range(run.size)) + run.size * step
        checkpoints.poll()
        pending = not checkpoints._pending[0].done()
        gate.set()
        checkpoints.wait()
        return pending and find(path, group=run.world).step == 0


def test_training_goes_on_beside_it(pool, tmp_path):
    assert pool.run(3, beside, tmp_path) == [True] * 3


def told(run, path):
    """The lines of a job that saves two steps behind training, and of one that goes on from the first of them."""
    jobs = []
    for steps in ((3, 6), (4,)):
        lines = []
        with opened(run, path, log=lines.append) as checkpoints:
            checkpoints.take()
            comm.barrier(group=run.world)
            if jobs and run.rank == 0:
                (path / "step-000006").rename(path / "of another branch")
            for step in steps:
                checkpoints.save_async(step, State(large(run, 1)))
                checkpoints.wait()
        jobs.append([re.sub(r"\d+\.\d+ s", "… s", line) for line in lines])
    return jobs


def test_the_durability_window_is_told(pool, tmp_path):
    first, *others = pool.run(3, told, tmp_path)
    assert others == [[[], []]] * 2
    lines = []
    for step, before in ((3, "the start"), (6, "step 3"), (4, "step 3")):
        folder = tmp_path / f"step-{step:06d}"
        there = tmp_path / "of another branch" if step == 6 else folder
        size = sum(file.stat().st_size for file in there.glob("rank-*"))
        lines.append(f"step {step} staged in … s; a failure before it is durable goes back to {before}")
        lines.append(f"step {step} is durable … s after the call: {size:,} bytes in {folder}")
    assert first == [lines[:4], lines[4:]]


def grows(run, path):
    """Saves of more, less and other bytes than the slots were made for."""
    dtypes = (torch.bool, torch.float64, torch.bfloat16, torch.int64)
    with opened(run, path) as checkpoints:
        for step, sizes in enumerate([(3,), (5, 3, 1), (1, 70, 3, 5), (1,), (9, 1, 200, 7)]):
            state = {f"t{i}": [(Box.whole((n,)), torch.full((n,), step).to(dtypes[i]))] for i, n in enumerate(sizes)}
            checkpoints.save_async(step, State(state))
        checkpoints.wait()
        for step in range(5):
            saved = find(path / f"step-{step:06d}", group=run.world)
            targets = {name: [(Box.whole(s), torch.zeros(s, dtype=d))] for name, (d, s) in saved.tensors.items()}
            saved.read(targets)
            assert all((tensor == torch.tensor(step).to(tensor.dtype)).all() for [(_, tensor)] in targets.values())


def test_slots_of_any_sizes_and_elements(pool, tmp_path):
    pool.run(2, grows, tmp_path)


# -- what fails --------------------------------------------------------------------------------------------------------

NEXT = {
    "save": lambda checkpoints, state: checkpoints.save(2, state),
    "save_async": lambda checkpoints, state: checkpoints.save_async(2, state),
    "wait": lambda checkpoints, state: checkpoints.wait(),
    "open": lambda checkpoints, state: checkpoints.open(),
    "poll": lambda checkpoints, state: checkpoints.poll(),
    "the end": lambda checkpoints, state: checkpoints.__exit__(None, None, None),
}
FAILED = {"disk": "[Errno 28] No space left on device", "program": "TypeError: no such thing"}
FAILURES = {"disk": OSError(28, "No space left on device"), "program": TypeError("no such thing")}


def fails(run, path, failure, then):
    """A save on which rank 1 fails: the words of the next call, what is in the folder, and the step of a good save."""
    files = Watched()
    state = State(large(run, 1))
    checkpoints = opened(run, path, files=files)
    checkpoints.save(0, state)
    files.failure = FAILURES[failure] if run.rank == 1 else None
    checkpoints.save_async(1, state)
    if then in ("poll", "save_async"):  # they do not wait for it, so the failure must be there
        with contextlib.suppress(Stopped):
            checkpoints._pending[0].result()
    with pytest.raises(Stopped) as error:
        NEXT[then](checkpoints, state)
    files.failure = None
    comm.barrier(group=run.world)  # rank 0 tidies up
    left = sorted(entry.name for entry in path.iterdir())
    if then == "the end":
        checkpoints = opened(run, path, files=files)
    with checkpoints:
        checkpoints.poll()
        checkpoints.save_async(3, state)
    return str(error.value), left, find(path, group=run.world, verify=True).step


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("then", NEXT)
def test_a_failure_surfaces_at_the_next_call(pool, tmp_path, failure, then):
    """T121: on all ranks, with rank and reason; nothing partial is left, and the next save works."""
    for words, left, step in pool.run(3, fails, tmp_path, failure, then):
        assert words == f"rank 1: {FAILED[failure]}"
        assert left == ["LOCK", "step-000000"] and step == 3


def one_knows_first(run, path, then):
    """A failure that rank 1's writer has told, and the others' not yet."""
    failed = Future()
    checkpoints = opened(run, path)
    checkpoints._pending = [failed]
    tell = threading.Timer(0.0 if run.rank == 1 else 0.5, failed.set_exception, [Stopped("rank 1: disk")])
    tell.start()
    if run.rank == 1:
        tell.join()
    with pytest.raises(Stopped, match="rank 1: disk"):
        NEXT[then](checkpoints, State({}))
    return checkpoints._pending


@pytest.mark.parametrize("then", ["poll", "save_async"])
def test_what_one_rank_knows_ends_the_call_of_all(pool, tmp_path, then):
    assert pool.run(3, one_knows_first, tmp_path, then) == [[]] * 3


def both_fail(run, path):
    """Two saves pending that fail; what three waits say, and then a save."""
    gate = threading.Event()
    files = Watched(failure=OSError(28, "first") if run.rank == 0 else None, gate=gate)
    state, told = State(large(run, 1)), []
    with opened(run, path, files=files) as checkpoints:
        checkpoints.save_async(1, state)
        checkpoints.save_async(2, state)
        gate.set()
        for _ in range(3):
            try:
                checkpoints.wait()
                told.append("")
            except Stopped as error:
                told.append(str(error))
        files.failure = None
        checkpoints.save_async(3, state)
    return told, find(path, group=run.world).step


def test_two_pending_fail(pool, tmp_path):
    for told, step in pool.run(2, both_fail, tmp_path):
        failures = [words for words in told if words]
        assert failures and set(failures) == {"rank 0: [Errno 28] first"} and not told[-1] and step == 3


class Interrupted(Exception):
    pass


def leaves(run, path, stopped):
    """A with that an exception leaves while a save is under way: seconds until it is left."""
    gate = threading.Event()
    began = time.monotonic()
    with contextlib.suppress(Interrupted, Stopped), opened(run, path, files=Watched(gate=gate)) as checkpoints:
        checkpoints.save_async(0, State(large(run, 1)))
        if stopped:
            gate.set()
            raise Stopped("all of us stop")
        raise Interrupted
    seconds = time.monotonic() - began
    gate.set()
    checkpoints._pending[0].exception()
    return seconds


@pytest.mark.parametrize("stopped", [False, True])
def test_an_exception_leaves_at_once(pool, tmp_path, stopped):
    assert max(pool.run(2, leaves, tmp_path, stopped)) < 10


def no_group(run, path):
    with Checkpoints(path, run.world) as checkpoints, pytest.raises(ValueError, match="writer_group") as error:
        checkpoints.save_async(0, State({}))
    return str(error.value)


def test_it_needs_a_group_of_its_own(pool, tmp_path):
    told = pool.run(2, no_group, tmp_path)
    assert told[0] == told[1] and "\n" not in told[0] and not list(tmp_path.iterdir())


# -- against a storm ---------------------------------------------------------------------------------------------------


def writers(run, path, at_a_time):
    files = Watched(seconds=0.05)
    with opened(run, path, files=files, storm=Storm(writers=at_a_time)) as checkpoints:
        checkpoints.save_async(0, State(large(run, 1)))
    return files.times


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_ranks_take_turns(pool, tmp_path, at_a_time):
    """Between the begin of one and the end of another turn nobody writes."""
    times = [span for [span] in pool.run(4, writers, tmp_path, at_a_time)]
    turns = [times[start : start + at_a_time] for start in range(0, 4, at_a_time)]
    for before, after in itertools.pairwise(turns):
        assert max(end for _, end in before) <= min(begin for begin, _ in after)


def test_turns_are_all_ranks_once():
    assert list(Storm(writers=2).turns(5)) == [range(2), range(2, 4), range(4, 5)]
    assert list(Storm().turns(3)) == [range(3)]
    assert Storm(writers=2, bandwidth=100).pace(5).bandwidth == 50
    assert Storm(writers=9, bandwidth=100).pace(4).bandwidth == 25
    for wrong in ({"writers": -1}, {"bandwidth": -1}):
        with pytest.raises(ValueError, match="-1"):
            Storm(**wrong)


@pytest.mark.parametrize("pause", [0.0, 0.03, 0.5])
def test_the_pace_by_a_clock_of_its_own(pause):
    """So many bytes a second from the first on; slow storage, or a pause of 5 s, saves up no credit."""
    now = [100.0]
    pace = Pace(10_000.0, clock=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    passed = []
    for block in range(50):
        pace.wait(1_000)
        passed.append(now[0])
        now[0] += 5.0 if block == 20 else pause
    gaps = [after - before for before, after in itertools.pairwise(passed)]
    assert gaps == pytest.approx([*[max(0.1, pause)] * 20, 5.0, *[max(0.1, pause)] * 28])
    unbounded = Pace(0.0, sleep=lambda seconds: pytest.fail("slept"))
    unbounded.wait(10**12)


def paced(run, path, bandwidth):
    files = Watched()
    with opened(run, path, files=files, storm=Storm(bandwidth=bandwidth)) as checkpoints:
        checkpoints.save(0, State(large(run, 8)))
    [(began, ended)] = files.times
    return ended - began


def test_the_bandwidth_of_all_together(pool, tmp_path):
    """16 MB from two ranks at 16 MB/s; the last block need not wait for its own time."""
    seconds = max(pool.run(2, paced, tmp_path, 16 << 20))
    assert 0.8 <= seconds <= 1.6


def test_a_path_may_be_text(pool, tmp_path):
    assert Path(pool.run(1, saved_path, str(tmp_path))[0]).is_absolute()


def saved_path(run, path):
    with Checkpoints(path, run.world) as checkpoints:
        return str(checkpoints.save(0, State({})))
