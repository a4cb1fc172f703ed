"""Offload: the pipeline's picture, its bytes to the last one, the same bits as without, and what is left when host
memory fails.
"""

import copy
import os
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
from torch import nn, optim

from collectives import comm
from collectives.host import FilePool, Pool
from tests.zero.test_optimizer import (
    SIZES,
    Counted,
    adamw,
    assert_same,
    each_optimizer,
    give_gradients,
    shards,
    train,
)
from tests.zero.versions import drilled
from zero.offload import Offload, Row, rows
from zero.optimizer import PieceByPiece

CPU = torch.device("cpu")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(params=["memory", "files"])
def host(request, tmp_path):
    return Pool(CPU) if request.param == "memory" else FilePool(tmp_path, CPU)


def shards_in(host, dtype=F64, sizes=SIZES):
    """As a handle keeps them that was given the pool: masters, and views of them."""
    masters = host.empty(sum(sizes), dtype)
    masters.copy_(torch.cat([shard.detach() for shard in shards(dtype, sizes)]))
    return [nn.Parameter(part) for part in masters.split(sizes)]


# -- the pipeline ------------------------------------------------------------------------------------------------------


PICTURE = """
read     0 1 2 3 . .
compute  . 0 1 2 3 .
write    . . 0 1 2 3
"""


def drawn(schedule):
    lines = [
        [name, *("." if piece is None else str(piece) for piece in line)]
        for name, line in zip(Row._fields, zip(*schedule, strict=True), strict=True)
    ]
    return "\n" + "".join(f"{name:8} {' '.join(line)}\n" for name, *line in lines)


def test_rows_are_the_picture():
    assert drawn(rows(4)) == PICTURE
    assert rows(1) == [Row(0, None, None), Row(None, 0, None), Row(None, None, 0)]
    assert rows(0) == []


def test_a_row_runs_at_the_same_time_and_ends_before_the_next():
    """Each of a row's three waits until all of them have begun, so one after the other would wait forever."""
    schedule = rows(4)
    meetings = [threading.Barrier(sum(piece is not None for piece in row), timeout=20) for row in schedule]
    log, threads = [], {}

    def at(kind, piece):
        row = piece + Row._fields.index(kind)
        meetings[row].wait()
        log.append(("begins", row))
        time.sleep(0.002 * (kind != "compute"))
        log.append(("ends", row))
        threads.setdefault(kind, set()).add(threading.get_ident())
        return piece

    Offload(Pool(CPU)).run(range(4), *(lambda piece, kind=kind: at(kind, piece) for kind in Row._fields))
    for row in range(len(schedule) - 1):
        last = max(i for i, entry in enumerate(log) if entry == ("ends", row))
        assert last < min(i for i, entry in enumerate(log) if entry == ("begins", row + 1))
    assert threads["compute"] == {threading.get_ident()}
    assert threading.get_ident() not in threads["read"] | threads["write"]


def test_each_piece_goes_through_all_three_in_order():
    written = []
    Offload(Pool(CPU)).run("abc", str.upper, lambda staged: staged * 2, written.append)
    assert written == ["AA", "BB", "CC"]
    Offload(Pool(CPU)).run([], None, None, None)


class Piece:
    """Something whose life can be watched."""


@pytest.mark.parametrize(("pieces", "most"), [(1, 1), (2, 2), (3, 3), (10, 3)])
def test_three_pieces_are_alive_at_most(pieces, most):
    alive, seen = weakref.WeakSet(), []

    def read(_):
        alive.add(piece := Piece())
        return piece

    def look(piece):
        time.sleep(0.005)
        seen.append(len(alive))
        return piece

    Offload(Pool(CPU)).run(range(pieces), read, look, look)
    assert max(seen) == most and len(alive) == 0


