"""Tests of fsdp/."""
