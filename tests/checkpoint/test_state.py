"""What a run keeps besides weights; and what is refused: with every difference, on every rank, and nothing changes."""

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from torch import nn

from checkpoint import Checkpoints, State, find, plain, random_state, restore, training
from checkpoint.dtypes import DTYPES
from collectives.agreement import Stopped
from collectives.layout import Box, Constant, Held
from tests.checkpoint import cuts

# -- small state as text -----------------------------------------------------------------------------------------------


def same(a, b):
    """Equal in type, value and bits; one NaN is as good as another."""
    match a:
        case torch.Tensor():
            alike = a.dtype == b.dtype and a.shape == b.shape and torch.equal(cuts.bits(a), cuts.bits(b))
        case np.ndarray() | np.generic():
            alike = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        case float():
            alike = struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
        case complex():
            alike = same(a.real, b.real) and same(a.imag, b.imag)
        case dict():
            alike = same(list(a), list(b)) and same(list(a.values()), list(b.values()))
        case list() | tuple():
            alike = len(a) == len(b) and all(map(same, a, b))
        case _:
            alike = a == b
    return alike and type(a) is type(b)


def back(value):
    return plain.decode(json.loads(json.dumps(plain.encode(value))))


LEAVES = [
    *(None, True, False, 0, -1, 2**63, -(10**300), "", "text", "$float", "ü\n\x00\ud800", b"", b"\x00\xff"),
    *(0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1j, complex(-0.0, math.inf)),
    *(set(), {1, 2}, {"a", (1, 2)}),
    *(np.float32(0.1), np.int64(-3), np.bool_(True), np.complex128(1j), np.arange(6.0).reshape(2, 3).T),
    *(np.array(2.5), np.zeros((0, 3)), np.array([-0.0, np.nan], dtype=">f4"), np.array([[True]]), np.float64(0.1)),
    *(torch.arange(6).view(2, 3).t(), torch.tensor(1.5), torch.zeros(0, 2), torch.tensor([math.nan, -0.0])),
]


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: repr(value)[:30])
def test_every_kind(value):
    assert same(value, back(value))
    assert same({"a": [value, (value,)]}, back({"a": [value, (value,)]}))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_of_every_dtype(dtype):
    data = bytes(draw % (2 if dtype == torch.bool else 256) for draw in range(0, 24 * 37, 37))
    tensor = torch.frombuffer(bytearray(data), dtype=dtype)
    for value in (tensor, tensor.view(-1, 1)[::2], tensor[0], tensor[:0], nn.Parameter(tensor, requires_grad=False)):
        assert same(value.detach(), back(value))


def some(draw, depth):
    kind = draw.randrange(6) if depth else 0
    inside = [some(draw, depth - 1) for _ in range(draw.randrange(4) if depth else 0)]
    keys = [0, -7, "a", "$dict", "$", (1, "b"), None, True, b"k", 2.5, ""]
    match kind:
        case 1:
            return inside
        case 2:
            return tuple(inside)
        case 3 | 4:
            return dict(zip(draw.sample(keys, len(inside)), inside, strict=True))
        case 5:
            return {f"k{i}": value for i, value in enumerate(inside)}
    return draw.choice(
        [*LEAVES, draw.getrandbits(draw.randrange(1, 200)), struct.unpack("d", draw.randbytes(8))[0], draw.randbytes(9)]
    )


def test_anything_nested():
    draw = random.Random(0)
    for _ in range(400):
        value = some(draw, 4)
        assert same(value, back(value)), value


def test_other_mappings_come_back_as_dicts():
    for mapping in (OrderedDict(b=1, a=2), defaultdict(list, {3: [1]}), Counter("aab")):
        assert same(dict(mapping), back(mapping))


class Thing:
    pass


