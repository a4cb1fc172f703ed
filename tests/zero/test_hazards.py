"""What goes wrong in silence, or in a crash, where weights and gradients lie elsewhere than a user thinks."""

import copy
import io
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives import boxed, comm
from collectives.host import FilePool, Pool
from zero import Mixed, stage0, stage1, stage2, stage3

WRAP = (stage0.wrap, stage1.wrap, stage2.wrap, stage3.wrap)
ROWS = torch.arange(12.0).view(4, 3) / 7


def chain(seed):
    """Three layers of 3 × 3."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))


def sgd(handle):
    return torch.optim.SGD(handle.parameters(), lr=0.5)


def update(model, handle, optimizer):
    optimizer.zero_grad()
    model(ROWS).square().sum().backward()
    handle.finish()
    optimizer.step()
    handle.after_step()


def weights(model, handle):
    with handle.whole():
        return [param.detach().clone() for param in model.parameters()]


# -- every stage -------------------------------------------------------------------------------------------------------


def frozen_by_hand(run, stage):
    """The shards of a frozen layer get values; then a state with others is loaded."""
    model = chain(0)
    model[1].requires_grad_(False)
    handle = WRAP[stage](model, run.world)
    with torch.no_grad():
        for shard in handle.parameters():
            shard.fill_(3.0)
    handle.after_load()
    threes = weights(model, handle)
    everyone = comm.all_gather_object(boxed.save(handle.parameters(), sgd(handle)), group=run.world)
    other = chain(1)
    other[1].requires_grad_(False)
    handle = WRAP[stage](other, run.world)
    boxed.load(boxed.merged(everyone), handle.parameters(), sgd(handle))
    handle.after_load()
    return [bool((value == 3).all()) for value in threes + weights(other, handle)]


@pytest.mark.parametrize("stage", range(4))
def test_frozen_weights_take_what_is_loaded(pool, stage):
    assert pool.run(3, frozen_by_hand, stage) == [[True] * 12] * 3


def dropped(run, stage):
    """A batch that is not a number is dropped; the next step is that of a new model."""
    steps = []
    for bad in (False, True):
        model = chain(0)
        handle = WRAP[stage](model, run.world, cap=1)
        optimizer = sgd(handle)
        if bad:
            (model(ROWS) * torch.nan).sum().backward()
            handle.finish()
        update(model, handle, optimizer)
        steps.append(weights(model, handle))
    return all(map(torch.equal, *steps))


@pytest.mark.parametrize("stage", range(4))
def test_a_batch_is_dropped_by_finish_and_zero_grad(pool, stage):
    assert pool.run(2, dropped, stage) == [True, True]


def assigned(run, stage):
    model = chain(0)
    handle = WRAP[stage](model, run.world)
    with pytest.raises(ValueError, match="assign=False"), handle.whole():
        model.load_state_dict(chain(1).state_dict(), assign=True)


@pytest.mark.parametrize("stage", range(4))
def test_parameters_that_are_replaced_are_noticed(pool, stage):
    pool.run(2, assigned, stage)


def full_at_wrap(run, folder):
    """Rank 1's disk is full when its masters are to be made."""
    full = mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device"))
    with full if run.rank == 1 else mock.MagicMock(), pytest.raises(RuntimeError) as error:
        stage2.wrap(chain(0), run.world, cap=1, host=FilePool(folder, run.device))
    return str(error.value)


def test_a_full_disk_at_wrap_is_told_on_every_rank(pool, tmp_path):
    [told] = set(pool.run(3, full_at_wrap, Path(tmp_path), timeout=10.0))
    assert "No space left on device" in told and "make room" in told


