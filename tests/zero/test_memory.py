"""What a rank holds after backward, by storage and to the byte, and how far above that a step rises for a moment."""

import gc
import itertools

import pytest
import torch
from torch import nn

from collectives import allocated
from tests.zero.counted import STAGES, Net, adamw, backward, padded
from tests.zero.versions import drilled
from zero import Mixed

BF16 = torch.bfloat16
EVEN = (5, 384, 2)  # vocabulary, width, hidden: each parameter is a multiple of 384 elements, and nothing is padded
ODD = (11, 7, 5)
KINDS = {  # bytes a parameter, whole: weights, gradients, masters, moments
    "K = 12": (Mixed(gradients=BF16), (2, 2, 4, 8)),
    "K = 8": (Mixed(gradients=BF16, moments=BF16), (2, 2, 4, 4)),
    "K = 12, gradients in float32": (Mixed(), (2, 4, 4, 8)),
    "K = 8, gradients in float32": (Mixed(moments=BF16), (2, 4, 4, 4)),
    "float32": (None, (4, 4, 0, 8)),
}
AGREEMENT = 8 * (8 + 4)  # bytes: a number for each parameter and bucket
PARTS = ("weights", "gradients", "masters", "moments")
CUT = {0: (), 1: PARTS[2:], 2: PARTS[1:], 3: PARTS}
LECTURE = {
    0: lambda w, g, k, n: w + g + k,
    1: lambda w, g, k, n: w + g + k / n,
    2: lambda w, g, k, n: w + (g + k) / n,
    3: lambda w, g, k, n: (w + g + k) / n,
}


def from_here():
    """From now on `living` sees only what is made, and looks through nothing older."""
    torch.optim.SGD([torch.zeros(1)], lr=1)  # the first optimizer of a process imports much of torch
    gc.collect()
    gc.freeze()


def living():
    """Bytes of every storage that a tensor has, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def by_part(model, handle, optimizer):
    """The tensors of each part; a step count is none of them."""
    buckets = handle.buckets
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    freed = [param for param in model.parameters() if param.isnan().all()]  # one number a layer stands for them
    return {
        "freed": freed,
        "weights": [*model.parameters(), *(weights for b in buckets for weights in (b.weights, b.shard))],
        "gradients": [
            *(param.grad for param in (*model.parameters(), *handle.parameters())),
            *(b.full for b in buckets),
        ],
        "masters": handle.parameters(),
        "moments": [value for value in state if value.dim()],
        "step counts": [value for value in state if not value.dim()],
    }


def counted(parts):
    """Bytes of each part, a storage in the first that has it; `hidden`: of all that lives and is in none."""
    unclaimed, found = living(), {}
    for part, tensors in parts.items():
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
        found[part] = sum(unclaimed.pop(where, 0) for where in addresses)
    return {**found, "hidden": sum(unclaimed.values())}


def hold(run, stage, mixed, sizes, ids):
    """Bytes by part between the second step's backward and its update."""
    model = Net(*sizes)
    cap = sum(param.nbytes for param in model.parameters()) // 3
    handle = STAGES[stage].wrap(model, run.world, cap=cap, mixed=mixed)
    optimizer = adamw(handle)
    backward(handle, model, ids, 2)
    optimizer.step()
    handle.after_step()
    optimizer.zero_grad()
    backward(handle, model, ids, 2)
    return counted(by_part(model, handle, optimizer))


def hold_all(run, stage):
    ids = torch.tensor([run.rank])
    from_here()
    return [hold(run, stage, KINDS[kind][0], sizes, ids) for kind, sizes in CASES]


CASES = [*((kind, EVEN) for kind in KINDS), ("K = 12", ODD), ("float32", ODD)]


@pytest.mark.parametrize("ranks", [2, *map(drilled, (1, 3, 4))])
def test_bytes_after_backward(pool, ranks):
    """Every row of the lecture's table, to the byte: the formula, or where padded that of the row."""
    for stage in range(4):
        for (kind, sizes), *mine in zip(CASES, *pool.run(ranks, hold_all, stage), strict=True):
            check(stage, ranks, sizes, KINDS[kind][1], mine)


