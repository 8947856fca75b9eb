"""Inspect calls without running them: problems, reports on this or another GPU, and the plan cache."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Unpack

from .attention_functions import attention, attention_backward
from .block_masks.block_mask_calls import dense_description, method_description, reasons_for_dense
from .block_masks.empty_blocks import describe_empty_blocks
from .block_masks.entries import TableSizes
from .block_masks.intersection import within_band
from .core._typing import Array
from .core.boundary.arguments import read_shapes
from .core.boundary.conversion import Conversion
from .core.boundary.layouts import takes_default
from .core.boundary.options import split_requests, takes_options
from .core.errors import CudnnError, Unsupported
from .core.graph import graph_of
from .core.options.band import read as read_band
from .core.options.table import GradientOptions
from .core.options.values import read_flag
from .core.problem.problem import Problem
from .core.programs import stats_gradient
from .core.programs.calls import OF_FORWARD, Call
from .core.programs.executor import ReadCall
from .core.replay.call_report import (
    Report,
    explain_on_device,
    joined,
    plan_report,
    refusal_report,
    unplanned_report,
    with_workarounds,
)
from .core.runtime import cupy_runtime, driver
from .core.runtime.interpreted_array import plain
from .core.support.engine_problem import launched_problems
from .core.support.why_not import why_not
from .core.version import RELEASES, version_number, version_text
from .derivatives.derivative import TANGENTS
from .derivatives.derivative_form import form_of
from .derivatives.jvp import attention_jvp

if TYPE_CHECKING:  # modules that load cuDNN are imported only where they are needed
    from .core.cudnn_engine.plan import Target
    from .core.cudnn_engine.plan_cache import PlanCache
    from .offline.remote_planner import Planner

Arguments = ParamSpec("Arguments")


@takes_options(gradients=True)
def problem(
    q: Array | Sequence[int],
    k: Array | Sequence[int],
    v: Array | Sequence[int],
    *,
    dtype: Any = None,
    out_dtype: str = "",
    return_stats: bool | Literal["max_sumexp"] = False,
    backward: bool = False,
    deterministic: bool = False,
    dstats: bool = False,
    **options: Any,
) -> Problem:
    """Describe a call by shapes and dtypes, as a problem for :func:`explain` and :func:`cupy_sdpa.store.build`.

    Args:
        q, k, v: shapes ``(D, Hq, Sq, B)``, ``(D, Hkv, Skv, B)`` and ``(Dv, Hkv, Skv, B)`` of dense arrays in Fortran order; or
            arrays, of which only shape, strides and dtype are read.
        dtype: the dtype of q, k and v if they are shapes; ``"float8_e4m3fn"`` or ``"float8_e5m2"`` for FP8. For values with a
            mean (:func:`cupy_sdpa.fp8.quantize_qkv`) also pass ``return_stats=True``, because the call computes the
            log-sum-exp.
        out_dtype: the dtype of the output of FP8 arrays, as for :func:`cupy_sdpa.fp8.attention`. Default: q's dtype.
        return_stats, options: as for :func:`cupy_sdpa.attention`; every array may be passed as its shape (a bias then has q's
            dtype); ``seq_lens_q``, ``seq_lens_kv``, ``alibi_slopes`` and ``sinks`` also as True. Only the sign of the scale
            matters.
        backward: the problem of the gradients. Default False.
        deterministic: as for the call.
        requests: as for :func:`cupy_sdpa.attention_backward`.
        dstats: whether the call gets a gradient of the log-sum-exp. Default False.

    Returns:
        The problem, frozen and hashable; calls with such arrays use its plan.

    Raises:
        TypeError, ValueError: the arguments are invalid.
        Unsupported: a GPU cannot guarantee ``batch_invariant=True``.

    >>> import cupy_sdpa
    >>> print(cupy_sdpa.problem((128, 32, 4096, 1), (128, 8, 4096, 1), (128, 8, 4096, 1), dtype="bfloat16", causal=True))
    forward attention, bfloat16: batch 1, 32 query and 8 key/value heads (GQA, 4 query heads per key/value head), 4096 \
