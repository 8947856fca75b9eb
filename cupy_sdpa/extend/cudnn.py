"""Look up the installed cuDNN and what it supports, and plan for described GPUs. Importing this module does not load cuDNN.

========== ===================================================================================================================
versions   Cudnn
errors     CudnnError
========== ===================================================================================================================
"""

from ..core.errors import CudnnError
from ..core.support.installed import Cudnn

__all__ = [
    "Cudnn",
    "CudnnError",
]
