"""Calls that are planned once and run many times, and autotuning."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, overload

from ._typing import Array, ArrayT
from .arrays.conversion import OUTPUTS, Conversion, convert, gradient_names
from .arrays.layouts import other_layout, results_in
from .calls.arguments import read_backward, read_forward
from .calls.call import Call, tuning_enabled
from .calls.options import DTensors, Options, read_flag, takes_options
from .calls.replay_cache import cache_call, run_cached
from .calls.report import Report, explain_call
from .calls.user_functions import kept_options
from .problem.problem import Problem
from .programs.run import compiled

if TYPE_CHECKING:  # modules that load cuDNN are imported only for CuPy arrays
    from .calls.autotune import Tuning

ResultT = TypeVar("ResultT")


# fmt: off
@overload
def prepare(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[False] = False, backward: Literal[False] = False,
    deterministic: bool = False, return_dbias: bool = False, return_dsinks: bool = False, return_dtensors: DTensors = False,
    autotune: bool = False, **options: Unpack[Options],
) -> Prepared[ArrayT]: ...
@overload
def prepare(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[True], backward: Literal[False] = False,
    deterministic: bool = False, return_dbias: bool = False, return_dsinks: bool = False, return_dtensors: DTensors = False,
    autotune: bool = False, **options: Unpack[Options],
) -> Prepared[tuple[ArrayT, Any]]: ...
@overload
def prepare(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal["max_sumexp"],
    backward: Literal[False] = False, deterministic: bool = False, return_dbias: bool = False, return_dsinks: bool = False,
    return_dtensors: DTensors = False, autotune: bool = False, **options: Unpack[Options],
) -> Prepared[tuple[ArrayT, Any, Any, Any]]: ...
@overload
def prepare(
    q: Array, k: Array, v: Array, *, return_stats: bool | Literal["max_sumexp"] = False, backward: bool = False,
    deterministic: bool = False, return_dbias: bool = False, return_dsinks: bool = False, return_dtensors: DTensors = False,
    autotune: bool = False, **options: Unpack[Options],
) -> Prepared[Any]: ...
# fmt: on
@takes_options
def prepare(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_stats: bool | Literal["max_sumexp"] = False,
    backward: bool = False,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: DTensors = False,
    autotune: bool = False,
    **options: Unpack[Options],
) -> Prepared[Any]:
    """Plan a call now, to run it many times on arrays of the same shapes, strides and dtypes.

    Score and mask functions are those of now: if one has changed since, pass it to the prepared call again. Other numbers are
    used, and other operations raise ValueError.

    Args:
        q, k, v, return_stats, options: as for :func:`cupy_sdpa.attention`. The elements of q, k and v are read only for
            ``autotune``.
        backward: prepare :func:`cupy_sdpa.attention_backward`. Default False.
        deterministic: as for the prepared call.
        return_dbias, return_dsinks, return_dtensors: as for :func:`cupy_sdpa.attention_backward`.
        autotune: measure every engine config that cuDNN's heuristics propose on these arrays, and keep the fastest, also for
            later processes. This takes about a second and synchronizes; with ``backward`` it runs the forward pass first.
            Default False. On the CPU it has no effect.

    Returns:
        The prepared call: ``call(q, k, v, out=...)``, or ``call(dout, q, k, v, out, stats, dq=...)``.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as the call.

    >>> import numpy as np, cupy_sdpa
    >>> q = k = v = np.ones((8, 2, 16, 1), np.float32, order="F")
    >>> call = cupy_sdpa.prepare(q, k, v, causal=True)
    >>> call(q, k, v).shape
    (8, 2, 16, 1)
    """
    given = kept_options(q, options)
    if (engine := given.pop("engine", None)) is not None:
        callers = {"engine": engine, "layout": given.get("layout")}
        conversion = Conversion(q, {name: x for name, x in {**given, **callers}.items() if name != "compute_dtype"})
        if conversion.engine == "cupy":
            own = {name: conversion.into(name, array) for name, array in (("q", q), ("k", k), ("v", v))}
            with conversion.stream():
                prepared: Prepared[Any] = prepare(
                    **own, return_stats=return_stats, backward=backward, deterministic=deterministic, return_dbias=return_dbias,
                    return_dsinks=return_dsinks, return_dtensors=return_dtensors, autotune=autotune, **conversion.options,
                )  # fmt: skip
            prepared.callers = callers
            return prepared
    if backward:
        if isinstance(return_dtensors, (list, set)):
            return_dtensors = tuple(return_dtensors)  # the caller's list may change before the call
        outputs: dict[str, Any] = {
            "deterministic": deterministic, "return_dbias": return_dbias, "return_dsinks": return_dsinks,
            "return_dtensors": return_dtensors,
        }  # fmt: skip
        call = read_backward(q, k, v, given, **outputs)
    else:
        outputs = {"return_stats": return_stats, "deterministic": deterministic}
        call = read_forward(q, k, v, given, **outputs)
    report = explain_call(call)
    if report.reasons:
        raise report.error("\n".join(report.reasons))
    tunings: list[Tuning] = []
    if read_flag("autotune", autotune) and call.on_gpu and not call.problem.trivial:
        call = _with_forward_results(call)
        with tuning_enabled() as tunings:
            compiled(call).run()
        report = explain_call(call)
    return Prepared(call.problem, given, outputs, report, tunings[0] if tunings else None)


class Prepared(Generic[ResultT]):
    """A call that is already planned; returned by :func:`prepare`.

    Attributes:
        problem: the problem that it computes.
        report: how it runs, see :func:`cupy_sdpa.explain`.
        tuning: the measurements of ``autotune``, or None.
        callers: the options ``engine`` and ``layout`` by which the arrays of a call are converted; empty without ``engine``.
    """

    def __init__(
        self, problem: Problem, options: dict[str, Any], outputs: dict[str, Any], report: Report, tuning: Tuning | None
    ) -> None:
        self.problem, self.report, self.tuning = problem, report, tuning
        self.callers: dict[str, Any] = {}
        self._options, self._outputs = options, outputs
        self._key = object()  # in the replay cache: every call with it has been compared with the problem
        self._inputs = ("dout", "q", "k", "v", "out", "stats") if problem.backward else ("q", "k", "v")
        self._results = ("dq", "dk", "dv") if problem.backward else ("out", "stats")

    def __call__(
        self,
        *arrays: Array,
        out: Array | None = None,
        stats: Array | None = None,
        dq: Array | None = None,
        dk: Array | None = None,
        dv: Array | None = None,
        **options: Unpack[Options],
    ) -> ResultT:
        """Compute.

        Args:
            arrays: q, k and v; for the backward pass dout, q, k, v, out and stats.
            out, stats, dq, dk, dv: arrays to write the results into.
            options: options that differ from those of :func:`prepare`, such as other lengths.

        Raises:
            ValueError: the arguments define a problem that differs from the prepared one.
        """
        if self.callers:
            of_engine: ResultT = self._converted(
                arrays, {"out": out, "stats": stats, "dq": dq, "dk": dk, "dv": dv}, dict(options)
            )
            return of_engine
        merged = {**self._options, **options} if options else self._options
        passed = (*arrays, out, stats) if dq is dk is dv is None else (*arrays, out, stats, dq, dk, dv)
        kind = self._key, len(arrays)
        results = run_cached(kind, passed, merged)
        if results is None:
            call = compiled(self._read(arrays, {"out": out, "stats": stats, "dq": dq, "dk": dk, "dv": dv}, merged))
            results = call.run()
            names = (*self._inputs, "out", "stats", "dq", "dk", "dv")
            cache_call(kind, names[: len(passed)], passed, merged, call)
        if layout := other_layout(merged):
            flags = (bool(self._outputs.get(name)) for name in ("return_dbias", "return_dsinks"))
            made = gradient_names(*flags) if self.problem.backward else OUTPUTS
            given = {"out": out, "stats": stats} if not self.problem.backward else {"dq": dq, "dk": dk, "dv": dv}
            results = results_in(layout, made, results, given, merged)
        result: Any = results[0] if len(results) == 1 else tuple(results)
        return result  # type: ignore[no-any-return]

    def _converted(self, arrays: tuple[Array, ...], results: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Compute with the arrays of ``engine="cupy"``."""
        self._check_count(arrays)
        own = copy.copy(self)
        own.callers = {}

        def call(**given: Any) -> Any:
            inputs = [given.pop(name) for name in self._inputs]
            return own(*inputs, **given)

        flags = (bool(self._outputs.get(name)) for name in ("return_dbias", "return_dsinks"))
        names = gradient_names(*flags) if self.problem.backward else OUTPUTS
        passed = {name: array for name, array in results.items() if array is not None}
        return convert(call, {**dict(zip(self._inputs, arrays, strict=True)), **passed}, {**self.callers, **options}, names)

    def _check_count(self, arrays: tuple[Array, ...]) -> None:
        """Raise TypeError for another number of arrays than the prepared call has."""
        if len(arrays) != len(self._inputs):
            raise TypeError(f"{len(arrays)} arrays are passed; the call was prepared for {', '.join(self._inputs)}")

    def _read(self, arrays: tuple[Array, ...], results: dict[str, Any], options: dict[str, Any]) -> Call:
        """Validate the arguments, and compare their problem with the prepared one."""
        self._check_count(arrays)
        results = {name: array for name, array in results.items() if array is not None}
        if extra := [name for name in results if name not in self._results]:
            raise TypeError(f"{extra[0]} is not a result of the prepared call; its results are {', '.join(self._results)}")
        inputs: dict[str, Any] = dict(zip(self._inputs, arrays, strict=True))
        read = read_backward if self.problem.backward else read_forward
        call = read(options=options, **inputs, **self._outputs, **results)
        if call.problem != self.problem:
            raise ValueError(_difference(self.problem, call.problem))
        call.has_all_keys = True
        return call

    def __repr__(self) -> str:
        return f"<prepared: {self.problem}>"


