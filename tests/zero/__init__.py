"""Tests of zero/."""
