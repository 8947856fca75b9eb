"""Questions about calls: what would run and how, here or on a GPU that is not here, and what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from .calls.arguments import read_backward, read_forward, read_shapes
from .calls.call import every_launch, explain_here, planned_report, refused
from .calls.options import DTensors, Options, takes_options
from .calls.report import Report
from .calls.staging import engine_problem
from .device import cupy_runtime
from .errors import CudnnError
from .graph.patterns import graph_of
from .problem.problem import Problem
from .problem.validation import ReturnStats
from .support.why_not import unverified, why_not
from .version import RELEASES, version_number, version_text

if TYPE_CHECKING:  # cuDNN's rooms are entered only where they are needed
    from .plans.plan_cache import PlanCache


@takes_options
def problem(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: Any = None,
    seq_lens: bool = False,
    return_stats: ReturnStats = False,
    backward: bool = False,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: DTensors = False,
    **options: Unpack[Options],
) -> Problem:
    """What a call would ask, from shapes and dtypes alone: for :func:`explain`, and for :func:`cupy_sdpa.store.build`.

    Args:
        q, k, v: shapes ``(D, Hq, Sq, B)``, ``(D, Hkv, Skv, B)`` and ``(Dv, Hkv, Skv, B)`` of dense arrays in Fortran order; or
            arrays, of which nothing is read but shape, strides and dtype.
        dtype: of arrays given as shapes.
        seq_lens: whether arrays of lengths are given. Default False.
        return_stats, options: as for :func:`cupy_sdpa.attention`; every array may be given as its shape (a bias is then of
            q's dtype), ``alibi_slopes`` and ``sinks`` as True. Of the scale only the sign matters.
        backward: the gradients. Default False.
        deterministic: as for the call.
        return_dbias, return_dsinks, return_dtensors: as for :func:`cupy_sdpa.attention_backward`.

    Returns:
        The problem, frozen and hashable; calls with such arrays use its plan.

    Raises:
        TypeError, ValueError: the arguments are no attention problem at all.

    >>> import cupy_sdpa
    >>> print(cupy_sdpa.problem((128, 32, 4096, 1), (128, 8, 4096, 1), (128, 8, 4096, 1), dtype="bfloat16", causal=True))
    forward attention, bfloat16: batch 1, 32 query and 8 key/value heads (GQA, 4 query heads per key/value head), \
4096 queries, 4096 keys, head dim 128, causal from the top left
    """
    return read_shapes(
        q, k, v, options, dtype=dtype, seq_lens=seq_lens, return_stats=return_stats, backward=backward,
        return_dbias=return_dbias, return_dsinks=return_dsinks, return_dtensors=return_dtensors, deterministic=deterministic,
    )  # fmt: skip


@takes_options
def explain(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    return_stats: ReturnStats = False,
    backward: bool = False,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: DTensors = False,
    dout: Any = None,
    out: Any = None,
    stats: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    gpu: str | None = None,
    cudnn: str | None = None,
    **options: Unpack[Options],
) -> Report:
    """Whether and how :func:`cupy_sdpa.attention`, or :func:`cupy_sdpa.attention_backward`, would run with the same arguments.

    Nothing is executed. On a GPU that is here, the plan that is built is kept, and is the very one that the call then uses.
    With ``gpu`` the question is about a GPU that need not be here: the real cuDNN plans for its description, in a process of
    its own, and the plan goes to the store, where a process on such a GPU finds it.

    Args:
        q, k, v: as for the call; or, in place of all arguments but the last two, a problem (:func:`cupy_sdpa.problem`).
        return_stats, deterministic, return_dbias, return_dsinks, return_dtensors, options: as for the call.
        backward: ask about the backward pass. Default False.
        dout, out, stats, dq, dk, dv: as for the call; what is not given is taken to be dense, in Fortran order.
        gpu: the name of a described GPU, such as ``"H200"``, or the path of a description. Default None: the arrays' own
            device, or the current one.
        cudnn: a version, such as ``"9.19"``. Where it is not the one that plans here, the answer comes from the support table
            alone, and says so. Default None: the one that plans here.

    Returns:
        A report: true where the call would run; printed, or shown in a notebook, the problem, the graph, and the plan or every
        reason against it.

    Raises:
        TypeError, ValueError: the arguments are no attention problem at all, as the call would raise; an unknown GPU or
            version.
        CudnnError: a GPU was named, and this machine cannot plan for it; the message says what it lacks.

    >>> import numpy as np, cupy_sdpa
    >>> x = np.ones((8, 1, 4, 1), np.float32)
    >>> report = cupy_sdpa.explain(x, x, x)
    >>> bool(report), report.engine
    (True, 'numpy')
    >>> shape = (512, 8, 1024, 2)
    >>> asked = cupy_sdpa.problem(shape, shape, shape, dtype="float16", backward=True)
    >>> print(cupy_sdpa.explain(asked, gpu="H200", cudnn="9.19").reasons[0])
    gradients with head dims 512 and 512 are not supported on compute capability 9.0 with cuDNN 9.19.0: use head dims up to 256
    """
    if isinstance(q, Problem):
        others = {
            "k": k, "v": v, "return_stats": return_stats, "backward": backward, "deterministic": deterministic,
            "return_dbias": return_dbias, "return_dsinks": return_dsinks, "return_dtensors": return_dtensors, "dout": dout,
            "out": out, "stats": stats, "dq": dq, "dk": dk, "dv": dv, **options,
        }  # fmt: skip
        if extra := [name for name, value in others.items() if value is not None and value is not False]:
            raise TypeError(f"a problem is given, and {extra[0]}: it belongs into cupy_sdpa.problem(...)")
        return every_launch(q, lambda asked: _elsewhere(asked, gpu, cudnn) if gpu or cudnn else _on_current_device(asked))
    if backward:
        call = read_backward(
            q, k, v, options, dout=dout, out=out, stats=stats, dq=dq, dk=dk, dv=dv,
            deterministic=deterministic, return_dbias=return_dbias, return_dsinks=return_dsinks,
            return_dtensors=return_dtensors,
        )  # fmt: skip
    else:
        call = read_forward(q, k, v, options, return_stats=return_stats, deterministic=deterministic, out=out, stats=stats)
    if not gpu and not cudnn:
        return call.explain()
    return every_launch(engine_problem(call.problem, call.bucket, True), lambda asked: _elsewhere(asked, gpu, cudnn))


def _on_current_device(asked: Problem) -> Report:
    device = cupy_runtime.current_device()
    if device is None:
        raise ValueError("there is no GPU here to ask about: name one, explain(problem, gpu='H200')")
    return explain_here(asked, device)


def _elsewhere(asked: Problem, named: str | None, cudnn: str | None) -> Report:
    from .offline.planner import Planner, load_target

    if named is None:
        raise ValueError(f"cudnn is {cudnn!r} and no GPU is named: explain(problem, gpu='H200', cudnn={cudnn!r})")
    target, graph = load_target(named), graph_of(asked)
    wanted = None if cudnn is None else version_number(cudnn)
    if asked.trivial:
        return Report("cuDNN", asked, graph)

    if wanted is not None and (reasons := why_not(asked, wanted, target.capability)):
        return refused(asked, reasons, _where(target.model, wanted))
    try:
        with Planner() as planner:
            if wanted in (None, planner.version):
                note = _where(target.model, planner.version)
                if reasons := why_not(asked, planner.version, target.capability):
                    return refused(asked, reasons, note)
                answer = planner.plan(asked, target)
                if isinstance(answer, str):
                    return Report("cuDNN", asked, graph, reasons=tuple(answer.splitlines()), note=note)
                return planned_report(asked, answer, target.capability, note)
            why = f"cuDNN {version_text(planner.version)} is here"
    except CudnnError as error:
        if wanted is None:
            raise
        why = error.summary.splitlines()[0]
    assert wanted is not None
    newest = f" (which ends with {version_text(RELEASES[-1])})" if wanted > RELEASES[-1] else ""
    note = f"{_where(target.model, wanted)}; by the support table{newest} alone, it was not planned: {why}"
    return Report("cuDNN", asked, graph, note=note, unverified=unverified(asked, wanted, target.capability))


def _where(model: str, version: int) -> str:
    return f"{model}; cuDNN {version_text(version)}"


def get_plan_cache() -> PlanCache:
    """The plan cache of the calling thread in the current CUDA context.

    Returns:
        The cache: ``hits``, ``misses``, ``size``, ``bytes``, ``limit``, ``clear()``, ``set_limit()``; of the calls that are
        recorded as CUDA graphs ``recordings``, ``recording_bytes``, ``recording_limit``, ``set_recording_limit()``;
        printed, or shown in a notebook, a table of its plans.

    Raises:
        RuntimeError: there is no GPU, or no CuPy; the message says what to install.
        CudnnError: cuDNN is not found.
    """
    if cupy_runtime.current_device() is None:
        cupy_runtime.cupy()  # raises where that is what is missing
        raise RuntimeError(
            "there is no GPU here, hence no plan cache: CuPy finds no CUDA device. "
            "`python -m cupy_sdpa info` lists what is missing"
        )
    from .plans.plan_cache import session

    return session(cupy_runtime.context_id()).cache