def trained_with(run, stage, place, folder):
    """The weights after two steps in mixed precision, masters and moments in this place."""
    host = {"device": lambda: None, "memory": lambda: Pool(run.device), "files": lambda: FilePool(folder, run.device)}
    model = chain(run.rank)
    handle = WRAP[stage](model, run.world, cap=1, mixed=Mixed(), host=host[place]())
    optimizer = handle.optimizer(torch.optim.AdamW(handle.parameters(), lr=1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        model(ROWS.bfloat16()).float().square().sum().backward()
        handle.finish()
        optimizer.step()
        handle.after_step()
    return [value.float() for value in weights(model, handle)] + [shard.detach() for shard in handle.parameters()]


@pytest.mark.parametrize("place", ["memory", "files"])
@pytest.mark.parametrize("stage", range(4))
def test_offload_changes_no_bit(pool, stage, place, tmp_path):
    expected = pool.run(3, trained_with, stage, "device", "")
    for ours, others in zip(pool.run(3, trained_with, stage, place, str(tmp_path)), expected, strict=True):
        assert all(map(torch.equal, ours, others))


def refused_optimizer(run, stage):
    handle = WRAP[stage](chain(0), run.world)
    with pytest.raises(ValueError, match="Adafactor cannot step shards"):
        handle.optimizer(torch.optim.Adafactor(handle.parameters()))


@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_of_whole_tensors_is_refused_by_the_handle(pool, stage):
    pool.run(2, refused_optimizer, stage)


def full_at_step(run, folder):
    """Rank 1's disk is full when its moments are to be made; then there is room."""
    model = chain(0)
    handle = stage2.wrap(model, run.world, mixed=Mixed(), host=FilePool(folder, run.device))
    optimizer = handle.optimizer(torch.optim.AdamW(handle.parameters(), lr=1e-2))
    before = weights(model, handle)
    model(ROWS.bfloat16()).sum().backward()
    handle.finish()
    full = mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device"))
    with full if run.rank == 1 else mock.MagicMock(), pytest.raises(RuntimeError) as error:
        optimizer.step()
    whole = all(map(torch.equal, before, weights(model, handle)))
    optimizer.step()
    handle.after_step()
    return str(error.value), whole, [value.sum().item() for value in weights(model, handle)]


def test_a_full_disk_at_a_step_leaves_all_ranks_as_they_were(pool, tmp_path):
    results = pool.run(3, full_at_step, str(tmp_path), timeout=10.0)
    [told] = {told for told, _, _ in results}
    assert told.startswith("rank 1: ") and "make room" in told and "Nothing has changed on any rank" in told
    assert all(whole and after == results[0][2] for _, whole, after in results)


def by_turns(run):
    """Two halves of a model are trained in turn: the reductions of each step."""
    model = nn.ModuleList([chain(0), chain(1)])
    handle = stage2.wrap(model, run.world, cap=1)
    counts = []
    for step in range(4):
        with mock.patch.object(comm, "reduce_scatter_single", wraps=comm.reduce_scatter_single) as reduce:
            model[step % 2](ROWS).sum().backward()
            handle.finish()
        counts.append(reduce.call_count)
    return counts


def test_halves_that_are_trained_in_turn(pool):
    """Each is expected once it has been used in one of the last two steps. Before, its buckets start empty with the
    first gradient, all but that one's, and go a second time.
    """
    for counts in pool.run(2, by_turns):
        assert counts == [12, 17, 12, 12]


# -- stage 3: reading and writing --------------------------------------------------------------------------------------


def kept_state(run):
    model = chain(0)
    handle = stage3.wrap(model, run.world)
    expected = chain(0).state_dict() if run.rank == 0 else None
    with handle.whole():
        state, part = model.state_dict(), model[1].state_dict()
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file)
    for call in (model[1].state_dict, lambda: model[1].load_state_dict(part)):
        with pytest.raises(RuntimeError, match="weights are in shards"):
            call()
    return expected is None or all(
        torch.equal(value, loaded[name]) and torch.equal(value, state[name]) for name, value in expected.items()
    )


def test_a_state_dict_outlives_whole(pool):
    assert all(pool.run(2, kept_state))


def stale(run):
    """Somebody forgets reshard, then looks."""
    model, straight = chain(0), chain(0)
    handle, other = stage3.wrap(model, run.world), stage3.wrap(straight, run.world)
    optimizer, expected = sgd(handle), sgd(other)
    for step in range(3):
        update(straight, other, expected)
        if step < 2:
            handle.unshard(model)
        update(model, handle, optimizer)
        if step == 0:
            weights(model, handle)
    return all(map(torch.equal, weights(model, handle), weights(straight, other)))


def test_weights_gathered_before_an_update_are_gone_after_it(pool):
    assert pool.run(2, stale) == [True, True]


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = chain(0)

    def forward(self, x, count):
        for layer in self.layers[:count]:
            x = layer(x)
        return x


def uneven_places(run):
    """A forward without gradients that ends elsewhere on each rank; then all read."""
    model = Skipping()
    handle = stage3.wrap(model, run.world)
    with torch.no_grad():
        model(ROWS, 1 + run.rank)
    read = weights(model, handle)
    with handle.whole(), handle.whole():
        pass
    return all(map(torch.equal, read, weights(model, handle)))


def test_reading_where_ranks_have_come_to_different_layers(pool):
    assert all(pool.run(3, uneven_places, timeout=10.0))


def copied(run):
    """A copy made inside of whole runs by itself, on one rank."""
    model = chain(0)
    handle = stage3.wrap(model, run.world)
    with handle.whole():
        twin = copy.deepcopy(model)
    if run.rank == 0:
        twin(ROWS)
    update(model, handle, sgd(handle))
    return weights(model, handle)


def test_a_copy_of_the_module_is_nobodys(pool):
    first, *others = pool.run(2, copied, timeout=10.0)
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


# -- stage 3: layers that it cannot have -------------------------------------------------------------------------------


class Positions(nn.Module):
    """A layer that returns its weights."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 3))

    def forward(self, x):
        return self.table[: len(x)]


@dataclass
class Opaque:
    out: torch.Tensor


class Wrapped(nn.Linear):
    def forward(self, x):
        return Opaque(super().forward(x))


class Around(nn.Module):
    """Runs a layer in some way."""

    def __init__(self, layer, use):
        super().__init__()
        self.first, self.layer, self.use = nn.Linear(3, 3), layer, use

    def forward(self, x):
        return self.use(self.layer, self.first(x))


REFUSED = {
    "returns its weights": (Positions, lambda layer, x: x + layer(x), "returns its weights"),
    "returns what torch does not know": (lambda: Wrapped(3, 3), lambda layer, x: layer(x).out, "returns a Opaque"),
    "recomputed from outside": (
        *(lambda: nn.Linear(3, 3), lambda layer, x: checkpoint(layer, x, use_reentrant=False)),
        "layer runs inside of a backward, as in recomputation",
    ),
    "read from outside": (
        *(lambda: nn.Linear(3, 3), lambda layer, x: x @ layer.weight),
        "a weight was read when its layer did not run",
    ),
}


def refused(run, what):
    make, use, told = REFUSED[what]
    handle = stage3.wrap(model := Around(make(), use), run.world)
    with pytest.raises((ValueError, RuntimeError), match=told):
        model(ROWS).sum().backward()
    del handle


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_layer_cannot_do_is_told(pool, what):
    pool.run(2, refused, what, timeout=10.0)


def left_out(run, what):
    """The remedy: the layer stays whole."""
    make, use, _ = REFUSED[what]
    torch.manual_seed(0)
    model = Around(make(), use)
    torch.manual_seed(0)
    alone = Around(make(), use)
    handle = stage3.wrap(model, run.world, layers=[model.first])
    model(ROWS).sum().backward()
    handle.finish()
    alone(ROWS).sum().backward()
    grads = {shard.held.name: shard for shard in handle.parameters()}
    return all(
        torch.allclose(grads[name].grad, param.grad.flatten()[grads[name].held.boxes[0].index().flatten()])
        for name, param in alone.named_parameters()
        if param.grad is not None and len(grads[name].held.boxes) == 1
    )


@pytest.mark.parametrize("what", REFUSED)
def test_left_out_of_layers_it_can(pool, what):
    assert pool.run(2, left_out, what, timeout=10.0) == [True, True]


def hooked(run):
    """A hook of the user's that was there before wrap, and reads weights."""
    model, seen = chain(0), []
    model[1].register_forward_pre_hook(lambda layer, args: seen.append(layer.weight.detach().sum().isfinite().item()))
    handle = stage3.wrap(model, run.world)
    model(ROWS)
    handle.finish()
    return seen


def test_hooks_of_before_see_whole_weights(pool):
    assert pool.run(2, hooked) == [[True], [True]]


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(3), torch.ones(3)])
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x * self.scales[0]) * self.scales[1]


def listed(run):
    model = Listed()
    handle = stage3.wrap(model, run.world)
    model(ROWS).sum().backward()
    handle.finish()
    return all(shard.grad.isfinite().all() for shard in handle.parameters())


def test_a_list_of_parameters_is_no_layer(pool):
    assert pool.run(2, listed) == [True, True]


def run_in_shards(run):
    """unshard and reshard from outside, and then a forward without unshard."""
    model = chain(0)
    handle = stage3.wrap(model, run.world)
    handle.unshard(model)
    handle.reshard(model)
    with pytest.raises(RuntimeError, match="0 runs in shards: call `unshard`"):
        model(ROWS)
    handle.finish()
    return model(ROWS).isfinite().all().item()


def test_a_forward_that_nobody_gathers_for_is_told(pool):
    assert pool.run(2, run_in_shards) == [True, True]
