"""Host memory, counted: what is held, what was copied, and what becomes of files that vanish or find no room."""

import errno
import gc
import os
import resource
import subprocess
import sys
import textwrap
import threading
from unittest import mock

import pytest
import torch

from collectives.host import FilePool, Level, Moves, Pool

CPU = torch.device("cpu")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(params=["memory", "files"])
def host(request, tmp_path):
    return Pool(CPU) if request.param == "memory" else FilePool(tmp_path, CPU)


def in_files(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- what is held ------------------------------------------------------------------------------------------------------


def test_a_tensor_counts_until_its_last_view_is_gone(host):
    first = host.empty(10, F64)
    second = host.empty(7, BF16)
    assert (host.host.now, host.host.peak) == (94, 94)
    view = first[3:5].view(2, 1)
    del first, second
    assert (host.host.now, host.host.peak) == (80, 94)
    view.fill_(1.0)
    del view
    assert (host.host.now, host.host.peak) == (0, 94)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, torch.int64, torch.bool])
def test_a_tensor_is_flat_and_holds_what_is_put_there(host, dtype):
    values = torch.arange(11).to(dtype)
    tensor = host.empty(11, dtype)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((11,), dtype, CPU)
    tensor.copy_(values)
    assert torch.equal(tensor, values)


def test_an_empty_tensor_takes_nothing(host):
    tensor = host.empty(0, F32)
    assert (tensor.shape, tensor.dtype, host.host.now, host.holds(tensor)) == ((0,), F32, 0, True)
    host.write(tensor, torch.empty(0))
    assert host.moves.written == 0


def test_a_pool_knows_its_own(host):
    mine, theirs = host.empty(4, F32), Pool(CPU).empty(4, F32)
    assert host.holds(mine[1:]) and not host.holds(theirs) and not host.holds(torch.empty(4))
    assert not host.holds(mine.clone())


# -- what is copied ----------------------------------------------------------------------------------------------------


def test_copies_are_counted_by_direction(host):
    kept = host.empty(6, BF16)
    host.write(kept, torch.arange(6, dtype=BF16))
    host.read(part := torch.empty(2, dtype=BF16), kept[4:])
    assert part.tolist() == [4, 5]
    assert (host.moves.written, host.moves.read) == (12, 4)
    before = host.moves
    staged = host.stage(kept[1:4])
    assert staged.tolist() == [1, 2, 3] and not host.holds(staged)
    moved = host.moves - before
    assert (moved.read, moved.written, moved.seconds > 0) == (6, 0, True)


def test_what_is_staged_counts_until_it_is_freed(host):
    kept = host.empty(8, F32).zero_()
    first, second = host.stage(kept), host.stage(kept[:2])
    assert (host.staged.now, host.staged.peak) == (40, 40)
    del first
    third = host.stage(kept[:1])
    assert (host.staged.now, host.staged.peak) == (12, 40)
    del second, third
    assert (host.staged.now, host.host.now) == (0, 32)


def test_a_staged_copy_is_apart_from_the_source(host):
    kept = host.empty(3, F32).zero_()
    staged = host.stage(kept)
    staged += 1
    assert kept.tolist() == [0, 0, 0]


@pytest.mark.parametrize("other", [torch.empty(5), torch.empty(4, dtype=F64), torch.empty(2, 2)])
def test_a_copy_changes_neither_shape_nor_dtype(host, other):
    kept = host.empty(4, F32)
    with pytest.raises(ValueError, match="neither shape nor dtype"):
        host.write(kept, other)
    with pytest.raises(ValueError, match="neither shape nor dtype"):
        host.read(other, kept)
    assert host.moves == Moves()


def test_threads_that_copy_at_once_lose_no_count(host):
    kept = [host.empty(1, F32) for _ in range(4)]

    def work(target):
        for _ in range(300):
            host.write(target, torch.ones(1))
            host.stage(target)

    threads = [threading.Thread(target=work, args=(target,)) for target in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (host.moves.read, host.moves.written, host.staged.now) == (4800, 4800, 0)


def test_a_level_calls_back_when_a_tensor_is_freed():
    level, freed = Level(), []
    tensor = level.add(torch.empty(3), lambda: freed.append(True))
    view = tensor[1:]
    del tensor
    assert (level.now, freed) == (12, [])
    del view
    assert (level.now, freed) == (0, [True])


# -- files -------------------------------------------------------------------------------------------------------------


def test_each_tensor_is_a_file_of_its_size(tmp_path):
    files = FilePool(tmp_path, CPU)
    first, second = files.empty(100, F64), files.empty(33, BF16)
    assert sorted(path.stat().st_size for path in files.folder.iterdir()) == [66, 800]
    second.fill_(3.0)
    files.check()
    del first
    assert in_files(tmp_path) == 66
    path = next(files.folder.iterdir())
    assert path.read_bytes() == torch.full((33,), 3.0, dtype=BF16).view(torch.uint8).numpy().tobytes()
    files.check()


def test_all_blocks_are_on_the_disk_at_once(tmp_path):
    files = FilePool(tmp_path, CPU)
    kept = files.empty(1 << 16, F32)
    (path,) = files.folder.iterdir()
    assert path.stat().st_blocks * 512 >= kept.nbytes


def test_two_pools_share_a_folder_and_leave_what_is_not_theirs(tmp_path):
    (tmp_path / "theirs").write_text("mine")
    first, second = FilePool(tmp_path, CPU), FilePool(tmp_path, CPU)
    kept = first.empty(3, F32).fill_(1.0), second.empty(3, F32).fill_(2.0)
    assert [tensor.tolist() for tensor in kept] == [[1.0] * 3, [2.0] * 3]
    first.close()
    second.check()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["theirs", second.folder.name])


