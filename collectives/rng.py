"""Randomness by counter: the number at index i under key k is a hash of (k, i), so every mesh draws the same ones,
whoever draws them.

An ordinary generator hands out its numbers in the order of asking, so a rank that holds half a tensor draws other
numbers than one that holds the whole. Here a rank asks for the numbers of its own boxes by their global index, and
nothing has to be saved, seeded a rank, or replayed: initial weights, dropout masks (also when a layer is computed
again) and the order of the data are functions of the seed.

The hash is a 64-bit mixer in wrapping int64 arithmetic (Steele et al. 2014, SplitMix64; constants of Stafford's variant
13), with the key entering twice so that no two keys walk the same sequence. Idea of counter-based generators: Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3". PyTorch's counterpart: torch.randn, and the per-rank RNG states
that Megatron-LM and FSDP checkpoints carry. Integers are the same on every device; normals are the same over every cut
on one kind of device (erfinv differs between CPU and GPU).
"""

import hashlib
import math

import torch
from torch import Tensor

from collectives.layout import Box, Constant, Normal

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_CHUNK = (
    1 << 14
)  # numbers drawn at a time: the intermediates stay in the cache (2.5 times as fast as one pass over a large tensor)


def key(seed: int, *names: int | str) -> int:
    """A 64-bit key for the stream that belongs to this seed and these names, such as ("embed.weight",) or ("dropout",
    layer, step).
    """
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: int, index: Tensor) -> Tensor:
    """64 random bits as int64 for each int64 in `index`, same shape."""
    # IDEA: a random number is a hash of its global index, so whoever holds an element draws the same number for it.
    z = index * _signed(_GOLDEN)
    z += key
    z ^= _shift(z, 30)
    z *= _signed(_MIX_A)
    z += _signed(key * _GOLDEN)
    z ^= _shift(z, 27)
    z *= _signed(_MIX_B)
    z ^= _shift(z, 31)
    return z


def uniform(key: int, index: Tensor) -> Tensor:
    """float64 in the open interval (0, 1), symmetric about 1/2: (k + 1/2) / 2^52."""
    return _shift(bits(key, index), 12).double().add_(0.5).mul_(2.0**-52)


def normal(key: int, index: Tensor) -> Tensor:
    """float64 of mean 0 and variance 1, one hash each: the inverse of the normal distribution at `uniform`."""
    return uniform(key, index).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


def keep(key: int, rows: Tensor, width: int, p: float, channels: range | None = None) -> Tensor:
    """Dropout's mask: bool [*rows.shape, width], False with probability p rounded to 1/65536; of these channels alone
    where they are given, consecutive ones of the width.

    Element c of row r looks at 16 bits: lane c % 4 (lowest first) of the hash at r * ceil(width / 4) + c // 4.
    """
    channels = range(width) if channels is None else channels
    if not range(width)[channels.start : channels.stop] == channels:
        raise ValueError(f"{channels} are not consecutive channels of a width of {width}")
    groups, first = -(-width // 4), channels.start // 4
    last = max(first, -(-channels.stop // 4))
    index = rows.reshape(-1, 1) * groups + torch.arange(first, last, device=rows.device)
    lanes = bits(key, index).reshape(-1).view(torch.int16).view(*rows.shape, 4 * (last - first))
    start = channels.start - 4 * first
    return lanes[..., start : start + len(channels)] >= _threshold(p) - 2**15


def dropout(
    x: Tensor, key: int, rows: Tensor, p: float, *, width: int | None = None, channels: range | None = None
) -> Tensor:
    """x [*rows.shape, D] with elements dropped by `keep` and the others scaled so that the mean stays.

    A rank that has only some of the channels says which, and of what width: its mask is that part of the whole one.
    """
    if _threshold(p) == 0:
        return x
    mask = keep(key, rows, x.shape[-1] if width is None else width, p, channels)
    return x * mask * (2**16 / (2**16 - _threshold(p)))


def permutation(key: int, index: Tensor, n: int) -> Tensor:
    """Where a random permutation of 0 … n-1 sends each of `index`: computed element by element, no table of n numbers.

    A Feistel network on pairs (left, right) of a rectangle just larger than n, each half shifted in turn by a hash of
    the other; what falls outside is sent round again (Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    columns = math.isqrt(n - 1) + 1 if n > 0 else 1
    rows = -(-n // columns)
    image = _shuffle(key, index, rows, columns)
    while (outside := image >= n).any():
        image[outside] = _shuffle(key, image[outside], rows, columns)
    return image


def _shuffle(key: int, index: Tensor, rows: int, columns: int) -> Tensor:
    left, right = index // columns, index % columns
    for _ in range(6):
        key = _signed(key + _GOLDEN)
        left = (left + bits(key, right)) % rows
        key = _signed(key + _GOLDEN)
        right = (right + bits(key, left)) % columns
    return left * columns + right


@torch.no_grad()
def fill(param: Tensor, seed: int) -> None:
    """Initialise this rank's part of a declared parameter in place, by its rule and its boxes; no rank makes more than
    its own part.
    """
    held, start = param.held, 0
    flat = param.view(-1)
    for box in held.boxes:
        local = flat[start : start + box.numel].view(box.local)
        start += box.numel
        match held.init:
            case Constant(value):
                local.fill_(value)
            case Normal(std):
                _fill_normal(local, box, key(seed, held.name), std)


def _fill_normal(local: Tensor, box: Box, key: int, std: float) -> None:
    if box.numel > _CHUNK:
        dim = next(d for d, size in enumerate(box.local) if size > 1)
        half = box.local[dim] // 2
        for first, length in ((0, half), (half, box.local[dim] - half)):
            _fill_normal(local.narrow(dim, first, length), box.cut(dim, first, length), key, std)
    elif box.numel:
        local.copy_(normal(key, box.index().to(local.device)).mul_(std))


def _shift(z: Tensor, count: int) -> Tensor:
    """z >> count without the sign, which int64 would carry in."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _threshold(p: float) -> int:
    threshold = round(p * 2**16) if 0 <= p < 1 else 2**16
    if threshold == 2**16:
        raise ValueError(f"dropout of {p} must be at least 0 and, rounded to 1/65536, less than 1")
    return threshold
