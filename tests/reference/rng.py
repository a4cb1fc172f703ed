"""Random numbers without state: number `index` of the stream `key` is a hash of the two.

All of it is arithmetic on unsigned 64-bit integers, which wrap (mod 2^64) and shift in zeros from the left.
"""

from hashlib import blake2b
from math import isqrt
from statistics import NormalDist

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
TWO_64 = 2**64


def key(seed, *names):
    """A 64-bit key for everything that is drawn under these names (str and int, as Python prints them)."""
    digest = blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def bits(key, index):
    """64 random bits for each index: uint64, shaped like `index`."""
    z = np.asarray(index).astype(np.uint64)
    with np.errstate(over="ignore"):  # wrapping is meant
        z = z * np.uint64(GOLDEN) + np.uint64(key)
        z = z ^ (z >> np.uint64(30))
        z = z * np.uint64(0xBF58476D1CE4E5B9)
        z = z + np.uint64(key * GOLDEN % TWO_64)
        z = z ^ (z >> np.uint64(27))
        z = z * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniform(key, index):
    """Numbers strictly between 0 and 1: the middles of 2^52 equal cells."""
    return ((bits(key, index) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def normal(key, index):
    """Standard normal numbers: where the normal distribution function takes the uniform's value."""
    return np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])(uniform(key, index))


def threshold(p):
    """How many of the 65536 values of a 16-bit lane mean "drop"."""
    return round(p * 65536)


def keep(key, rows, width, p):
    """Which elements dropout keeps, as booleans [*rows.shape, width]; `rows` are the rows' numbers in the whole run.

    One draw of 64 bits serves four neighbouring elements of a row, 16 bits each, the lowest 16 first.
    """
    groups = -(-width // 4)
    index = np.asarray(rows, dtype=np.int64)[..., None] * groups + np.arange(groups)  # [*rows.shape, groups]
    lanes = bits(key, index)[..., None] >> np.array([0, 16, 32, 48], dtype=np.uint64)  # [*rows.shape, groups, 4]
    lanes = lanes.astype(np.uint16).view(np.int16)  # the lowest 16 bits of each, read as a signed number
    lanes = lanes.reshape(*index.shape[:-1], groups * 4)[..., :width]
    return lanes.astype(np.int64) >= threshold(p) - 32768


def scale(p):
    """What a kept element is multiplied by, so that dropout does not change the mean."""
    return 65536 / (65536 - threshold(p))


def permutation(key, index, n):
    """Where a random permutation of 0 … n-1 sends `index`.

    `shuffle` permutes the cells of a table that has at least n of them; cells beyond n-1 are walked through.
    """
    columns = isqrt(n - 1) + 1
    rows = -(-n // columns)
    x = shuffle(key, index, rows, columns)
    while x >= n:
        x = shuffle(key, x, rows, columns)
    return x


def shuffle(key, x, rows, columns):
    """One cell to another: six times, each half is shifted by a hash of the other, which can always be undone."""
    left, right = x // columns, x % columns
    for _ in range(6):
        key = (key + GOLDEN) % TWO_64
        left = signed(left + int(bits(key, right))) % rows
        key = (key + GOLDEN) % TWO_64
        right = signed(right + int(bits(key, left))) % columns
    return left * columns + right


def signed(value):
    """The 64-bit signed integer with the lowest 64 bits of `value`."""
    value %= TWO_64
    return value - TWO_64 if value >= 2**63 else value
