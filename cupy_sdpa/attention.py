"""The user's calls. numpy arrays run on the interpreter, CuPy arrays on cuDNN; neither ever stands in for the other."""

from __future__ import annotations

from typing import Any, Unpack

from .calls.arguments import read_backward, read_forward
from .calls.options import DTensors, Options, read_flag, takes_options
from .calls.replay_cache import learn, repeated
from .problem.validation import ReturnStats


@takes_options
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_stats: ReturnStats = False,
    deterministic: bool = False,
    out: Any = None,
    stats: Any = None,
    **options: Unpack[Options],
) -> Any:
    r"""Scaled dot-product attention in Julia's layout, ``(head_dim, heads, seq, batch)``, Fortran order.

    .. math:: O = \operatorname{softmax}(S)\, V, \qquad S_{ij} = \tau\, q_i \cdot k_j, \qquad
              L_i = \log \sum_j e^{S_{ij}}

    numpy arrays give numpy arrays, computed on the CPU; CuPy arrays give CuPy arrays, computed by cuDNN's fused kernel on
    CuPy's current stream, without synchronizing, with nothing of size Sq x Skv in memory.

    The options change the scores in this order: ``scale``, ``score_mod``, ``softcap``, ``alibi_slopes``, ``bias``; then they
    hide keys: lengths, ``causal``, ``window``, ``mask``, ``mask_mod``. All calls take the same options.

    Args:
        q: queries ``(D, Hq, Sq, B)``. float16 or bfloat16 on the GPU; also float32 and float64 on the CPU.
        k: keys ``(D, Hkv, Skv, B)``, of q's dtype. Hq is a multiple of Hkv; each key head serves Hq/Hkv query heads.
        v: values ``(Dv, Hkv, Skv, B)``, of q's dtype.
        return_stats: give L too, as float32; ``"max_sumexp"``: also what it is made of, the greatest score m of each row and
            the sum of :math:`e^{S_{ij} - m_i}`. Default False.
        deterministic: give the same bits in every run. With a single query the GPU's default kernel splits the keys and adds up
            their parts in any order; then a kernel without that is used, which is slower for few heads and many keys. With more
            queries this option changes nothing. Default False.
        out: array ``(Dv, Hq, Sq, B)`` to write the result into, of q's dtype; it must not overlap an input.
        stats: float32 array ``(Sq, Hq, B)`` to write L into; implies ``return_stats``.
        scale: :math:`\tau`; default ``1/sqrt(D)``. Changing it never needs a new plan.
        causal: True or ``"top_left"``: query i sees the keys up to and with i. ``"bottom_right"``: the last query sees all
            keys, the one before it one less. Default False: every query sees every key.
        window: ``(left, right)``: query i sees the keys from i - left to i + right, inclusive; None for no bound. With
            ``causal`` nothing behind the diagonal is seen, and the diagonal is that of ``causal``; without, a third entry
            ``"bottom_right"`` names it. Default None.
        mask: bool ``(Skv, Sq, Hq, B)``, True where the key is seen; every axis may be 1. On the GPU it is copied as float16,
            2 bytes for each of its own elements. Default None.
        bias: ``(Skv, Sq, Hq, B)``, added to the scores; every axis may be 1. float16, bfloat16 or float32 (on the CPU also
            float64), whatever q is; a score that it makes -1e6 or less counts as masked, as of ``finfo.min``. Default None.
        seq_lens_q, seq_lens_kv: int32 ``(B,)``, how many queries and keys each batch entry has; what lies beyond is never read,
            and gives 0, and -inf for L. The diagonal from the bottom right is each entry's own. Default None: all.
        cu_seqlens_q, cu_seqlens_kv: int32 or int64 ``(B+1,)``: packed sequences. q, k and v are then ``(D, Hq, Tq)``,
            ``(D, Hkv, Tkv)`` and ``(Dv, Hkv, Tkv)``; sequence b has the positions from ``cu_seqlens[b]`` up to
            ``cu_seqlens[b+1]``. Positions before the first sequence and after the last one are ignored; their output is 0.
            The output is ``(Dv, Hq, Tq)`` and L is ``(Hq, Tq)``. Every diagonal is the sequence's own. Default None.
        max_seqlen_q, max_seqlen_kv: at least the lengths of the longest packed sequences; plans depend on them, but neither on
            the totals nor on where sequences begin. On the GPU, where lengths are not read, a longer sequence is cut off: the
            output of the rest is 0.
        alibi_slopes: float32 ``(Hq,)``; takes ``slope |p - j|`` from the score of key j, p being the query's place on the
            diagonal (that of ``causal`` or ``window``; default top left). :func:`cupy_sdpa.alibi_slopes` gives the usual ones.
        softcap: c > 0 makes the scores :math:`c \tanh(S / c)`. Changing it never needs a new plan. Default None.
        score_mod: ``f(score, b, h, q_idx, kv_idx, **tensors) -> score``, FlexAttention's signature: what becomes of the scaled
            score of query q_idx and key kv_idx. It is called once in every call, with traced values: arithmetic, comparisons
            and numpy's functions of them run inside the fused kernel, and the backward pass is derived. Its numbers, but
            0, 1 and -1, may change without a new plan. :mod:`cupy_sdpa.zoo` has those of the field. Default None.
        mask_mod: ``f(b, h, q_idx, kv_idx, **tensors) -> condition``, which keys are seen; causal masks and windows that are
            written so are recognized. Default None.
        tensors: a mapping of names to the arrays that the functions read, by b, h, q_idx, kv_idx and whole numbers, such as
            ``bias[h, q_idx, kv_idx]``. On the GPU integers have 32 bits, and int64 arrays raise TypeError. Default None.
        sinks: float32 ``(Hq,)``, for each head the score of one more key, which every query sees and which has no value. It
            takes part in L, in m and in the sum. Default None.
        dropout_p: the probability with which a weight is dropped; those kept are divided by ``1 - dropout_p``. No rate is
            rounded; each has a plan of its own. Default 0.
        seed, offset: what decides which weights are dropped: integers, or int64 arrays of one, which a captured graph reads
            anew with every replay. Give the same to both passes; offsets that differ by less than 4 overlap. The engines draw
            different numbers. Default for offset 0.
        dropout_mask: bool ``(Skv, Sq, Hq, B)``, True where a weight is kept, in place of random numbers; on the CPU only, see
            :func:`cupy_sdpa.dropout_mask`.
        max_workspace: bytes of the GPU's memory that cuDNN may use beside the arrays. Default None: no limit.
        bucket: round lengths up, so that many share a plan: to multiples of a number, to a ``"power_of_two"``, or as a function
            of a length says. The arrays are copied into longer ones, and what is added is not seen; of packed sequences only
            ``max_seqlen`` is rounded, and nothing copied. A single query stays one. Default None: a plan for every length.

    Returns:
        ``out``, ``(out, stats)`` or ``(out, stats, max, sum_exp)``. New arrays are in Fortran order. A query that sees no key
        gives 0, and -inf for L and m; one that has a sink sees that.

    Raises:
        TypeError: numpy and CuPy arrays mixed, other kinds of arrays, a dtype that the engine does not take.
        ValueError: shapes that do not fit, a layout that cuDNN cannot read, a number that is not finite.
        Unsupported: this cuDNN or GPU cannot run it; :func:`cupy_sdpa.explain` says so beforehand.
        CudnnError: cuDNN failed.

    Sources: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Dao 2023, "FlashAttention-2", section 3.1 (L);
    Gemma Team 2024, "Gemma 2", section 2 (softcap); Press et al. 2022, "Train Short, Test Long", section 3 (ALiBi); OpenAI
    2025, "gpt-oss model card", section 2.1 (sinks); Srivastava et al. 2014, "Dropout".

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (np.asfortranarray(rng.standard_normal((64, 8, 100, 2), np.float32)) for _ in range(3))
    >>> out, stats = cupy_sdpa.attention(q, k, v, causal=True, return_stats=True)
    >>> out.shape, stats.shape
    ((64, 8, 100, 2), (100, 8, 2))
    >>> bool(np.allclose(out[:, :, 0], v[:, :, 0], atol=1e-6))     # the first query sees only the first key
    True

    Two sequences of 60 and 40 positions behind one another:

    >>> q, k, v = (np.asfortranarray(x[..., 0]) for x in (q, k, v))
    >>> starts = np.array([0, 60, 100], np.int32)
    >>> packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 60, "max_seqlen_kv": 60}
    >>> cupy_sdpa.attention(q, k, v, causal=True, **packed).shape
    (64, 8, 100)
    """
    exact = deterministic is not False and read_flag("deterministic", deterministic)
    how = ("forward", return_stats if type(return_stats) is bool else str(return_stats), exact)
    arrays = (q, k, v, out, stats)
    results = repeated(how, arrays, options)
    if results is None:
        call = read_forward(q, k, v, options, return_stats=return_stats, deterministic=exact, out=out, stats=stats)
        results = call.run()
        learn(how, ("q", "k", "v", "out", "stats"), arrays, options, call)
    return tuple(results) if len(results) > 1 else results[0]