REFUSED = {
    "object": ({"a": [0, {"b": Thing()}]}, "state.a[1].b is a tests.checkpoint.test_state.Thing"),
    "function": ([len], "state[0] is a builtins.builtin_function_or_method"),
    "in a tuple": ((1, {2: Thing()}), "state[1][2] is a tests"),
    "key": ({Thing: 1}, "state is a builtins.type"),
    "text array": ({"a": [np.array(["a"])]}, "state.a[0] is an array of"),
    "wide": ({"w": torch.zeros(2, dtype=torch.complex128)}, "state.w is a tensor of torch.complex128"),
    "frozenset": (frozenset({1}), "state is a builtins.frozenset"),
    "dtype": ({"d": torch.float32}, "state.d is a torch.dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_its_place(case):
    value, words = REFUSED[case]
    with pytest.raises(ValueError, match="cannot hold") as error:
        plain.encode(value)
    assert str(error.value).startswith(words)


# -- what a run keeps --------------------------------------------------------------------------------------------------


def kept(run, path):
    """Scheduler, loss scaler, generators, cursor and metrics, as they come back in another object."""

    def made():
        param = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([param], lr=0.1)
        return optimizer, [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
        ]

    optimizer, parts = made()
    for _ in range(3):
        optimizer.step()
        parts[0].step()
        parts[1].step()
        parts[2].scale(torch.ones(()))
    parts[2].update(512.0)
    counted = {"step": 3, "samples": 2**40, "tokens": 2**70, "cursor": {"epoch": 1, "at": 5}, "metrics": [(1, 0.1)]}
    shared = {**counted, "parts": [part.state_dict() for part in parts]}
    for generator in (random.random, np.random.random, lambda: torch.rand(1)):
        for _ in range(run.rank + 1):  # T127: each rank has drawn another number of times
            generator()
    random.gauss(0, 1)  # half of a pair is kept in the state
    with Checkpoints(path, run.world) as checkpoints:
        checkpoints.save(3, State({}, shared, {"random": random_state.capture()}))
    expected = draws()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

    saved = find(path, group=run.world)
    random_state.restore(saved.own["random"])
    assert draws() == expected
    assert {key: saved.shared[key] for key in counted} == counted and saved.step == 3
    _, again = made()
    for part, state, before in zip(again, saved.shared["parts"], parts, strict=True):
        part.load_state_dict(state)
        assert part.state_dict() == before.state_dict()
    assert again[2].get_scale() == 512.0
    return expected


def draws():
    return [random.random(), random.gauss(0, 1), *np.random.normal(size=3), *torch.randn(3).tolist()]


def test_everything_comes_back(pool, tmp_path):
    expected = pool.run(3, kept, tmp_path)
    assert len({tuple(drawn) for drawn in expected}) == 3


def own_of(run, path):
    saved = find(path, group=run.world)
    return saved.own, saved.shared


def test_own_state_is_for_as_many_ranks(pool, tmp_path):
    pool.run(2, saves_own, tmp_path)
    assert pool.run(2, own_of, tmp_path) == [({"rank": rank}, {"seed": 1}) for rank in range(2)]
    for ranks in (1, 3):
        assert pool.run(ranks, own_of, tmp_path) == [(None, {"seed": 1})] * ranks


def saves_own(run, path):
    with Checkpoints(path, run.world) as checkpoints:
        checkpoints.save(0, State({}, {"seed": 1}, {"rank": run.rank}))


def unlike(run, path, what):
    """What one rank gives otherwise than the others: the words, and whether anything was written."""
    shared, step = {"seed": 1, "lr": 0.1, "rng": {"a": 1}}, 4
    tensors = {"w": [(Box.whole((4,)), torch.zeros(4))]}
    if run.rank == 1:
        shared |= {"seed": {"seed": 2}, "missing": {}}.get(what, {})
        shared.update({"more": {"extra": 0}, "nothing": {"rng": Thing()}}.get(what, {}))
        if what == "missing":
            del shared["lr"]
        step += what == "step"
        if what == "dtype":
            tensors["w"] = [(Box.whole((4,)), torch.zeros(4, dtype=torch.float64))]
        if what == "values":
            tensors["w"] = [(Box.whole((4,)), torch.zeros(2))]
    with Checkpoints(path, run.world) as checkpoints:
        with pytest.raises(Stopped) as error:
            checkpoints.save(step, State(tensors, shared))
        checkpoints.save(9, State({}))
    return str(error.value), find(path, group=run.world).step


UNLIKE = {
    "seed": "the ranks differ in shared state seed: give what is a rank's own as `own`",
    "missing": "the ranks differ in shared state lr: ",
    "more": "the ranks differ in shared state extra: ",
    "nothing": "rank 1: shared['rng'] is a tests.checkpoint.test_state.Thing",
    "step": "the ranks save different steps: [4, 5, 4], by rank",
    "dtype": "rank 1 has torch.float64 [4]",
    "values": "rank 1: w: the box [4] comes with values of shape [2]",
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_disagree(pool, tmp_path, what):
    told = pool.run(3, unlike, tmp_path, what)
    assert len(set(told)) == 1 and UNLIKE[what] in told[0][0] and told[0][1] == 9, told


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
}
SHAPES = {"a": (7, 5), "b": (11,), "number": (), "never": (4,)}


def declared(run, cut):
    found = []
    for name, shape in SHAPES.items():
        held = cuts.boxes(shape, cut, run.rank, run.size)
        local = held[0].local if len(held) == 1 else (sum(box.numel for box in held),)
        param = nn.Parameter(torch.zeros(local, dtype=torch.float64))
        param.held = Held(name, tuple(held), Constant(0.0), decay=False)
        param.data.copy_(of_place(param, "value"))
        found.append(param)
    return found


def of_place(param, salt):
    """Numbers by the place of each element, whatever the cut."""
    index = torch.cat([torch.empty(0, dtype=torch.int64), *(box.index().flatten() for box in param.held.boxes)])
    return torch.sin(index.double() + len(salt) + ord(param.held.name[0])).view(param.shape)


def stepped(params, optimizer, numbers):
    for number in numbers:
        for param in params:
            param.grad = None if param.held.name == "never" else of_place(param, "x" * number)
        optimizer.step()


def state_of(params, optimizer):
    return {p.held.name: {"parameter": p.detach(), **optimizer.state.get(p, {})} for p in params}


def goes_on(run, path, kind, before, after):
    """Two steps, saved under one cut; loaded under another, and two more: every bit as without the stop."""
    params = declared(run, before)
    optimizer = OPTIMIZERS[kind](params)
    stepped(params, optimizer, (1, 2))
    with Checkpoints(path, run.world) as checkpoints:
        checkpoints.save(2, State(training(params, optimizer)))
    straight = declared(run, after)
    expected = OPTIMIZERS[kind](straight)
    stepped(straight, expected, (1, 2))
    params = declared(run, after)
    for param in params:
        param.data.zero_()
    optimizer = OPTIMIZERS[kind](params)
    stepped(params, optimizer, (5,))  # a state that must go
    restore(find(path, group=run.world), params, optimizer)
    for steps in ((), (3, 4)):
        stepped(straight, expected, steps)
        stepped(params, optimizer, steps)
        now, wanted = state_of(params, optimizer), state_of(straight, expected)
        for name, kinds in wanted.items():
            assert {k for k, v in now[name].items() if v is not None} == {k for k, v in kinds.items() if v is not None}
            for kind_of, value in kinds.items():
                if value is not None:
                    tensors = torch.as_tensor(now[name][kind_of]), torch.as_tensor(value)
                    assert tensors[0].shape == tensors[1].shape, (name, kind_of)
                    assert torch.equal(*tensors), (name, kind_of)
    assert kind == "adagrad" or not optimizer.state.get(params[-1])  # which has a state from the start
    return sorted(find(path, group=run.world).tensors)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_go_on(pool, tmp_path, kind):
    names = pool.run(3, goes_on, tmp_path, kind, "rows", "flat")[0]
    assert "parameter/never" in names and (kind == "adagrad" or sum(name.endswith("/never") for name in names) == 1)
    assert (len(names) == 4) == (kind == "sgd")


def factored(run, path):
    """A state that is neither a number nor of its parameter's shape."""
    [param, *_] = declared(run, "copies")
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {"row": torch.zeros(7)}
    with pytest.raises(ValueError, match="row of a has shape") as error:
        training([param], optimizer)
    return str(error.value)


def test_a_state_that_is_none_is_not_kept():
    param = nn.Parameter(torch.zeros(3))
    param.held = Held("w", (Box.whole((3,)),), Constant(0.0), decay=False)
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {"momentum_buffer": None, "step": 0.1}
    found = training([param], optimizer)
    assert found.keys() == {"parameter/w", "step/w"}
    [(_, step)] = found["step/w"]
    assert step.dtype == torch.float64 and step == 0.1


def test_a_state_of_another_shape_is_refused(pool, tmp_path):
    assert all("use an elementwise optimizer" in told for told in pool.run(2, factored, tmp_path))


# -- strict ------------------------------------------------------------------------------------------------------------


def misfit(run, path, changes):
    """A run whose parameters differ from the checkpoint's: what it is told, and whether every bit is as it was."""
    names = [name for name in cuts.TENSORS if name != changes.get("more")]
    params = cuts.params(run, "rows", names)
    for param in params:
        name = param.held.name
        if name == changes.get("renamed"):
            param.held.name = "new"
        if name == changes.get("shape"):
            param.data = torch.zeros(5, 7)
            param.held.boxes = (Box.whole((5, 7)),)
        if name == changes.get("dtype"):
            param.data = param.data.half()
    optimizer = torch.optim.AdamW(params)
    for param in params:
        optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(param)}
    before = [(cuts.bits(p).clone(), {k: cuts.bits(v) for k, v in optimizer.state[p].items()}) for p in params]
    with pytest.raises(Stopped) as error:
        restore(find(path, group=run.world), params, optimizer)
    unchanged = all(
        torch.equal(cuts.bits(param), values)
        and optimizer.state[param].keys() == state.keys()
        and all(torch.equal(cuts.bits(optimizer.state[param][k]), v) for k, v in state.items())
        for param, (values, state) in zip(params, before, strict=True)
    )
    return str(error.value), unchanged


MISFITS = {
    "renamed": ({"renamed": "vector"}, ["parameter/new is not in it", "exp_avg/vector is unknown here"]),
    "more": ({"more": "cube"}, ["parameter/cube is unknown here", "step/cube is unknown here"]),
    "shape": ({"shape": "matrix"}, ["parameter/matrix has shape [7, 5], here [5, 7]", "exp_avg/matrix has shape"]),
    "dtype": ({"dtype": "matrix"}, ["parameter/matrix is torch.float32, here torch.float16"]),
    "all": (
        {"renamed": "vector", "more": "cube", "shape": "matrix", "dtype": "tall"},
        [
            "parameter/new is not",
            "cube is unknown",
            "matrix has shape [7, 5]",
            "tall is torch.float64, here torch.float16",
        ],
    ),
}


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    """A checkpoint of `cuts.filled` from two ranks."""
    return pool.run(2, cuts.write, "columns", tmp_path_factory.mktemp("run"))[0]


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_told_and_changes_nothing(pool, written, case):
    changes, words = MISFITS[case]
    told = pool.run(3, misfit, written, changes)
    assert len({line for line, _ in told}) == 1 and all(unchanged for _, unchanged in told)
    assert "\n" not in told[0][0] and all(word in told[0][0] for word in words), told[0][0]


def only_parameters(run, path, strict):
    params = cuts.params(run, "flat")
    targets = {
        f"parameter/{param.held.name}": [
            (box, part.view(box.local))
            for box, part in zip(
                param.held.boxes, param.detach().view(-1).split([b.numel for b in param.held.boxes]), strict=True
            )
        ]
        for param in params
        if param.held.boxes
    }
    find(path, group=run.world).read(targets, all_names=strict)
    for param in params:
        assert torch.equal(cuts.bits(param), cuts.bits(cuts.numbers("parameter", param.held.name, param.held.boxes)))


def test_the_parameters_alone(pool, written):
    pool.run(3, only_parameters, written, False)


def wrong_tensors(run, path):
    """On one rank a target is not of its box's shape: the words, and whether the others were filled."""
    fine, wrong = torch.zeros(5, dtype=torch.float64), torch.zeros(2 if run.rank == 1 else 4, dtype=torch.float64)
    with Checkpoints(path, run.world) as checkpoints:
        checkpoints.save(
            0, State({n: [(Box.whole(t), torch.ones(t).double())] for n, t in {"a": (5,), "b": (4,)}.items()})
        )
    with pytest.raises(Stopped) as error:
        find(path, group=run.world).read({"a": [(Box.whole((5,)), fine)], "b": [(Box.whole((4,)), wrong)]})
    return str(error.value), fine.any().item()


def test_a_target_that_is_not_of_its_box(pool, tmp_path):
    for words, filled in pool.run(2, wrong_tensors, tmp_path):
        assert words.endswith("b: the box [4] comes with a tensor of shape [2]") and not filled


# -- which checkpoint --------------------------------------------------------------------------------------------------


def first_alone_looks(run, path):
    """The other ranks would find nothing."""
    if run.rank:
        path = path.parent.parent / "nowhere"
    return find(path, group=run.world).step


def test_one_rank_decides(pool, written):
    assert pool.run(3, first_alone_looks, written.parent) == [5, 5, 5]


def finds(run, path):
    try:
        return find(path, group=run.world).step
    except Stopped as error:
        return str(error)


def test_a_path_or_a_folder(pool, tmp_path):
    pool.run(2, several, tmp_path)
    (tmp_path / "step-000009.tmp").mkdir()
    (tmp_path / "empty").mkdir()
    assert pool.run(2, finds, tmp_path) == [7, 7]
    assert pool.run(2, finds, tmp_path / "step-000003") == [3, 3]
    for name, words in {
        "step-000009.tmp": "did not end",
        "empty": "has no complete checkpoint",
        "nowhere": "is not a folder",
        "step-000004": "is not a folder",
    }.items():
        told = pool.run(2, finds, tmp_path / name)
        assert told[0] == told[1] and words in told[0] and str(tmp_path / name) in told[0], told


def several(run, path):
    with Checkpoints(path, run.world) as checkpoints:
        for step in (3, 7, 5, 0):
            checkpoints.save(step, State({}))