def _difference(prepared: Problem, passed: Problem) -> str:
    """A message that describes how two problems differ."""
    one, other = (", ".join(map(str, problem.tensors)) for problem in (prepared, passed))
    if one == other:
        one, other = str(prepared), str(passed)
    values = f"Prepared: {one}. Passed: {other}." if one != other else "Their functions or options differ."
    return f"the arguments define a problem that differs from the prepared one. {values} Prepare a call for each problem"


def _with_forward_results(call: Call) -> Call:
    """A backward call with the results of its forward pass as inputs; the output also serves as dout."""
    if not call.problem.backward:
        return call
    results = ("dout", "out", "stats", *(spec.name for spec in call.problem.results))
    inputs = {name: array for name, array in call.arrays.items() if name not in results}
    settings = call.problem.settings._replace(deterministic=False)
    forward = dataclasses.replace(
        call.problem, dout=None, dq=None, dk=None, dv=None, dbias=None, dsinks=None, dcaptured=(), settings=settings
    )
    out, stats = compiled(dataclasses.replace(call, problem=forward, arrays=dict(inputs), gradients=None)).run()
    return dataclasses.replace(call, arrays={**inputs, "out": out, "stats": stats, "dout": out})


@contextmanager
def autotune() -> Iterator[list[Tuning]]:
    """A context manager that tunes every call in its block that was not tuned before; yields the list of measurements.

    The first call of each problem takes about a second and synchronizes; later ones, also in later processes, use the
    result. On the CPU it has no effect.

    >>> import numpy as np, cupy_sdpa
    >>> x = np.ones((8, 2, 16, 1), np.float32, order="F")
    >>> with cupy_sdpa.autotune() as tunings:
    ...     out = cupy_sdpa.attention(x, x, x)
    >>> tunings
    []
    """
    with tuning_enabled() as tunings:
        yield tunings
