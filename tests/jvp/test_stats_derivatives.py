"""The derivative of the log-sum-exp: ``return_dstats`` of attention_jvp."""

import pytest
from engines import every_engine, numbers


@pytest.mark.parametrize("number", numbers(40, quick=10))
@every_engine
def test_random_problems(number, engine):
    """It is the mean score derivative, with any other options, and 0 in masked rows and in padding."""
    engine.agrees(engine.draw({"jvp", "stats"}, number), refused=True)
