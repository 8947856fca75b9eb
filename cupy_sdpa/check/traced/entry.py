"""The problems of a trace file, and their plans."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cupy_sdpa

from ...problem.problem import Problem
from ...tracing.trace_file import read_trace_file
from ..cases.data import dtype_of
from ..cases.functions import compiled

#: The functions whose calls a trace contains.
CALLS = ("attention", "attention_backward", "attention_jvp")


class NotReplayableError(ValueError):
    """A problem of a trace cannot be made again; the message is the reason."""


@dataclass(frozen=True)
class Entry:
    """One line of a trace.

    Attributes:
        number: the number of the line, from 1.
        call: the name of the function.
        arrays: the array arguments: dictionaries with ``shape``, ``dtype`` and, unless dense in Fortran order, ``strides``.
        options: the other arguments; arrays are such dictionaries, functions have a ``name`` and a ``source``.
    """

    number: int
    call: str
    arrays: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any]

    def check(self) -> None:
        """Check that the problem can be made again.

        Raises:
            NotReplayableError: it cannot.
        """
        for name, value in self.options.items():
            if isinstance(value, Mapping) and (reason := value.get("not_replayable")):
                raise NotReplayableError(f"{name} {value.get('name', '')} was not recorded: {reason}")
        if "widened" in self.options:
            raise NotReplayableError("the tangents were passed as widened arrays")

    def problems(self) -> tuple[Problem, ...]:
        """The problems that a plan is needed for; results and dout are assumed to be dense.

        Raises:
            NotReplayableError: the problem cannot be made again.
            TypeError, ValueError: the arguments are invalid.
        """
        self.check()
        q, k, v = (placeholder(self.arrays[name]) for name in "qkv")
        options = {name: _option(name, value) for name, value in self.options.items()}
        if self.call == "attention_jvp":
            tangents = [name for name in ("dq", "dk", "dv") if name in self.arrays]
            options["return_stats"] = bool(options.get("return_stats") or "stats" in self.arrays)
            return cupy_sdpa.jvp_problems(q, k, v, tangents=tangents, **options)
        if self.call == "attention_backward":
            return (cupy_sdpa.problem(q, k, v, backward=True, **options),)
        if "stats" in self.arrays:
            options.setdefault("return_stats", True)
        return (cupy_sdpa.problem(q, k, v, **options),)

    def describe(self) -> str:
        """The call in one line."""
        shapes = ", ".join(f"{name} {tuple(self.arrays[name]['shape'])}" for name in "qkv")
        options = "".join(f", {name}={_short(value)}" for name, value in self.options.items())
        return f"{self.call}({shapes}, {self.arrays['q']['dtype']}{options})"


def read_trace(path: str | os.PathLike[str]) -> list[Entry]:
    """Read a trace; lines that occur twice are read once.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a problem; the message contains its number.
    """
    try:
        lines = read_trace_file(Path(path)).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a trace: {error}") from None
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and line not in entries:
            try:
                entries[line] = _entry(number, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not a problem: {error}") from None
    if not entries:
        raise ValueError(f"{path} has no problem")
    return list(entries.values())


def _entry(number: int, values: dict[str, Any]) -> Entry:
    call, options = values.pop("call"), values.pop("options")
    if call not in CALLS:
        raise ValueError(f"call is {call!r}; it must be one of {', '.join(CALLS)}")
    for name in "qkv":
        if not isinstance(values[name]["shape"], list) or len(values[name]["shape"]) not in (3, 4):
            raise ValueError(f"{name} has the shape {values[name]['shape']!r}; it must have 3 or 4 lengths")
        dtype_of(values[name]["dtype"])
    return Entry(number, call, values, dict(options))


def function_of_entry(option: str, value: Mapping[str, Any]) -> Callable[..., Any]:
    """The score or mask function of an option."""
    return compiled(option, value["source"])[0]


def placeholder(array: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """An array of the shape, the dtype and the strides, whose elements share memory."""
    shape, dtype = tuple(map(int, array["shape"])), dtype_of(array["dtype"])
    dense = np.zeros((), dtype)
    strides = array.get("strides") or np.cumprod([dtype.itemsize, *shape])[: len(shape)].tolist()
    return np.lib.stride_tricks.as_strided(dense, shape, tuple(map(int, strides)), writeable=False)


def _option(name: str, value: Any) -> Any:
    """An argument of :func:`cupy_sdpa.problem`."""
    if name in ("score_mod", "mask_mod"):
        return function_of_entry(name, value)
    if name == "tensors":
        return {key: placeholder(array) for key, array in value.items()}
    if isinstance(value, Mapping):
        return placeholder(value)
    return tuple(value) if isinstance(value, list) and name == "window" else value


def _short(value: Any) -> str:
    """An option in one line."""
    if isinstance(value, Mapping):
        if "shape" in value:
            return f"{value['dtype']} {tuple(value['shape'])}"
        return str(value["name"]) if "name" in value else ", ".join(f"{name} {_short(x)}" for name, x in value.items())
    return repr(value)
