"""Names in a folder of checkpoints, without ranks: which count, which is the newest, which may go."""

import pytest

from checkpoint import Keep
from checkpoint.files import Files
from checkpoint.folder import candidates, is_checkpoint, name, recover

NAMES = (
    *("step-000002", "step-000002.old", "step-000010.old", "step-000010.tmp", "step-000011.gone", "step-999999"),
    *("step-1234567", "step-12x", "step-", "steps-000099", "step-000012.tmp.old", "LOCK", "journal"),
)


def test_the_newest_comes_first(tmp_path):
    """By its number, also where that has more digits than others."""
    for entry in NAMES:
        (tmp_path / entry).mkdir()
    names = ["step-1234567", "step-999999", "step-000010.old", "step-000002"]
    assert [path.name for _, path in candidates(tmp_path)] == names
    assert [step for step, _ in candidates(tmp_path)] == [1234567, 999999, 10, 2]
    assert [name(step) for step in (0, 20, 1234567)] == ["step-000000", "step-000020", "step-1234567"]


def test_order_after_a_crash(tmp_path):
    """Nothing goes but what was left over; who was moved aside and not replaced has its name again."""
    for entry in NAMES:
        (tmp_path / entry).mkdir()
    recover(Files(), tmp_path)
    gone = {"step-000002.old", "step-000010.old", "step-000010.tmp", "step-000011.gone"}
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES) - gone | {"step-000010"}


@pytest.mark.parametrize(
    ("keep", "removed"),
    [
        (Keep(), []),
        (Keep(every=4), []),
        (Keep(last=1), [1, 2, 4, 6, 8]),
        (Keep(last=3), [1, 2, 4]),
        (Keep(last=1, every=4), [1, 2, 6]),
        (Keep(last=9), []),
    ],
)
def test_what_may_go(keep, removed):
    assert keep.removes([8, 1, 2, 9, 4, 6]) == removed


def test_what_is_one_checkpoint(tmp_path):
    for entry in ("step-000001", "step-1234567", "step-000002.old", "a copy", "a run", "step-by-step"):
        (tmp_path / entry).mkdir()
    (tmp_path / "a copy" / "COMMIT").touch()
    (tmp_path / "a run" / "manifest.json").touch()
    ones = [entry.name for entry in sorted(tmp_path.iterdir()) if is_checkpoint(entry)]
    assert ones == ["a copy", "step-000001", "step-000002.old", "step-1234567"]


@pytest.mark.parametrize("wrong", [{"last": -1}, {"every": -1}])
def test_no_negative_numbers(wrong):
    with pytest.raises(ValueError, match="-1"):
        Keep(**wrong)
