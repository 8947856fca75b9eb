"""Convert between array layouts without copies: axes are named by letters, results are views.

The letters are ``b`` batch, ``s`` sequence, ``h`` heads, ``d`` head dim, and ``t`` all positions of packed sequences. This
package uses ``dhsb`` (packed: ``dht``); in Fortran order this is the memory layout of ``bshd`` (packed: ``thd``) in C order.
"""

from .core._typing import Layout
from .core.layout import LAYOUTS, default, from_julia, to_julia

__all__ = ["LAYOUTS", "Layout", "default", "from_julia", "to_julia"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
