"""GPUs described as cuDNN describes them, so that plans can be made for one that is not here.

``h200`` was read off the card with cuDNN 9.28 (9.19 takes the same text); ``a100``, ``b200``, ``l40s`` and ``rtx5090`` are
constructed from published figures, not read off a device.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

#: The names of the GPUs that are described here.
NAMES = ("a100", "b200", "h200", "l40s", "rtx5090")
#: What a description must have for us; cuDNN wants more, and says so.
_KEYS = ("deviceName", "deviceVer", "multiProcessorCount")


def describe(name: str) -> str:
    """The description of a GPU, as JSON.

    Args:
        name: one of :data:`NAMES`, in any case, or the path of a file that ``python -m cupy_sdpa info --describe`` wrote.

    Raises:
        ValueError: no such description, or a file that is none.
        TypeError: the name is no text.

    >>> json.loads(describe("H200"))["deviceName"]
    'NVIDIA H200'
    """
    if not isinstance(name, str):
        raise TypeError(f"a GPU is named by a text, such as 'h200', or the path of a description; {name!r} is none")
    if name.lower() in NAMES:
        return files(__package__).joinpath(f"{name.lower()}.json").read_text().strip()
    if not Path(name).is_file():
        raise ValueError(
            f"no GPU named {name!r} is described; there are {', '.join(NAMES)}. For another, give the path of a file that "
            "python -m cupy_sdpa info --describe wrote on a machine that has it"
        )
    try:
        text = Path(name).read_text(encoding="utf-8").strip()
        missing = [key for key in _KEYS if key not in json.loads(text)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} does not describe a GPU: {error}") from None
    if missing:
        raise ValueError(f"{name} does not describe a GPU: it has no {', '.join(missing)}")
    return text


def capability(name: str) -> int:
    """The compute capability of a described GPU, 9.0 as 90.

    >>> capability("h200"), capability("rtx5090")
    (90, 120)
    """
    return int(json.loads(describe(name))["deviceVer"]) // 10
