"""What goes wrong at the edges: layers that are more than their class, inputs that change their mind, memory that
stays, numbers that are none, arguments that make no sense.
"""

import gc
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from collectives import layout
from collectives.partials import sum_partials
from nd_mesh.recompute import recompute
from tensor_parallel import (
    Column,
    ColumnParallelLinear,
    KeyValue,
    Region,
    Role,
    Row,
    VocabParallelEmbedding,
    entrance,
    parallelize,
    vocab_parallel_cross_entropy,
)
from tests.recorder import recording
from tests.tensor_parallel.training import MODES

D, HIDDEN, ROWS, TOKENS = 8, 12, 2, 4
PLAN = {"a": Column(), "b": Column(), "row": Row()}
EACH_MODE = pytest.mark.parametrize("mode", MODES)


class Pair(nn.Module):
    """Two columns that share an input, and a row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.row = nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        self.double()

    def forward(self, x):
        return self.row(self.a(x) * self.b(x))


def cut_pair(run, mode="tp"):
    parallelize(pair := Pair(), PLAN, run.world, **MODES[mode])
    return pair


def given(run, mode="tp"):
    """This rank's input."""
    x = torch.randn(ROWS, TOKENS, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x if mode == "tp" else x.tensor_split(run.size, 1)[run.rank].clone()


def told(call):
    """(class, text) of what is raised, or None."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)


# -- what would be lost, or left half done -----------------------------------------------------------------------------


def doubled(pair):
    once = pair.b.forward
    pair.b.forward = lambda x: 2 * once(x)


def recomputed(pair):
    recompute([pair.b])


def cut_before(pair):
    """Rank 0's part on every rank."""
    layout.declare(pair, lambda name: None, lambda name: True)
    layout.cut(pair.b.weight, 0, 0, HIDDEN // 2)


def prepared(run, prepare):
    """What is raised, whether the first layer was cut all the same, and how much was sent."""
    prepare(pair := Pair())
    with recording() as recorder:
        refusal = told(lambda: parallelize(pair, PLAN, run.world))
    return refusal, type(pair.a), pair.a.weight.shape, len(recorder.calls)


@pytest.mark.parametrize("prepare", [doubled, recomputed, cut_before])
def test_a_layer_that_is_more_than_a_linear_is_refused(pool, prepare):
    """A forward of its own would be lost; a parameter that has been cut cannot be cut again."""
    for refusal, kind, shape, sent in pool.run(2, prepared, prepare):
        assert refusal is not None and refusal[0] == "ValueError" and refusal[1].startswith("b: ")
        assert kind is nn.Linear and shape == (HIDDEN, D) and sent == 0


def with_gradients(run):
    """Gradients of two backwards, the first before the module was cut: of the first column, and what is right."""
    pair, plain = Pair(), Pair()
    for each in (pair, plain):
        each(given(run)).sum().backward()
    refusal = told(lambda: parallelize(pair, PLAN, run.world))
    if refusal is None:
        pair(given(run)).sum().backward()
        plain(given(run)).sum().backward()
    parts = plain.a.weight.grad.tensor_split(run.size)
    return refusal, pair.a.weight.grad, plain.a.weight.grad if refusal else parts[run.rank]


def test_a_gradient_that_is_there_is_cut_or_refused(pool):
    for refusal, ours, expected in pool.run(2, with_gradients):
        assert refusal is None or refusal[0] == "ValueError"
        assert torch.allclose(ours, expected, rtol=0, atol=1e-12)


def modes(run):
    parallelize(pair := Pair().eval(), PLAN, run.world)
    return [part.training for part in pair.modules()]


def test_layers_are_in_the_mode_of_those_they_replace(pool):
    assert pool.run(2, modes) == [[False] * 4] * 2


# -- an input that changes its mind ------------------------------------------------------------------------------------


def wanted_later(run, mode):
    """The gradient of an input that requires one from the second column on."""
    pair, x = cut_pair(run, mode), given(run, mode)
    a = pair.a(x)
    x.requires_grad_()
    pair.row(a * pair.b(x)).sum().backward()
    return x.grad


@EACH_MODE
def test_an_input_that_begins_to_require_a_gradient(pool, mode):
    """As of nn.Linear: those who saw it before give it none, the others do."""
    pair = Pair()
    [x] = pool.run(1, given)
    a = pair.a(x)
    x.requires_grad_()
    pair.row(a * pair.b(x)).sum().backward()
    grads = pool.run(2, wanted_later, mode)
    assert all(grad is not None for grad in grads)
    assert torch.allclose(grads[0] if mode == "tp" else torch.cat(grads, 1), x.grad, rtol=0, atol=1e-12)


# -- memory that stays -------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Two regions, one after the other."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.up = (nn.Linear(D, HIDDEN) for _ in range(3))
        self.o, self.down = (nn.Linear(HIDDEN, D) for _ in range(2))

    def forward(self, x):
        return self.down(self.up(x + self.o(self.q(x) * self.k(x))))


IN_ORDER = {"q": Column(), "k": Column(), "o": Row(), "up": Column(), "down": Row()}
BY_KIND = {"q": Column(), "k": Column(), "up": Column(), "o": Row(), "down": Row()}


def left(run, mode, plan, again):
    """How many of the whole inputs that were gathered are alive after backward."""
    parallelize(layer := Layer(), plan, run.world, **MODES[mode])
    recompute([layer.get_submodule(name) for name in again])
    seen, true = [], entrance._start_gather

    def start_gather(x, group):
        whole, work = true(x, group)
        seen.append(StorageWeakRef(whole.untyped_storage()))
        return whole, work

    with mock.patch.object(entrance, "_start_gather", start_gather):
        x = given(run, mode)[:1].float().requires_grad_()  # a row alone is in order as it arrives
        layer(x).square().sum().backward()
    gc.collect()
    end = time.monotonic() + 1
    while not all(ref.expired() for ref in seen) and time.monotonic() < end:
        time.sleep(0.005)  # gloo's threads let go of a buffer a moment after the wait
    assert seen
    return sum(not ref.expired() for ref in seen)


@pytest.mark.parametrize(
    ("plan", "again"), [(IN_ORDER, ()), (IN_ORDER, ("q",)), (IN_ORDER, ("k",)), (IN_ORDER, ("q", "k")), (BY_KIND, ())]
)
@pytest.mark.parametrize("mode", ["sp", "sp, whole inputs kept"])
def test_no_whole_input_is_left_after_backward(pool, mode, plan, again):
    """Whichever columns run again, and whatever order a plan has."""
    assert pool.run(2, left, mode, plan, again) == [0] * 2


# -- numbers that are none ---------------------------------------------------------------------------------------------


def anomalies(run, mode):
    """What anomaly detection says of a backward without one, where memory that nobody has written yet is NaN."""
    pair, x = cut_pair(run, mode), given(run, mode).requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            return told(lambda: pair(x).sum().backward())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@EACH_MODE
def test_anomaly_detection_finds_none(pool, mode):
    """A gradient on its way is not looked at before it has come."""
    assert pool.run(2, anomalies, mode) == [None] * 2


LABELS = torch.tensor([0, -100, 6])


def ignored(run, value):
    """Loss and gradient of three tokens of which the second, an ignored one, has these logits."""
    whole = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole[1] = value
    logits = whole.tensor_split(run.size, 1)[run.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, LABELS, 7, group=run.world)
    loss.sum().backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_an_ignored_token_is_zero_whatever_its_logits(pool, value):
    """Padding may be masked altogether."""
    for loss, grad in pool.run(2, ignored, value):
        assert loss[1] == 0 and not grad[1].any()
        assert loss[[0, 2]].isfinite().all() and grad[[0, 2]].isfinite().all() and grad[0].any()


def bytes_of_labels(run):
    """Losses with labels of type uint8."""
    whole = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 3, 6], dtype=torch.uint8)
    logits = whole.tensor_split(run.size, 1)[run.rank]
    return vocab_parallel_cross_entropy(logits, labels, 7, group=run.world), F.cross_entropy(
        whole, labels, reduction="none"
    )


