"""Which collectives a step makes, in which order, and when they start; when gradients and weights are freed."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch import nn

from collectives.host import Level
from tests.recorder import recording
from tests.shards import assembled, pieces
from tests.zero.versions import STAGES, drilled, vectors
from zero import stage0, stage1, stage2, stage3
from zero.bucket import Bucket

F64 = torch.float64
SIZES = (16, 40, 64)  # of the layers 0, 1, 2: no padding on 1, 2 and 4 ranks


class Chain(nn.Module):
    """A scalar passed through layers, in any order; marks where forward and backward have got to."""

    def __init__(self, sizes=SIZES):
        super().__init__()
        self.layers = vectors(" ".join(map(str, sizes)))

    def forward(self, x, order, calls):
        for i in order:
            calls.append(f"forward {i}")
            x = torch.tanh(self.layers[i](x))
            # The gradient arrives here after that of all later layers, and before that of this one.
            x.register_hook(lambda dout, i=i: calls.append(f"backward {i}"))
        return x


def steps_of(run, wrap, orders, quiet=0, sizes=SIZES):
    """What happens in each of two steps, in which rank r runs its layers in orders[r], the first `quiet` microbatches
    of them under no_sync; and the gradients.
    """
    model = Chain(sizes)
    handle, told = wrap(model, run.world, average=False), []
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.0)
    names = {size: i for i, size in enumerate(sizes)}
    names |= {sizes[i] + sizes[i + 1]: f"{i + 1}{i}" for i in range(len(sizes) - 1)} | {sum(sizes): "210"}
    names |= {len(sizes) + len(handle.buckets): "what was used"}
    for _ in range(2):
        optimizer.zero_grad()
        with recording() as recorder, freeing(recorder, names):
            for micro in range(1 + quiet):
                x = torch.tensor(0.1 * (run.rank + 1), dtype=F64, requires_grad=True)
                with handle.no_sync() if micro < quiet else contextlib.nullcontext():
                    model(x, orders[run.rank], recorder.calls).backward()
                recorder.calls.append("microbatch" if micro < quiet else "finish")
            handle.finish()
            recorder.calls.append("step")
            optimizer.step()
            handle.after_step()
        told.append(recorder.told(names))
    return told, pieces(handle)


@contextlib.contextmanager
def freeing(recorder, names):
    """Marks where weights are freed."""
    true = Bucket.reshard

    def reshard(bucket):
        recorder.calls.append(f"free {names[bucket.partition.padded]}")
        true(bucket)

    with mock.patch.object(Bucket, "reshard", reshard):
        yield


FORWARD = "forward 0, forward 1, forward 2"
AT_THE_END = f"{FORWARD}, backward 2, backward 1, backward 0, finish"
USED = "sum what was used, step"
LAYERS = (
    "forward 0, gather 0, free 0, forward 1, gather 1, free 1, forward 2, gather 2, free 2, "
    "backward 2, gather 2, backward 1, reduce 2, free 2, gather 1, backward 0, reduce 1, free 1, gather 0, "
)
SCHEDULES = {
    ("stage 0", 1): f"{AT_THE_END}, sum 2, sum 1, sum 0, {USED}",
    ("stage 0", 1000): f"{AT_THE_END}, sum 210, {USED}",
    ("stage 1", 1): f"{AT_THE_END}, reduce 2, reduce 1, reduce 0, {USED}, gather 2, gather 1, gather 0",
    ("stage 1", 8 * 64): f"{AT_THE_END}, reduce 2, reduce 10, {USED}, gather 2, gather 10",
    ("stage 2", 1): f"{FORWARD}, backward 2, reduce 2, backward 1, reduce 1, backward 0, reduce 0, finish, "
    f"{USED}, gather 2, gather 1, gather 0",
    ("stage 2", 8 * 64): f"{FORWARD}, backward 2, reduce 2, backward 1, backward 0, reduce 10, finish, "
    f"{USED}, gather 2, gather 10",
    ("stage 2", 8 * 104): f"{FORWARD}, backward 2, backward 1, reduce 21, backward 0, reduce 0, finish, "
    f"{USED}, gather 21, gather 0",
    ("stage 2", 1000): f"{FORWARD}, backward 2, backward 1, backward 0, reduce 210, finish, {USED}, gather 210",
    ("stage 3", 1): f"{LAYERS}finish, reduce 0, free 0, {USED}",
}


@pytest.mark.parametrize(("stage", "cap"), SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, drilled(4)])
def test_launches(pool, ranks, stage, cap):
    """Stages 0 and 1 start in finish; stage 2 as soon as a bucket is complete, long before backward ends; stage 3 has
    one layer at a time.
    """
    wrap = functools.partial(STAGES[stage], cap=cap)
    for told, _ in pool.run(ranks, steps_of, wrap, [(0, 1, 2)] * ranks):
        assert told == [SCHEDULES[stage, cap]] * 2


def test_launches_of_what_stays_whole(pool):
    """Stage 3 treats it as stage 2 does, but after backward."""
    wrap = functools.partial(stage3.wrap, cap=1, threshold=40)
    expected = (
        "forward 0, forward 1, forward 2, gather 2, free 2, backward 2, gather 2, backward 1, backward 0, finish, "
        f"reduce 2, free 2, reduce 1, reduce 0, {USED}, gather 1, gather 0"
    )
    for told, _ in pool.run(2, steps_of, wrap, [(0, 1, 2)] * 2):
        assert told == [expected] * 2


QUIET = {
    "stage 0": f"{FORWARD}, backward 2, backward 1, backward 0, microbatch, ",
    "stage 1": f"{FORWARD}, backward 2, backward 1, backward 0, microbatch, ",
    "stage 2": f"{FORWARD}, backward 2, reduce 2, backward 1, reduce 1, backward 0, reduce 0, microbatch, ",
    "stage 3": f"{LAYERS}reduce 0, free 0, microbatch, ",
}


@pytest.mark.parametrize("stage", STAGES)
def test_launches_under_no_sync(pool, stage):
    """Stages 0 and 1 reduce once, 2 and 3 in every microbatch; the last one is as a step by itself."""
    for told, _ in pool.run(2, steps_of, functools.partial(STAGES[stage], cap=1), [(0, 1, 2)] * 2, 2):
        assert told == [2 * QUIET[stage] + SCHEDULES[stage, 1]] * 2


def test_stage_2_does_not_wait_for_what_was_not_used_in_the_step_before(pool):
    """What was expected and did not come is started in finish; in the next step nobody expects it."""
    first = "forward 0, forward 2, backward 2, reduce 2, backward 0, finish, reduce 1, reduce 0"
    second = "forward 0, forward 2, backward 2, reduce 2, reduce 1, backward 0, reduce 0, finish"
    gathers = f"{USED}, gather 2, gather 1, gather 0"
    for told, _ in pool.run(2, steps_of, functools.partial(stage2.wrap, cap=1), [(0, 2)] * 2):
        assert told == [f"{first}, {gathers}", f"{second}, {gathers}"]


def thawed(run, wrap):
    """What happens in each of three steps; layer 2 trains from the second on."""
    model = Chain()
    model.layers[2].requires_grad_(False)
    handle, told = wrap(model, run.world, cap=1), []
    names = {size: i for i, size in enumerate(SIZES)}
    for step in range(3):
        model.layers[2].requires_grad_(step > 0)
        with recording() as recorder:
            x = torch.tensor(0.1, dtype=F64, requires_grad=True)
            model(x, (0, 1, 2), recorder.calls).backward()
            recorder.calls.append("finish")
            handle.finish()
        told.append(recorder.told(names))
    return told


def test_a_bucket_that_is_unfrozen_takes_part_beside_backward_from_the_next_step_on(pool):
    """Frozen parameters are dealt last, so their bucket starts last."""
    frozen = f"{FORWARD}, backward 2, backward 1, reduce 1, backward 0, reduce 0, finish"
    for told in pool.run(2, thawed, stage2.wrap):
        assert told == [frozen, f"{frozen}, reduce 2", frozen.replace("reduce 0", "reduce 0, reduce 2")]


def frozen_layer(run, wrap):
    """The collectives of a step in which layer 1 is frozen."""
    model = Chain()
    model.layers[1].requires_grad_(False)
    handle = wrap(model, run.world, cap=1)
    with recording() as recorder:
        model(torch.tensor(0.1, dtype=F64, requires_grad=True), (0, 1, 2), []).backward()
        handle.finish()
        handle.after_step()
    return recorder.told({size: i for i, size in enumerate(SIZES)})


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("stage 0", "sum 2, sum 0"),
        ("stage 1", "reduce 2, reduce 0, gather 2, gather 0"),
        ("stage 2", "reduce 2, reduce 0, gather 2, gather 0"),
        ("stage 3", "gather 0, gather 1, gather 2, gather 2, reduce 2, gather 1, gather 0, reduce 0"),
    ],
)
def test_what_is_frozen_is_not_reduced(pool, stage, expected):
    """Nor gathered, but where it is cut."""
    assert pool.run(2, frozen_layer, STAGES[stage]) == [expected] * 2


def collectives(told):
    return [word for word in told.split(", ") if word.startswith(("gather", "reduce", "sum"))]


@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_starts_in_the_same_order_whatever_its_backward_reaches_first_or_never(pool, stage):
    """Layers in another order (in stage 3 only that of all ranks), some on some ranks only: no rank waits for ever."""
    orders = [(0, 1, 2), (0, 2), (1,), (2,)] if stage == "stage 3" else [(0, 1, 2), (2, 1, 0), (1,), ()]
    results = pool.run(4, steps_of, functools.partial(STAGES[stage], cap=1), orders)
    true = pool.run(4, steps_of, functools.partial(stage0.wrap, cap=1), orders)
    for told, _ in results:
        assert list(map(collectives, told)) == [collectives(SCHEDULES[stage, 1])] * 2
    ours, theirs = (assembled([held for _, held in ranks])[0] for ranks in (results, true))
    assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())


def test_a_rank_that_runs_none_of_the_layers(pool):
    pool.run(2, steps_of, stage3.wrap, [(0, 1, 2), ()], timeout=2.0)


# -- what is freed, and when -------------------------------------------------------------------------------------------


def living(run, wrap, quiet):
    """Bytes of full gradients that live when each is complete, after each microbatch, and after finish."""
    model = Chain((1000, 1000, 1000, 1000))
    handle, level, seen = wrap(model, run.world, average=False), Level(), []
    true = Bucket.pack

    def pack(bucket):
        full = level.add(true(bucket))
        seen.append(level.now)
        return full

    with mock.patch.object(Bucket, "pack", pack):
        for micro in range(1 + quiet):
            x = torch.tensor(0.1, dtype=F64, requires_grad=True)
            with handle.no_sync() if micro < quiet else contextlib.nullcontext():
                model(x, (0, 1, 2, 3), []).backward()
            assert all(param.grad is None for param in model.parameters())
            seen.append(level.now)
        handle.finish()
        seen.append(level.now)
    return seen, sum(shard.grad.numel() for shard in handle.parameters())


FULL = 8 * 1000  # bytes


@pytest.mark.parametrize("quiet", [0, 2])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [stage2, stage3])
def test_full_gradients_are_freed_under_way(pool, stage, overlap, quiet):
    """At most two live: the one that is complete, and where ranks do not wait the one under way. Under accumulation
    nothing full is kept from one microbatch to the next, but for what is under way; after finish nothing at all.
    """
    for seen, owned in pool.run(2, living, functools.partial(stage.wrap, cap=1, overlap=overlap), quiet):
        assert max(seen) == FULL * (1 + overlap)
        assert len(seen) == (4 + 1) * (1 + quiet) + 1
        assert set(seen[4 : 5 * quiet : 5]) <= {FULL * overlap}
        assert seen[-1] == 0 and owned == 4 * 500


def test_stage_1_keeps_full_gradients(pool):
    """The test above can fail."""
    for seen, owned in pool.run(2, living, functools.partial(stage1.wrap, cap=1), 0):
        assert seen[-1] == 4 * FULL and owned == 4 * 500


def held_in_weights(run):
    """Bytes of weights that have memory: after wrap, in forward, in backward, after finish, after the step."""
    model = Chain((1000, 1000, 1000))
    handle, seen = stage3.wrap(model, run.world), []

    def look(*_):
        storages = [bucket.weights.untyped_storage().nbytes() for bucket in handle.buckets]
        seen.append(sum(storages) // FULL)

    look()
    for layer in model.layers:
        layer.register_forward_hook(look, prepend=True)
    x = torch.tensor(0.1, dtype=F64, requires_grad=True)
    out = model(x, (0, 1, 2), [])
    look()
    for layer in model.layers:
        layer.weight.register_post_accumulate_grad_hook(look)
    out.backward()
    handle.finish()
    look()
    handle.after_step()
    look()
    return seen


def test_stage_3_has_one_layer_at_a_time(pool):
    assert pool.run(2, held_in_weights) == [[0, 1, 1, 1, 0, 1, 1, 1, 0, 0]] * 2


def without_freeing():
    return mock.patch.object(Bucket, "free", lambda bucket: None)


def living_without_freeing(run):
    with without_freeing():
        return living(run, functools.partial(stage2.wrap, cap=1), 0)


def test_a_full_gradient_that_stays_shows(pool):
    for seen, _ in pool.run(2, living_without_freeing):
        assert seen[-1] == 4 * FULL
