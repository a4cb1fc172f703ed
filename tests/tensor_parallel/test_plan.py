"""Plans: what is refused, on every rank and before anything has changed; stars; and who holds which rows, as tables."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from collectives import layout
from collectives.layout import Box, Normal
from tensor_parallel import (
    Column,
    ColumnParallelLinear,
    Heads,
    KeyValue,
    Row,
    RowParallelLinear,
    Stream,
    VocabParallelEmbedding,
    Vocabulary,
    Whole,
    cut,
    parallelize,
)
from tests.recorder import recording

# -- who holds which rows ----------------------------------------------------------------------------------------------


def table(ranges):
    """The rows of each rank, as text."""
    return ["".join(f"{row:x}" for row in rows) for rows in ranges]


@pytest.mark.parametrize(
    ("rows", "ranks", "units", "expected"),
    [
        (12, 1, None, ["0123456789ab"]),
        (12, 3, None, ["0123", "4567", "89ab"]),
        (12, 4, None, ["012", "345", "678", "9ab"]),
        (12, 2, 6, ["012345", "6789ab"]),
        (12, 3, 3, ["0123", "4567", "89ab"]),
    ],
)
def test_even(rows, ranks, units, expected):
    assert table(cut.even(rows, ranks, units=units)) == expected


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (13, 1, ["0123456789abc"]),
        (13, 2, ["0123456", "789abc"]),
        (13, 3, ["01234", "5678", "9abc"]),
        (13, 4, ["0123", "456", "789", "abc"]),
        (14, 4, ["0123", "4567", "89a", "bcd"]),
        (12, 4, ["012", "345", "678", "9ab"]),
        (4, 4, ["0", "1", "2", "3"]),
        (5, 4, ["01", "2", "3", "4"]),
    ],
)
def test_nearly_even(rows, ranks, expected):
    assert table(cut.nearly_even(rows, ranks)) == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),  # a row a head
    [
        (8, 2, 1, ["01"]),
        (8, 2, 2, ["0", "1"]),
        (8, 2, 4, ["0", "0", "1", "1"]),
        (8, 2, 8, ["0", "0", "0", "0", "1", "1", "1", "1"]),
        (8, 1, 4, ["0", "0", "0", "0"]),
        (8, 4, 2, ["01", "23"]),
        (6, 3, 3, ["0", "1", "2"]),
        (6, 3, 6, ["0", "0", "1", "1", "2", "2"]),
        (12, 6, 2, ["012", "345"]),
    ],
)
def test_shared(heads, kv_heads, ranks, expected):
    assert table(cut.shared(kv_heads, ranks, units=kv_heads, heads=heads)) == expected


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (6, 2), (12, 4), (12, 6)])
def test_every_query_finds_its_keys(heads, kv_heads):
    """Query head q looks at key head q // (heads / kv_heads): the rank that has the one has the other, in order."""
    for ranks in cut.degrees(heads, kv_heads):
        keys = cut.shared(kv_heads * 2, ranks, units=kv_heads, heads=heads)
        for queries, rows in zip(cut.even(heads, ranks), keys, strict=True):
            mine = list(rows)[::2]  # the first row of each head
            each = len(queries) // len(mine)
            assert [mine[i // each] // 2 for i in range(len(queries))] == [q * kv_heads // heads for q in queries]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [(8, 2, [1, 2, 4, 8]), (6, 3, [1, 3, 6]), (6, 2, [1, 2, 6]), (6, 1, [1, 2, 3, 6]), (4, 4, [1, 2, 4]), (1, 1, [1])],
)
def test_degrees(heads, kv_heads, expected):
    assert cut.degrees(heads, kv_heads) == expected


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "expected"),
    [
        (range(4), 2, [(0, 1), (2, 3)]),
        (range(4), 1, [(0, 1, 2, 3)]),
        (range(4), 4, [(0,), (1,), (2,), (3,)]),
        (range(2), 8, [(0,), (1,)]),
        ((1, 3, 5, 7), 2, [(1, 3), (5, 7)]),
    ],
)
def test_sharers(ranks, kv_heads, expected):
    assert cut.sharers(ranks, kv_heads) == expected