def test_closed_the_files_are_gone_and_memory_in_use_is_not(tmp_path):
    files = FilePool(tmp_path, CPU)
    kept = files.empty(3, F32).fill_(1.0)
    files.close()
    files.close()
    assert not list(tmp_path.iterdir())
    assert kept.tolist() == [1, 1, 1]
    del kept
    assert files.host.now == 0


def test_a_pool_that_nobody_has_any_more_removes_its_folder(tmp_path):
    kept = FilePool(tmp_path, CPU).empty(3, F32)
    gc.collect()
    assert in_files(tmp_path) == 12  # a tensor keeps its pool
    del kept
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_the_interpreters_end_removes_the_folder_and_a_forks_does_not(tmp_path):
    script = """
        import os, sys, torch
        from collectives.host import FilePool
        files = FilePool(sys.argv[1], torch.device("cpu"))
        kept = files.empty(5, torch.float32)
        child = os.fork()
        if child == 0:
            files.close()
            os._exit(0)
        os.waitpid(child, 0)
        files.check()
        print(len(os.listdir(sys.argv[1])), kept.fill_(2.0).sum().item())
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1 10.0\n", "")
    assert not list(tmp_path.iterdir())


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def vanish(path):
    path.unlink()


def truncate(path):
    os.truncate(path, 8)


def grow(path):
    os.truncate(path, 1000)


def replace(path):
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (vanish, "has vanished (No such file or directory)"),
        (truncate, "has 8 bytes, not the 40"),
        (grow, "has 1,000 bytes, not the 40"),
        (replace, "is not the file that was made here"),
    ],
)
def test_a_file_that_is_not_what_it_was_is_named(tmp_path, harm, told):
    files = FilePool(tmp_path, CPU)
    kept = [files.empty(4, F32), files.empty(10, F32)]
    path = next(path for path in files.folder.iterdir() if path.stat().st_size == 40)
    harm(path)
    with pytest.raises(OSError) as caught:
        files.check()
    assert f"{path} {told}" in str(caught.value) and "load a checkpoint" in str(caught.value)
    assert len(kept) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
def test_no_room_is_an_error_that_names_file_bytes_and_remedy_and_leaves_no_file(tmp_path, code):
    files = FilePool(tmp_path, CPU)
    kept = files.empty(4, F32)
    with (
        mock.patch("os.posix_fallocate", side_effect=OSError(code, os.strerror(code))),
        pytest.raises(OSError, match=r"cannot allocate 40,000 bytes \(.*choose another folder") as caught,
    ):
        files.empty(10_000, F32)
    assert caught.value.errno == code and str(files.folder) in str(caught.value)
    assert (files.host.now, in_files(tmp_path), len(list(files.folder.iterdir()))) == (16, 16, 1)
    files.check()
    assert kept.fill_(1.0).sum() == 4
    assert files.empty(10_000, F32).nbytes == 40_000  # room again


def test_a_limit_of_the_process_is_an_error_and_no_signal(tmp_path):
    files = FilePool(tmp_path, CPU)
    kept = files.empty(1000, F32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(OSError, match=r"cannot allocate 4,004 bytes \(File too large\)"):
            files.empty(1001, F32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (kept.fill_(1.0).sum(), in_files(tmp_path)) == (1000, 4000)


@pytest.mark.drill
def test_a_disk_that_is_really_full_is_an_error_and_no_signal(tmp_path):
    script = """
        import sys, torch
        from collectives.host import FilePool
        files = FilePool(sys.argv[1], torch.device("cpu"))
        kept = []
        try:
            while True:
                kept.append(files.empty(65536 // 4, torch.float32))
        except OSError as error:
            print(error)
        print(sum(tensor.fill_(1.0).sum().item() for tensor in kept) / 65536)
        kept.pop()
        files.empty(65536 // 4, torch.float32)
    """
    small_disk = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", small_disk, str(tmp_path)]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk of its own")
    command = [*inside, sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "cannot allocate 65,536 bytes (No space left on device)" in ended.stdout
    assert float(ended.stdout.splitlines()[-1]) == pytest.approx(4.0, abs=0.3)  # 16 tensors of 2**14 ones: 1 MB


def test_a_folder_that_is_not_there_or_may_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(OSError, match=r"no scratch folder can be made in .*; name a folder that exists") as caught:
            FilePool(folder, CPU)
        assert str(folder) in str(caught.value)


def test_memory_that_cannot_be_mapped_leaves_no_file(tmp_path):
    files = FilePool(tmp_path, CPU)
    with mock.patch("torch.from_file", side_effect=RuntimeError("unable to mmap")), pytest.raises(RuntimeError):
        files.empty(4, F32)
    assert not list(files.folder.iterdir())
    files.check()


def test_a_pool_of_memory_has_nothing_to_check_or_close():
    pool = Pool(CPU)
    kept = pool.empty(2, F32).fill_(1.0)
    pool.check()
    pool.close()
    assert kept.tolist() == [1, 1] and pool.host.now == 8
