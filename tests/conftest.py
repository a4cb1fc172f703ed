"""What every test may ask for."""

import subprocess
from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)  # as every rank has: two threads beside two ranks on two cores take turns


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker ranks that all tests of the session share."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 400 KB; where we may not mount one, the test is skipped."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a file system that can be filled: run as root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)
