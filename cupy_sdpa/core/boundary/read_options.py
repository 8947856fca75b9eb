"""A call's options after reading; the call's parts take them, so that nothing is read again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ..hooks import PassOption
from ..options.scale import read_scale
from ..options.table import Settings
from ..options.values import read_flag
from ..problem.arrays import OPTION_ARRAYS
from ..problem.bucket import read_bucket
from .options import check_names, read_settings
from .user_functions import FUNCTIONS, check_tensors

#: The options that are kept unchanged: arrays, seeds, functions and the arrays that functions read.
_INPUTS = (*OPTION_ARRAYS, *FUNCTIONS, "tensors")


@dataclass(frozen=True)
class ReadOptions(Mapping[str, Any]):
    """A call's options after reading: a mapping of the arrays and functions; attributes hold what the other options mean.

    ``options | changes`` replaces inputs and fields of the settings: ``options | {"band": Band(right=0)}`` is causal. Other
    names, such as ``causal``, raise TypeError. ``{**options}`` has only the inputs: it loses the settings and the scalars.

    Attributes:
        inputs: the arrays, seeds, functions and ``tensors`` that the caller passed.
        settings: what determines a plan, except ``deterministic`` and the functions' expression.
        scalars: the scalars, which are passed by value.
        round_up: how ``bucket`` rounds a length up; None for exact lengths.
        batch_invariant: whether the bits of a result must not depend on the rest of the batch.
        causal, bucket, layout: the values as passed, for messages and for decisions that depend on how they were written.
        layer_option, compute_dtype: the options that :meth:`.Builder.add_pass` computes in several steps, or None. Other
            steps raise TypeError for them.

    :func:`.read_operands` returns them.

    >>> import numpy as np
    >>> from cupy_sdpa.extend import read_operands
    >>> passed = {"causal": True, "sinks": np.zeros(2, np.float32)}
    >>> _, _, options = read_operands({"q": np.zeros((64, 2, 5, 1))}, passed)
    >>> [*options], options.scalars["scale"], [*options.without("sinks")], (options | {"seed": 3})["seed"]
    (['sinks'], 0.125, [], 3)
    """

    inputs: Mapping[str, Any]
    settings: Settings
    scalars: Mapping[str, float]
    round_up: Callable[[int], int] | None
    batch_invariant: bool
    causal: Any
    bucket: Any
    layout: str | None
    layer_option: PassOption | None = None
    compute_dtype: str | None = None

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)

    def __or__(self, changes: Mapping[str, Any]) -> ReadOptions:
        _check_inputs(changes.keys() - {*Settings._fields})
        settings = {name: value for name, value in changes.items() if name in Settings._fields}
        inputs = {**self.inputs, **{name: value for name, value in changes.items() if name not in settings}}
        return dataclasses.replace(self, inputs=inputs, settings=self.settings._replace(**settings))

    @property
    def functions(self) -> dict[str, Any]:
        """The score and mask functions that the caller passed, by option name."""
        return {name: self.inputs[name] for name in FUNCTIONS if name in self.inputs}

    def without(self, *names: str) -> ReadOptions:
        """Return the options without some inputs: arrays, seeds or functions; other names raise TypeError."""
        _check_inputs({*names})
        return dataclasses.replace(self, inputs={name: value for name, value in self.inputs.items() if name not in names})

    def of_one_problem(self) -> ReadOptions:
        """Return the options without :attr:`layer_option` and :attr:`compute_dtype`."""
        return dataclasses.replace(self, layer_option=None, compute_dtype=None)


def _check_inputs(names: Set[str]) -> None:
    """Check that names are names of inputs; the scale is one if it is an array."""
    for name in names - {*_INPUTS, "scale"}:
        raise TypeError(
            f"{name} is no input of ReadOptions; inputs are {', '.join(_INPUTS)}, and `|` also takes settings, such as band"
        )


def check_option_names(options: Mapping[str, Any]) -> None:
    """Check that one problem can have every option, and that the keys of ``tensors`` are names."""
    if not isinstance(options, ReadOptions):
        check_names(options)
        check_tensors(options)
    elif layer_option := options.layer_option:
        check_names({layer_option.name: layer_option.value})
    elif options.compute_dtype:
        check_names({"compute_dtype": options.compute_dtype})


def read_options(options: Mapping[str, Any], head_dim: int) -> ReadOptions:
    """Read options whose names and ``tensors`` were checked; return options that were already read unchanged.

    Raises:
        TypeError, ValueError: an option is invalid.
    """
    if isinstance(options, ReadOptions):
        return options
    settings, scalars = read_settings({**options, "scale": read_scale(options.get("scale"), head_dim)})
    return ReadOptions(
        inputs={name: options[name] for name in _INPUTS if options.get(name) is not None},
        settings=settings,
        scalars=scalars,
        round_up=read_bucket(options.get("bucket")),
        batch_invariant=read_flag("batch_invariant", options.get("batch_invariant", False)),
        causal=options.get("causal"),
        bucket=options.get("bucket"),
        layout=options.get("layout"),
    )
