"""Problems as plain data: dictionaries, lists, texts and numbers, field by field, as JSON has them.

Fields that have their default value are left out. Data that comes from elsewhere is checked: :func:`problem_of_data` returns
only problems that this version of the package can run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..options.band import Band
from ..options.table import Settings, Split
from ..score_fn.expression import LEAVES, Expression, Step
from ..score_fn.modes import MODES
from .problem import Problem
from .tensor_spec import ITEMSIZE, TensorSpec


def as_data(value: Any) -> Any:
    """Return a problem, or a part of it, as plain data; a number that is not finite is a text.

    >>> as_data(Band(right=0))
    {'right': 0}
    >>> as_data((Step("score"), Step("neg", (0,))))
    [{'mode': 'score'}, {'mode': 'neg', 'args': [0]}]
    """
    if dataclasses.is_dataclass(value) or hasattr(value, "_asdict"):
        named = ((name, getattr(value, name), default) for name, default in _fields(type(value)).items())
        return {name: as_data(part) for name, part, default in named if part != default or type(part) is not type(default)}
    if isinstance(value, tuple):
        return [as_data(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def problem_of_data(data: Any) -> Problem:
    """Return the problem of plain data.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the data is not a problem, or is one of another version.

    >>> import cupy_sdpa
    >>> problem = cupy_sdpa.problem((64, 8, 100, 1), (64, 2, 100, 1), (64, 2, 100, 1), dtype="float16", causal=True)
    >>> problem_of_data(as_data(problem)) == problem
    True
    """
    _require(isinstance(data, Mapping), f"a problem is a JSON object, not {data!r}")
    if missing := [name for name in ("q", "k", "v", "out") if name not in data]:
        raise ValueError(f"{', '.join(missing)} is missing")
    if unknown := [name for name in data if name not in _fields(Problem)]:
        raise ValueError(f"a problem has no {', '.join(unknown)}; the file may come from another version: write it again")
    found: dict[str, Any] = {}
    for name, value in data.items():
        if name == "settings":
            found[name] = _settings(value)
        elif name in ("captured", "dcaptured"):
            found[name] = tuple(_spec(name, part) for part in value)
        else:
            found[name] = _spec(name, value)
    for name in ("q", "k", "v", "out"):
        _require(len(found[name].shape) in (3, 4), f"{name} has the shape {found[name].shape}; it must have 3 or 4 axes")
    return Problem(**found)


def _fields(kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or a NamedTuple, each with its default; :data:`dataclasses.MISSING` if it has none."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    return {name: kind._field_defaults.get(name, dataclasses.MISSING) for name in kind._fields}


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _spec(name: str, value: Any) -> TensorSpec:
    """Return an array of a problem."""
    names = _fields(TensorSpec)
    _require(isinstance(value, dict) and value.keys() == names.keys(), f"{name} must have {', '.join(names)}")
    dtype, shape, strides = value["dtype"], value["shape"], value["strides"]
    named = value["name"] == name or (name in ("captured", "dcaptured") and type(value["name"]) is str)
    _require(named, f"{name} has the name {value['name']!r}")
    _require(type(dtype) is str and dtype in ITEMSIZE, f"{name} has the dtype {dtype!r}")
    _require(isinstance(shape, list) and all(map(_is_count, shape)), f"{name} has the shape {shape!r}")
    valid = isinstance(strides, list) and all(type(x) is int for x in strides) and len(strides) == len(shape)
    _require(valid and value["alignment"] in (1, 2, 4, 8, 16), f"{name} has the strides {strides!r} and shape {shape!r}")
    return TensorSpec(value["name"], dtype, tuple(shape), tuple(strides), value["alignment"])


def _settings(value: Any) -> Settings:
    """Return the settings of a problem."""
    _require(isinstance(value, dict), f"settings is {value!r}")
    if unknown := [name for name in value if name not in Settings._fields]:
        raise ValueError(f"settings has no {', '.join(unknown)}; the file may come from another version: write it again")
    found = dict(value)
    if "band" in value:
        sides = value["band"].values()
        _require(all(part is None or type(part) in (int, bool) for part in sides), f"the band is {value['band']!r}")
        found["band"] = Band(**value["band"])
    if "split" in value:
        found["split"] = Split(**value["split"])
    if "expression" in value:
        found["expression"] = _expression(value["expression"])
    return Settings(**found)


def _expression(value: Any) -> Expression:
    """Return the score and mask functions: each step reads steps before it, and is one that a graph has."""
    steps: list[Step] = []
    for number, given in enumerate(value["steps"]):
        constant = given.get("value", 0.0)
        constant = float(constant) if isinstance(constant, str) else constant
        step = Step(**{**given, "args": tuple(given.get("args", ())), "value": constant})
        _require(all(_is_count(arg) and arg < number for arg in step.args), f"step {number} reads {step.args}")
        known = step.mode in LEAVES or (step.mode in MODES and len(step.args) == MODES[step.mode].operands)
        _require(
            known,
            f"a function has the operation {step.mode!r} of {len(step.args)} operands, which this version does not have; the "
            "file may come from another version: write it again",
        )
        steps.append(step)
    roots = value["score"], value["mask"]
    _require(
        all(root is None or (_is_count(root) and root < len(steps)) for root in roots), "a function ends outside its steps"
    )
    return Expression(tuple(steps), *roots)
