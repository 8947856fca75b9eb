"""Repeated calls are not parsed."""

import contextlib

import pytest

from cupy_sdpa.boundary import argument, arguments, user_functions
from cupy_sdpa.problem.problem import Problem


@contextlib.contextmanager
def not_parsed():
    """Assert that no function is traced, no option is read, and no problem is created."""

    def fail(*_, **__):
        pytest.fail("the call was parsed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_functions, "trace", fail)
        patch.setattr(arguments, "read_settings", fail)
        patch.setattr(arguments, "make_problem", fail)
        patch.setattr(argument, "make_spec", fail)
        patch.setattr(Problem, "__post_init__", fail)
        yield
