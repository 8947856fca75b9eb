"""The package's version, the oldest cuDNN that it takes, and how cuDNN's version numbers are written."""

from __future__ import annotations

__version__ = "0.1.0.dev0"

#: The oldest cuDNN that this package runs on: the oldest that it was measured with.
MINIMUM_CUDNN = 91900

#: The releases from there on that plans were made with.
RELEASES = (91900, 92000, 92100, 92200, 92300, 92400, 92401, 92501, 92600, 92601, 92700, 92800)


def version_text(version: int) -> str:
    """A cuDNN version as people write it.

    >>> version_text(91900), version_text(92501)
    ('9.19.0', '9.25.1')
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def version_number(text: str) -> int:
    """A cuDNN version as cuDNN counts; what is left out at the end is 0.

    Raises:
        ValueError: it is no version.
        TypeError: it is no text.

    >>> version_number("9.19"), version_number("9.25.1"), version_number("9.28.0.42")
    (91900, 92501, 92800)
    """
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no text; write a cuDNN version as '9.19'")
    parts = text.split(".")
    if not 1 < len(parts) < 5 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is no cuDNN version; write it as 9.19 or 9.25.1")
    major, minor, patch = (int(part) for part in [*parts, "0"][:3])
    if major != MINIMUM_CUDNN // 10000:
        raise ValueError(f"{text!r} is another cuDNN than this package speaks to, which is cuDNN 9; name one from 9.19 on")
    return major * 10000 + minor * 100 + patch