queries, 4096 keys, head dim 128, causal from the top left
    """
    if hasattr(options.get("scale"), "shape"):  # q is multiplied by it before
        options = {**options, "scale": 1.0}
    requests, others = split_requests(options)
    if backward and read_flag("dstats", dstats):
        q, k, v, others = stats_gradient.wide_shapes(q, k, v, others, dtype, {"deterministic": deterministic, **requests})
    requests = {name: value for name, value in requests.items() if name != "return_dscale"}
    return read_shapes(
        q, k, v, others, dtype=dtype, out_dtype=out_dtype, return_stats=return_stats, backward=backward,
        deterministic=deterministic, **requests,
    )  # fmt: skip


@takes_options(gradients=True)
def explain(
    q: Array | Problem,
    k: Array | None = None,
    v: Array | None = None,
    *,
    return_stats: bool | Literal["max_sumexp"] = False,
    backward: bool = False,
    jvp: bool = False,
    deterministic: bool = False,
    dout: Array | None = None,
    out: Array | None = None,
    stats: Array | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dstats: Array | None = None,
    gpu: str | None = None,
    cudnn: str | None = None,
    **options: Unpack[GradientOptions],
) -> Report:
    """Report whether and how :func:`cupy_sdpa.attention`, its gradients or its derivative would run, without running it.

    On a GPU of this machine, the plan is built and cached, and the call uses it. ``gpu`` selects a GPU that need not be in this
    machine: cuDNN plans for its description in a separate process, and stores the plan in the disk cache, where a process on
    such a GPU finds it.

    Args:
        q, k, v: as for the call; or q is a problem (:func:`cupy_sdpa.problem`), which replaces all other arguments except gpu
            and cudnn.
        return_stats, deterministic, options: as for the call.
        requests: as for :func:`cupy_sdpa.attention_backward`.
        backward: explain the backward pass. Default False.
        jvp: explain :func:`cupy_sdpa.attention_jvp` with the passed tangents dq, dk and dv, or with all three if you pass none;
            the report has all passes. Default False.
        dout, out, stats, dq, dk, dv: as for the call; missing arrays are assumed to be dense, in Fortran order.
        dstats: as for the call. Default None: no gradient of the log-sum-exp.
        gpu: the name of a described GPU, such as ``"H200"``, or the path of a description. Default None: the device of the
            arrays, or the current one.
        cudnn: a version, such as ``"9.19"``. For a version other than the installed one, the report relies on the support table
            alone and says so. Default None: the installed version.

    Returns:
        A report, which is true if the call would run. It prints the problem, the graph, and the plan or every reason why the
        call cannot run.

    Raises:
        TypeError, ValueError: the arguments are invalid, as for the call; or the GPU or the version is unknown.
        CudnnError: this machine cannot plan for ``gpu``; the message names what is missing.

    >>> import numpy as np, cupy_sdpa
    >>> x = np.ones((8, 1, 4, 1), np.float32, order="F")
    >>> report = cupy_sdpa.explain(x, x, x)
    >>> bool(report), report.engine
    (True, 'numpy')
    >>> shape = (512, 8, 1024, 2)
    >>> problem = cupy_sdpa.problem(shape, shape, shape, dtype="float16", backward=True)
    >>> print(cupy_sdpa.explain(problem, gpu="H200", cudnn="9.19").reasons[0])
    gradients with head dims 512 and 512 are not supported on compute capability 9.0 with cuDNN 9.19.0: use head dims up to 256
    """
    flags: dict[str, Any] = {"return_stats": return_stats, "backward": backward, "jvp": jvp, "deterministic": deterministic}
    outputs, others = split_requests(options)
    results: dict[str, Any] = {"dout": dout, "out": out, "stats": stats, "dq": dq, "dk": dk, "dv": dv, "dstats": dstats}
    if isinstance(q, Problem):
        return _explain_problem(q, {"k": k, "v": v, **flags, **outputs, **results, **others}, gpu, cudnn)
    if jvp and backward:
        raise ValueError("backward and jvp are True: pass one of them")
    function: Callable[..., Any]
    names: tuple[str, ...] = tuple(results)
    missing: Sequence[str] = ()
    if backward:
        function, missing = attention_backward, OF_FORWARD
    elif jvp:
        function, names = attention_jvp, TANGENTS
        missing = () if any(results[name] is not None for name in TANGENTS) else TANGENTS
    else:
        function, names = attention, ("out", "stats")
    of_function = {"q": q, "k": k, "v": v, **{name: results[name] for name in names}, "deterministic": deterministic}
    of_function |= outputs if backward else {"return_stats": return_stats}
    try:
        call, report = _described(function, (), {**of_function, **others}, gpu, cudnn, missing)
    except Unsupported as error:
        if others.get("batch_invariant"):
            rest: dict[str, Any] = {**flags, **outputs, **results, **others, "batch_invariant": False}
            report = explain(q, k, v, **rest, gpu=gpu, cudnn=cudnn)
            reasons = tuple(dict.fromkeys((str(error), *report.reasons)))
            return dataclasses.replace(report, plan=None, launches=(), reasons=reasons, batch_dependence=None)
        if not backward:
            raise
        # gradients of paged keys: there is no graph for them
        forward = explain_function(attention, q, k, v, **others, gpu=gpu, cudnn=cudnn)
        note = "the steps belong to the forward pass"
        return dataclasses.replace(forward, plan=None, launches=(), reasons=(str(error),), note=note)
    own = call.arrays
    if jvp and report.reasons:
        given_tangents = tuple(name in own for name in TANGENTS)
        form = form_of(own["q"].shape[0], own["v"].shape[0], given_tangents, others, deterministic=deterministic)
        report = dataclasses.replace(report, reasons=(*report.reasons, form.remedy))
    if backward and dstats is not None and report.reasons:
        report = dataclasses.replace(report, reasons=(*report.reasons, stats_gradient.REMEDY))
    if others.get("batch_invariant") and not report.reasons:
        report = dataclasses.replace(report, batch_dependence="")  # otherwise the call would have been refused
    requested: dict[str, Any] = {"outputs": outputs if backward else {}, "return_stats": not backward and return_stats}
    own_conversion = Conversion.of(q, others)
    own_options: Mapping[str, Any] = others if own_conversion is None else own_conversion.options
    converted, blocks = _notes(own, own_options, report, **requested)
    return dataclasses.replace(report, conversion=converted, blocks=blocks)


def _with_arguments_of(
    function: Callable[Arguments, Any],
) -> Callable[[Callable[..., bool]], Callable[Arguments, bool]]:
    """Give a predicate the signature of a function."""

    def decorate(predicate: Callable[..., bool]) -> Callable[Arguments, bool]:
        result: Any = predicate
        result.__signature__ = inspect.signature(function).replace(return_annotation=bool)
        return result  # type: ignore[no-any-return]

    return decorate


@_with_arguments_of(explain)
def supported(*arguments: Any, gpu: str | None = None, cudnn: str | None = None, **options: Any) -> bool:
    """Return True if the call described by these arguments can run.

    It takes the arguments of :func:`explain`, which also returns the reasons. Use it to choose between this package and another
    implementation: with valid arguments it never raises an exception. As with :func:`explain`, nothing is executed, and the
    plan is cached for the call.

    Args:
        q, k, v, options: as for :func:`explain`; or a single problem instead.
        gpu, cudnn: as for :func:`explain`. If this machine cannot plan for ``gpu`` because it has no cuDNN, the answer comes
            from the support table of the newest known version.

    Returns:
        Whether the call can run here, or on ``gpu``.

    Raises:
        TypeError, ValueError: the arguments are invalid.

    >>> import numpy as np, cupy_sdpa
    >>> x = np.ones((8, 1, 4, 1), np.float32, order="F")
    >>> cupy_sdpa.supported(x, x, x, backward=True)
    True
    >>> shape = (512, 8, 1024, 2)
    >>> problem = cupy_sdpa.problem(shape, shape, shape, dtype="float16", backward=True)
    >>> cupy_sdpa.supported(problem, gpu="H200", cudnn="9.19")
    False
    """
    try:
        return bool(explain(*arguments, gpu=gpu, cudnn=cudnn, **options))
    except Unsupported:
        return False
    except CudnnError:
        if gpu is None or cudnn is not None:
            return False
        return supported(*arguments, gpu=gpu, cudnn=version_text(RELEASES[-1]), **options)


@takes_default
def explain_function(
    function: Callable[..., Any], *arguments: Any, gpu: str | None = None, cudnn: str | None = None, **options: Any
) -> Report:
    """Report whether and how a call of a function that computes attention would run, without running it.

    The report has the call's steps, the plan of each attention step, and the bytes of temporary arrays.

    Args:
        function: :func:`cupy_sdpa.attention`, ``attention_backward``, ``attention_jvp``, ``weight_sums``,
            ``weight_entropy``, :func:`cupy_sdpa.shared_prefix_attention`, :func:`cupy_sdpa.fp8.attention`, or an operation
            that you wrote (:doc:`/extending`), also in a ``functools.partial``.
        arguments, options: its arguments.
        gpu, cudnn: as for :func:`explain`.

    Returns:
        The report, which is true if the call would run.

    Raises:
        TypeError, ValueError, Unsupported: as the function.
        CudnnError: this machine cannot plan for ``gpu``.

    >>> import numpy as np, cupy_sdpa
    >>> x = np.ones((8, 1, 256, 1), np.float32, order="F")
    >>> mask = cupy_sdpa.block_mask(cupy_sdpa.zoo.sliding_window(64), 256, 256)
    >>> report = cupy_sdpa.explain_function(cupy_sdpa.attention_jvp, x, x, x, x, block_mask=mask)
    >>> bool(report), len(report.steps) > 1
    (True, True)
    """
    _, report = _described(function, arguments, options, gpu, cudnn)
    return report


def _described(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    gpu: str | None,
    cudnn: str | None,
    missing: Sequence[str] = (),
) -> tuple[ReadCall, Report]:
    """Read the call of :func:`explain_function`, and return it with its report; ``missing`` is as for :meth:`.Call.read`."""
    call = Call.of(function, *arguments, **options)
    if gpu is None and cudnn is None:
        read_call = call.read(missing=missing)
        return read_call, read_call.report()

    def explain_for(problem: Problem) -> Report:
        return _explain_for(problem, gpu, cudnn)

    if options.get("engine") == "cupy":
        raise ValueError(f"engine is 'cupy', which plans nothing for gpu={gpu!r}, cudnn={cudnn!r}: omit engine, gpu or cudnn")
    read_call = call.read(for_gpu=True, missing=missing)
    return read_call, read_call.report(explain_for, lambda: _version_and_capability(gpu, cudnn))


def _notes(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    report: Report,
    *,
    outputs: Mapping[str, Any],
    return_stats: Any,
) -> tuple[str, str]:
    """Return what a report says about ``compute_dtype``, a block mask, and a mask function's empty blocks."""
    q, k, v = (arrays[name] for name in "qkv")
    conversion = ""
    if (kind := options.get("compute_dtype")) is not None and str(q.dtype) != str(kind):
        conversion = f"{q.dtype} to {kind} before the call, and back after it"
    rest = {name: x for name, x in options.items() if name not in ("block_mask", "compute_dtype")}
    reasons = ["FP8 arrays"] * ("descale_k" in arrays)
    if (mask := options.get("block_mask")) is not None:
        reasons += reasons_for_dense(rest, return_stats=return_stats, outputs=outputs)
        if reasons:
            return conversion, dense_description(mask, reasons)
        mask = within_band(mask, read_band(rest))
        return conversion, method_description(mask, TableSizes(q.shape[1], v.shape[1], q.shape[3]))
    settings, function = report.problem.settings, rest.pop("mask_mod", None)
    reasons += reasons_for_dense(rest, return_stats=return_stats, outputs=outputs)
    if reasons or function is None or settings.expression is None or settings.expression.mask is None:  # or at most a band
        return conversion, ""
    if cupy_runtime.current_device() is not None and cupy_runtime.capturing():
        return conversion, ""
    sizes = q.shape[2], k.shape[2], q.shape[1], q.shape[3]
    tensors = {name: plain(x) for name, x in (options.get("tensors") or {}).items()}
    return conversion, describe_empty_blocks(function, tensors, sizes, settings.band)


