"""The version of the package, the supported cuDNN versions, and the format of cuDNN version numbers."""

from __future__ import annotations

__version__ = "0.1.0"

#: The minimum cuDNN version: the oldest that was tested.
MINIMUM_CUDNN = 91900

#: The cuDNN releases with which plans were tested.
RELEASES = (91900, 92000, 92100, 92200, 92300, 92400, 92401, 92501, 92600, 92601, 92700, 92800)


def version_text(version: int) -> str:
    """Format a cuDNN version number.

    >>> version_text(91900), version_text(92501)
    ('9.19.0', '9.25.1')
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def version_number(text: str) -> int:
    """Parse a cuDNN version; a missing patch number is 0, and a fourth number is ignored.

    >>> version_number("9.19"), version_number("9.25.1"), version_number("9.28.0.42")
    (91900, 92501, 92800)
    """
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not a string; pass a cuDNN version as '9.19'")
    parts = text.split(".")
    if not 1 < len(parts) < 5 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is not a cuDNN version; write it as 9.19 or 9.25.1")
    major, minor, patch = (int(part) for part in [*parts, "0"][:3])
    if major != MINIMUM_CUDNN // 10000:
        raise ValueError(f"{text!r} is not supported: this package needs cuDNN 9.19 or newer 9.x")
    return major * 10000 + minor * 100 + patch
