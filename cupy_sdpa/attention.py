"""The user's calls. numpy arrays run on the interpreter, CuPy arrays on cuDNN; neither ever stands in for the other."""

from __future__ import annotations

from typing import Any

from .arguments import read_backward, read_forward
from .bucket import Bucket
from .problem import Window


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: Window = None,
    seq_lens_q: Any = None,
    seq_lens_kv: Any = None,
    return_stats: bool = False,
    max_workspace: int | None = None,
    bucket: Bucket = None,
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
        causal: True or ``"top_left"``: query i sees the keys up to and with i. ``"bottom_right"``: the last query sees all
            keys, the one before it one less. Default False: every query sees every key.
        window: ``(left, right)``: query i sees the keys from i - left to i + right, inclusive; None for no bound. With
            ``causal`` nothing behind the diagonal is seen, and the diagonal is that of ``causal``; without, a third entry
            ``"bottom_right"`` names it. Default None.
        seq_lens_q, seq_lens_kv: int32 ``(B,)``, how many queries and keys each batch entry has; what lies beyond is never read,
            and gives 0, and -inf for L. The diagonal from the bottom right is each entry's own. Default None: all.
        return_stats: give L too, as float32. Default False.
        max_workspace: bytes of the GPU's memory that cuDNN may use beside the arrays. Default None: no limit.
        bucket: round lengths up, so that many share a plan: to multiples of a number, to a ``"power_of_two"``, or as a function
            of a length says. The arrays are copied into longer ones, and what is added is not seen. A single query stays one.
            Default None: a plan for every length.
        out: array ``(Dv, Hq, Sq, B)`` to write the result into, of q's dtype; it must not overlap an input.
        stats: float32 array ``(Sq, Hq, B)`` to write L into; implies ``return_stats``.

    Returns:
        ``out``, or ``(out, stats)``. New arrays are in Fortran order. A query that sees no key gives 0 and -inf.

    Raises:
        TypeError: numpy and CuPy arrays mixed, other kinds of arrays, a dtype that the engine does not take.
        ValueError: shapes that do not fit, a layout that cuDNN cannot read, a scale that is not finite.
        Unsupported: this cuDNN or GPU cannot run it; :func:`cupy_sdpa.explain` says so beforehand.
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
    call = read_forward(
        q, k, v, scale=scale, causal=causal, window=window, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv,
        return_stats=return_stats, max_workspace=max_workspace, bucket=bucket,
        out=out, stats=stats,
    )  # fmt: skip
    results = call.run()
    return tuple(results) if len(results) > 1 else results[0]


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    stats: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: Window = None,
    seq_lens_q: Any = None,
    seq_lens_kv: Any = None,
    deterministic: bool = False,
    max_workspace: int | None = None,
    bucket: Bucket = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
) -> tuple[Any, Any, Any]:
    r"""The gradients of :func:`attention` with respect to q, k and v.

    .. math:: dV = P^\top dO, \qquad dS = P \circ (dO\, V^\top - \operatorname{rowsum}(dO \circ O)), \qquad
              dQ = \tau\, dS\, K, \qquad dK = \tau\, dS^\top Q

    P is computed anew from q, k and the log-sum-exp, so nothing of size Sq x Skv is kept between the passes. The log-sum-exp
    is float32, so gradients of float64 arrays are good to about 1e-7 of their size.

    Args:
        dout: the gradient of the output, ``(Dv, Hq, Sq, B)``, of q's dtype.
        q, k, v: as they were given to :func:`attention`.
        out: what it returned, ``(Dv, Hq, Sq, B)``.
        stats: the log-sum-exp that it returned with ``return_stats=True``, ``(Sq, Hq, B)`` float32, in Fortran order.
        scale, causal, window, seq_lens_q, seq_lens_kv: as they were given to :func:`attention`. Beyond the lengths gradients
            are 0.
        deterministic: give the same bits in every run. By default dQ is added up in any order on the GPU (dK and dV always
            are the same). It costs either memory of size Hq x Sq x Skv or, beyond ``max_workspace`` and what is free, time,
            on Hopper with cuDNN 9.25.1 or newer; :func:`cupy_sdpa.explain` shows which. Default False.
        max_workspace: bytes of the GPU's memory that may be used beside the arrays. Default None: no limit.
        bucket: as for :func:`attention`; the gradients are the same.
        dq, dk, dv: arrays to write the gradients into, of the shapes and dtypes of q, k and v.

    Returns:
        ``(dq, dk, dv)``; new arrays are in Fortran order. dk and dv are summed over the query heads of a group in float32.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`attention`.

    Source: Dao 2023, "FlashAttention-2", section 2.2 and algorithm 2.

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (np.asfortranarray(rng.standard_normal((16, 2, 10, 1))) for _ in range(4))
    >>> out, stats = cupy_sdpa.attention(q, k, v, return_stats=True)
    >>> dq, dk, dv = cupy_sdpa.attention_backward(dout, q, k, v, out, stats)
    >>> bool(np.allclose((dq * q).sum(), (dk * k).sum()))         # scaling q or k does the same to the scores
    True
    """
    for name, array in (("dout", dout), ("out", out), ("stats", stats)):
        if array is None:
            raise TypeError(
                f"{name} is None; the backward pass needs it: attention(..., return_stats=True) gives out and stats"
            )
    call = read_backward(
        q, k, v, dout=dout, out=out, stats=stats, dq=dq, dk=dk, dv=dv,
        scale=scale, causal=causal, window=window, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv,
        deterministic=deterministic, max_workspace=max_workspace, bucket=bucket,
    )  # fmt: skip
    d_q, d_k, d_v = call.run()
    return d_q, d_k, d_v


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: Window = None,
    seq_lens_q: Any = None,
    seq_lens_kv: Any = None,
    deterministic: bool = False,
    max_workspace: int | None = None,
    bucket: Bucket = None,
) -> tuple[Any, Pullback]:
    """Attention, and the function that pulls gradients of its output back to q, k and v.

    Args:
        q, k, v, scale, causal, window, seq_lens_q, seq_lens_kv, max_workspace, bucket: as for :func:`attention`.
        deterministic: as for :func:`attention_backward`.

    Returns:
        ``(out, pullback)``; ``dq, dk, dv = pullback(dout)``, as often as wanted.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`attention`.

    >>> import numpy as np, cupy_sdpa
    >>> q = k = v = np.ones((8, 1, 4, 1), np.float32)
    >>> out, pullback = cupy_sdpa.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> pullback
    <pullback of attention, keeps 272 bytes>
    """
    shared: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "window": window,
        "seq_lens_q": seq_lens_q,
        "seq_lens_kv": seq_lens_kv,
        "max_workspace": max_workspace,
        "bucket": bucket,
    }
    out, stats = attention(q, k, v, return_stats=True, **shared)
    options = {**shared, "deterministic": deterministic}
    return out, Pullback((q, k, v, out, stats), options)


class Pullback:
    """Gives the gradients of one attention call; made by :func:`attention_vjp`.

    It keeps q, k, v, out and stats themselves, not copies: whoever changes them in place changes the gradients. They are let
    go with it.
    """

    def __init__(self, arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._arrays, self._options = arrays, options

    def __call__(self, dout: Any, *, dq: Any = None, dk: Any = None, dv: Any = None) -> tuple[Any, Any, Any]:
        """``(dq, dk, dv)`` for a gradient of the output; see :func:`attention_backward`."""
        return attention_backward(dout, *self._arrays, **self._options, dq=dq, dk=dk, dv=dv)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that it keeps; one that serves twice, as q = k, counts once."""
        return sum({id(array): int(array.nbytes) for array in self._arrays}.values())

    def __repr__(self) -> str:
        return f"<pullback of attention, keeps {self.nbytes} bytes>"