@pytest.mark.parametrize("kind", Row._fields)
@pytest.mark.parametrize("piece", [0, 2, 5])
def test_an_error_leaves_when_all_threads_have_ended_and_nothing_starts_after_it(kind, piece):
    running, begun, before = [], [], threading.active_count()

    def work(own):
        def call(number):
            begun.append((own, number))
            running.append(own)
            time.sleep(0.01)
            running.remove(own)
            if (own, number) == (kind, piece):
                raise OSError(f"{kind} {piece} failed")
            return number

        return call

    with pytest.raises(OSError, match=f"{kind} {piece} failed"):
        Offload(Pool(CPU)).run(range(6), *map(work, Row._fields))
    assert running == [] and threading.active_count() == before
    last = piece + Row._fields.index(kind)
    assert max(number + Row._fields.index(own) for own, number in begun) == last


# -- the step ----------------------------------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("piece", [64, drilled(1 << 20)])
def test_offloaded_it_ends_bit_for_bit_as_whole(build, piece, host):
    params, others = shards_in(host), shards()
    optimizer, reference = PieceByPiece(build(params), piece=piece, pool=host), build(others)
    train(optimizer, params, 3)
    train(reference, others, 3)
    assert_same(optimizer, params, reference, others)
    for kinds in optimizer.state.values():
        assert all(host.holds(value) for value in kinds.values() if isinstance(value, torch.Tensor) and value.dim())


def test_offloaded_with_bfloat16_moments_it_is_as_on_the_device(host):
    params, others = shards_in(host, F32), shards(F32)
    optimizer = PieceByPiece(adamw(params), piece=64, pool=host, moments=BF16)
    reference = PieceByPiece(adamw(others), piece=64, moments=BF16)
    for step in range(4):
        give_gradients(params, step, BF16)
        give_gradients(others, step, BF16)
        optimizer.step()
        reference.step()
    assert_same(optimizer, params, reference, others)


@pytest.mark.parametrize(("moments", "k"), [(None, 4 + 4 + 4), (BF16, 4 + 2 + 2)])
def test_bytes_held_and_moved_are_the_formulas(host, moments, k):
    """AdamW: K bytes a parameter are held. The first step reads the masters and writes all, the others read all too."""
    n = 64 * 10
    params = shards_in(host, F32, sizes=(64 * 7, 64 * 3))
    optimizer = PieceByPiece(adamw(params), piece=64, pool=host, moments=moments)
    train(optimizer, params, 1)
    assert (host.host.now, host.host.peak) == (k * n, k * n)
    assert (optimizer.offload.moves.read, optimizer.offload.moves.written) == (4 * n, k * n)
    train(optimizer, params, 3)
    assert (host.host.now, host.host.peak) == (k * n, k * n)
    assert (optimizer.offload.moves.read, optimizer.offload.moves.written) == (k * n, k * n)
    assert (host.staged.peak, host.staged.now) == (3 * 64 * 12, 0)  # bfloat16: 8 being read, 8 + 8 computed, 12 written


def test_masters_on_the_device_are_not_moved(host):
    n, params = sum(SIZES), shards(F32)
    optimizer = PieceByPiece(adamw(params), piece=64, pool=host)
    train(optimizer, params, 2)
    assert host.host.now == 8 * n
    assert (optimizer.offload.moves.read, optimizer.offload.moves.written) == (8 * n, 8 * n)
    assert host.staged.peak <= 3 * 64 * 8


def test_gradients_on_the_host_are_read(host):
    n = sum(SIZES)
    params, others = shards_in(host, F32), shards(F32)
    optimizer, reference = PieceByPiece(adamw(params), piece=64, pool=host), adamw(others)
    train(optimizer, params, 1)
    train(reference, others, 1)
    give_gradients(params, 1)
    give_gradients(others, 1)
    for param in params:
        kept = host.empty(param.numel(), F32)
        param.grad = kept.copy_(param.grad)
    optimizer.step()
    reference.step()
    assert (optimizer.offload.moves.read, optimizer.offload.moves.written) == (16 * n, 12 * n)
    assert_same(optimizer, params, reference, others)