def check(stage, ranks, sizes, each, mine):
    vocab, width, hidden = sizes
    block = (hidden * width, hidden * width, width)  # a bucket's or layer's, last parameter first
    rows = ((vocab * width,), block, block, (vocab * width,))
    n = sum(map(sum, rows))
    row = sum(padded(row, ranks if stage else 1, each[0]) for row in rows)
    assert row == n or sizes == ODD
    share = {part: ranks if part in CUT[stage] else 1 for part in PARTS}
    for found in mine:
        for part, nbytes in zip(PARTS[:3], each, strict=False):
            assert found[part] * share[part] == nbytes * row, f"{part} of stage {stage} on {ranks} ranks: {found}"
        assert found["moments"] * share["moments"] <= each[3] * row
        assert found["step counts"] <= 4 * 8
        assert found["hidden"] in (0, AGREEMENT), (
            "a storage of no part (the agreement may still be held by a thread of gloo)"
        )
        if row == n:
            weights, gradients, *optimizer = (nbytes * n for nbytes in each)
            assert sum(found[part] for part in PARTS) == LECTURE[stage](weights, gradients, sum(optimizer), ranks)
    assert sum(found["moments"] for found in mine) == each[3] * n * ranks / share["moments"]


# -- for a moment ------------------------------------------------------------------------------------------------------

WIDTH, LAYERS, BUCKET, ROWS = 128, 16, 2, 2  # a bucket holds two layers; a layer is one matrix
LAYER = 4 * WIDTH * WIDTH  # bytes
ACTIVATIONS = 4 * ROWS * WIDTH * (LAYERS + 4) / LAYER  # in layers, less than half of one: every term below counts


def peak(run, stage, microbatches, overlap):
    """The most that lives during a step without its update, in layers."""
    settings = {} if overlap is None else {"overlap": overlap}
    from_here()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    handle = STAGES[stage].wrap(model, run.world, cap=BUCKET * LAYER, **settings)
    x = torch.randn(ROWS, WIDTH)

    def zero():
        for shard in handle.parameters():
            shard.grad = None

    rise = allocated.peak_bytes(lambda: backward(handle, model, x, microbatches), run.device, prepare=zero)
    zero()
    return (sum(living().values()) + rise) / LAYER


def rises(unit, ranks, microbatches, overlap):
    """Layers above weights and the gradients' shards: a unit that fills, with the matrix that autograd has just made;
    with overlap the unit that is under way as well; and the pieces that arrive for one.
    """
    owned, arriving = unit / ranks, unit * (ranks - 1) / ranks
    new = owned if microbatches > 1 else 0  # a sum that is added to another; the first is the gradient's shard itself
    made = 1 - (owned - new)  # for then the sum is not there yet
    return 2 * unit + arriving + new + max(made, new) if overlap else unit + max(arriving + new, made)


def expected_peak(stage, microbatches, overlap, ranks):
    if stage < 2:
        return 2 * LAYERS + max(1, BUCKET * (ranks - 1) / ranks)
    if stage == 2:
        return LAYERS + LAYERS / ranks + rises(BUCKET, ranks, microbatches, overlap)
    return 2 * LAYERS / ranks + 1 + rises(1, ranks, microbatches, overlap)


STEPS = [(0, 2, None), (1, 2, None), *itertools.product((2, 3), (1, 2), (True, False))]


@pytest.mark.parametrize("ranks", [2, drilled(3), drilled(4)])
def test_peaks(pool, ranks):
    """Gradients rise above their shards by a bucket or two, and weights by a layer, however many there are."""
    found = {}
    for step in STEPS:
        least = expected_peak(*step, ranks)
        found[step] = pool.run(ranks, peak, *step)
        assert all(least <= most <= least + ACTIVATIONS for most in found[step]), f"{step}: {found[step]}, not {least}"
        stage, microbatches, overlap = step
        print(
            f"stage {stage}, k {microbatches}, overlap {overlap}: {least} expected, {max(found[step]):.2f} at the peak"
        )
    for step, lower in ((1, 2, None), (2, 2, True)), ((2, 2, True), (3, 2, True)):
        assert min(found[step]) > expected_peak(*lower, ranks) + ACTIVATIONS, (
            "each stage keeps less than the one before"
        )