@takes_options
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    stats: Any,
    *,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: DTensors = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    r"""The gradients of :func:`attention` with respect to q, k and v, and to the bias and the sinks where asked for.

    .. math:: dV = P^\top dO, \qquad dS = P \circ (dO\, V^\top - \operatorname{rowsum}(dO \circ O)), \qquad
              dQ = \tau\, dS\, K, \qquad dK = \tau\, dS^\top Q

    P is computed anew from q, k and the log-sum-exp, so nothing of size Sq x Skv is kept between the passes. The log-sum-exp
    is float32, so gradients of float64 arrays are good to about 1e-7 of their size.

    Args:
        dout: the gradient of the output, ``(Dv, Hq, Sq, B)``, of q's dtype.
        q, k, v: as they were given to :func:`attention`.
        out: what it returned, ``(Dv, Hq, Sq, B)``.
        stats: the log-sum-exp that it returned with ``return_stats=True``, ``(Sq, Hq, B)`` float32, in Fortran order.
        deterministic: give the same bits in every run. By default dQ is added up in any order on the GPU (dK and dV always
            are the same). It needs a workspace of 2 x Hq x Sq x Skv x B bytes; where that exceeds
            ``max_workspace``, a slower engine with little memory is used, on Hopper with cuDNN 9.25.1 or newer. The choice
            never depends on how much memory is free; :func:`cupy_sdpa.explain` shows the workspace. Default False.
        return_dbias: give the gradient of the bias, of its shape and dtype, summed over the axes along which it is broadcast.
            On the GPU it is added up in 16 bits, also where the bias is float32. Default False.
        return_dsinks: give the gradient of the sinks, ``(Hq,)`` float32. Default False.
        return_dtensors: give the gradients of the floating-point arrays in ``tensors``: True for all, or the names of some. An
            array that the scores depend on as they do on q's and k's product shares the launch (a bias); any other one, and
            every further way in which one is read, takes a launch more, which costs as much again. On the GPU each is added up
            in 16 bits, in memory of size Sq x Skv, times Hq and B where the array has them, and then in float32. Default False.
        dq, dk, dv: arrays to write the gradients into, of the shapes and dtypes of q, k and v.
        options: as they were given to :func:`attention`. Beyond the lengths gradients are 0.

    Returns:
        ``(dq, dk, dv)``, then, where asked for, dbias, dsinks, and a dict of the gradients of ``tensors``, of their shapes and
        dtypes; new arrays are in Fortran order. dk and dv are summed over the query heads of a group in float32.

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
    tensors_too = return_dtensors is not None and return_dtensors is not False
    for name, value in (("deterministic", deterministic), ("return_dbias", return_dbias), ("return_dsinks", return_dsinks)):
        read_flag(name, value)
    how = ("backward", bool(deterministic), bool(return_dbias), bool(return_dsinks), tensors_too)
    arrays = (dout, q, k, v, out, stats, dq, dk, dv)
    results = repeated(how, arrays, options)
    if results is not None:
        return tuple(results)
    for name, array in (("dout", dout), ("out", out), ("stats", stats)):
        if array is None:
            raise TypeError(
                f"{name} is None; the backward pass needs it: attention(..., return_stats=True) gives out and stats"
            )
    call = read_backward(
        q, k, v, options, dout=dout, out=out, stats=stats, dq=dq, dk=dk, dv=dv,
        return_dbias=return_dbias, return_dsinks=return_dsinks, return_dtensors=return_dtensors,
        deterministic=deterministic,
    )  # fmt: skip
    results = call.run()
    learn(how, ("dout", "q", "k", "v", "out", "stats", "dq", "dk", "dv"), arrays, options, call)
    return tuple(results)


@takes_options
def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: DTensors = False,
    **options: Unpack[Options],
) -> tuple[Any, Pullback]:
    """Attention, and the function that pulls gradients of its output back to q, k and v.

    Args:
        q, k, v, options: as for :func:`attention`.
        deterministic: as for :func:`attention` and :func:`attention_backward`, for both passes.
        return_dbias, return_dsinks, return_dtensors: as for :func:`attention_backward`.

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
    if extra := [name for name in ("out", "stats", "return_stats") if name in options]:
        raise TypeError(f"attention_vjp takes no {extra[0]}: it keeps out and stats for the pullback, and makes them itself")
    out, stats = attention(q, k, v, return_stats=True, deterministic=deterministic, **options)
    if tensors := options.get("tensors"):
        options["tensors"] = dict(tensors)  # the caller's may change until the pullback is called
    how = {
        "deterministic": deterministic, "return_dbias": return_dbias, "return_dsinks": return_dsinks,
        "return_dtensors": return_dtensors,
    }  # fmt: skip
    return out, Pullback((q, k, v, out, stats), {**options, **how})


class Pullback:
    """Gives the gradients of one attention call; made by :func:`attention_vjp`.

    It keeps q, k, v, out, stats and the options' arrays themselves, not copies: whoever changes them in place changes the
    gradients. They are let go with it.
    """

    def __init__(self, arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._arrays, self._options = arrays, options

    def __call__(self, dout: Any, *, dq: Any = None, dk: Any = None, dv: Any = None) -> tuple[Any, ...]:
        """``(dq, dk, dv)``, and what else was asked for, for a gradient of the output; see :func:`attention_backward`."""
        return attention_backward(dout, *self._arrays, **self._options, dq=dq, dk=dk, dv=dv)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that it keeps; one that serves twice, as q = k, counts once."""
        tensors = self._options.get("tensors") or {}
        kept = (*self._arrays, *tensors.values(), *(value for value in self._options.values() if hasattr(value, "nbytes")))
        return sum({id(array): int(array.nbytes) for array in kept}.values())

    def __repr__(self) -> str:
        return f"<pullback of attention, keeps {self.nbytes} bytes>"
