"""Attention and a function that computes its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

import numpy as np

from .attention_functions import attention, attention_backward
from .block_masks.block_mask_calls import dense_options
from .core._typing import Array, ArrayT
from .core.boundary.compute import COMPUTE_DTYPES
from .core.boundary.conversion import Conversion, gradient_names, needs_conversion
from .core.boundary.layouts import has_own_axes
from .core.boundary.options import NO_REQUESTS, special_call, split_requests, takes_options
from .core.boundary.user_functions import kept_options
from .core.errors import Unsupported
from .core.layout import default_layout
from .core.options.table import GradientOptions, Options
from .core.options.values import read_flag
from .core.problem.arrays import FORWARD, GRADIENT_ARRAYS, REQUESTED_GRADIENTS, REQUESTS
from .core.problem.tensor_spec import FP8_LARGEST
from .core.problem.validation import NO_FP8_GRADIENTS, NO_PAGED_GRADIENTS
from .core.programs.calls import Call, results_of
from .core.programs.head_scales import check_request
from .core.programs.passes import parse_backward, parse_forward
from .core.replay.call_key import CallKey
from .core.runtime import cupy_runtime
from .core.support.batch import NOT_DETERMINISTIC, not_invariant
from .fp8.array import Fp8Array
from .fp8.fp8_attention import forward_in_fp8, gradients_in_fp8, refuse_fp8

GradientsT = TypeVar("GradientsT")
#: The arguments of the forward pass for results that are created here.
_OWN_RESULTS = frozenset(("out", "stats"))
#: The flags of the backward pass by default.
_NO_OUTPUTS: Mapping[str, Any] = MappingProxyType({"deterministic": False, **NO_REQUESTS})


# fmt: off
@overload
def attention_vjp(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[False] = False, deterministic: bool = False,
    **options: Unpack[Options],
) -> tuple[ArrayT, Pullback[tuple[ArrayT, ArrayT, ArrayT]]]: ...
@overload
def attention_vjp(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[False] = False, deterministic: bool = False,
    **options: Unpack[GradientOptions],
) -> tuple[ArrayT, Pullback[tuple[Any, ...]]]: ...
@overload
def attention_vjp(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[True], deterministic: bool = False,
    **options: Unpack[GradientOptions],
) -> tuple[tuple[ArrayT, Any], Pullback[tuple[Any, ...]]]: ...
# fmt: on
@takes_options(gradients=True)
def attention_vjp(
    q: Any = ...,
    k: Any = ...,
    v: Any = ...,
    *positional: Any,
    return_stats: bool = False,
    deterministic: bool = False,
    **options: Unpack[GradientOptions],
) -> tuple[Any, Pullback[Any]]:
    """Compute attention, and return it with a function that computes the gradients (the vector-Jacobian product).

    Args:
        q, k, v, options: as for :func:`attention`.
        return_stats: also return the log-sum-exp; the pullback then also takes its gradient. Default False.
        deterministic: as for :func:`attention` and :func:`attention_backward`, for both passes.
        requests: as for :func:`attention_backward`.
        compute_dtype: as for :func:`attention`; or ``"float8_e4m3fn"`` or ``"float8_e5m2"``, which computes the forward pass in
            FP8 (:doc:`/fp8`): q, k and v are converted with one scale each, q and k after a rotation, and the FP8 arrays are
            kept instead of q, k and v. The output and the gradients have q's dtype.

    Returns:
        ``(out, pullback)``. Call ``dq, dk, dv = pullback(dout)`` once or several times. With ``return_stats``: ``((out, stats),
        pullback)`` and ``pullback(dout, dstats)``, where either may be None for 0.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`attention`.

    >>> import numpy as np, cupy_sdpa
    >>> q = k = v = np.ones((8, 1, 4, 1), np.float32, order="F")
    >>> out, pullback = cupy_sdpa.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> pullback
    <pullback of attention, keeps 272 bytes>

    The z-loss is the mean of the squares of the log-sum-exp:

    >>> (out, stats), pullback = cupy_sdpa.attention_vjp(q, k, v, causal=True, return_stats=True)
    >>> dq, dk, dv = pullback(np.ones_like(out), 2 * stats / stats.size)
    """
    if positional or v is ... or default_layout() is not None:
        found: tuple[Any, Pullback[Any]] = special_call(attention_vjp, locals())
        return found
    if not _OWN_RESULTS.isdisjoint(options):
        extra = sorted(_OWN_RESULTS.intersection(options))
        raise TypeError(
            f"attention_vjp does not take {extra[0]}: it creates out and stats itself and keeps them for the pullback"
        )
    if options.get("compute_dtype") is None and any(isinstance(x, Fp8Array) for x in (q, k, v)):
        raise Unsupported(NO_FP8_GRADIENTS)
    if options.get("page_table") is not None:
        raise Unsupported(NO_PAGED_GRADIENTS)
    requests, others = split_requests(options)
    if requests is not NO_REQUESTS:
        _check_requests(requests, others)
    of_stats = return_stats is not False and read_flag("return_stats", return_stats)
    is_plain = requests is NO_REQUESTS and deterministic is False
    outputs = _NO_OUTPUTS if is_plain else {"deterministic": deterministic, **requests}
    kept = kept_options(q, others)
    kind = options.get("compute_dtype")
    if kind in FP8_LARGEST:
        refuse_fp8(others)
    elif isinstance(kind, str) and kind not in COMPUTE_DTYPES:
        names = " or ".join(map(repr, (*COMPUTE_DTYPES, *FP8_LARGEST)))
        raise ValueError(f"compute_dtype is {kind!r}; it must be {names}, or None for q's dtype")
    # in this case both calls permute axes themselves, and repeat with the caller's arrays
    is_shared = kind is None and "engine" not in others and (isinstance(q, np.ndarray) or cupy_runtime.is_array(q))
    conversion = None
    if is_shared or not needs_conversion(q, others):
        out, stats, pullback = _forward(q, k, v, kept, outputs)
    else:
        conversion = Conversion(q, kept)
        compute = functools.partial(_forward, options=conversion.options, outputs=outputs)
        out, stats, pullback = conversion.run(compute, {"q": q, "k": k, "v": v}, ("out", "stats"))
    pullback.conversion, pullback.takes_dstats = conversion, of_stats
    return ((out, stats) if of_stats else out), pullback


def _check_requests(requests: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that the gradients that are requested are of options that are passed."""
    if (of_scale := requests["return_dscale"]) is not False:
        check_request(options, read_flag("return_dscale", of_scale))
    for row in REQUESTED_GRADIENTS:
        requested = requests[row.request]
        if requested is not False and read_flag(row.request, requested) and options.get(row.of) is None:
            raise ValueError(f"{row.request} is True and {row.of} is None: pass {row.of}=, or remove {row.request}")


