"""The state as boxes: saved under one stage on some ranks, it goes on under another on others, unchanged."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from collectives import boxed, comm
from collectives.host import Pool
from collectives.layout import Box
from tests.zero.versions import drilled
from zero import Mixed, stage0, stage1, stage2, stage3

WRAP = (stage0.wrap, stage1.wrap, stage2.wrap, stage3.wrap)
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, eps=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


class Model(nn.Module):
    """Sizes that divide by nothing, a scalar, and a part that is never used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 37)
        self.down = nn.Linear(37, 11)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 1)

    def forward(self, ids):
        return self.down(self.up(self.embed(ids)).relu()) * self.scale


def built(run, stage, optimizer, mixed=None, host=None):
    torch.manual_seed(0)
    model = Model() if mixed else Model().double()
    handle = WRAP[stage](model, run.world, average=False, cap=1000, mixed=mixed, host=host)
    return model, handle, handle.optimizer(OPTIMIZERS[optimizer](handle.parameters()))


def steps(run, model, handle, optimizer, numbers):
    """The same global batches whatever the number of ranks."""
    for number in numbers:
        batch = torch.randint(11, (9, 2), generator=torch.Generator().manual_seed(number))
        ids, labels = batch.tensor_split(run.size)[run.rank].unbind(1)
        optimizer.zero_grad()
        (cross_entropy(model(ids), labels, reduction="sum") / 9).backward()
        handle.finish()
        optimizer.step()
        handle.after_step()


def weights(model, handle):
    with handle.whole():
        return [param.detach().clone() for param in model.parameters()]


def copied(state):
    """A state of its own, as a file would be."""
    return boxed.State(
        {
            name: {kind: [(box, values.clone()) for box, values in pieces] for kind, pieces in kinds.items()}
            for name, kinds in state.tensors.items()
        },
        {name: {kind: value.clone() for kind, value in kinds.items()} for name, kinds in state.scalars.items()},
    )


def trained(run, stage, optimizer, more):
    """Three steps, the state of all ranks, and the weights after `more` steps."""
    model, handle, stepped = built(run, stage, optimizer)
    steps(run, model, handle, stepped, range(3))
    everyone = comm.all_gather_object(copied(boxed.save(handle.parameters(), stepped)), group=run.world)
    steps(run, model, handle, stepped, range(3, 3 + more))
    return boxed.merged(everyone), weights(model, handle)


def resumed(run, stage, optimizer, state, more):
    """The weights after `more` steps from this state, and the state at once after loading it."""
    model, handle, stepped = built(run, stage, optimizer)
    boxed.load(state, handle.parameters(), stepped)
    handle.after_step()
    again = comm.all_gather_object(copied(boxed.save(handle.parameters(), stepped)), group=run.world)
    steps(run, model, handle, stepped, range(3, 3 + more))
    return weights(model, handle), boxed.merged(again)


def whole(state):
    """Every tensor put together, and every scalar."""
    together = {}
    for name, kinds in state.tensors.items():
        for kind, pieces in kinds.items():
            for box, values in pieces:
                known = together.setdefault((name, kind), torch.full(box.shape, torch.nan, dtype=values.dtype))
                known[box.slices(Box.whole(box.shape))] = values
    return together | {(name, kind): value for name, kinds in state.scalars.items() for kind, value in kinds.items()}


CHANGES = [((1, 3), (3, 2)), ((3, 4), (1, 1)), ((2, 2), (0, 3)), ((0, 2), (2, 4)), ((1, 1), (3, 3))]


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        *(*((*change, "adamw") for change in CHANGES[:3]), (*CHANGES[3], "sgd"), (*CHANGES[4], "adagrad")),
        *(*(drilled(*change, "adamw") for change in CHANGES[3:]), drilled(*CHANGES[0], "sgd")),
        drilled(*CHANGES[1], "adagrad"),
    ],
)
def test_goes_on_anywhere(pool, before, after, optimizer):
    (first, ranks), (then, others) = before, after
    state, straight = pool.run(ranks, trained, first, optimizer, 3)[0]
    for ours, again in pool.run(others, resumed, then, optimizer, state, 3):
        for mine, expected in zip(ours, straight, strict=True):
            assert (mine - expected).abs().max() <= 1e-12 * expected.abs().max()
        saved, loaded = whole(state), whole(again)
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(value, loaded[key]) for key, value in saved.items())


