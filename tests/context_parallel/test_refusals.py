"""What does not fit is refused: one clear line on every rank, before any message."""

import pytest

from tests.context_parallel.cases import METHODS, Case, attend, part
from tests.recorder import recording

EACH_METHOD = pytest.mark.parametrize("method", [*METHODS, "ring_ulysses 2", "ring_ulysses 1"])
FIT = "do not fit places of 3 rows of 4 tokens a rank: give q as [B, H, T/P, K], k and v as [B, KV, T/P, K]"
REFUSALS = {  # what is changed of q, k, v → text
    "k is short": (lambda q, k, v: (q, k[:, :, 1:], v), f"q (3, 4, 4, 4), k (3, 2, 3, 4), v (3, 2, 4, 4) {FIT}"),
    "k, v are short": (
        lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]),
        f"q (3, 4, 4, 4), k (3, 2, 3, 4), v (3, 2, 3, 4) {FIT}",
    ),
    "another batch": (lambda q, k, v: (q, k[:2], v[:2]), f"q (3, 4, 4, 4), k (2, 2, 4, 4), v (2, 2, 4, 4) {FIT}"),
    "fewer rows": (lambda q, k, v: (q[:2], k[:2], v[:2]), f"q (2, 4, 4, 4), k (2, 2, 4, 4), v (2, 2, 4, 4) {FIT}"),
    "v has another head": (lambda q, k, v: (q, k, v[:, :1]), f"q (3, 4, 4, 4), k (3, 2, 4, 4), v (3, 1, 4, 4) {FIT}"),
    "other head sizes": (lambda q, k, v: (q, k, v[..., :2]), f"q (3, 4, 4, 4), k (3, 2, 4, 4), v (3, 2, 4, 2) {FIT}"),
    "no batch": (lambda q, k, v: (q[0], k[0], v[0]), f"q (4, 4, 4), k (2, 4, 4), v (2, 4, 4) {FIT}"),
    "T83: heads that do not divide": (
        lambda q, k, v: (q[:, :3], k, v),
        "3 query heads are no multiple of 2 KV heads",
    ),
    "other dtypes": (
        lambda q, k, v: (q, k.bfloat16(), v),
        "q, k, v are float64, bfloat16, float64; give all the same dtype",
    ),
    "another device": (
        lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
        "q, k, v are on meta, meta, meta, places on cpu: make them of documents there",
    ),
    "two devices": (
        lambda q, k, v: (q, k, v.to("meta")),
        "q, k, v are on cpu, cpu, meta, places on cpu: make them of documents there",
    ),
}


def refused(run, case, name):
    """What is raised, and how many calls were made before."""
    tensors = [part(x, case.slots(run.size)[run.rank]) for x in case.tensors()[:3]]
    attention = attend(run, case.method)
    with recording() as recorder, pytest.raises(ValueError) as error:
        attention(*REFUSALS[name][0](*tensors), case.places(run.size))
    return str(error.value), len(recorder.calls)


@EACH_METHOD
@pytest.mark.parametrize("name", REFUSALS)
def test_tensors_that_do_not_fit(pool, method, name):
    assert pool.run(4, refused, Case(method), name) == [(REFUSALS[name][1], 0)] * 4


def on_a_group(run, case, ranks):
    tensors = [x[:, :, : case.T // ranks] for x in case.tensors()[:3]]
    attention = attend(run, case.method)
    with recording() as recorder, pytest.raises(ValueError) as error:
        attention(*tensors, case.places(ranks))
    return str(error.value), len(recorder.calls)


@EACH_METHOD
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_places_of_another_group(pool, method, ranks):
    text = f"places of {ranks} ranks in a group of 4; make them with slots(order, T, 4)"
    assert pool.run(4, on_a_group, Case(method), ranks) == [(text, 0)] * 4
