"""16 bits against float64: the error of loss, gradient and update has a bound, and a mesh adds nothing to it.

The bound. One rounding to 16 bits errs by at most u of a number, 2^-8 in bfloat16 and 2^-11 in float16; on average over
what is rounded its standard deviation is 0.4 u. On the longest way through three layers, forward and back, about 150
results are rounded one after the other, some 15 a block forward and twice as many backward. Errors that know nothing of
each other grow with the root: 0.4 · √150 · u = 5 u, and the largest of some thousands is three of those: 15 u. It is
measured against a tensor's largest number. Sums over tokens, ranks and microbatches are in float32, and add nothing.
The loss is a mean over tokens: within u. An error in u that is the same in both dtypes says that it is rounding.
"""

import pytest

from collectives.runtime import Runtime
from nd_mesh.config import Config
from nd_mesh.sample import generate
from tests import parity
from tests.nd_mesh.in_16_bits import Errors, U, against_float64, every_second

BOUND = 15  # u
MIXTURE = {"experts": 4, "choices": 4, "z_loss": 0.1, "expert_hidden": 12, "shared_hidden": 6}  # all of them
ROUTED = {"dp": 2, "ep": 2} | MIXTURE | {"choices": 2, "balance": 1.0}
DATA = ("auto", "naive", "bucketed", "overlapped", "zero1", "zero2", "zero3", "fsdp")
MESHES = [
    *({"dp": 2, "data": data, "microbatches": 2, "cap": 1000} for data in DATA),
    {"fsdp": 2, "reshard": False},
    {"tp": 2, "sequence": True},
    *({"cp": 2, "attention": attention} for attention in ("ring", "all_gather", "ulysses")),
    {"pp": 2, "microbatches": 4, "recompute": ("ffn",)},
    {"pp": 2, "microbatches": 4, "schedule": "zb_h1"},
    {"pp": 2, "microbatches": 4, "schedule": "zbv", "data": "fsdp"},
    *({"dp": 2, "ep": 2, "data": data} | MIXTURE for data in ("auto", "zero2", "fsdp")),
    {"tp": 2, "sequence": True} | MIXTURE,
    {"cp": 2, "ep": 2} | MIXTURE,
]


@pytest.fixture(scope="module")
def errors(pool):
    """Of a run, in u; each is made once."""
    known: dict[str, Errors] = {}

    def of(dtype: str, ranks: int, **settings) -> Errors:
        key = repr((dtype, ranks, settings))
        if key not in known:
            run = parity.config(dtype=dtype, **settings)
            known[key] = against_float64(pool, run, ranks, parity.documents())
        return known[key].over(U[dtype])

    return of


@pytest.mark.parametrize("mixture", [{}, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("dtype", U)
def test_one_device_is_within_the_bound(errors, dtype, mixture):
    one = errors(dtype, 1, **mixture)
    assert within(one), one
    assert one.gradient > 1, "an error below one rounding: nothing is in 16 bits"


@pytest.mark.parametrize(("mesh", "dtype"), every_second(MESHES, U))
def test_a_mesh_is_no_worse(errors, dtype, mesh):
    """Within the bound, and within twice what one device has in the same dtype."""
    one, many = errors(dtype, 1, **(MIXTURE if "experts" in mesh else {})), errors(dtype, 2, **mesh)
    assert within(many), many
    assert many.gradient <= 2 * one.gradient and many.whole <= 2 * one.whole, (many, one)


@pytest.mark.parametrize("dtype", U)
@pytest.mark.parametrize("mesh", [{"pp": 2, "microbatches": 4}, {"tp": 2, "sequence": True}], ids=["pp", "tp"])
def test_tied_ends(errors, dtype, mesh):
    """Errors are twice as large, and a mesh may leave the bound; it is no worse than twice one device. At a usual loss
    scale the first step would be left out: the gradient of a tied table begins larger.
    """
    tied = {"tied": True, "loss_scale": 1024.0}
    one, many = errors(dtype, 1, **tied), errors(dtype, 2, **tied, **mesh)
    assert within(one), one
    assert many.gradient <= 2 * one.gradient and many.whole <= 2 * one.whole, (many, one)


def test_the_losses_of_a_router_are_scaled_as_the_loss_is(pool):
    """Balance and z-loss. In float16 these tokens choose as they do in float64."""
    assert within(of_float16(pool, **ROUTED))


def after_a_step(run: Runtime, config: Config) -> tuple[float, list[int]]:
    """The loss of the validation stream, and a sample."""
    trainer = parity.built(run, config, parity.documents())
    trainer.step(0)
    settings = {"context": parity.CONTEXT, "vocab": parity.VOCAB, "seed": 1, "rows": trainer.rows}
    return trainer.evaluate(), generate(trainer.model, [1], 3, **settings)


@pytest.mark.parametrize("dtype", U)
def test_it_evaluates_and_samples(pool, dtype):
    """Also where the last stage is elsewhere, and rows are cut."""
    [(loss, text)] = pool.run(1, after_a_step, parity.config(dtype=dtype))
    for settings in ({"pp": 2, "microbatches": 2}, {"cp": 2}, {"tp": 2}, {"fsdp": 2}):
        [(first, sample), other] = pool.run(2, after_a_step, parity.config(dtype=dtype, **settings))
        assert abs(first - loss) <= U[dtype] * loss and sample == text and other == (first, sample)


def within(errors: Errors) -> bool:
    return errors.loss <= 1 and errors.gradient <= BOUND and errors.update <= BOUND and errors.chosen


def of_float16(pool, fault: str = "none", **settings) -> Errors:
    run = parity.config(dtype="float16", **settings)
    return against_float64(pool, run, 2, parity.documents(), fault=fault).over(U["float16"])


# -- faults that must show ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["unscaled twice", "loss in 16 bits"])
def test_a_fault_shows(pool, fault):
    assert not within(of_float16(pool, fault, dp=2))


def test_router_losses_that_are_not_scaled_show(pool):
    assert of_float16(pool, "routers not scaled", **ROUTED).gradient > 10 * BOUND