def test_divisors():
    assert [cut.divisors(n) for n in (1, 7, 12)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12]]


@pytest.mark.parametrize(
    ("role", "rows", "ranks", "expected"),
    [
        (Column(), 12, 3, [["0123", "4567", "89ab"]]),
        (Column((4,)), 8, 4, [["01", "23", "45", "67"]]),
        (Column((4, 2, 2)), 8, 2, [["01", "23"], ["4", "5"], ["6", "7"]]),  # queries, keys, values
        (Column((2, 2)), 12, 2, [["012", "345"], ["678", "9ab"]]),  # gate, up
        (KeyValue(2, 8), 4, 4, [["01", "01", "23", "23"]]),
    ],
)
def test_each_matrix_in_a_fused_one_is_cut_by_itself(role, rows, ranks, expected):
    dim, pieces = role.cut(linear(rows), ranks)
    assert (dim, [table(piece) for piece in pieces]) == (0, expected)


def linear(rows, columns=4):
    return nn.Linear(columns, rows, device="meta")


def test_a_row_is_cut_along_its_inputs_and_others_not_at_all():
    assert Row().cut(linear(5, 6), 3) == (1, [[range(2), range(2, 4), range(4, 6)]])
    assert Vocabulary().cut(linear(5, 6), 2) == (0, [[range(3), range(3, 5)]])
    assert Vocabulary().cut(nn.Embedding(5, 6, device="meta"), 2) == (0, [[range(3), range(3, 5)]])
    assert [role.cut(linear(5, 6), 2) for role in (Stream(), Heads(), Whole())] == [None] * 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: cut.even(8, 3, what="heads"), "tp=3 does not divide 8 heads; use a tp of 1, 2, 4 or 8"),
        (lambda: cut.even(7, 2, what="heads"), "tp=2 does not divide 7 heads; use a tp of 1 or 7"),
        (lambda: cut.even(10, 2, units=4, what="heads"), "10 rows are not 4 heads of equal size"),
        (lambda: cut.even(10, 2, units=0, what="heads"), "10 rows are not 0 heads of equal size"),
        (lambda: cut.nearly_even(3, 4), "tp=4 is more than 3 rows: each rank holds at least one; use a tp of 3"),
        (lambda: cut.shared(6, 2, units=3, heads=8), "3 key and value heads do not divide 8 query heads"),
        (
            lambda: cut.shared(6, 4, units=3, heads=6),
            "tp=4 does not fit 6 query heads and 3 key and value heads; use a tp of 1, 3 or 6",
        ),
        (lambda: Column((4, 2)).cut(linear(13), 2), "13 rows are not 4 + 2 heads of equal size"),
        (
            lambda: Column((4, 2, 2)).cut(linear(16), 4),
            "tp=4 does not divide 2 heads; use a tp of 1 or 2",
        ),
    ],
)
def test_what_does_not_divide_names_what_does(call, text):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == text


# -- refused before anything has changed -------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """A linear layer that is none."""

    def forward(self, x):
        return 2 * super().forward(x)


