"""Descriptions of GPUs in cuDNN's JSON format, used to plan for GPUs that are not present.

``h200.json`` was read from an H200 with cuDNN 9.28; 9.19 accepts the same text. The others were constructed from published
properties. cuDNN chooses its engine configs by these properties, so a plan for a constructed description may differ from the
plan on the device; a stored plan is found on the device only if its name and its number of multiprocessors are the same.

To add a GPU, run ``python -m cupy_sdpa info --describe > NAME.json`` on a machine that has it, with a name in lower case, move
the file into this folder, and add the name to :data:`READ`. For a new compute capability also add it to
:data:`REPRESENTATIVES`, to ``GENERATIONS`` of core/support/why_not.py, to ``ENGINES`` of tests/support/test_support.py, with
the engines that ``python tools/support_table.py measure`` reports, and to ``GPUS`` in check/draw.py; docs/support.md then has
one more column: ``python tools/support_table.py page > docs/support.md``. A description outside this folder is selected by its
path.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

#: The names of the GPUs described in this folder.
NAMES = tuple(sorted(file.name.removesuffix(".json") for file in files(__package__).iterdir() if file.name.endswith(".json")))
#: The GPUs whose description was read from a device; the others were constructed.
READ = ("h200",)
#: One GPU of each compute capability, in ascending order: the support table depends on the compute capability alone.
REPRESENTATIVES = ("a100", "a10", "l40s", "h200", "b200", "rtx5090")
#: The keys that this package reads. cuDNN requires more, and reports a missing one.
_KEYS = ("deviceName", "deviceVer", "multiProcessorCount")


def describe(name: str) -> str:
    """Return the description of a GPU as JSON.

    Args:
        name: one of :data:`NAMES`, in upper or lower case, or the path of a file written by
            ``python -m cupy_sdpa info --describe``.

    Raises:
        ValueError: there is no such description, or the file is not a description.
        TypeError: the name is not a string.

    >>> json.loads(describe("H200"))["deviceName"]
    'NVIDIA H200'
    """
    if not isinstance(name, str):
        raise TypeError(f"gpu is {name!r}; it must be a string: a name such as 'h200', or the path of a description")
    if name.lower() in NAMES:
        return files(__package__).joinpath(f"{name.lower()}.json").read_text().strip()
    if not Path(name).is_file():
        raise ValueError(
            f"no GPU named {name!r}; the names are {', '.join(NAMES)}. For another GPU, pass the path of a "
            "file written by python -m cupy_sdpa info --describe on a machine that has it"
        )
    try:
        text = Path(name).read_text(encoding="utf-8").strip()
        missing = [key for key in _KEYS if key not in json.loads(text)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} does not describe a GPU: {error}") from None
    if missing:
        raise ValueError(f"{name} does not describe a GPU: {', '.join(missing)} missing")
    return text


def capability_of(name: str) -> int:
    """Return the compute capability of a described GPU; 9.0 is 90.

    >>> capability_of("h200"), capability_of("rtx5090")
    (90, 120)
    """
    return int(json.loads(describe(name))["deviceVer"]) // 10


def origin(name: str) -> str:
    """Return how a described GPU became known: ``read`` from a device, or ``constructed`` from its published properties.

    >>> origin("H200"), origin("h100")
    ('read', 'constructed')
    """
    return "constructed" if name.lower() in NAMES and name.lower() not in READ else "read"
