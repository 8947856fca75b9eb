"""The user's calls. numpy arrays run on the interpreter, CuPy arrays on cuDNN; neither ever stands in for the other."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from . import gpu
from .errors import CudnnError, Unsupported
from .interpreter import evaluate
from .patterns import forward
from .problem import Problem, Signature, problem
from .report import Report
from .support import Reason, why_not

if TYPE_CHECKING:  # cuDNN's rooms are entered only for CuPy arrays
    from .cache import PlanCache
    from .plan import Plan

T = TypeVar("T")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    return_stats: bool = False,
    out: Any = None,
    stats: Any = None,
) -> Any:
    r"""Scaled dot-product attention in Julia's layout, ``(head_dim, heads, seq, batch)``, Fortran order.

    .. math:: O = \operatorname{softmax}(\tau\, Q K^\top + \text{mask})\, V, \qquad
              L_i = \log \sum_j e^{\tau\, q_i \cdot k_j + \text{mask}_{ij}}

    numpy arrays give numpy arrays, computed on the CPU; CuPy arrays give CuPy arrays, computed by cuDNN's fused kernel on
    CuPy's current stream, without synchronizing, with nothing of size Sq x Skv in memory.

    Args:
        q: queries ``(D, Hq, Sq, B)``. float16 or bfloat16 on the GPU; also float32 and float64 on the CPU.
        k: keys ``(D, Hkv, Skv, B)``, of q's dtype. Hq is a multiple of Hkv; each key head serves Hq/Hkv query heads.
        v: values ``(Dv, Hkv, Skv, B)``, of q's dtype.
        scale: :math:`\tau`; default ``1/sqrt(D)``. Changing it never needs a new plan.
        causal: True or ``"top_left"``: query i sees the keys up to and with i. Default False: every query sees every key.
        return_stats: give L too, as float32. Default False.
        out: array ``(Dv, Hq, Sq, B)`` to write the result into, of q's dtype; it must not overlap an input.
        stats: float32 array ``(Sq, Hq, B)`` to write L into; implies ``return_stats``.

    Returns:
        ``out``, or ``(out, stats)``. New arrays are in Fortran order. A query that sees no key gives 0 and -inf.

    Raises:
        TypeError: numpy and CuPy arrays mixed, other kinds of arrays, a dtype that the engine does not take.
        ValueError: shapes that do not fit, a layout that cuDNN cannot read, a scale that is not finite.
        Unsupported: this cuDNN or GPU cannot run it; :func:`explain` says so beforehand.
        CudnnError: cuDNN failed.

    Sources: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Dao 2023, "FlashAttention-2", section 3.1 (L).

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (np.asfortranarray(rng.standard_normal((64, 8, 100, 2), np.float32)) for _ in range(3))
    >>> out, stats = cupy_sdpa.attention(q, k, v, causal=True, return_stats=True)
    >>> out.shape, stats.shape
    ((64, 8, 100, 2), (100, 8, 2))
    >>> bool(np.allclose(out[:, :, 0], v[:, :, 0], atol=1e-6))     # the first query sees only the first key
    True
    """
    call = _read(q, k, v, scale=scale, causal=causal, return_stats=return_stats, out=out, stats=stats)
    asked, arrays = call.problem, call.arrays
    if asked.trivial:
        call.allocate()
        arrays["out"][...] = 0
        if asked.stats:
            arrays["stats"][...] = -math.inf
    elif call.on_gpu:
        with gpu.on_device_of(q) as device:
            try:
                _planned(asked, device, lambda plan: _launch(plan, call))
            except (Unsupported, CudnnError) as error:
                error.add_note(f"asked for: {asked}")
                raise
    else:
        call.allocate()
        evaluate(forward(asked), arrays, call.scalars)
    return (arrays["out"], arrays["stats"]) if asked.stats else arrays["out"]


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    return_stats: bool = False,
    out: Any = None,
    stats: Any = None,
) -> Report:
    """Whether and how :func:`attention` with the same arguments would run; nothing is executed.

    The plan that it builds is kept, and is the very one that the call then uses.

    Args:
        q, k, v, scale, causal, return_stats, out, stats: as for :func:`attention`.

    Returns:
        A report: true where the call would run; printed, it shows the problem, the graph, and the plan or every reason
        against it.

    Raises:
        TypeError, ValueError: the arguments are no attention problem at all, as :func:`attention` would raise.

    >>> import numpy as np, cupy_sdpa
    >>> x = np.ones((8, 1, 4, 1), np.float32)
    >>> report = cupy_sdpa.explain(x, x, x)
    >>> bool(report), report.engine
    (True, 'numpy')
    """
    call = _read(q, k, v, scale=scale, causal=causal, return_stats=return_stats, out=out, stats=stats)
    graph = forward(call.problem)
    if not call.on_gpu:
        return Report("numpy", call.problem, graph)
    if call.problem.trivial:
        return Report("cuDNN", call.problem, graph)
    with gpu.on_device_of(q) as device:
        if reasons := _objections(call.problem, device):
            return Report("cuDNN", call.problem, graph, reasons=tuple(reason.text for reason in reasons))
        try:
            return Report("cuDNN", call.problem, graph, _planned(call.problem, device, lambda plan: plan.info))
        except Unsupported as error:
            return Report("cuDNN", call.problem, graph, reasons=tuple(str(error).splitlines()))


def get_plan_cache() -> PlanCache:
    """The plan cache of the calling thread in the current CUDA context.

    Returns:
        The cache: ``hits``, ``misses``, ``limit``, ``len()``, ``clear()``, ``set_limit()``; printed, a table of its plans.

    Raises:
        RuntimeError: there is no GPU.
        CudnnError: cuDNN is not found.
    """
    from .cache import session

    return session(gpu.context_id()).cache


@dataclass
class _Call:
    """A call's arguments, read: the problem they pose, the arrays by name, the numbers by name."""

    problem: Problem
    arrays: dict[str, Any]
    scalars: dict[str, float]
    on_gpu: bool

    def allocate(self) -> None:
        """Make the outputs that the caller did not give."""
        for spec in (self.problem.out, self.problem.stats):
            if spec is not None and self.arrays.get(spec.name) is None:
                like = self.arrays["q"]
                dtype = like.dtype if spec.name == "out" else np.float32
                empty = gpu.cupy().empty if self.on_gpu else np.empty
                self.arrays[spec.name] = empty(spec.shape, dtype, order="F")