class Toy(nn.Module):
    """A part of each kind."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.sparse, self.padded = nn.Embedding(10, 8, sparse=True), nn.Embedding(10, 8, padding_idx=0)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in "01")
        self.norm, self.odd, self.doubled = nn.RMSNorm(8), nn.Linear(7, 9), Doubled(8, 8)
        self.normed = weight_norm(nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(()))


PARTS = ("embed", "head", "sparse", "padded", "blocks", "norm", "odd", "doubled", "normed")


def plan_of(**roles):
    """All parts whole but these, of which the first are good: they must not be cut before the others are looked at."""
    good = {"blocks.*.up": Column(), "blocks.*.down": Row(), "norm": Stream(), "embed": Vocabulary()}
    whole = {name: Whole() for name in PARTS if name not in ("blocks", "norm", "embed") and name not in roles}
    return {name: role for name, role in (good | whole | roles).items() if role is not None}


def untouched(run, plan, settings, build):
    """What is raised, and whether the module is as it was and nothing was sent."""
    torch.manual_seed(0)
    module = build()
    if hasattr(module, "scale"):
        del module.scale
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kinds = [(name, type(part)) for name, part in module.named_modules()]
    held = [hasattr(param, "held") for param in module.parameters()]
    with recording() as recorder:
        try:
            parallelize(module, plan, run.world, **settings)
        except ValueError as error:
            now = module.state_dict()
            same = now.keys() == before.keys() and all(torch.equal(now[name], value) for name, value in before.items())
            same &= kinds == [(name, type(part)) for name, part in module.named_modules()]
            same &= held == [hasattr(param, "held") for param in module.parameters()]
            return str(error), same, len(recorder.calls)
    return "nothing was refused"


def with_dropout():
    toy = Toy()
    toy.blocks[1]["dropout"] = nn.Dropout(0.1)
    return toy


REFUSED = {
    "a wrong name": (
        plan_of(norn=Stream()),
        "the plan names 'norn', which the module does not have: did you mean 'norm'?",
    ),
    "a wrong star": (
        plan_of(**{"blocks.*.upp": Column()}),
        "the plan names 'blocks.*.upp', which the module does not have",
    ),
    "a star for two parts": (plan_of(**{"*.up": Column()}), "the plan names '*.up', which the module does not have"),
    "a missing name": (plan_of(odd=None), "odd.weight has no role: name its module in the plan; Stream() or Whole()"),
    "a missing block": (
        {**plan_of(**{"blocks.*.up": None}), "blocks.0.up": Column()},
        "blocks.1.up.weight has no role: name its module in the plan",
    ),
    "two roles": (
        plan_of(**{"blocks.0.up": Column()}),
        "blocks.0.up has two roles",
    ),
    "two roles, by a parent": (
        plan_of(**{"blocks.1": Whole()}),
        "blocks.1.up has two roles, those of blocks.1.up and of blocks.1: give it one",
    ),
    "a column that is a norm": (plan_of(norm=Column()), "norm: a RMSNorm cannot have the role Column"),
    "a row that is an embedding": (plan_of(embed=Row()), "embed: a Embedding cannot have the role Row"),
    "keys that are a list": (
        {**plan_of(**{"blocks.*.up": None, "blocks.*.down": None}), "blocks": KeyValue(2, 4)},
        "blocks: a ModuleList cannot have the role KeyValue",
    ),
    "a vocabulary that is a norm": (
        plan_of(norm=Vocabulary()),
        "norm: a RMSNorm cannot have the role Vocabulary",
    ),
    "two different roles": (plan_of(**{"blocks.0.up": Whole()}), "blocks.0.up has two roles, Column("),
    "a layer with a forward of its own": (plan_of(doubled=Column()), "doubled: a Doubled cannot have the role Column"),
    "a layer whose weight is computed": (
        plan_of(normed=Row()),
        "normed: a ParametrizedLinear cannot have the role Row",
    ),
    "a sparse embedding": (plan_of(sparse=Vocabulary()), "an embedding with sparse cannot be cut by its vocabulary"),
    "a padded embedding": (plan_of(padded=Vocabulary()), "an embedding with padding_idx cannot be cut"),
    "outputs": (plan_of(odd=Column()), "odd: tp=2 does not divide 9 output features; use a tp of 1, 3 or 9"),
    "inputs": (plan_of(odd=Row()), "odd: tp=2 does not divide 7 input features; use a tp of 1 or 7"),
    "heads": (plan_of(odd=Column((3, 6))), "odd: tp=2 does not divide 3 heads; use a tp of 1 or 3"),
    "rows of heads": (plan_of(odd=Column((4,))), "odd: 9 rows are not 4 heads of equal size"),
    "keys for which there is no group": (
        plan_of(doubled=Whole(), head=KeyValue(1, 2)),
        "head: tp=2 is more than 1 key and value heads, of which ranks [0, 1] hold the same: give KeyValue their group",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_changed_nothing(pool, case):
    plan, text = REFUSED[case]
    for told, same, sent in pool.run(2, untouched, plan, {}, Toy):
        assert text in told
        assert same and sent == 0


def test_more_ranks_than_tokens(pool):
    for told, same, _ in pool.run(3, untouched, {"0": Column(), "1": Vocabulary()}, {}, two_tokens):
        assert told == "1: tp=3 is more than 2 tokens of a vocabulary: each rank holds at least one; use a tp of 2"
        assert same


def two_tokens():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def with_a_group_of_its_own(run):
    """What is raised where keys that two ranks share are to be summed by each for itself."""
    own = [run.new_group([rank]) for rank in range(run.size)][run.rank]
    try:
        parallelize(two_tokens(), {"0": KeyValue(1, 2, own), "1": Row()}, run.world)
    except ValueError as error:
        return str(error)


def test_keys_with_a_wrong_group_are_refused(pool):
    text = "0: tp=2 is more than 1 key and value heads, of which ranks [0, 1] hold the same: give KeyValue their group"
    for told in pool.run(2, with_a_group_of_its_own):
        assert told.startswith(text)


def test_dropout_is_refused(pool):
    text = "blocks.1.dropout is Dropout: it draws by the generator of its rank, so copies would get other masks"
    for told, same, sent in pool.run(2, untouched, plan_of(), {}, with_dropout):
        assert text in told and same and sent == 0


def without_drops(run):
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, 2))
    parallelize(module, {"0": Column(), "2": Row()}, run.world)
    return type(module[1])


def test_dropout_that_drops_nothing_is_not(pool):
    assert pool.run(2, without_drops) == [nn.Dropout] * 2


def test_a_mode_of_another_mode_is_refused(pool):
    for told, same, sent in pool.run(2, untouched, plan_of(), {"save_gathered": True}, Toy):
        assert told.startswith("save_gathered=True is a mode of sequence_parallel=True") and same and sent == 0


def tied(how):
    """Two layers with one weight."""

    def build():
        module = nn.Module()
        module.first, module.second = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if how == "square":
            module.first, module.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
        module.second.weight = module.first.weight
        return module

    return build


def tied_square():
    return tied("square")()


def tied_vocabulary():
    return tied("vocabulary")()


@pytest.mark.parametrize(
    ("build", "first", "second"),
    [
        (tied_vocabulary, Vocabulary(), Whole()),
        (tied_vocabulary, Stream(), Vocabulary()),
        (tied_square, Column(), Row()),
        (tied_square, Row(), Column((2,))),
        (tied_square, Stream(), Whole()),
    ],
)
def test_a_shared_parameter_is_cut_alike_or_refused(pool, build, first, second):
    for told, same, sent in pool.run(2, untouched, {"first": first, "second": second}, {}, build):
        assert told == "second.weight is first.weight too, which is cut otherwise: give both modules the same role"
        assert same and sent == 0


def hooked(run, register):
    """What is raised for a layer with a hook, and whether it is as it was."""
    module = two_tokens()
    getattr(module[1], register)(lambda *args: None)
    try:
        parallelize(module, {"0": Column(), "1": Row()}, run.world)
    except ValueError as error:
        return str(error), [type(part) for part in module]


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_hook_that_would_be_lost_is_refused(pool, register):
    for told, kinds in pool.run(2, hooked, register):
        assert told == "1: it has hooks, which would be lost, since Row replaces it: register them afterwards"
        assert kinds == [nn.Linear] * 2


def hooked_norm(run):
    """What a norm makes whose hook doubles it, in a module that was cut."""
    module = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].register_forward_hook(lambda part, args, out: 2 * out)
    parallelize(module, {"0": Stream(), "1": Column(), "2": Row()}, run.world)
    return module[0](torch.ones(1, 4)).tolist()


def test_a_hook_of_what_stays_stays(pool):
    for rows in pool.run(2, hooked_norm):
        assert rows == [pytest.approx([2.0] * 4)]


def twice_named(run, plan):
    """A module of two names is replaced under both."""
    torch.manual_seed(0)
    module = nn.Module()
    module.first = module.other = nn.Linear(4, 6)
    module.inner = nn.Sequential(module.first, nn.Linear(6, 4))
    parallelize(module, plan, run.world)
    x = torch.ones(2, 4)
    return module.first is module.other is module.inner[0], type(module.first), module.first(x).shape


@pytest.mark.parametrize("names", [["first"], ["other"], ["inner.0"], ["first", "inner.0", "other"]])
def test_a_module_of_several_names(pool, names):
    plan = {name: Column() for name in names} | {"inner.1": Row()}
    assert pool.run(2, twice_named, plan) == [(True, ColumnParallelLinear, (2, 3))] * 2


def two_named():
    """A layer of two names."""
    module = nn.Module()
    module.first = module.other = nn.Linear(4, 6)
    return module


def test_a_module_of_several_names_and_roles_is_refused(pool):
    for told, same, sent in pool.run(2, untouched, {"first": Column(), "other": Whole()}, {}, two_named):
        assert told.startswith("other has two roles, Column(") and told.endswith("and Whole() by 'other': give it one")
        assert same and sent == 0


def parameter_of_nobody(run):
    toy = Toy()
    try:
        parallelize(toy, plan_of(), run.world)
    except ValueError as error:
        return str(error)


def test_a_parameter_in_no_named_module_is_refused(pool):
    [told] = pool.run(1, parameter_of_nobody)
    assert told.startswith("scale has no role")


def parallelized_twice(run):
    module = two_tokens()
    parallelize(module, {"0": Column(), "1": Row()}, run.world)
    try:
        parallelize(module, {"0": Column(), "1": Row()}, run.world)
    except ValueError as error:
        return str(error)


def test_a_second_plan_is_refused(pool):
    assert pool.run(2, parallelized_twice) == ["0: a ColumnParallelLinear cannot have the role Column"] * 2


# -- what a plan makes -------------------------------------------------------------------------------------------------


def made(run, sequence_parallel):
    """Kinds, regions and sums of a toy of two blocks, and whether parameters are the objects they were."""
    toy = Toy()
    del toy.scale
    before = dict(toy.named_parameters())
    plan = plan_of(doubled=Heads(), head=Vocabulary(gather_output=True), odd=Stream())
    parallelize(toy, plan, run.world, sequence_parallel=sequence_parallel)
    layout.check(toy.parameters(), run.world)
    blocks = toy.blocks
    regions = [{id(block["up"].region), id(block["down"].region)} for block in blocks]
    kinds = {name: type(part) for name, part in toy.named_modules() if "Parallel" in type(part).__name__}
    sums = sorted(name for name, param in toy.named_parameters() if param.held.sums)
    same = all(param is before[name] for name, param in toy.named_parameters())
    names = all(param.held.name == name for name, param in toy.named_parameters())
    return kinds, [len(each) for each in (*regions, regions[0] | regions[1])], sums, same and names


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stars_are_regions_of_their_own(pool, sequence_parallel):
    """In each place of the stars; parameters stay the objects they are, and have the module's names."""
    column, row = ColumnParallelLinear, RowParallelLinear
    expected = {f"blocks.{i}.{name}": kind for i in "01" for name, kind in (("up", column), ("down", row))}
    expected |= {"embed": VocabParallelEmbedding, "head": column}
    sums = ["doubled.bias", "doubled.weight"]
    if sequence_parallel:
        sums = sorted([*sums, "norm.weight", "odd.weight", "odd.bias", "blocks.0.down.bias", "blocks.1.down.bias"])
    for kinds, regions, partial, same in pool.run(2, made, sequence_parallel):
        assert kinds == expected
        assert regions == [1, 1, 2]
        assert partial == sums
        assert same