def test_labels_may_be_bytes(pool):
    """As torch's may."""
    for ours, expected in pool.run(2, bytes_of_labels):
        assert torch.allclose(ours, expected, rtol=0, atol=1e-12)


def on_meta(run):
    """The shape of losses of a dry run, which has no values."""
    logits = torch.empty(2, 3, 7, device="meta")
    labels = torch.empty(2, 3, dtype=torch.int64, device="meta")
    return told(lambda: vocab_parallel_cross_entropy(logits, labels, 7, group=run.world))


def test_a_loss_without_values(pool):
    """Nobody looks at labels where looking means waiting: on the meta device it cannot be done, on a GPU it is slow."""
    assert pool.run(1, on_meta) == [None]


def looked_at(run):
    """Whether memory that was compared can still be resized, as fsdp's must."""
    pair = cut_pair(run)
    layout.check_copies([(param.held, param) for param in pair.parameters()], run.world)
    return [param.untyped_storage().resizable() for param in pair.parameters()]


def test_what_was_compared_is_as_it_was(pool):
    for resizable in pool.run(2, looked_at):
        assert all(resizable)


# -- arguments that make no sense --------------------------------------------------------------------------------------

SENSELESS = {
    "a class": lambda: Column,
    "a word": lambda: "column",
    "a role of no kind": Role,
    "a number of heads": lambda: Column(4),
    "no head": lambda: Column((0,)),
    "no key": lambda: KeyValue(0, 4),
    "no query": lambda: KeyValue(2, 0),
    "less than no key": lambda: KeyValue(-2, 4),
}


