"""Calls that are planned once and run many times, and tuned where that is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from .calls.arguments import read_backward, read_forward
from .calls.call import Call, tuning_on
from .calls.options import ARRAYS, DTensors, Options, takes_options
from .calls.replay_cache import learn, repeated
from .calls.report import Report
from .problem.problem import Problem
from .problem.validation import ReturnStats

if TYPE_CHECKING:  # cuDNN's rooms are entered only for CuPy arrays
    from .calls.autotune import Tuning


@takes_options
def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_stats: ReturnStats = False,
    backward: bool = False,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: DTensors = False,
    autotune: bool | str = False,
    **options: Unpack[Options],
) -> Prepared:
    """Plan a call now, to run it many times later on arrays of the same shapes, layouts and dtypes.

    Args:
        q, k, v, return_stats, options: as for :func:`cupy_sdpa.attention`. The contents of q, k and v matter only to
            ``autotune``.
        backward: prepare :func:`cupy_sdpa.attention_backward`. Default False.
        deterministic: as for the call that is prepared.
        return_dbias, return_dsinks, return_dtensors: as for :func:`cupy_sdpa.attention_backward`.
        autotune: run every engine config that cuDNN's heuristics propose on these arrays, and keep the fastest, also for later
            processes. It takes about a second and waits for the GPU; with ``backward`` it runs the forward pass first.
            ``"knobs"`` also tries every setting of the engines' knobs that finalizes, which takes up to half a minute; such
            kernels are not meant for every problem, so try them where nothing is lost (docs/plans.md). Default False. On
            the CPU there is nothing to tune.

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
    if backward:
        fixed: dict[str, Any] = {
            "deterministic": deterministic, "return_dbias": return_dbias, "return_dsinks": return_dsinks,
            "return_dtensors": return_dtensors,
        }  # fmt: skip
        call = read_backward(q, k, v, options, **fixed)
    else:
        fixed = {"return_stats": return_stats, "deterministic": deterministic}
        call = read_forward(q, k, v, options, **fixed)
    report = call.explain()
    if report.reasons:
        raise report.error("\n".join(report.reasons))
    found: list[Tuning] = []
    if _check(autotune) and call.on_gpu and not call.problem.trivial:
        call = call.with_gradient_inputs()
        with tuning_on(autotune == "knobs") as found:
            call.run()
        report = call.explain()
    return Prepared(call.problem, dict(options), fixed, report, found[0] if found else None)


class Prepared:
    """A call that is planned already; made by :func:`prepare`.

    Attributes:
        problem: what it computes.
        report: how.
        tuning: what ``autotune`` has measured, or None.
    """

    def __init__(
        self, problem: Problem, options: dict[str, Any], fixed: dict[str, Any], report: Report, tuning: Tuning | None
    ) -> None:
        self.problem, self.report, self.tuning = problem, report, tuning
        self._options, self._fixed = options, fixed
        self._how = object()  # stands for the options, and what was asked for
        given = {name: value for name, value in options.items() if name in ARRAYS and hasattr(value, "strides")}
        self._inputs = ("dout", "q", "k", "v", "out", "stats") if problem.backward else ("q", "k", "v")
        self._arrays, self._names = tuple(given.values()), (*self._inputs, "out", "stats", "dq", "dk", "dv", *given)
        # What functions come to may change from call to call.
        self._repeatable = not any(callable(value) for value in options.values())

    def __call__(
        self, *arrays: Any, out: Any = None, stats: Any = None, dq: Any = None, dk: Any = None, dv: Any = None, **options: Any
    ) -> Any:
        """Compute.

        Args:
            arrays: q, k and v; for the backward pass dout, q, k, v, out and stats.
            out, stats, dq, dk, dv: arrays to write into.
            options: other values than those that were prepared, such as other lengths.

        Raises:
            ValueError: the arrays pose another problem than the one that was prepared.
        """
        given = (*arrays, out, stats, dq, dk, dv, *self._arrays)
        computed = repeated(self._how, given, options) if self._repeatable else None
        if computed is None:
            results = {"out": out, "stats": stats, "dq": dq, "dk": dk, "dv": dv}
            into = {name: array for name, array in results.items() if array is not None}
            call = self._read(arrays, into, {**self._options, **options})
            if call.problem != self.problem:
                raise ValueError(_different(self.problem, call.problem))
            computed = call.run()
            if self._repeatable:
                learn(self._how, self._names, given, options, call)
        return computed[0] if len(computed) == 1 else tuple(computed)

    def _read(self, arrays: tuple[Any, ...], into: dict[str, Any], options: dict[str, Any]) -> Call:
        results = ("dq", "dk", "dv") if self.problem.backward else ("out", "stats")
        if len(arrays) != len(self._inputs):
            raise TypeError(f"{len(arrays)} arrays are given; the call was prepared for {', '.join(self._inputs)}")
        if extra := [name for name in into if name not in results]:
            raise TypeError(f"{extra[0]} is no result of the call that was prepared; it gives {', '.join(results)}")
        if not self.problem.backward:
            q, k, v = arrays
            return read_forward(q, k, v, options, **self._fixed, **into)
        dout, q, k, v, out, stats = arrays
        return read_backward(q, k, v, options, dout=dout, out=out, stats=stats, **self._fixed, **into)

    def __repr__(self) -> str:
        return f"<prepared: {self.problem}>"


def _different(prepared: Problem, given: Problem) -> str:
    """What tells two problems from one another: their arrays, or, where these are the same, the problems in words."""
    one, other = (", ".join(map(str, problem.tensors)) for problem in (prepared, given))
    if one == other:
        one, other = str(prepared), str(given)
    told = f"Prepared: {one}. Given: {other}." if one != other else "They differ in what their functions or options are."
    return f"this is another problem than the one that was prepared. {told} Prepare a call for each"


def _check(autotune: Any) -> bool:
    if autotune not in (False, True, "knobs"):
        raise ValueError(f"autotune is {autotune!r}; it must be False, True or 'knobs'")
    return bool(autotune)


@contextmanager
def autotune(*, knobs: bool = False) -> Iterator[list[Tuning]]:
    """Tune every call made inside that has not been tuned before; gives the list that what was found is added to.

    The first call of each problem takes a second and waits for the GPU; later ones, in later processes too, use what was kept.
    On the CPU there is nothing to tune.

    Args:
        knobs: try settings of knobs by hand, too; see :func:`prepare`. Default False.

    >>> import numpy as np, cupy_sdpa
    >>> x = np.ones((8, 2, 16, 1), np.float32, order="F")
    >>> with cupy_sdpa.autotune() as found:
    ...     out = cupy_sdpa.attention(x, x, x)
    >>> found
    []
    """
    with tuning_on(knobs) as found:
        yield found
