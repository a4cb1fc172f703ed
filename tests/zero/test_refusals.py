"""What wrap refuses: the same message on every rank, within seconds, naming the first difference and the remedy."""

import pytest
import torch
from torch import nn

from tests.zero.versions import STAGES, each_stage
from zero import Mixed, stage1, stage3

SECONDS = 10.0


def base():
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(2, 3))})
    model.register_buffer("count", torch.zeros(2))
    return model


def changed(key, value):
    model = base()
    model[key] = value
    return model


def refused(run, wrap, build, odd, members, **settings):
    """The message of wrap on the members of a group, one of which builds its model, or calls wrap, in another way."""
    group = run.new_group(members)
    if group is None:
        return None
    with pytest.raises(ValueError) as error:
        wrap(build() if run.rank == odd else base(), group, **(settings if run.rank == odd else {}))
    return str(error.value)


def other_shape():
    return changed("b", nn.Parameter(torch.zeros(3, 2)))


def frozen():
    return changed("b", nn.Parameter(torch.zeros(2, 3), requires_grad=False))


def one_more():
    return changed("c", nn.Parameter(torch.zeros(1)))


DIFFERENT = {
    other_shape: ("1", "b [2, 3] float32", "b [3, 2] float32"),
    frozen: ("1", "b [2, 3] float32", "b [2, 3] float32 frozen"),
    one_more: ("2", "count [2] float32", "c [1] float32"),
}


@pytest.mark.parametrize(("odd", "members"), [(1, [0, 1]), (3, [1, 3])])
@pytest.mark.parametrize("build", DIFFERENT)
@each_stage
def test_models_that_differ_are_refused_on_every_rank(pool, wrap, build, odd, members):
    number, first, other = DIFFERENT[build]
    message = (
        f"the models differ: tensor {number} is {first} on rank {members[0]}, {other} on rank {odd}; "
        "build the same model on every rank"
    )
    results = pool.run(max(members) + 1, refused, wrap, build, odd, members, timeout=SECONDS)
    assert results == [message if rank in members else None for rank in range(len(results))]


def wrapped_otherwise(run, wrap, odd):
    with pytest.raises(ValueError) as error:
        wrap(base(), run.world, **(odd if run.rank == 1 else {}))
    return str(error.value)


@pytest.mark.parametrize(
    ("odd", "told"),
    [({"cap": 7}, "cap=7"), ({"average": False}, "average=False"), ({"mixed": Mixed()}, f"mixed={Mixed()}")],
)
@each_stage
def test_settings_that_differ_are_refused_on_every_rank(pool, wrap, odd, told):
    [message] = set(pool.run(3, wrapped_otherwise, wrap, odd, timeout=SECONDS))
    assert message.startswith("wrap was called with ") and message.endswith("; give the same on every rank")
    assert f"{told}" in message and "on rank 1" in message


def test_another_threshold_is_refused_on_every_rank(pool):
    [message] = set(pool.run(2, wrapped_otherwise, stage3.wrap, {"threshold": 5}, timeout=SECONDS))
    assert "threshold=0" in message and "on rank 0" in message and "threshold=5" in message and "on rank 1" in message


def other_layers(run):
    """Rank 1 names another layer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="layers"):
        stage3.wrap(model, run.world, layers=[model[run.rank]])


def test_other_layers_are_refused_on_every_rank(pool):
    pool.run(2, other_layers, timeout=SECONDS)


def whole_numbers():
    return nn.ParameterDict({"ids": nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)})


def sparse():
    return nn.ModuleDict({"embed": nn.Embedding(4, 2, sparse=True)})


def complex_parameter():
    return nn.ParameterDict({"phase": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})


REFUSED = {
    sparse: ({}, "embed makes sparse gradients, .* sparse=False"),
    complex_parameter: ({}, "phase is complex: keep it as a real tensor"),
    whole_numbers: ({"mixed": Mixed()}, "ids is torch.int64: no weight in mixed precision"),
    base: ({"cap": 0}, "a bucket of cap=0 bytes holds nothing: give it at least 1"),
}


def refused_everywhere(run, wrap, build):
    settings, message = REFUSED[build]
    with pytest.raises(ValueError, match=message):
        wrap(build(), run.world, **settings)


@pytest.mark.parametrize("build", REFUSED)
@pytest.mark.parametrize("stage", STAGES)
def test_what_no_stage_can_treat_is_refused(pool, stage, build):
    pool.run(2, refused_everywhere, STAGES[stage], build, timeout=SECONDS)


def frozen_whole_numbers(run, wrap):
    """Without mixed precision a frozen parameter may be of whole numbers."""
    model = whole_numbers()
    if run.rank == 0:
        model["ids"].data = torch.tensor([3, -(1 << 60)])
    handle = wrap(model, run.world)
    handle.finish()
    handle.after_step()
    with handle.whole():
        return model["ids"].tolist()


@each_stage
def test_frozen_whole_numbers(pool, wrap):
    assert pool.run(2, frozen_whole_numbers, wrap) == [[3, -(1 << 60)]] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": torch.float32}, "weights in torch.float32: use one of .*, or mixed=None"),
        ({"gradients": torch.float16}, "gradients in torch.float16: use float32, or the weights' torch.bfloat16"),
        ({"moments": torch.float16}, "moments in torch.float16: use float32 or bfloat16"),
    ],
)
def test_mixed_of_other_dtypes_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Mixed(**settings)


def no_member(run):
    group = run.new_group([0])
    if group is None:
        with pytest.raises((ValueError, TypeError, AttributeError)):
            stage1.wrap(base(), None)


def test_a_rank_that_is_no_member_is_refused(pool):
    pool.run(2, no_member, timeout=SECONDS)