def test_the_report_has_all_four_numbers(host):
    params = shards_in(host, F32, sizes=(640,))
    optimizer = PieceByPiece(adamw(params), piece=64, pool=host)
    train(optimizer, params, 2)
    report = optimizer.offload.report()
    assert "7,680 bytes on the host, of pieces at most 2,304 on cpu" in report
    assert "7,680 bytes read and 7,680 written" in report
    offload = optimizer.offload
    assert 0 < offload.computing < offload.seconds and offload.moves.seconds > 0
    assert f"{offload.moves.seconds:.3f} s, beside {offload.computing:.3f} s of computing" in report


def test_an_optimizer_that_is_gone_leaves_the_masters(host):
    params = shards_in(host, F32)
    optimizer = PieceByPiece(adamw(params), pool=host)
    train(optimizer, params, 1)
    del optimizer
    assert host.host.now == 4 * sum(SIZES)


def test_saved_and_loaded_state_goes_to_the_pool(host):
    params = shards_in(host, F32)
    optimizer = PieceByPiece(adamw(params), piece=64, pool=host, moments=BF16)
    train(optimizer, params, 2)
    saved, masters = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    train(optimizer, params, 2, first=2)
    for own, value in zip(params, masters, strict=True):
        own.data.copy_(value)
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.load_state_dict(saved)
    assert host.host.now == 8 * sum(SIZES)
    assert all(host.holds(kinds["exp_avg"]) for kinds in optimizer.state.values())
    train(optimizer, params, 2, first=2)
    for number, kinds in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, expected[number][kind]) for kind, value in kinds.items())


def test_state_that_is_there_from_the_beginning_moves_to_the_pool(host):
    params = shards_in(host, F32)
    optimizer = PieceByPiece(optim.Adagrad(params, initial_accumulator_value=0.5), pool=host)
    assert host.host.now == 8 * sum(SIZES) and optimizer.state[params[0]]["sum"].tolist() == [0.5] * SIZES[0]


def test_frozen_shards_take_no_room(host):
    params = shards_in(host, F32, sizes=(100, 100))
    optimizer = PieceByPiece(adamw(params), pool=host)
    give_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    assert host.host.now == 4 * 200 + 8 * 100


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Trained:
    """Shards in files, trained for some steps; what they were then."""

    def __init__(self, folder, steps, build=adamw, **settings):
        self.files = FilePool(folder, CPU)
        self.params = shards_in(self.files, F32)
        self.optimizer = PieceByPiece(build(self.params), piece=64, pool=self.files, **settings)
        train(self.optimizer, self.params, steps)
        self.masters = [param.detach().clone() for param in self.params]
        self.state = copy.deepcopy(self.optimizer.state_dict())

    def step(self):
        give_gradients(self.params, 9)
        self.optimizer.step()

    def assert_unchanged(self):
        assert all(torch.equal(param, old) for param, old in zip(self.params, self.masters, strict=True))
        state = self.optimizer.state_dict()
        assert state["param_groups"] == self.state["param_groups"]
        for number, kinds in self.state["state"].items():
            assert all(torch.equal(state["state"][number][kind], value) for kind, value in kinds.items())
        assert sum(map(len, state["state"].values())) == sum(map(len, self.state["state"].values()))


def user_s_own(params):
    return Counted(params, 0.1)


def full_disk(after):
    """Room for so many more files."""
    true, left = os.posix_fallocate, iter(range(after))

    def allocate(*arguments):
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        true(*arguments)

    return mock.patch("os.posix_fallocate", allocate)


@pytest.mark.parametrize(
    ("build", "after"),  # AdamW needs ten files, two for each of the five shards that are not empty
    [(adamw, 0), (adamw, 1), (adamw, 5), (adamw, 9), (user_s_own, 0), (user_s_own, 4)],
)
def test_a_full_disk_is_told_before_anything_changes_and_with_room_the_step_can_be_repeated(tmp_path, build, after):
    trained = Trained(tmp_path, 0, build)
    with (
        full_disk(after),
        pytest.raises(RuntimeError, match=r"cannot allocate .* bytes \(No space left.*choose") as caught,
    ):
        trained.step()
    assert "Nothing has changed on any rank: weights, masters and state are those before the step" in str(caught.value)
    del caught
    trained.assert_unchanged()
    assert trained.files.host.now == 4 * sum(SIZES)
    trained.step()
    others = shards(F32)
    reference = build(others)
    give_gradients(others, 9)
    reference.step()
    assert_same(trained.optimizer, trained.params, reference, others)


