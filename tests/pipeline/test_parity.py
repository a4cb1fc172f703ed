"""Every schedule trains as one process does: gradients, norm and updates, in float64, with dropout, unequal numbers of
tokens, an empty microbatch, uneven stages, and a matrix at both ends.
"""

import pytest

from pipeline import SCHEDULES
from tests.pipeline.training import EVERY_SCHEDULE, Case, Recipe, possible, several, trained, worst

SGD, TIED, ADAMW = Recipe(), Recipe(tied=True), Recipe("adamw", tied=True)
OFTEN = {  # of each schedule and its stages a rank: ranks and microbatches
    ("layer_wise", 1): [(2, 3)],
    ("layer_wise", 2): [(3, 2)],
    ("gpipe", 1): [(4, 5), (1, 3)],
    ("gpipe", 2): [(2, 3)],
    ("gpipe", 3): [(3, 4)],
    ("1f1b", 1): [(4, 6), (2, 1), (3, 5), (1, 2)],
    ("interleaved", 1): [(3, 2)],
    ("interleaved", 2): [(4, 3), (2, 5)],
    ("interleaved", 3): [(2, 4)],
    ("zb_h1", 1): [(4, 3), (3, 7), (1, 3)],
    ("zbv", 2): [(4, 9), (2, 4), (3, 3), (1, 3)],
    ("dualpipe", 2): [(4, 6), (2, 4)],
    ("dualpipe_v", 2): [(4, 3), (2, 5), (3, 7)],
}


def judge(pool, ranks, cases, recipes):
    recipes = [recipes[i % len(recipes)] for i in range(len(cases))]
    results = pool.run(ranks, several, trained, cases, recipes, timeout=200)
    for number, (case, recipe) in enumerate(zip(cases, recipes, strict=True)):
        share = worst([of_rank[number] for of_rank in results], case, recipe)
        assert share <= 1, f"{case} with {recipe}: {share}"


def test_every_schedule_is_there():
    assert {name for name, _ in EVERY_SCHEDULE} == set(SCHEDULES) and OFTEN.keys() == set(EVERY_SCHEDULE)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_is_that_of_one_process(pool, ranks):
    cases = [Case(*which, *sizes) for which, several in OFTEN.items() for sizes in several]
    judge(pool, ranks, [case for case in cases if case.ranks == ranks], (SGD, TIED, ADAMW))


@pytest.mark.drill
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_of_them(pool, ranks, name):
    numbers = [(v, m) for which, v in EVERY_SCHEDULE if which == name for m in range(1, 10)]
    cases = [Case(name, virtual, ranks, microbatches) for virtual, microbatches in numbers]
    judge(pool, ranks, [case for case in cases if possible(case)], (TIED, TIED, ADAMW))
