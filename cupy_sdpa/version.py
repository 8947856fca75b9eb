"""The package's version, the oldest cuDNN that it takes, and how cuDNN's version numbers are written."""

from __future__ import annotations

__version__ = "0.1.0.dev0"

#: The oldest cuDNN that this package runs on: the oldest that it was measured with.
MINIMUM_CUDNN = 91900


def version_text(version: int) -> str:
    """A cuDNN version as people write it.

    >>> version_text(91900), version_text(92501)
    ('9.19.0', '9.25.1')
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
