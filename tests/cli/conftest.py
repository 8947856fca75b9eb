"""Tests of commands run in an empty working directory."""

import contextlib

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """The working directory of the test, empty."""
    with contextlib.chdir(tmp_path):
        yield tmp_path