def _explain_problem(problem: Problem, others: Mapping[str, Any], gpu: str | None, cudnn: str | None) -> Report:
    """Return the report on a problem; raise TypeError for other arguments."""
    if extra := [name for name, value in others.items() if value is not None and value is not False]:
        raise TypeError(f"a problem is given, and {extra[0]}: pass {extra[0]} to cupy_sdpa.problem(...)")
    parts = launched_problems(problem)
    if gpu or cudnn:
        report = joined([_explain_for(part, gpu, cudnn) for part in parts])
        return with_workarounds(report, [problem], lambda: _version_and_capability(gpu, cudnn))
    device = cupy_runtime.current_device()
    if device is None:
        reason = "there is no GPU here: name one, explain(problem, gpu='H200')"
        return Report("cuDNN", problem, graph_of(problem), reasons=(reason,))
    report = joined([explain_on_device(part, device) for part in parts])
    if (plan := report.plan) is None:
        return report
    return with_workarounds(report, [problem], lambda: (plan.cudnn, cupy_runtime.capability(device)))


def _explain_for(problem: Problem, gpu: str | None, cudnn: str | None) -> Report:
    """Explain a problem for a described GPU, with a plan if the version is the installed one."""
    from .core.cudnn_engine.plan import Target
    from .offline.remote_planner import kept_planner

    if gpu is None:
        raise ValueError(f"cudnn is {cudnn!r} and gpu is None: name a GPU, explain(problem, gpu='H200', cudnn={cudnn!r})")
    target = Target.described(gpu)
    version = None if cudnn is None else version_number(cudnn)
    if problem.trivial:
        return Report("cuDNN", problem, graph_of(problem))
    if version is not None and (reasons := why_not(problem, version, target.capability)):
        return refusal_report(problem, reasons, _target_text(target.model, version))
    try:
        planner = kept_planner()
        if version in (None, planner.version):
            return _planned_report(planner, problem, target)
        cause = f"the installed cuDNN is {version_text(planner.version)}"
    except CudnnError as error:
        if version is None:
            raise
        cause = error.summary.splitlines()[0]
    assert version is not None
    newest = f" (which ends with {version_text(RELEASES[-1])})" if version > RELEASES[-1] else ""
    note = f"{_target_text(target.model, version)}; from the support table{newest} alone, not planned: {cause}"
    return unplanned_report(problem, version, target.capability, note)


