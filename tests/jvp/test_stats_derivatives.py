"""The derivative of the log-sum-exp: ``return_dstats`` of attention_jvp."""

import pytest
from engines import every_engine, numbers


@pytest.mark.parametrize(("d", "dv"), [(1, 0), (16, 0), (16, 8)])
@pytest.mark.parametrize("tangents", ["q", "k", "qkv"])
def test_dropout_without_values(d, dv, tangents, engine):
    """The mean score derivative needs a row of 1 beside the keys, also if there is no value beside them."""
    options = {"jvp": tangents, "stats": True, "dropout": (0.5, "seed", 7, 0)}
    engine.agrees(engine.case(d=d, dv=dv, sq=3, skv=5, options=options), refused=True)


@pytest.mark.parametrize("number", numbers(40, quick=10))
@every_engine
def test_random_problems(number, engine):
    """It is the mean score derivative, with any other options, and 0 in masked rows and in padding."""
    engine.agrees(engine.draw({"jvp", "stats"}, number), refused=True)