def _forward(q: Any, k: Any, v: Any, options: Mapping[str, Any], outputs: Mapping[str, Any]) -> tuple[Any, Any, Pullback[Any]]:
    """Return the output and the log-sum-exp of arrays of numpy or CuPy, and the pullback; ``outputs`` are its flags."""
    rest: Any = {**options}
    if (dtype := rest.get("compute_dtype")) in FP8_LARGEST:
        rest = {**dense_options(q, k, options)}
        del rest["compute_dtype"]
        out, stats, *in_fp8 = forward_in_fp8(q, k, v, dtype, rest)

        def fp8_backward(dout: Any, dstats: Any, dq: Any, dk: Any, dv: Any) -> tuple[Any, ...]:
            return tuple(gradients_in_fp8((dout, out, stats, dq, dk, dv, dstats), in_fp8, dtype, rest, **outputs))

        return out, stats, Pullback(fp8_backward, (*in_fp8[:3], out, stats), rest, outputs)
    if rest.get("batch_invariant") and not outputs["deterministic"] and cupy_runtime.is_array(q):
        raise not_invariant(NOT_DETERMINISTIC)  # the pullback would raise it
    of_forward: Mapping[str, Any] = {} if rest.get("compute_dtype") is None else Call.decide_pass({"q": q, "k": k}, rest)
    if "compute_dtype" not in of_forward:
        rest.pop("compute_dtype", None)
        out, stats = attention(q, k, v, return_stats=True, deterministic=outputs["deterministic"], **rest)
        asked = {} if outputs is _NO_OUTPUTS else {name: value for name, value in outputs.items() if value is not False}
        of_gradients = rest | asked

        def backward(dout: Any, dstats: Any, dq: Any, dk: Any, dv: Any) -> tuple[Any, ...]:
            found: tuple[Any, ...] = attention_backward(
                dout, q, k, v, out, stats, dstats=dstats, dq=dq, dk=dk, dv=dv, **of_gradients
            )
            return found

        return out, stats, Pullback(backward, (q, k, v, out, stats), rest, outputs)
    deterministic = outputs["deterministic"] is not False and read_flag("deterministic", outputs["deterministic"])
    key = CallKey(("forward, kept", deterministic), FORWARD[:3], (q, k, v), of_forward)
    parse = functools.partial(parse_forward, kept=True, return_stats=True, deterministic=deterministic)
    out, stats, *rounded = results_of(Call(key, parse))
    kept, of_gradients = (*rounded, stats), of_forward
    requested = {name: outputs[name] for name in REQUESTS if name != "return_dscale"}  # which blocks of a mask compute
    if any(requested.values()):
        of_gradients = Call.decide_pass({"q": q, "k": k}, rest, outputs=requested)
    tag = ("backward, kept", out.dtype, *map(repr, outputs.values()))
    parse_gradients = functools.partial(parse_backward, result=out.dtype, **outputs)

    def rounded_backward(dout: Any, dstats: Any, dq: Any, dk: Any, dv: Any) -> tuple[Any, ...]:
        arrays = (dout, *kept, dq, dk, dv, dstats)
        return tuple(results_of(Call(CallKey(tag, GRADIENT_ARRAYS, arrays, of_gradients), parse_gradients)))

    return out, stats, Pullback(rounded_backward, kept, rest, outputs)


