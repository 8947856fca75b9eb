"""Gradients through the log-sum-exp: ``dstats`` of attention_backward and of pullbacks."""

import pytest
from engines import every_engine, numbers


@pytest.mark.parametrize("number", numbers(40, quick=10))
@every_engine
def test_random_problems(number, engine):
    """They agree with the reference with any other options, also without the gradient of the output."""
    engine.agrees(engine.draw({"dstats"}, number), refused=True)