def _version_and_capability(gpu: str | None, cudnn: str | None) -> tuple[int, int]:
    """Return the version of cuDNN and the compute capability that a report is for."""
    from .core.cudnn_engine.plan import Target
    from .offline.remote_planner import kept_planner

    assert gpu
    return kept_planner().version if cudnn is None else version_number(cudnn), Target.described(gpu).capability


def _planned_report(planner: Planner, problem: Problem, target: Target) -> Report:
    """Return the report on a problem that the installed cuDNN plans for a described GPU."""
    from .core.cudnn_engine.described import plan_described

    note = _target_text(target.model, planner.version)
    if reasons := why_not(problem, planner.version, target.capability):
        return refusal_report(problem, reasons, note)
    answer = planner.call(plan_described, problem, target)
    if isinstance(answer, str):
        return Report("cuDNN", problem, graph_of(problem), reasons=tuple(answer.splitlines()), note=note)
    return plan_report(problem, answer, target.capability, note)


def _target_text(model: str, version: int) -> str:
    return f"{model}; cuDNN {version_text(version)}"


def get_plan_cache() -> PlanCache:
    """Return the plan cache of the calling thread in the current CUDA context.

    Returns:
        The cache: ``hits``, ``misses``, ``size``, ``bytes``, ``limit``, ``clear()``, ``set_limit()``; for the captured CUDA
        graphs of repeated calls ``recordings``, ``recording_bytes``, ``recording_limit``, ``set_recording_limit()``. It prints
        as a table of its plans. Without a GPU or CuPy, the cache is new and empty.

    Raises:
        CudnnError: there is a GPU, and cuDNN is not found.

    >>> from cupy_sdpa import get_plan_cache
    >>> get_plan_cache().size <= get_plan_cache().limit
    True
    """
    if cupy_runtime.current_device() is None:
        from .core.cudnn_engine.plan_cache import PlanCache

        return PlanCache()
    from .core.cudnn_engine.sessions import session

    return session(driver.context_id()).cache
