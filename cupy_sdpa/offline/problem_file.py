"""Problems in a file, one JSON object per line, field by field.

Fields that have their default value are left out. Programs that run at the same time may add to one file.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..extend.arrays import ITEMSIZE, Problem, TensorSpec
from ..extend.functions import Expression, Step
from ..extend.options import Band
from ..extend.planning import Settings, Split

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: The largest file in bytes. A line has about a thousand bytes.
MAX_BYTES = 64 << 20
#: How every line begins.
_BEGIN = b'{"q": {'
#: The fields of a problem.
_FIELDS = tuple(field.name for field in dataclasses.fields(Problem) if field.init)


def to_json(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON values."""
    values = {name: getattr(problem, name) for name in _FIELDS}
    return {name: encoded(value) for name, value in values.items() if value not in (None, (), Settings())}


def encoded(value: Any) -> Any:
    """Return a problem's value as JSON values: arrays and settings as objects without fields that have their defaults."""
    if isinstance(value, TensorSpec):
        return {field.name: encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):  # a NamedTuple
        defaults = type(value)._field_defaults
        return {
            name: encoded(part)
            for name, part in value._asdict().items()
            if name not in defaults or (part != defaults[name] or type(part) is not type(defaults[name]))
        }
    if isinstance(value, tuple):
        return [encoded(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def from_json(values: Mapping[str, Any]) -> Problem:
    """Return the problem of :func:`to_json`."""
    _check(isinstance(values, Mapping), f"a problem is a JSON object, not {values!r}")
    if missing := [name for name in ("q", "k", "v", "out") if name not in values]:
        raise ValueError(f"{', '.join(missing)} is missing")
    if unknown := [name for name in values if name not in _FIELDS]:
        raise ValueError(f"a problem has no {', '.join(unknown)}; the file may come from another version: write it again")
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "settings":
            found[name] = _settings(value)
        elif name in ("captured", "dcaptured"):
            found[name] = tuple(_spec(name, part) for part in value)
        else:
            found[name] = _spec(name, value)
    for name in ("q", "k", "v", "out"):
        _check(len(found[name].shape) in (3, 4), f"{name} has the shape {found[name].shape}; it must have 3 or 4 axes")
    return Problem(**found)


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _spec(name: str, value: Any) -> TensorSpec:
    """Return an array of a problem."""
    names = [field.name for field in dataclasses.fields(TensorSpec)]
    _check(isinstance(value, dict) and sorted(value) == sorted(names), f"{name} must have {', '.join(names)}")
    dtype, shape, strides = value["dtype"], value["shape"], value["strides"]
    named = value["name"] == name or (name in ("captured", "dcaptured") and type(value["name"]) is str)
    _check(named, f"{name} has the name {value['name']!r}")
    _check(type(dtype) is str and dtype in ITEMSIZE, f"{name} has the dtype {dtype!r}")
    _check(isinstance(shape, list) and all(map(_is_count, shape)), f"{name} has the shape {shape!r}")
    valid = isinstance(strides, list) and all(type(x) is int for x in strides) and len(strides) == len(shape)
    _check(valid and value["alignment"] in (1, 2, 4, 8, 16), f"{name} has the strides {strides!r} and shape {shape!r}")
    return TensorSpec(value["name"], dtype, tuple(shape), tuple(strides), value["alignment"])


def _settings(value: Any) -> Settings:
    """Return the settings of a problem."""
    _check(isinstance(value, dict) and value.keys() <= set(Settings._fields), f"settings is {value!r}")
    found = dict(value)
    if "band" in value:
        _check(
            all(part is None or type(part) in (int, bool) for part in value["band"].values()), f"the band is {value['band']!r}"
        )
        found["band"] = Band(**value["band"])
    if "split" in value:
        found["split"] = Split(**value["split"])
    if "program" in value:
        found["program"] = _program(value["program"])
    return Settings(**found)


def _program(value: Any) -> Expression:
    """Return the program of score and mask functions: each step reads steps before it."""
    steps = []
    for number, given in enumerate(value["steps"]):
        constant = given.get("value", 0.0)
        constant = float(constant) if isinstance(constant, str) else constant
        step = Step(**{**given, "args": tuple(given.get("args", ())), "value": constant})
        _check(all(_is_count(arg) and arg < number for arg in step.args), f"step {number} reads {step.args}")
        steps.append(step)
    roots = value["score"], value["mask"]
    _check(all(root is None or (_is_count(root) and root < len(steps)) for root in roots), "a program ends outside its steps")
    return Expression(tuple(steps), *roots)


# Files


def read(path: str | os.PathLike[str], check: Callable[[Problem], None]) -> list[Problem]:
    """Return the problems of a file; ``check`` raises ValueError for one that this version of the package cannot run."""
    import json  # takes a part of the time of importing the package

    with open(_open(path, os.O_RDONLY), "rb") as file:
        lines = file.read(MAX_BYTES).splitlines()
    found: dict[Problem, None] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                problem = from_json(json.loads(line))
                check(problem)
                found[problem] = None
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not a problem: {error}") from None
    if not found:
        raise ValueError(f"{path} has no problem")
    return list(found)


def add(path: str | os.PathLike[str], problems: Iterable[Problem]) -> int:
    """Add problems to a file, which is created if it does not exist; those that it has are not written again.

    Returns:
        The number of problems in the file.
    """
    import json

    lines = dict.fromkeys(json.dumps(to_json(problem), allow_nan=False).encode() for problem in problems)
    with open(_open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "r+b", buffering=0) as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        content = file.read(MAX_BYTES)
        if content and not content.startswith(_BEGIN):
            raise OSError(errno.EINVAL, "the file does not contain problems", str(path))
        known = set(content.splitlines())
        added = [line for line in lines if line not in known]
        text = b"\n" * (bool(content) and not content.endswith(b"\n")) + b"".join(line + b"\n" for line in added)
        try:
            while text:  # one write, unless the disk is nearly full
                text = text[file.write(text) :]
        except OSError:
            os.ftruncate(file.fileno(), len(content))
            raise
    return len(known) + len(added)


def _open(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of problems. A pipe is not waited for, and a device is not read."""
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o644)
    status, reason = os.fstat(file), ""
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif status.st_size > MAX_BYTES:
        reason = f"it has {status.st_size >> 20} MiB, and a file of problems has at most {MAX_BYTES >> 20} MiB"
    elif flags & os.O_RDWR and hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        reason = "it belongs to another user"
    if reason:
        os.close(file)
        raise OSError(errno.EINVAL, reason, str(path))
    return file
