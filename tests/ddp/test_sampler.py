"""Which samples each rank reads: partitions, tails, what is recorded of them, positions, and torch's counterpart."""

import itertools
import math
import re

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from ddp.sampler import LAST_POSITION, Sampler


def everyone(length, size, **options):
    return [Sampler(length, rank, size, **options) for rank in range(size)]


def dealt(samplers):
    """The order of the epoch again, from the ranks' samples in turn."""
    return [sample for turn in zip(*samplers, strict=True) for sample in turn]


# -- an epoch is a partition (T136) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_epoch_is_a_partition_in_an_order_of_its_own(size):
    epochs = [dealt(s.at_epoch(epoch) for s in everyone(30, size, seed=7)) for epoch in range(3)]
    assert all(sorted(order) == list(range(30)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    assert epochs == [dealt(s.at_epoch(epoch) for s in everyone(30, size, seed=7)) for epoch in range(3)]
    assert dealt(everyone(30, size, seed=8)) != epochs[0]


def test_the_order_does_not_depend_on_the_number_of_ranks():
    orders = {tuple(dealt(everyone(60, size))) for size in (1, 2, 3, 4, 5)}
    assert len(orders) == 1


def test_global_batches_do_not_depend_on_the_number_of_ranks():
    def batches(size):
        loaded = [DataLoader(range(48), batch_size=12 // size, sampler=s) for s in everyone(48, size)]
        return [sorted(torch.cat(parts).tolist()) for parts in zip(*loaded, strict=True)]

    assert batches(1) == batches(2) == batches(3) == batches(4)


def test_without_shuffling_ranks_take_turns():
    assert [list(s) for s in everyone(7, 2, shuffle=False, tail="pad")] == [[0, 2, 4, 6], [1, 3, 5, 0]]
    assert [list(s) for s in everyone(7, 2, shuffle=False, tail="drop")] == [[0, 2, 4], [1, 3, 5]]


# -- tails (T23, T135, T137) -------------------------------------------------------------------------------------------

TAILS = list(itertools.product([1, 2, 5, 7, 10, 24], [1, 2, 3, 4], [1, 2, 3], ["drop", "pad"], [0, 1, 4]))


@pytest.mark.parametrize("shuffle", [False, True])
def test_tails_are_the_same_length_everywhere_and_fully_recorded(shuffle):
    """Any length, ranks, batch and position in the epoch: what is read, padding aside, and what is dropped are what is
    left of the epoch, each once.
    """
    seen = 0
    for length, size, batch, tail, consumed in TAILS:
        if consumed >= length or (tail == "drop" and length < size * batch):
            continue
        seen += 1
        whole = list(Sampler(length, 0, 1, shuffle=shuffle))
        samplers = everyone(length, size, batch=batch, tail=tail, shuffle=shuffle, position=consumed)
        (count,) = {len(s) for s in samplers}
        (dropped,) = {tuple(s.dropped().tolist()) for s in samplers}
        assert all(count == len(list(s)) == len(s.padding()) and count % batch == 0 for s in samplers)
        real = [i for s in samplers for i, more in zip(s, s.padding().tolist(), strict=True) if not more]
        assert sorted([*real, *dropped]) == sorted(whole[consumed:])
        assert len(dropped) < size * batch if tail == "drop" else dropped == ()
        assert (
            sum(int(s.padding().sum()) for s in samplers) < size * batch if tail == "pad" else count * size == len(real)
        )
    assert seen > 150


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 4])
def test_an_evaluation_that_masks_padding_does_not_depend_on_the_ranks(size, batch):
    """T135: ten items, the loss is the id."""
    total = count = 0
    for sampler in everyone(10, size, batch=batch, tail="pad"):
        masks = sampler.padding().split(batch)
        for ids, padding in zip(DataLoader(range(10), batch_size=batch, sampler=sampler), masks, strict=True):
            total += int(ids[~padding].sum())
            count += int((~padding).sum())
    assert (total / count, count) == (4.5, 10)


@pytest.mark.parametrize(("tail", "steps"), [("drop", 1), ("pad", 2)])
def test_every_rank_makes_the_same_steps(tail, steps):
    """T137: 5 samples, batches of 2, 2 ranks."""
    for sampler in everyone(5, 2, batch=2, tail=tail):
        batches = list(DataLoader(range(5), batch_size=2, sampler=sampler))
        assert [len(ids) for ids in batches] == [2] * steps


def test_fewer_samples_than_ranks():
    padded = everyone(3, 8, tail="pad", shuffle=False)
    assert [list(s) for s in padded] == [[0], [1], [2], [0], [1], [2], [0], [1]]
    assert [bool(s.padding()) for s in padded] == [False] * 3 + [True] * 5
    with pytest.raises(ValueError, match=r'3 samples do not fill a batch of 1 on 8 ranks.*tail="pad"'):
        everyone(3, 8, tail="drop")


# -- going on in the middle of an epoch (T129) -------------------------------------------------------------------------


def epochs_of(sampler, steps, batch, workers=0):
    """(batches of this many steps from here on, the position after them), over the ends of epochs."""
    taken = []
    while len(taken) < steps:
        loader = DataLoader(range(sampler.length), batch_size=batch, sampler=sampler, num_workers=workers)
        done = 0
        for ids in itertools.islice(loader, steps - len(taken)):
            taken.append(ids.tolist())
            done += len(ids)
        sampler = sampler.at(sampler.after(done))
    return taken, sampler.position


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [5, 8, 13])
def test_a_run_that_is_interrupted_reads_what_an_uninterrupted_one_does(stop, workers):
    """64 ids, 8 steps of 4 on 2 ranks an epoch; stopped in epoch 0, between epochs, in epoch 1. A loader that reads
    ahead has asked for more than was used.
    """
    for rank in range(2):
        sampler = Sampler(64, rank, 2, seed=3, batch=4)
        whole, end = epochs_of(sampler, 20, 4)
        before, position = epochs_of(sampler, stop, 4, workers)
        after, again = epochs_of(sampler.at(position), 20 - stop, 4)
        assert before + after == whole and again == end == 2 * 64 + 4 * 8
        assert position == 8 * stop


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize(("first", "then"), [(4, 2), (2, 3), (3, 4), (1, 4)])
def test_a_run_goes_on_with_other_ranks_where_it_was(first, then, tail):
    length = 50
    ranks = [s.at_epoch(2) for s in everyone(length, first, tail=tail)]
    read = [sample for s in ranks for sample in list(s)[:5]]
    position = ranks[0].after(5)
    rest = [s.at(position) for s in everyone(length, then, tail=tail)]
    real = [i for s in rest for i, more in zip(s, s.padding().tolist(), strict=True) if not more]
    assert sorted([*read, *real, *rest[0].dropped().tolist()]) == list(range(length))


def test_positions():
    sampler = Sampler(10, 1, 3)  # three samples a rank, the tenth is dropped
    assert [sampler.after(taken) for taken in range(4)] == [0, 3, 6, 10]
    assert [sampler.at(16).after(taken) for taken in range(2)] == [16, 20]
    assert (len(sampler.at(18)), sampler.at(18).after(0)) == (0, 20)  # less than a sample for each is left
    assert sampler.at_epoch(4).position == 40
    for taken in (-1, 4):
        with pytest.raises(ValueError, match=f"taken={taken} must be from 0 to the 3 samples"):
            sampler.after(taken)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "a data set of 0 samples has nothing to read"),
        ({"length": -3}, "a data set of -3 samples"),
        ({"length": 2.5}, "length=2.5 must be an integer"),
        ({"seed": None}, "seed=None must be an integer"),
        ({"batch": True}, "batch=True must be an integer"),
        ({"size": 0}, "rank=0 must be one of 0 … size-1, with size=0 at least 1"),
        ({"rank": 2}, "rank=2 must be one of 0 … size-1, with size=2"),
        ({"rank": -1}, "rank=-1 must be one of"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"tail": "wrap"}, 'tail=\'wrap\' must be "drop" or "pad"'),
        ({"batch": 6}, "10 samples do not fill a batch of 6 on 2 ranks"),
        ({"position": -1}, "position=-1 must be from 0"),
        ({"position": 2**63}, "position=9223372036854775808 must be from 0 to 9223372036854775807"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampler(**{"length": 10, "rank": 0, "size": 2, **arguments})


@pytest.mark.parametrize("epoch", [-1, 1.0, LAST_POSITION])
def test_epochs_that_are_none(epoch):
    with pytest.raises(ValueError, match=rf"epoch={epoch} must be an integer from 0 to {LAST_POSITION // 10}"):
        Sampler(10, 0, 2).at_epoch(epoch)


def test_the_last_epoch():
    samplers = [s.at_epoch(LAST_POSITION // 10 - 1) for s in everyone(10, 2)]
    assert sorted(dealt(samplers)) == list(range(10))


def test_a_long_data_set_costs_a_rank_only_its_own_part():
    """Of 10^12 samples the last few entries, without a table of them."""
    sampler = Sampler(10**12, 3, 8, position=10**12 - 40)
    assert len(list(sampler)) == 5 and all(0 <= i < 10**12 for i in sampler)


# -- beside torch's ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("length", "size"), [(10, 1), (10, 4), (11, 3), (12, 3), (5, 4)])
def test_as_many_as_torchs_and_together_the_same_samples(length, size, drop, shuffle):
    ours = everyone(length, size, tail="drop" if drop else "pad", shuffle=shuffle)
    theirs = [DistributedSampler(range(length), size, rank, shuffle, drop_last=drop) for rank in range(size)]
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(list(mine)) == len(other) == len(list(other))
        if not shuffle:
            assert list(mine) == list(other)
    assert len(set().union(*ours)) == len(set().union(*theirs)) == (length // size * size if drop else length)
    assert sum(map(len, ours)) == size * (length // size if drop else math.ceil(length / size))


def test_a_position_inside_the_padding_is_the_next_epochs_first():
    """A batch may be stopped in the middle; nothing of the next epoch has been read."""
    sampler = Sampler(10, 0, 1, batch=8, tail="pad")
    assert [sampler.after(taken) for taken in (8, 9, 10, 12, 16)] == [8, 9, 10, 10, 10]
    assert [sampler.at(10).after(taken) for taken in (9, 12, 16)] == [19, 20, 20]
