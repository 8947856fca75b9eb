"""Look up the installed cuDNN, and what a version of cuDNN supports: for tools such as the command line.

Importing this module does not load cuDNN. It is separate because it takes longer to import than ``cupy_sdpa.extend``.

========== ===================================================================================================================
versions   Cudnn
========== ===================================================================================================================
"""

from ..core.support.installed import Cudnn

__all__ = ["Cudnn"]
