"""Generate ``cupy_sdpa/core/cudnn/constants.py`` from NVIDIA's header: ``python tools/constants.py path/to/cudnn_graph.h``.

The cuDNN wheels contain the header, in ``nvidia/cudnn/include``. The table has the constants that the package names, and all
notes, which cuDNN returns.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

CORE = Path(__file__).resolve().parents[1] / "cupy_sdpa" / "core"
TARGET = CORE / "cudnn" / "constants.py"
#: The enums of the table by their C names. True: all constants; False: those that the package names.
ENUMS = {
    "cudnnStatus_t": False,
    "cudnnDataType_t": False,
    "cudnnReduceTensorOp_t": False,
    "cudnnPointwiseMode_t": False,
    "cudnnRngDistribution_t": False,
    "cudnnBackendAttributeName_t": False,
    "cudnnBackendAttributeType_t": False,
    "cudnnBackendDescriptorType_t": False,
    "cudnnBackendNumericalNote_t": True,
    "cudnnBackendKnobType_t": False,
    "cudnnBackendHeurMode_t": False,
    "cudnnCudaGraphRetention_t": False,
}
#: The modules of the core that name constants: by attributes such as ``DataType.HALF``, or in strings, such as ``"cmp_eq"``.
CODE = ("cudnn/*.py", "cudnn_engine/*.py", "graph/*.py", "score_fn/modes.py")

_ENUM = re.compile(r"typedef enum\s*\{(?P<body>[^{}]*)\}\s*(?P<name>cudnn\w+_t)\b")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_MEMBER = re.compile(r"(?P<name>CUDNN_\w+)\s*(?:CUDNN_DEPRECATED_ENUM\s*)?(?:=\s*(?P<value>-?\w+))?\s*(?:,|$)")


def header_version(text: str) -> int:
    """The cuDNN version that a ``cudnn_version.h`` declares, as ``cudnnGetVersion`` returns it (92800 is 9.28.0)."""
    major, minor, patch = (int(re.search(rf"#define CUDNN_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR", "PATCHLEVEL"))  # type: ignore[index]
    return major * 10000 + minor * 100 + patch


def parse(text: str) -> dict[str, dict[str, int]]:
    """The enums of a header: by their C names, the constants' C names and values, in the header's order.

    The number of constants, which is the last one of some enums, is omitted: it changes with every version.
    """
    enums = {}
    for match in _ENUM.finditer(_COMMENT.sub(" ", text)):
        values: dict[str, int] = {}
        number = -1
        for member in _MEMBER.finditer(match["body"].strip()):
            name, value = member["name"], member["value"]
            if value is None:  # one more than the constant before
                number = number + 1
            else:
                number = values[value] if value in values else int(value, 0)
            values[name] = number
        enums[match["name"]] = {name: value for name, value in values.items() if not name.endswith(("_COUNT", "_COUNTS"))}
    return enums


def python_name(c_enum: str) -> str:
    """``cudnnBackendAttributeName_t`` becomes ``AttributeName``."""
    return c_enum.removeprefix("cudnn").removeprefix("Backend").removesuffix("_t")


def prefix(names: list[str]) -> str:
    """The common prefix of the constants of an enum, up to an underscore."""
    low, high = min(names), max(names)
    end = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[: low.rfind("_", 0, end) + 1]


def words() -> set[str]:
    """The strings, attributes and keywords in the code that names constants."""
    found = set()
    for path in (path for pattern in CODE for path in CORE.glob(pattern) if path != TARGET):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.upper())
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
    return found


def is_named(enum: str, name: str, words: set[str]) -> bool:
    """Whether the package names a constant.

    Args:
        enum, name: the names in Python.
        words: the words of the code. It writes the kind of a descriptor and the rest of an attribute's name apart, and omits
            ``OPERATION_``.
    """
    if {name, name.removesuffix("_DESCRIPTOR"), name.removeprefix("OPERATION_").removesuffix("_DESCRIPTOR")} & words:
        return True
    parts = name.removeprefix("OPERATION_").split("_")
    halves = (("_".join(parts[:i]), "_".join(parts[i:])) for i in range(1, len(parts)))
    return enum == "AttributeName" and any(kind in words and rest in words for kind, rest in halves)


def render(enums: dict[str, dict[str, int]], version: int) -> str:
    """The text of ``constants.py``."""
    lines = [
        '"""The enums of cuDNN\'s graph API, with the constants that this package uses.',
        "",
        "Generated from NVIDIA's cudnn_graph.h by ``python tools/constants.py``; do not edit.",
        "A constant's C name is its enum's prefix followed by its name here.",
        '"""',
        "",
        "from enum import IntEnum",
        "",
        "#: The cuDNN version whose header this table was made from.",
        f"HEADER_VERSION = {version}",
        "",
        "",
        "class CudnnConstant(IntEnum):",
        '    """A constant of the C API."""',
        "",
        "",
        "def name_of(enum: type[CudnnConstant], value: int) -> str | None:",
        '    """The name of a value, or None where it is newer than this table."""',
        "    return enum._value2member_map_[value].name if value in enum._value2member_map_ else None",
    ]
    used = words()
    for c_enum, whole in ENUMS.items():
        enum, common = python_name(c_enum), prefix([*enums[c_enum]])
        lines += ["", "", f"class {enum}(CudnnConstant):"]
        lines += [f'    """``{c_enum}``: constants begin with ``{common}``."""', ""]
        for c_name, value in enums[c_enum].items():
            name = c_name.removeprefix(common)
            if whole or is_named(enum, name, used):
                lines.append(f"    {name} = {value}")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Write the table from the header named on the command line."""
    if len(argv) != 1:
        raise SystemExit(__doc__)
    header = Path(argv[0])
    version = header_version(header.with_name("cudnn_version.h").read_text())
    text = render(parse(header.read_text()), version)
    TARGET.write_text(text)
    print(f"{TARGET.name}: {text.count(' = ') - 1} constants of cuDNN {version}")


if __name__ == "__main__":
    main(sys.argv[1:])