def _read(q: Any, k: Any, v: Any, *, scale: Any, causal: Any, return_stats: bool, out: Any, stats: Any) -> _Call:
    """Check the arguments and pose the problem; the first thing wrong is raised, before anything is allocated."""
    arrays = {"q": q, "k": k, "v": v}
    arrays |= {name: array for name, array in (("out", out), ("stats", stats)) if array is not None}
    on_gpu = _engine(arrays)
    if causal not in (False, True, "top_left"):
        raise ValueError(f"causal is {causal!r}; it must be False, True or 'top_left'")
    tau = _scale(scale, q.shape[0] if q.ndim else 0)
    asked = problem(
        _signature(q), _signature(k), _signature(v),
        None if out is None else _signature(out), None if stats is None else _signature(stats),
        bool(return_stats), bool(causal), tau >= _SMALLEST_SCALE,
    )  # fmt: skip
    for name in ("out", "stats"):
        if name in arrays:
            for other in arrays:
                if other != name and _overlap(asked, arrays, name, other):
                    raise ValueError(f"{name} overlaps {other} in memory: results would overwrite it; pass an array of its own")
    return _Call(asked, arrays, {"scale": tau}, on_gpu)


def _engine(arrays: Mapping[str, Any]) -> bool:
    """True where the arrays are CuPy's, on one device; False where they are numpy's."""
    kinds = {}
    for name, array in arrays.items():
        if gpu.is_array(array):
            kinds[name] = "CuPy"
        elif type(array) in (np.ndarray, np.memmap):  # a subclass, such as a masked array, may mean more than its numbers
            kinds[name] = "numpy"
        else:
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__qualname__}; attention takes numpy and CuPy arrays: "
                "convert with numpy.asarray, cupy.asarray or cupy.from_dlpack"
            )
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} is a {kind} array" for name, kind in kinds.items())
        raise TypeError(f"arrays are mixed: {listed}. Move them to one side with cupy.asarray(...) or cupy.asnumpy(...)")
    if kinds["q"] == "numpy":
        return False
    devices = {name: array.data.device_id for name, array in arrays.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on device {device}" for name, device in devices.items())
        raise ValueError(
            f"arrays are on different devices: {listed}. Copy them to one: with cupy.cuda.Device(...): cupy.asarray(...)"
        )
    return True


def _signature(array: Any) -> Signature:
    address = array.data.ptr if gpu.is_array(array) else 16  # the interpreter reads any alignment
    return (array.dtype.name, array.shape, array.strides, address & -address & 15 or 16)


#: cuDNN gets the scale as float32: these are the least positive and the largest that it can hold without loss of range.
_SMALLEST_SCALE, _LARGEST_SCALE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def _scale(scale: Any, head_dim: int) -> float:
    default = 1 / math.sqrt(head_dim or 1)
    if scale is None:
        return default
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a number: float(...) makes one of an array")
    value = float(scale)
    if not abs(value) <= _LARGEST_SCALE:  # true of NaN too
        raise ValueError(f"scale is {value}; it must be finite in float32. None stands for 1/sqrt(head_dim) = {default:.6g}")
    return value


def _overlap(asked: Problem, arrays: Mapping[str, Any], one: str, other: str) -> bool:
    """Whether two arrays share an element; decided on addresses alone, no element is read."""
    a, b = arrays[one], arrays[other]
    if gpu.is_array(a):
        (a_from, a_to), (b_from, b_to) = asked.extents[one], asked.extents[other]
        apart = b.data.ptr - a.data.ptr
        if a_to <= apart + b_from or apart + b_to <= a_from:
            return False
        a, b = np.asarray(_Standin(a)), np.asarray(_Standin(b))
    return bool(np.shares_memory(a, b))


class _Standin:
    """What numpy needs to know of an array on a GPU to compare addresses; a numpy array made from it must not be read."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "data": (array.data.ptr, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "version": 3,
        }


def _objections(asked: Problem, device: int) -> list[Reason]:
    """What the support table has against a problem on this device, with the cuDNN that is loaded."""
    from ._cudnn.library import library

    return why_not(asked, library().version, gpu.capability(device))


def _planned(asked: Problem, device: int, run: Callable[[Plan], T]) -> T:
    """Run with the plan of a problem, which is looked up or, after the support table has been asked, built."""
    from .cache import session

    here = session(gpu.context_id())

    def build() -> Plan:
        from .plan import Plan

        if reasons := _objections(asked, device):
            raise reasons[0].error("\n".join(reason.text for reason in reasons))
        return Plan(forward(asked), here.handle)

    def run_on_stream(plan: Plan) -> T:
        here.handle.set_stream(gpu.stream())
        return run(plan)

    return here.cache.use(asked, build, run_on_stream)


def _launch(plan: Plan, call: _Call) -> None:
    call.allocate()
    workspace = gpu.allocate(plan.info.workspace)
    addresses = {name: array.data.ptr for name, array in call.arrays.items()}
    plan.execute(addresses, call.scalars, workspace.ptr)