@pytest.mark.parametrize(
    ("harm", "told"),
    [(os.unlink, "has vanished"), (lambda path: os.truncate(path, 4), "has 4 bytes, not the")],
    ids=["vanished", "truncated"],
)
def test_a_lost_file_is_told_before_anything_changes(tmp_path, harm, told):
    trained = Trained(tmp_path, 2)
    path = max(trained.files.folder.iterdir(), key=lambda path: int(path.name))  # not the masters', so they can be read
    kept = path.read_bytes()
    harm(path)
    with pytest.raises(RuntimeError, match=f"{path} {told}.*load a checkpoint.*Nothing has changed"):
        trained.step()
    if not path.exists():
        trained.assert_unchanged()  # what is mapped is still there
    else:
        path.write_bytes(kept)
        trained.assert_unchanged()
        trained.step()


@pytest.mark.parametrize("call", ["write", "stage"])
def test_an_error_midway_says_that_masters_are_partly_new(tmp_path, call):
    trained = Trained(tmp_path, 2)
    true, calls = getattr(trained.files, call), iter(range(8))

    def failing(*arguments):
        if next(calls, None) is None:
            raise OSError(5, "Input/output error")
        return true(*arguments)

    with (
        mock.patch.object(trained.files, call, failing),
        pytest.raises(RuntimeError, match=r"Input/output error.*midway.*still has its weights.*load a checkpoint"),
    ):
        trained.step()
    changed = [not torch.equal(p, old) for p, old in zip(trained.params, trained.masters, strict=True)]
    assert any(changed) and not all(changed)


class Agreed(Exception):
    pass


def test_every_step_is_agreed_on_before_it_and_after(tmp_path):
    heard = []
    trained = Trained(tmp_path, 1, agree=heard.append)
    assert heard == ["", ""]
    with mock.patch.object(trained.files, "check", side_effect=OSError("lost")), pytest.raises(RuntimeError):
        trained.step()
    assert heard[2].startswith("lost. Nothing has changed")
    with mock.patch.object(trained.files, "write", side_effect=OSError("broken")), pytest.raises(RuntimeError):
        trained.step()
    assert heard[3] == "" and heard[4].startswith("broken. The step ended midway") and len(heard) == 5


def test_a_peers_error_is_raised_here():
    def raises(error):
        raise Agreed(error or "rank 1: disk full")

    pool = Pool(CPU)
    params = shards_in(pool)
    optimizer = PieceByPiece(adamw(params), pool=pool, agree=raises)
    give_gradients(params, 0)
    with pytest.raises(Agreed, match="rank 1: disk full"):
        optimizer.step()


def one_disk_is_full(run, folder):
    """What each rank says when rank 1 finds no room, whether its masters are as before, the steps it counts then."""

    def agree(error):
        errors = comm.all_gather_object(error, group=run.world)
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]:
            raise Agreed("; ".join(failed))

    trained = Trained(folder, 1, agree=agree)
    for param in trained.params:
        trained.optimizer.state.pop(param)
    try:
        with full_disk(after=3 if run.rank == 1 else 99):
            trained.step()
    except Agreed as error:
        same = all(torch.equal(p, old) for p, old in zip(trained.params, trained.masters, strict=True))
        trained.step()  # there is room now
        return str(error), same, {int(kinds["step"]) for kinds in trained.optimizer.state.values()}


def test_all_ranks_stop_when_one_disk_is_full(pool, tmp_path):
    results = pool.run(3, one_disk_is_full, str(tmp_path))
    [told] = {told for told, *_ in results}
    assert told.startswith("rank 1: ") and "cannot allocate" in told and "Nothing has changed on any rank" in told
    assert [rest for _, *rest in results] == [[True, {1}]] * 3


def test_without_a_pool_nothing_is_agreed_on():
    params = shards()
    train(PieceByPiece(adamw(params), agree=lambda error: pytest.fail("called")), params, 1)
