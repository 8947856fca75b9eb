"""Generate ``constants.py`` from NVIDIA's header: ``python -m cupy_sdpa._cudnn.generate path/to/cudnn_graph.h``.

In the header of cuDNN 9.27 and newer a comment on every constant states the version that introduced it (``@since``). The cuDNN
wheels contain the header, in ``nvidia/cudnn/include``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """A constant of a C enum: its C name, its value, and the cuDNN version that introduced it (0 if it is not stated)."""

    name: str
    value: int
    since: int


_ENUM = re.compile(r"(?:/\*\*(?P<comment>(?:(?!\*/).)*)\*/\s*)?typedef enum\s*\{(?P<body>.*?)\}\s*(?P<name>cudnn\w+_t)\b", re.S)
_COMMENT = re.compile(r"/\*(?!\*<).*?\*/|//[^\n]*", re.S)  # comments that do not document a constant
_MEMBER = re.compile(
    r"(?P<name>CUDNN_\w+)\s*(?:CUDNN_DEPRECATED_ENUM\s*)?(?:=\s*(?P<value>-?\w+))?\s*,?\s*(?:/\*\*<(?P<comment>.*?)\*/)?", re.S
)
_SINCE = re.compile(r"@since cuDNN (\d+)\.(\d+)\.(\d+)")


def header_version(text: str) -> int:
    """The cuDNN version that a ``cudnn_version.h`` declares, as ``cudnnGetVersion`` returns it (92800 is 9.28.0)."""
    major, minor, patch = (int(re.search(rf"#define CUDNN_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR", "PATCHLEVEL"))  # type: ignore[index]
    return major * 10000 + minor * 100 + patch


def parse(text: str) -> dict[str, list[Entry]]:
    """The enums of a header by their C names, in the header's order."""
    enums = {}
    for match in _ENUM.finditer(text):
        entries: list[Entry] = []
        values: dict[str, int] = {}
        number = -1
        for member in _MEMBER.finditer(_COMMENT.sub(" ", match["body"])):
            name, value = member["name"], member["value"]
            if value is None:  # one more than the constant before
                number = number + 1
            else:
                number = values[value] if value in values else int(value, 0)
            values[name] = number
            since = _SINCE.search(member["comment"] or "") or _SINCE.search(match["comment"] or "")
            version = int(since[1]) * 10000 + int(since[2]) * 100 + int(since[3]) if since else 0
            if not name.endswith(("_COUNT", "_COUNTS")):  # the number of constants, which changes with every version
                entries.append(Entry(name, number, version))
        enums[match["name"]] = entries
    return enums


def python_name(c_enum: str) -> str:
    """``cudnnBackendAttributeName_t`` becomes ``AttributeName``."""
    return c_enum.removeprefix("cudnn").removeprefix("Backend").removesuffix("_t")


def prefix(names: list[str]) -> str:
    """The common prefix of the constants of an enum, up to an underscore."""
    if len(names) == 1:
        return names[0].rpartition("_")[0] + "_"
    low, high = min(names), max(names)
    end = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[: low.rfind("_", 0, end) + 1]


def render(enums: dict[str, list[Entry]], version: int) -> str:
    """The text of ``constants.py``."""
    lines = [
        '"""The enums of cuDNN\'s graph API, each constant with the cuDNN version that introduced it.',
        "",
        "Generated from NVIDIA's cudnn_graph.h by ``python -m cupy_sdpa._cudnn.generate``; do not edit.",
        "A constant's C name is its enum's ``prefix`` followed by its name here.",
        '"""',
        "",
        "from enum import IntEnum",
        "",
        "#: The cuDNN version whose header this table was made from.",
        f"HEADER_VERSION = {version}",
        "",
        "",
        "class Constant(IntEnum):",
        '    """A constant of the C API; ``since`` is the cuDNN version that introduced it (9.4.0 is 90400)."""',
        "",
        "    since: int",
        "",
        '    def __new__(cls, value: int, since: int) -> "Constant":',
        "        member = int.__new__(cls, value)",
        "        member._value_ = value",
        "        member.since = since",
        "        return member",
        "",
        "",
        "def name_of(enum: type[Constant], value: int) -> str | None:",
        '    """The name of a value, or None where it is newer than this table."""',
        "    return enum._value2member_map_[value].name if value in enum._value2member_map_ else None",
    ]
    for c_enum, entries in enums.items():
        common = prefix([entry.name for entry in entries])
        lines += ["", "", f"class {python_name(c_enum)}(Constant):"]
        lines += [f'    """``{c_enum}``: constants begin with ``{common}``."""', ""]
        for name, value, since in entries:
            if not since:
                raise SystemExit(f"{name} has no @since comment: use the header of cuDNN 9.27 or newer")
            lines.append(f"    {name.removeprefix(common)} = {value}, {since}")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Write ``constants.py`` in this folder from the header named on the command line."""
    if len(argv) != 1:
        raise SystemExit(__doc__)
    header = Path(argv[0])
    version = header_version(header.with_name("cudnn_version.h").read_text())
    target = Path(__file__).with_name("constants.py")
    target.write_text(render(parse(header.read_text()), version))
    print(f"{target.name}: {len(parse(header.read_text()))} enums of cuDNN {version}")


if __name__ == "__main__":
    main(sys.argv[1:])
