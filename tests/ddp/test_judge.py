"""The judge of these tests sees what is not a number."""

import torch

from ddp.__main__ import _error
from tests.ddp.training import worst


def test_what_is_not_a_number_is_a_miss():
    """max(0.0, nan) is 0.0."""
    one, nan = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, float("nan")])}
    start = {"w": torch.zeros(2)}
    assert worst([(one, one)], [(one, one)], start) == 0
    assert worst([(nan, one)], [(one, one)], start) > 1
    assert worst([(one, nan)], [(one, one)], start) > 1


def test_the_demo_sees_it_too():
    one, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert max(0.0, _error([one, nan], [one, one], [one, one])) > 1