def two_pairs(run):
    """Of each layer of two pairs that follow one another in a plan the number of its region."""
    sizes = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8), "up": (8, 12), "down": (12, 8)}
    module = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    keys = KeyValue(2, 4)  # as many as ranks: there is no group to sum over
    plan = {"q": Column((4,)), "k": keys, "v": keys, "o": Row(), "up": Column(), "down": Row()}
    parallelize(module, plan, run.world)
    regions = list(dict.fromkeys(part.region for part in module.values()))
    assert not any(param.held.sums for param in module.parameters())
    return [regions.index(part.region) for part in module.values()], [len(region.columns) for region in regions]


def test_a_row_ends_a_region(pool):
    assert pool.run(2, two_pairs) == [([0, 0, 0, 0, 1, 1], [3, 1])] * 2


def whole_logits(run):
    """The logits of a head that gathers them, beside those of the whole one."""
    torch.manual_seed(0)
    head, x = nn.Linear(4, 5), torch.ones(2, 4)
    expected = head(x)
    module = nn.Sequential(head)
    parallelize(module, {"0": Vocabulary(gather_output=True)}, run.world)
    return torch.allclose(module(x), expected)


def test_a_vocabulary_that_does_not_divide_is_gathered(pool):
    assert pool.run(2, whole_logits) == [True] * 2


