"""GPUs described as cuDNN describes them, so that plans can be made for one that is not here.

``h200`` was read off the card with cuDNN 9.28 (9.19 takes the same text); ``a100``, ``b200``, ``l40s`` and ``rtx5090`` are
constructed from published figures, not read off a device.
"""

from __future__ import annotations

import json
from importlib.resources import files

#: The names of the GPUs that are described here.
NAMES = ("a100", "b200", "h200", "l40s", "rtx5090")


def describe(name: str) -> str:
    """The description of a GPU, as JSON.

    Raises:
        ValueError: no such description.

    >>> json.loads(describe("H200"))["deviceName"]
    'NVIDIA H200'
    """
    if name.lower() not in NAMES:
        raise ValueError(f"no GPU named {name!r} is described; there are {', '.join(NAMES)}")
    return files(__package__).joinpath(f"{name.lower()}.json").read_text().strip()


def capability(name: str) -> int:
    """The compute capability of a described GPU, 9.0 as 90.

    >>> capability("h200"), capability("rtx5090")
    (90, 120)
    """
    return int(json.loads(describe(name))["deviceVer"]) // 10
