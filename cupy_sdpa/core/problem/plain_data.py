"""Read a problem's arguments from plain data, and check that this version of the package knows all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._data import fields_of
from ..options.band import Band
from ..options.table import Settings, Split
from ..score_fn.expression import LEAVES, Expression, Step
from ..score_fn.modes import MODES
from .tensor_spec import ITEMSIZE, TensorSpec


def arguments_of(data: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return a problem's arguments from plain data; ``names`` lists all arguments. Raises as :meth:`.Problem.of_data`."""
    _require(isinstance(data, Mapping), f"a problem is a JSON object, not {data!r}")
    if missing := [name for name in ("q", "k", "v", "out") if name not in data]:
        raise ValueError(f"{', '.join(missing)} is missing")
    if unknown := [name for name in data if name not in names]:
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
    return found


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _spec(name: str, value: Any) -> TensorSpec:
    """Return the spec of a problem's array from plain data."""
    names = fields_of(TensorSpec)
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
    """Return a problem's settings from plain data."""
    _require(isinstance(value, dict), f"settings is {value!r}; it must be a JSON object")
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
    """Return the score and mask functions. Check that each step reads only earlier steps and has a known operation."""
    steps: list[Step] = []
    for number, given in enumerate(value["steps"]):
        constant = given.get("value", 0.0)
        constant = float(constant) if isinstance(constant, str) else constant
        step = Step(**{**given, "args": tuple(given.get("args", ())), "value": constant})
        _require(
            all(_is_count(arg) and arg < number for arg in step.args),
            f"step {number} reads {step.args}; it must read earlier steps",
        )
        known = step.mode in LEAVES or (step.mode in MODES and len(step.args) == MODES[step.mode].operands)
        _require(
            known,
            f"this version has no operation {step.mode!r} with {len(step.args)} operands, which a function uses; the "
            "file may come from another version: write it again",
        )
        steps.append(step)
    roots = value["score"], value["mask"]
    _require(
        all(root is None or (_is_count(root) and root < len(steps)) for root in roots), "a function's result is not a step"
    )
    return Expression(tuple(steps), *roots)
