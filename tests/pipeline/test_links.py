"""Links: which groups there are, and what is told of the tensors of a message."""

import pytest
import torch

from pipeline import connect, links, schedule
from pipeline.links import Incoming, Kind, Outgoing, described, gradients_of

DTYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "uint8", "bool"]


def tensors():
    """Of every dtype and of many shapes, some of which want gradients; strided, expanded, empty, without dimensions."""
    numbers = torch.Generator().manual_seed(0)
    for i, name in enumerate(DTYPES):
        yield (torch.randn(2, i + 1, generator=numbers) * 50).to(getattr(torch, name))
    yield torch.randn(4, 3, generator=numbers).T.requires_grad_()
    yield torch.randn(5, 2, generator=numbers)[:, 1]
    yield torch.randn(1, 2, generator=numbers).expand(3, 2).requires_grad_()
    yield torch.empty(0, 7)
    yield torch.tensor(3.0).requires_grad_()


def test_descriptions():
    kinds = described(list(tensors()))
    length, text = links._encoded(kinds, torch.device("cpu"))
    assert int(length) == len(text) and links._decoded(text) == kinds
    assert links._decoded(links._encoded((), torch.device("cpu"))[1]) == ()
    assert gradients_of(kinds) == (
        Kind((3, 4), torch.float32, False),
        Kind((3, 2), torch.float32, False),
        Kind((), torch.float32, False),
    )


def message(run, told):
    """What rank 1 receives of rank 0, after a message without tensors."""
    group = run.new_group([0, 1], "message")
    sent, found = list(tensors()), []
    for each in ([], sent):
        kinds = described(each)
        if run.rank == 0:
            Outgoing(each, group, torch.device("cpu"), kinds if told else None).settle()
        else:
            incoming = Incoming(None if told else kinds, group, run.device)
            found.append(incoming.wait())
            assert incoming.kinds == kinds
    return found


@pytest.mark.parametrize("told", [True, False])
def test_a_message_arrives_bitwise(pool, told):
    _, (nothing, received) = pool.run(2, message, told)
    assert nothing == []
    for got, sent in zip(received, tensors(), strict=True):
        assert got.dtype == sent.dtype and got.is_contiguous() and torch.equal(got, sent.detach())


def channels(run, name, virtual, pipelines):
    """{channel: (global ranks of its group, place in it)}, and the number of distinct groups."""
    plan = schedule(name, len(pipelines[0]), 2, virtual)
    made = connect(plan, pipelines, run.new_group)
    again = connect(plan, pipelines, run.new_group)
    assert made == again
    ranks = {channel: torch.distributed.get_process_group_ranks(group) for channel, group in made.items()}
    return ranks, len(set(made.values()))


@pytest.mark.parametrize("pipelines", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1], [2, 0]]])
def test_a_group_for_each_direction_of_a_boundary(pool, pipelines):
    """Of each pipeline by itself. Where a V turns round there is no boundary."""
    for name, virtual, boundaries in (("1f1b", 1, [0]), ("interleaved", 2, [0, 1, 2]), ("zbv", 2, [0, 2])):
        for rank, (ranks, distinct) in enumerate(pool.run(4, channels, name, virtual, pipelines)):
            [own] = [sorted(each) for each in pipelines if rank in each]
            assert ranks == {(kind, s): own for kind in ("activation", "gradient") for s in boundaries}
            assert distinct == 2 * len(boundaries)