def senseless(run, case):
    with recording() as recorder:
        return told(lambda: parallelize(Pair(), PLAN | {"b": SENSELESS[case]()}, run.world)), len(recorder.calls)


@pytest.mark.parametrize("case", SENSELESS)
def test_a_role_that_makes_no_sense_names_the_module_or_itself(pool, case):
    for refusal, sent in pool.run(2, senseless, case):
        assert refusal is not None and refusal[0] == "ValueError"
        assert refusal[1].startswith(("b: ", "Column(heads=", "KeyValue(kv_heads=")) and sent == 0


def no_members(run):
    calls = [
        lambda: Region(None),
        lambda: parallelize(Pair(), PLAN, None),
        lambda: vocab_parallel_cross_entropy(torch.randn(3, 7), LABELS, 7, group=None),
    ]
    return [told(call) for call in calls]


def test_who_is_no_member_is_told_so(pool):
    """None is what Runtime.new_group gives who is in another group, or in none."""
    for refusals in pool.run(1, no_members):
        for refusal in refusals:
            assert refusal is not None and refusal[0] == "ValueError" and "member" in refusal[1]


def without_tokens(run):
    pair = cut_pair(run, "sp")
    table = VocabParallelEmbedding(nn.Embedding(7, D), Region(run.world, sequence_parallel=True))
    calls = [
        lambda: pair.a(torch.randn(D, dtype=torch.float64)),
        lambda: pair.row(torch.randn(HIDDEN // run.size, dtype=torch.float64)),
        lambda: table(torch.tensor(3)),
    ]
    with recording() as recorder:
        return [told(call) for call in calls], len(recorder.calls)


def test_an_input_without_a_dim_of_tokens_is_refused(pool):
    """With sequence parallelism, which cuts it: on every rank, before anything is sent."""
    for refusals, sent in pool.run(2, without_tokens):
        assert sent == 0
        assert all(refusal is not None and refusal[0] == "ValueError" and "token" in refusal[1] for refusal in refusals)


def a_word_for_a_tuple(run):
    """What is raised, and whether the bias of a row, which saw some tokens, has its whole gradient."""
    pair = cut_pair(run, "sp")
    pair(given(run, "sp")).sum().backward()
    refusal = told(lambda: sum_partials(pair.parameters(), "tp"))
    return refusal, bool((pair.row.bias.grad == ROWS * TOKENS).all())


def test_a_word_for_labels_is_refused_or_is_one_label(pool):
    """And not letters, of which none is known."""
    for refusal, summed in pool.run(2, a_word_for_a_tuple):
        assert summed if refusal is None else refusal[0] in ("TypeError", "ValueError")


def of_too_few_ranks(run):
    linear = nn.Linear(D, HIDDEN)
    refusal = told(lambda: ColumnParallelLinear(linear, Region(run.world), pieces=[[range(HIDDEN // 2)]]))
    return refusal, linear.weight.shape


def test_pieces_of_too_few_ranks_are_refused_by_all(pool):
    for refusal, shape in pool.run(2, of_too_few_ranks):
        assert refusal is not None and refusal[0] == "ValueError" and shape == (HIDDEN, D)
