"""Each mutant changes one line of a file, once, and the file is still Python; by `make drill` the grid catches all."""

from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_one_line_that_compiles(mutant):
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    wrong = text.replace(mutant.old, mutant.new)
    before, after = text.splitlines(), wrong.splitlines()
    assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 1
    compile(wrong, mutant.file, "exec")


def test_names_are_different():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.drill
def test_the_grid_catches_all():
    assert mutants.main() == 0
