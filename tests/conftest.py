"""What every test may ask for."""

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
