"""How a layer takes part in calls of the core, which does not import layers.

The package's root registers a layer by the name of a module, which is imported when a call needs it:

- :func:`register_option`: an option, such as ``block_mask``, whose value decides by which steps a pass is computed;
- :func:`register_libraries`: types of arrays that belong to other libraries.

Three more ways need no registration. An operation declares itself (:func:`.programs.calls.operation`). An array type whose
calls have their own programs, such as :class:`cupy_sdpa.fp8.Fp8Array`, has a method ``_call_of``. A type that calls do not
accept as an array, such as :class:`cupy_sdpa.BlockMask`, has an attribute ``_not_an_array``, which ends the error message and
says what to pass instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol


class OptionModule(Protocol):
    """The module of an option that decides by which steps a pass is computed."""

    def decide(self, value: Any, arrays: Mapping[str, Any], options: Mapping[str, Any], **outputs: Any) -> Any:
        """Return the options of a call that is computed without the option; None if it is computed with it.

        ``options`` are the other options. ``outputs`` are ``return_stats`` and ``outputs``, as in :meth:`.Call.decide_pass`.
        """

    def check(self, value: Any, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Check the shapes of q, k and v, and that the other options work with this option's value.

        ``arrays`` are the call's arrays by name. From q, k and v the core derives and checks everything else: the other arrays'
        shapes and dtypes, and all strides.
        """

    def add(self, builder: Any, arrays: Any, value: Any, options: Mapping[str, Any], *, deterministic: bool) -> None:
        """Add the steps of a pass: of the gradients if ``dout`` is among the arrays, otherwise of the forward pass."""


class PassOption(NamedTuple):
    """An option that decides by which steps a pass is computed.

    Attributes:
        name, value: of the option.
        module: what computes the pass.
    """

    name: str
    value: Any
    module: OptionModule


class Library(Protocol):
    """A library whose arrays callers can pass."""

    @property
    def name(self) -> str:
        """The name of the library."""

    @property
    def writable(self) -> bool:
        """Whether arrays can be written to."""

    @property
    def stream(self) -> Callable[[int], int] | None:
        """A function that takes a device number and returns the address of the library's current stream on that device.

        None: the library has no such function, so calls use CuPy's current stream and return when their work is done.
        """

    def device(self, array: Any) -> int | None:
        """Return the number of the GPU that holds the library's array; None for an array in CPU memory."""

    def share(self, name: str, array: Any) -> Any:
        """Convert the library's array, passed as the argument ``name``, to a numpy or CuPy array."""

    def returned(self, array: Any) -> Any:
        """Convert a numpy or CuPy array to the library's array type."""


#: The modules of options by name, and the modules that know types of arrays of other libraries.
_options: dict[str, str] = {}
_libraries: list[str] = []


def register_option(name: str, module: str) -> None:
    """Register the module of an option, an :class:`OptionModule`."""
    _options[name] = module


def register_libraries(module: str) -> None:
    """Register a module whose function ``library_of_type`` returns the :class:`Library` of an array type, or None."""
    _libraries.append(module)


def pass_option(options: dict[str, Any]) -> PassOption | None:
    """Remove the options that decide by which steps a pass is computed; return the one that is passed, or None."""
    layer_option = None
    for name, module in _options.items():
        if (value := options.pop(name, None)) is not None:
            layer_option = PassOption(name, value, importlib.import_module(module))
    return layer_option


def split_options(options: Mapping[str, Any]) -> tuple[PassOption | None, str | None, dict[str, Any]]:
    """Split decided options: a layer's option, the dtype to compute in, and the others."""
    others = {**options}
    dtype, layer_option = others.pop("compute_dtype", None), pass_option(others)
    return layer_option, dtype, others


def registered_library(kind: type) -> Library | None:
    """Return the library of a type of arrays, from the registered modules; None if they do not know it."""
    modules = (importlib.import_module(name) for name in _libraries)
    return next((library for module in modules if (library := module.library_of_type(kind)) is not None), None)