def declared(run):
    """The boxes of a fused matrix, made on the meta device, with its own rules; whether it is on it still."""
    module = nn.Sequential(nn.Linear(4, 16, device="meta"), nn.Linear(8, 4, device="meta"))
    layout.declare(module, lambda name: Normal(0.5), lambda name: name.endswith("weight"))
    module[0].weight.requires_grad_(False)
    parallelize(module, {"0": Column((4, 2, 2)), "1": Row()}, run.world)
    [first, bias, second, last] = module.parameters()
    assert all(param.is_meta for param in module.parameters())
    assert [param.held.decay for param in module.parameters()] == [True, False, True, False]
    assert all(param.held.init == Normal(0.5) for param in module.parameters())
    assert not first.requires_grad and bias.requires_grad
    return first.held.boxes, bias.held.boxes, second.held.boxes, last.held.boxes, tuple(first.shape)


def test_a_plan_edits_declarations(pool):
    """Two ranks: 4, 2 and 2 heads of two rows each."""
    for rank, (first, bias, second, last, shape) in enumerate(pool.run(2, declared)):
        starts = [(4 * rank, 4), (8 + 2 * rank, 2), (12 + 2 * rank, 2)]
        assert first == tuple(Box((16, 4), (start, 0), (length, 4)) for start, length in starts)
        assert bias == tuple(Box((16,), (start,), (length,)) for start, length in starts)
        assert second == (Box((4, 8), (0, 4 * rank), (4, 4)),)
        assert last == (Box.whole((4,)),)
        assert shape == (8, 4)


def undeclared(run):
    """What a plan declares of parameters that have no declaration."""
    module = two_tokens()
    module[1].bias.held = layout.Held("mine", (Box.whole((2,)),), Normal(0.5), True)
    parallelize(module, {"0": Column(), "1": Row()}, run.world)
    return [(param.held.name, param.held.init, param.held.decay) for param in module.parameters()]


def test_what_is_not_declared_is_declared(pool):
    """Matrices decay; values are those that they have. A declaration that there is stays."""
    expected = [
        ("0.weight", None, True),
        ("0.bias", None, False),
        ("1.weight", None, True),
        ("mine", Normal(0.5), True),
    ]
    assert pool.run(2, undeclared) == [expected] * 2


def printed(run):
    toy = Toy()
    del toy.scale
    parallelize(toy, plan_of(), run.world)
    return [repr(part) for part in (toy.blocks[0]["up"], toy.blocks[0]["down"], toy.embed)]


def test_layers_say_what_they_hold(pool):
    expected = ["ColumnParallelLinear((6, 8) of (12, 8))", "RowParallelLinear((8, 6) of (8, 12))"]
    assert pool.run(2, printed)[1] == [*expected, "VocabParallelEmbedding(tokens 5 … 9 of 10)"]
