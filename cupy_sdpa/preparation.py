"""Prepare a call: plan it once, run it many times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

from .attention_functions import attention, attention_backward
from .core._typing import Array, ArrayT
from .core.boundary.layouts import has_own_axes
from .core.boundary.options import check_spelling, split_requests, takes_options
from .core.boundary.user_functions import kept_options
from .core.options.table import GradientOptions, Options
from .core.problem.problem import Problem
from .core.programs.calls import OF_FORWARD, Call
from .core.programs.executor import ReadCall
from .core.replay.call_key import CallKey
from .core.replay.replay_cache import run_cached

ResultT = TypeVar("ResultT")


# fmt: off
@overload
def prepare(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[False] = False, backward: Literal[False] = False,
    deterministic: bool = False, dstats: Array | None = None, **options: Unpack[GradientOptions],
) -> Prepared[ArrayT]: ...
@overload
def prepare(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[True], backward: Literal[False] = False,
    deterministic: bool = False, dstats: Array | None = None, **options: Unpack[GradientOptions],
) -> Prepared[tuple[ArrayT, Any]]: ...
@overload
def prepare(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal["max_sumexp"],
    backward: Literal[False] = False, deterministic: bool = False, dstats: Array | None = None,
    **options: Unpack[GradientOptions],
) -> Prepared[tuple[ArrayT, Any, Any, Any]]: ...
@overload
def prepare(
    q: Array, k: Array, v: Array, *, return_stats: bool | Literal["max_sumexp"] = False, backward: bool = False,
    deterministic: bool = False, dstats: Array | None = None, **options: Unpack[GradientOptions],
) -> Prepared[Any]: ...
# fmt: on
@takes_options(gradients=True)
def prepare(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_stats: bool | Literal["max_sumexp"] = False,
    backward: bool = False,
    deterministic: bool = False,
    dstats: Array | None = None,
    **options: Unpack[GradientOptions],
) -> Prepared[Any]:
    """Plan a call now, to run it many times on arrays of the same shapes, strides and dtypes.

    Score and mask functions are captured now. Pass a changed function to the prepared call again: new numbers take effect, new
    operations raise ValueError.

    Args:
        q, k, v, return_stats, options: as for :func:`cupy_sdpa.attention`, including a block mask, ``compute_dtype``, FP8
            arrays and arrays of other libraries. The elements of q, k and v are not read.
        backward: prepare :func:`cupy_sdpa.attention_backward`. Default False.
        deterministic: as for the prepared call.
        requests: as for :func:`cupy_sdpa.attention_backward`.
        dstats: with ``backward``, an array like the gradient of the log-sum-exp that every call will pass; its elements are not
            read. Default None: the calls do not pass it.

    Returns:
        The prepared call: ``call(q, k, v, out=...)``, or ``call(dout, q, k, v, out, stats, dq=...)``, also with ``dstats=``.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as the call.

    >>> import numpy as np, cupy_sdpa
    >>> q = k = v = np.ones((8, 2, 16, 1), np.float32, order="F")
    >>> call = cupy_sdpa.prepare(q, k, v, causal=True)
    >>> call(q, k, v).shape
    (8, 2, 16, 1)
    """
    requests, others = split_requests(options)
    check_spelling(others)
    given = kept_options(q, others)
    outputs: dict[str, Any] = {"deterministic": deterministic}
    function: Callable[..., Any]
    if backward:
        outputs |= requests
        function, arrays = attention_backward, {"dout": None, "q": q, "k": k, "v": v, "out": None, "stats": None}
        arrays |= {} if dstats is None else {"dstats": dstats}
    else:
        outputs["return_stats"] = return_stats
        function, arrays = attention, {"q": q, "k": k, "v": v}
    return Prepared(function, arrays, given, outputs)


class Prepared(Generic[ResultT]):
    """Make a call of a function of this package that is already planned; returned by :func:`prepare`.

    Attributes:
        problem: the problem that it computes.
        report: how it runs, see :func:`cupy_sdpa.explain`.

    >>> import numpy as np, cupy_sdpa
    >>> q = k = v = np.ones((8, 2, 16, 1), np.float32, order="F")
    >>> call = cupy_sdpa.prepare(q, k, v, causal=True)
    >>> call.report.engine, call.problem.sizes
    ('numpy', (8, 8, 2, 2, 16, 16, 1))
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arrays: Mapping[str, Any],
        options: dict[str, Any],
        outputs: dict[str, Any],
    ) -> None:
        """Plan the call.

        ``arrays`` are by name in the order of the function's arguments; of a backward pass dout, out and stats may be None, and
        dstats is passed by name. The prepared call may replace the ``options``, but not the ``outputs``, which are the other
        arguments.
        """
        missing = OF_FORWARD if "dout" in arrays else ()
        call = Call.of(function, **arrays, **options, **outputs).read(missing=missing)
        report = call.report()
        if report.reasons:
            raise report.error("\n".join(report.reasons))
        self.problem = call.problem or report.problem
        self.report = report
        self._inputs = tuple(name for name in arrays if name != "dstats")
        self._function, self._options, self._outputs = function, options, outputs
        self._problems, self._given = _problems(call), _in_words(arrays, options)
        self._constants = [call.program.constant(name) for name in call.program.constants]  # keeps them
        self._tag = object()  # in the replay cache: every call with it has been compared with the problem
        self._results = _RESULTS[2:] if "dout" in arrays else _RESULTS[:2]

    @has_own_axes
    def __call__(
        self,
        *arrays: Array,
        out: Array | None = None,
        stats: Array | None = None,
        dq: Array | None = None,
        dk: Array | None = None,
        dv: Array | None = None,
        dstats: Array | None = None,
        **options: Unpack[Options],
    ) -> ResultT:
        """Compute the call with other arrays.

        Args:
            arrays: q, k and v; for the backward pass dout, q, k, v, out and stats. Shapes are as for
                :func:`cupy_sdpa.attention` and :func:`cupy_sdpa.attention_backward`.
            out, stats, dq, dk, dv: arrays to write the results into. Default None: new arrays.
            dstats: the gradient of the log-sum-exp, if the backward pass was prepared with one.
            options: options that differ from the options of :func:`prepare`, such as other lengths.

        Returns:
            The results of the prepared function: an array, or a tuple.

        Raises:
            TypeError: the number of arrays is wrong, a result does not belong to the call, or an option is passed that
                :func:`prepare` has already set, such as ``return_stats``.
            ValueError: the arguments define a problem that differs from the prepared one.

        >>> import numpy as np, cupy_sdpa
        >>> q = k = v = np.ones((8, 2, 16, 1), np.float32, order="F")
        >>> call = cupy_sdpa.prepare(q, k, v, causal=True)
        >>> out = np.empty_like(q)
        >>> call(2 * q, k, v, out=out) is out
        True
        """
        merged = {**self._options, **options} if options else self._options
        passed = (*arrays, out, stats) if dq is dk is dv is dstats is None else (*arrays, out, stats, dq, dk, dv, dstats)
        tag = self._tag, len(arrays)
        results = run_cached(tag, passed, merged)
        if results is None:
            named = self._named(arrays, {"out": out, "stats": stats, "dq": dq, "dk": dk, "dv": dv})
            named |= {} if dstats is None else {"dstats": dstats}
            merged = kept_options(named["q"], merged)  # as in prepare: a recorded function may read its arrays in another order

            if repeated := [name for name in options if name in self._outputs]:
                name = repeated[0]
                raise TypeError(
                    f"{name} is {merged[name]!r}, but prepare already set it: prepare another call with another {name}="
                )
            call = Call.of(self._function, **named, **merged, **self._outputs)
            key = CallKey(tag, (*self._inputs, *_RESULTS, "dstats")[: len(passed)], passed, merged)
            results = call.run(key, check=functools.partial(self._check, _in_words(named, merged)))
        result: Any = results[0] if len(results) == 1 else tuple(results)
        return result  # type: ignore[no-any-return]

    def _check(self, passed: Mapping[str, str], call: ReadCall) -> None:
        """Raise ValueError if a call with the arguments ``passed``, in words, defines another problem."""
        if _problems(call) != self._problems:
            raise ValueError(_difference(self.problem, call.problem or self.problem, self._given, passed))

    def _named(self, arrays: tuple[Array, ...], results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays by name."""
        if len(arrays) != len(self._inputs):
            raise TypeError(f"{len(arrays)} arrays are passed; the call was prepared for {', '.join(self._inputs)}")
        given = {name: array for name, array in results.items() if array is not None}
        if extra := [name for name in given if name not in self._results]:
            raise TypeError(f"{extra[0]} is not a result of the prepared call; its results are {', '.join(self._results)}")
        return {**dict(zip(self._inputs, arrays, strict=True)), **given}

    def __repr__(self) -> str:
        return f"<prepared: {self.problem}>"


def _in_words(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """Return the arrays and options of a call by name, for messages."""
    given = {name: x for name, x in {**arrays, **options}.items() if x is not None}
    return {
        name: f"{tuple(x.shape)} {x.dtype}" if hasattr(x, "shape") and hasattr(x, "dtype") else repr(x)
        for name, x in given.items()
        if not callable(x) and not isinstance(x, Mapping)
    }


def _difference(prepared: Problem, passed: Problem, *given: Mapping[str, str]) -> str:
    """Describe how two problems differ, or the arguments ``given`` if several launches compute the call."""
    one, other = (", ".join(map(str, problem.tensors)) for problem in (prepared, passed))
    if one == other:
        one, other = str(prepared), str(passed)
    if one == other:
        assumed = {*OF_FORWARD} - given[0].keys()
        names = [name for name in {**given[0], **given[1]} if given[0].get(name) != given[1].get(name) and name not in assumed]
        one, other = (", ".join(f"{name} {x.get(name)}" for name in names) for x in given)
    values = f"Prepared: {one}. Passed: {other}." if one else "Their functions, or the blocks of their masks, differ."
    return f"the arguments define a problem that differs from the prepared one. {values} Prepare a call for each problem"


#: The results that a prepared call can write into the caller's arrays.
_RESULTS = ("out", "stats", "dq", "dk", "dv")


def _problems(call: ReadCall) -> tuple[Any, ...]:
    """Return what prepared calls have in common: the specs of the arrays, and the steps."""
    return call.problem, call.tensors, tuple((step.name, step.attend and step.attend.problem) for step in call.program.steps)
