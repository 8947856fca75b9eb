"""Score and mask functions: recorded, and as traced steps.

========== ===================================================================================================================
recorded   Recorded
traced     Expression, Step
========== ===================================================================================================================
"""

from ..core.score_fn.expression import Expression, Step
from ..core.score_fn.recorded import Recorded

__all__ = [
    "Expression",
    "Recorded",
    "Step",
]