class Pullback(Generic[GradientsT]):
    """Compute the gradients of one attention call; returned by :func:`attention_vjp`.

    It keeps references to q, k, v, out, stats and the options' arrays, not copies: do not change them before the last call. On
    the CPU a change of q, k or v raises ValueError, because stats and out then belong to other arrays. Score and mask functions
    stay as in the forward pass, even if they have changed since. If the forward pass is captured in a CUDA graph, keep the
    pullback as long as the graph: with ``compute_dtype`` it owns arrays that the graph writes.

    >>> import numpy as np, cupy_sdpa
    >>> q = k = v = np.ones((8, 1, 4, 1), np.float32, order="F")
    >>> (out, stats), pullback = cupy_sdpa.attention_vjp(q, k, v, return_stats=True)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> dq, dk, dv = pullback(None, np.ones_like(stats))
    >>> float(abs(dv).max())
    0.0
    """

    def __init__(
        self,
        backward: Callable[..., tuple[Any, ...]],
        arrays: tuple[Any, ...],
        options: Mapping[str, Any],
        outputs: Mapping[str, Any],
    ) -> None:
        self._backward, self._arrays, self._options, self._outputs = backward, arrays, options, outputs
        #: The conversion of dout and of the gradients; None for arrays of numpy and CuPy.
        self.conversion: Conversion | None = None
        #: Whether the caller got the log-sum-exp, so that it can have a gradient.
        self.takes_dstats = False

    @has_own_axes
    def __call__(
        self,
        dout: Array | None,
        dstats: Array | None = None,
        *,
        dq: Array | None = None,
        dk: Array | None = None,
        dv: Array | None = None,
    ) -> GradientsT:
        r"""Compute ``(dq, dk, dv)`` and the other requested gradients; see :func:`attention_backward`.

        .. math:: dq = \Bigl(\frac{\partial o}{\partial q}\Bigr)^{\!T} do + \Bigl(\frac{\partial L}{\partial q}\Bigr)^{\!T} dL
                  \qquad \text{(dk and dv likewise)}

        Args:
            dout: :math:`do`, the gradient of the output, ``(Dv, Hq, Sq, B)``, packed ``(Dv, Hq, Tq)``; None for 0.
            dstats: :math:`dL`, the gradient of the log-sum-exp, ``(Sq, Hq, B)``, packed ``(Hq, Tq)``, with the dtype of stats.
                Default None: 0. Only if ``attention_vjp`` was called with ``return_stats=True``.
            dq, dk, dv: arrays to write the gradients into, with the shapes and dtypes of q, k and v. Default None: new
                arrays.

        Returns:
            ``(dq, dk, dv)``, then the requested gradients in the order of :func:`attention_backward`.

        Raises:
            TypeError: ``dstats`` is passed, and the call did not return the log-sum-exp.
            TypeError, ValueError, Unsupported, CudnnError: as :func:`attention_backward`; on the CPU ValueError also if q, k or
                v has changed since the forward pass.

        >>> import numpy as np, cupy_sdpa
        >>> q = k = v = np.ones((8, 1, 4, 1), np.float32, order="F")
        >>> out, pullback = cupy_sdpa.attention_vjp(q, k, v, sinks=np.zeros(1, np.float32), return_dsinks=True)
        >>> [gradient.shape for gradient in pullback(np.ones_like(out), dq=np.empty_like(q))]
        [(8, 1, 4, 1), (8, 1, 4, 1), (8, 1, 4, 1), (1,)]
        """
        if dstats is not None and not self.takes_dstats:
            raise TypeError(
                "dstats is passed, the second positional argument, but the call did not return the log-sum-exp: pass "
                "return_stats=True to attention_vjp"
            )
        gradients: Any
        if self.conversion is None:
            gradients = self._backward(dout, dstats, dq, dk, dv)
        else:
            arrays = {"dout": dout, "dstats": dstats, "dq": dq, "dk": dk, "dv": dv}
            gradients = self.conversion.run(self._backward, arrays, gradient_names(self._outputs))
        return gradients  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the pullback keeps; an array that is used twice, as with q = k, counts once.

        >>> import numpy as np, cupy_sdpa
        >>> q, k, v = (np.ones((8, 1, 4, 1), np.float32, order="F") for _ in range(3))
        >>> out, pullback = cupy_sdpa.attention_vjp(q, k, v)
        >>> pullback.nbytes == 4 * out.nbytes + 4 * 4  # q, k, v, out, and stats (4, 1, 1) in float32
        True
        """
        tensors = self._options.get("tensors") or {}
        kept = (*self._arrays, *tensors.values(), *(value for value in self._options.values() if hasattr(value, "nbytes")))
        return sum({id(array): int(array.nbytes) for array in kept}.values())

    def __repr__(self) -> str:
        return f"<pullback of attention, keeps {self.nbytes} bytes>"
