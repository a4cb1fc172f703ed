"""What every test may ask for."""

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker ranks that all tests of the session share."""
    pool = Pool()
    yield pool
    pool.close()
