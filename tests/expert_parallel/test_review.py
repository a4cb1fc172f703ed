"""What the other tests leave open, each in one process: rows that are cut by `Sequences.cut`, groups given to the
constructor, and in the trainer what is counted, told, initialised, and asked of two families.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from context_parallel import slots
from expert_parallel import MoE, Observation, Router, Sequences
from nd_mesh import data
from nd_mesh.experts import summary
from nd_mesh.families import Families
from nd_mesh.model import GPT, Normal
from nd_mesh.parallelize import _divided
from tests import parity

# -- the router --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logit", [-60.0, -88.0, -90.0, -104.0, -300.0])
def test_scores_that_are_all_zero(logit):
    """Sigmoids of float32 vanish: neither a weight nor a gradient may be no number."""
    router = Router(1, 4, 2, score="sigmoid")
    torch.nn.init.ones_(router.weight)
    routing = router(torch.full((1, 1, 1), logit).requires_grad_())
    (
        (routing.shares * torch.arange(1.0, 9.0, 2)).sum() + (routing.weights * torch.tensor([50.0, -9.0])).sum()
    ).backward()
    for each in (routing.weights, routing.shares, router.weight.grad):
        assert each.isfinite().all()
    assert routing.experts.tolist() == [[[0, 1]]]


# -- rows that are cut -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_slots_beyond_the_end_of_a_row_are_no_tokens(ranks, order):
    """The last slot of a row holds a token, and its padding none; all else is that of the whole row."""
    whole = Sequences.whole(torch.zeros(2, 5, 1))
    everyones = slots(order, 5, ranks, multiple=2)
    parts = [whole.cut(everyones, rank) for rank in range(ranks)]
    for part, mine in zip(parts, everyones, strict=True):
        assert part.routed.tolist() == [(mine < 5).tolist()] * 2
        assert part.slots is everyones and part.length == 5 and part.counted.tolist() == [True, True]
    assert sum(int(part.routed.sum()) for part in parts) == int(whole.tokens) == 10


def test_the_constructor_keeps_both_groups():
    """Also where experts are shared as the layer is made."""
    one, row = (SimpleNamespace(size=lambda: 1, rank=lambda: 0) for _ in range(2))
    assert MoE(4, 4, 4, sequence_group=row).sequence_group is row
    made = MoE(4, 4, 4, group=one, sequence_group=row)
    assert made.group is one and made.sequence_group is row
    made.distribute(one)
    assert made.sequence_group is row


# -- in the trainer ----------------------------------------------------------------------------------------------------


def batch():
    """Rows of four: one of tokens that are documents of their own, one that begins with such a one and ends early."""
    stream = data.Stream(np.arange(8, dtype=np.uint8), np.array([0, 1, 2, 3, 4, 5]), 4)
    numbers = torch.arange(2)
    return data.make_batch(stream, 0, numbers, numbers)


def test_rows_without_a_label_are_not_counted_and_yet_routed():
    made = batch()
    places = made.where.sequences
    assert (made.labels[0] == data.IGNORE).all() and (made.labels[1] != data.IGNORE).sum() == 2
    assert places.counted.tolist() == [False, True] and places.routed.all()


def test_counts():
    """Valid tokens and tokens of documents of each rank that has a part of the row; rows of the first alone."""
    first, second = (data.counts([batch(), batch()], first=which).tolist() for which in (True, False))
    assert first == [4, 2, 16] and second == [4, 0, 16]


def test_a_batch_of_the_whole_has_its_numbers():
    places = batch().of(torch.tensor([7, 5, 90]), 1.0).where.sequences
    assert (int(places.rows), int(places.tokens)) == (5, 90)


def test_summary():
    """Means over layers, of the imbalance the largest; nothing without mixtures."""
    layers = {
        1: Observation(torch.tensor([3, 1, 0, 0]), 1, 0.5, 1.5, 2.0),
        3: Observation(torch.tensor([2, 2, 2, 2]), 4, 1.5, 1.0, 4.0),
    }
    told = {"balance": 1.25, "z": 3.0, "entropy": 1.0, "overflow": (1 / 4 + 4 / 8) / 2, "imbalance": 3.0}
    assert summary(layers) == told | {"tokens": {"1": [3, 1, 0, 0], "3": [2, 2, 2, 2]}}
    assert summary({}) is None


class Handle:
    """Says what it is asked."""

    def __init__(self, name, story):
        self.name, self.story, self.params = name, story, [object()]

    def parameters(self):
        return self.params

    def __getattr__(self, asked):
        def answer(*args):
            self.story.append((self.name, asked, *args))
            return self._around(asked) if asked in ("no_sync", "deferring", "whole") else self.name

        return answer

    @contextlib.contextmanager
    def _around(self, asked):
        self.story.append((self.name, "in", asked))
        yield
        self.story.append((self.name, "out", asked))


@pytest.mark.parametrize("asked", ["finish", "after_step", "after_load", "unshard", "reshard", "reduce"])
def test_both_families_do_what_is_asked(asked):
    story = []
    handles = [Handle(name, story) for name in "ab"]
    args = ("module",) if asked in ("unshard", "reshard", "reduce") else ()
    getattr(Families(handles), asked)(*args)
    assert story == [("a", asked, *args), ("b", asked, *args)]
    assert Families(handles).parameters() == [*handles[0].params, *handles[1].params]
    assert Families(handles).padding() == "a, b"


@pytest.mark.parametrize("asked", ["no_sync", "deferring", "whole"])
def test_both_families_are_inside(asked):
    story = []
    with getattr(Families([Handle("a", story), Handle("b", story)]), asked)():
        assert [each for each in story if each[1] == "in"] == [("a", "in", asked), ("b", "in", asked)]
        assert not [each for each in story if each[1] == "out"]
    assert story[-2:] == [("b", "out", asked), ("a", "out", asked)]


@pytest.mark.parametrize(
    ("ranks", "shape", "dim"), [(2, (4, 8, 24), 0), (4, (2, 8, 24), 1), (3, (2, 8, 24), 2), (5, (2, 8, 24), 0)]
)
def test_experts_are_sharded_along_a_dim_that_divides(ranks, shape, dim):
    """Ranks may be more than experts; where nothing divides the first has to do."""
    assert _divided(ranks, "experts.gate", torch.empty(shape)) == dim


@pytest.mark.parametrize(
    ("name", "inputs", "into_stream"),
    [
        ("router.weight", 24, False),
        ("experts.gate", 24, False),
        ("experts.up", 24, False),
        ("experts.down", 12, True),
        ("shared.gate.weight", 24, False),
        ("shared.down.weight", 20, True),
    ],
)
def test_initial_values_of_a_mixture(name, inputs, into_stream):
    """Every matrix keeps the size of what it multiplies; those into the residual stream are smaller by 2L additions."""
    config = parity.config(experts=4, expert_hidden=12, shared_hidden=20, hidden=40).model
    with torch.device("meta"):
        model = GPT(config, 0)
    assert f"blocks.1.ffn.{name}" in dict(model.named_parameters())
    expected = (inputs * (2 * config.layers if into_stream else 1)) ** -0.5
    assert model.init_rule(f"blocks.1.ffn.{name}") == Normal(expected)