def test_the_state_is_each_tensor_once(pool):
    state, _ = pool.run(3, trained, 2, "adamw", 0)[0]
    counted = {
        (name, kind): sum(box.numel for box, _ in pieces)
        for name, kinds in state.tensors.items()
        for kind, pieces in kinds.items()
    }
    sizes = {name: param.numel() for name, param in Model().named_parameters()}
    kinds = ("parameter", "exp_avg", "exp_avg_sq")
    used = {(name, kind): size for name, size in sizes.items() for kind in kinds if "unused" not in name}
    assert counted == used | {(name, "parameter"): size for name, size in sizes.items() if "unused" in name}


def mixed_state(run, stage, offloaded, state):
    """Masters, bfloat16 moments: trained where there is no state, else loaded; and what is kept then."""
    host = Pool(run.device) if offloaded else None
    model, handle, stepped = built(run, stage, "adamw", Mixed(moments=torch.bfloat16), host)
    if state is None:
        steps(run, model, handle, stepped, range(2))
    else:
        boxed.load(state, handle.parameters(), stepped)
        handle.after_step()
    everyone = comm.all_gather_object(copied(boxed.save(handle.parameters(), stepped)), group=run.world)
    held = [value for kinds in stepped.state.values() for value in kinds.values() if value.dim()]
    return boxed.merged(everyone), weights(model, handle), all(not host or host.holds(value) for value in held)


@pytest.mark.parametrize("offloaded", [False, True])
def test_masters_and_moments_keep_dtypes_and_places(pool, offloaded):
    state, expected, _ = pool.run(3, mixed_state, 2, False, None)[0]
    again, loaded, in_place = pool.run(2, mixed_state, 3, offloaded, state)[0]
    dtypes = {kind: value.dtype for (_, kind), value in whole(again).items()}
    assert dtypes == {
        **dict.fromkeys(("parameter", "step"), torch.float32),
        **dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16),
    }
    assert all(torch.equal(value, whole(again)[key]) for key, value in whole(state).items())
    assert all(map(torch.equal, loaded, expected))
    assert in_place


def misfit(run, state):
    model, handle, stepped = built(run, 2, "adamw")
    before = weights(model, handle)
    told = ""
    with contextlib.suppress(ValueError):
        try:
            boxed.load(state, handle.parameters(), stepped)
        except ValueError as error:
            told = str(error)
    return told, all(map(torch.equal, before, weights(model, handle))), len(stepped.state)


def test_what_does_not_fit_is_told_and_changes_nothing(pool):
    state, _ = pool.run(2, trained, 1, "adamw", 0)[0]
    del state.tensors["scale"]
    state.tensors["up.weight"]["exp_avg"] = state.tensors["up.weight"]["exp_avg"][:1]
    state.tensors["embed.weight"]["parameter"] = [
        (Box.whole((7, 11)), torch.zeros(7, 11, dtype=torch.float64)),
    ]
    answers = pool.run(2, misfit, state)
    assert all(unchanged and not kept for _, unchanged, kept in answers)
    together = "; ".join(told for told, _, _ in answers)
    for name in ("scale is missing", "up.weight (exp_avg)", "embed.weight (parameter)"):
        assert name in together
    assert all(told.startswith("the state does not fit") for told, _, _ in answers)


def test_pieces_cover_or_not():
    """A box of which some element is in no piece is not filled."""
    full = torch.arange(12.0).view(3, 4)
    box, local = Box((3, 4), (1, 1), (2, 2)), torch.zeros(2, 2)
    rows = [(Box((3, 4), (row, 0), (1, 4)), full[row : row + 1]) for row in range(3)]
    for count, chosen in itertools.product(range(4), [rows]):
        assert boxed._fill(box, local, chosen[:count]) == (count == 3)
    assert torch.equal(local, full[1:3, 1:3])
