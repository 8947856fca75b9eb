"""Attention and its gradients. numpy arrays run on the CPU, CuPy arrays on cuDNN; other engines run only on request."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from ._typing import Array, ArrayT, StatsT
from .boundary.arguments import read_backward, read_forward
from .boundary.compute import read_compute_dtype
from .boundary.conversion import OUTPUTS, OWN_TYPES, convert, gradient_names, needs_conversion
from .boundary.layouts import other_layout, results_in
from .boundary.options import DTensors, Options, read_flag, refuse_arguments, takes_options
from .fp8.array import Fp8Array
from .fp8.fp8_attention import attend as attend_in_fp8
from .programs.executor import compiled
from .programs.passes import attend, attend_backward, blocks_of
from .replay.replay_cache import cache_call, run_cached


# fmt: off
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[False] = False, deterministic: bool = False,
    out: Array | None = None, stats: None = None, **options: Unpack[Options],
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[True], deterministic: bool = False,
    out: Array | None = None, stats: Array | None = None, **options: Unpack[Options],
) -> tuple[ArrayT, Any]: ...
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal[False] = False, deterministic: bool = False,
    out: Array | None = None, stats: StatsT, **options: Unpack[Options],
) -> tuple[ArrayT, StatsT]: ...
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: Literal["max_sumexp"], deterministic: bool = False,
    out: Array | None = None, stats: Array | None = None, **options: Unpack[Options],
) -> tuple[ArrayT, Any, Any, Any]: ...
@overload
def attention(
    q: ArrayT, k: Array, v: Array, *, return_stats: bool | Literal["max_sumexp"], deterministic: bool = False,
    out: Array | None = None, stats: Array | None = None, **options: Unpack[Options],
) -> Any: ...
# fmt: on
@takes_options
def attention(
    q: Any = ...,
    k: Any = ...,
    v: Any = ...,
    *positional: Any,
    return_stats: bool | Literal["max_sumexp"] = False,
    deterministic: bool = False,
    out: Array | None = None,
    stats: Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Scaled dot-product attention of arrays ``(head_dim, heads, seq, batch)`` in Fortran order.

    .. math:: O = \operatorname{softmax}(S)\, V, \qquad S_{ij} = \tau\, q_i \cdot k_j, \qquad
              L_i = \log \sum_j e^{S_{ij}}

    numpy arrays are computed on the CPU and return numpy arrays. CuPy arrays are computed by cuDNN's fused kernels and return
    CuPy arrays: the call enqueues them on CuPy's current stream without synchronization, and stores nothing of size Sq x Skv.
    Arrays of PyTorch, JAX, Numba and other libraries with DLPack are shared without a copy, and results are arrays of the same
    library (:doc:`/layouts`).

    Options change the scores in this order: ``scale``, ``score_mod``, ``softcap``, ``alibi_slopes``, ``bias``; then keys are
    masked: lengths, ``causal``, ``window``, ``mask``, ``mask_mod``.

    Args:
        q: queries ``(D, Hq, Sq, B)``. float16 or bfloat16 on the GPU; also float32 and float64 on the CPU. q, k and v may be
            FP8 arrays (:func:`cupy_sdpa.fp8.attention`).
        k: keys ``(D, Hkv, Skv, B)``, of q's dtype. Hq must be a multiple of Hkv (grouped-query attention): each key/value head
            serves Hq/Hkv query heads.
        v: values ``(Dv, Hkv, Skv, B)``, of q's dtype.
        return_stats: also return the log-sum-exp L, float32; ``"max_sumexp"``: also return the maximum m of the scores of each
            row and the sum of :math:`e^{S_{ij} - m_i}`. Default False.
        deterministic: return the same bits in every run. With a single query the GPU's default kernel splits the keys and adds
            the partial results in an arbitrary order; True selects another kernel, slower with few heads and many keys. With
            more queries this option changes nothing. Default False.
        out: array ``(Dv, Hq, Sq, B)`` to write the output into, of q's dtype; it must not overlap an input.
        stats: float32 array ``(Sq, Hq, B)`` to write L into; implies ``return_stats``. With float64 inputs it may be float64.
        scale: :math:`\tau`; default ``1/sqrt(D)``. A new value does not need a new plan.
        causal: True or ``"top_left"``: query i attends to keys 0 to i. ``"bottom_right"``: the last query attends to all keys,
            the query before it to one key less. Default False: every query attends to every key.
        window: ``(left, right)``: query i attends to keys i - left to i + right, inclusive; None for no bound. With ``causal``
            the diagonal is that of ``causal``, and keys above it are masked; without it, a third entry ``"bottom_right"``
            selects the diagonal. Default None.
        mask: bool ``(Skv, Sq, Hq, B)``, True where the query attends to the key; every axis may be 1. On the GPU it is copied
            as float16, 2 bytes for each element. Default None.
        bias: ``(Skv, Sq, Hq, B)``, added to the scores; every axis may be 1. float16, bfloat16 or float32 (on the CPU also
            float64), for every dtype of q. Scores of -1e6 and less, such as from ``finfo.min``, are masked. Default None.
        seq_lens_q, seq_lens_kv: int32 ``(B,)``, the number of queries and keys of each batch entry. The rest is padding: it is
            never read, its output is 0 and its L is -inf. A bottom-right diagonal follows the lengths of each batch entry.
            Default None: the full length.
        cu_seqlens_q, cu_seqlens_kv: int32 or int64 ``(B+1,)``: varlen (packed) sequences. q, k and v are then
            ``(D, Hq, Tq)``, ``(D, Hkv, Tkv)`` and ``(Dv, Hkv, Tkv)``; sequence b consists of the positions from
            ``cu_seqlens[b]`` to ``cu_seqlens[b+1]``, exclusive. Positions before the first sequence and after the last one are
            ignored; their output is 0. The output is ``(Dv, Hq, Tq)`` and L is ``(Hq, Tq)``. Each sequence has its own
            diagonal. Default None.
        max_seqlen_q, max_seqlen_kv: upper bounds of the lengths of packed sequences. Plans depend on them, but not on Tq, Tkv
            and the offsets. The GPU does not check them: positions of a sequence after the bound are ignored, and their
            output is 0.
        page_table: int32 ``(P, B)``: paged keys and values, as in :class:`cupy_sdpa.KVCache`. k and v are then pools of pages,
            ``(D, Hkv, page size, pages)`` and ``(Dv, Hkv, page size, pages)`` in any memory order: pages in the order
            ``(D, page size, Hkv, pages)`` are passed as ``pages.transpose(0, 2, 1, 3)``. Key j of sequence b is row
            ``j % page size`` of page ``page_table[j // page size, b]``. ``seq_lens_kv`` is required, and Skv is P times the
            page size. Table entries and pages after the length are not used, but on the GPU rows of the last page after the
            length must be finite. The queries may be packed: ``cu_seqlens_q`` and ``max_seqlen_q`` without ``cu_seqlens_kv``.
            Forward pass only. On the GPU the page size is a power of two. Default None.
        num_splits: the number of chunks into which the pages of each sequence are split on the GPU, for few queries: at most
            512 rows, which are queries times Hq/Hkv. The result of a sequence then depends only on this sequence,
            ``num_splits`` and P: it has the same bits in every batch and in every run. Default None: chosen from B, Hkv and P.
        alibi_slopes: float32 ``(Hq,)``; subtracts ``slope |p - j|`` from the score of key j, where p is the position of the
            query on the diagonal (that of ``causal`` or ``window``; default top left). See :func:`cupy_sdpa.alibi_slopes`.
        softcap: c > 0 replaces the scores by :math:`c \tanh(S / c)`. A new value does not need a new plan. Default None.
        score_mod: ``f(score, b, h, q_idx, kv_idx, **tensors) -> score``, the signature of FlexAttention: a new score for query
            q_idx and key kv_idx from the scaled score. It is called once with traced values, and again if it has changed;
            arithmetic, comparisons and numpy functions of these values run inside the fused kernel, and the backward pass is
            derived. Constants, except 0, 1 and -1, may change without a new plan. Common ones are in :mod:`cupy_sdpa.zoo`.
            Default None.
        mask_mod: ``f(b, h, q_idx, kv_idx, **tensors) -> condition``, whether the query attends to the key. Causal masks and
            windows are recognized. On the GPU a function without ``tensors`` is evaluated once, and only its blocks are
            computed where that pays (:func:`cupy_sdpa.explain` shows it). Default None.
        tensors: a mapping of names to arrays that the functions read; they are indexed by b, h, q_idx, kv_idx and integers,
            such as ``bias[h, q_idx, kv_idx]``, or by integers that are computed from these, which needs memory for Skv x Sq
            elements (:doc:`/functions`). On the GPU integers have 32 bits, and int64 arrays raise TypeError. Default None.
        block_mask: a :class:`cupy_sdpa.BlockMask`, which replaces all other masks: only its blocks are computed, in both
            passes. It can be combined with ``scale``, ``softcap``, ``score_mod``, ``tensors``, ``sinks`` and
            ``max_workspace``. Default None.
        sinks: float32 ``(Hq,)``, for each head the score of an additional key without a value, to which every query attends.
            It is part of L, of m and of the sum. Default None.
        dropout_p: the probability of dropping a weight; the other weights are divided by ``1 - dropout_p``. Each value needs
            its own plan. Default 0.
        seed, offset: seed and offset of the dropout generator: integers, or one-element int64 arrays, which a captured CUDA
            graph reads at every replay. Both passes need the same values; offsets that differ by less than 4 overlap. CPU and
            GPU draw different numbers. offset is 0 by default.
        dropout_mask: bool ``(Skv, Sq, Hq, B)``, True where a weight is kept, in place of random numbers; on the CPU only, see
            :func:`cupy_sdpa.dropout_mask`.
        batch_invariant: guarantee that the bits of a sequence's output, log-sum-exp and gradients do not depend on the rest of
            the batch. Where this does not hold or is unknown, the call raises Unsupported with the reason and the option that
            makes it hold, such as ``deterministic`` or ``num_splits``; otherwise it runs as without this option, but with
            ``mask_mod`` in place of its blocks (:doc:`/options`). Default False.
        max_workspace: upper bound of cuDNN's workspace in bytes. Default None: no bound.
        bucket: round lengths up, so that different lengths share a plan: to multiples of an integer, to a ``"power_of_two"``,
            or by a function of the length. Arrays are copied into longer ones, and the padding is masked; for packed sequences
            only ``max_seqlen`` is rounded, and nothing is copied. A single query is not padded. Default None: a plan for every
            length.
        layout: the axes of q, k, v, out and their gradients: ``"bshd"``, ``"bhsd"``, ``"sbhd"``, or ``"thd"`` for packed
            sequences; nothing is copied, and results have these axes. All other arrays then have their axes in reverse order:
            ``mask`` and ``bias`` are ``(B, Hq, Sq, Skv)``, and missing first axes count as length 1; L is ``(B, Hq, Sq)``,
            packed ``(Tq, Hq)``; ``page_table`` is ``(B, P)``, and pages are ``(pages, page size, Hkv, D)`` with ``"bshd"``.
            Default None: ``"dhsb"``, packed ``"dht"``, the shapes above; strides that a GPU cannot read are then refused on the
            CPU, too (:doc:`/layouts`), because they are probably those of another layout. ``"dhsb"`` confirms the shapes.
        compute_dtype: ``"float16"`` or ``"bfloat16"``: float32 or float64 arrays are rounded to it, one kernel for each of q, k
            and v, and the output and all gradients have the dtype of q. float16 overflows above 65504. Default None: q's dtype.
        engine: ``"cupy"`` computes CuPy arrays with CuPy's own operations in place of cuDNN: on any GPU and without cuDNN, in
            float16, bfloat16, float32 and float64, with any head dim and every option, deterministic. It takes many launches
            for each head, so it is slower than cuDNN, it reads lengths, page tables and seeds on the host, and it cannot be
            captured in a CUDA graph (:doc:`/engines`). ``"numpy"`` and ``"cudnn"`` confirm the engine of the arrays. Default
            None: cuDNN for CuPy arrays, the CPU for numpy arrays.

    Returns:
        ``out``, ``(out, stats)`` or ``(out, stats, max, sum_exp)``. New arrays are in Fortran order. A fully masked row has
        output 0, and L and m are -inf; with a sink, the row attends to the sink.

    Raises:
        TypeError: numpy and CuPy arrays are mixed, or an array has a type or dtype that is not supported.
        ValueError: shapes do not match, cuDNN cannot read the strides of an array, or an option has an invalid value.
        Unsupported: this cuDNN or GPU cannot run it; :func:`cupy_sdpa.explain` returns the reasons.
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
    >>> bool(np.allclose(out[:, :, 0], v[:, :, 0], atol=1e-6))     # the first query attends to the first key only
    True

    Two packed sequences of lengths 60 and 40:

    >>> q, k, v = (np.asfortranarray(x[..., 0]) for x in (q, k, v))
    >>> starts = np.array([0, 60, 100], np.int32)
    >>> packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 60, "max_seqlen_kv": 60}
    >>> cupy_sdpa.attention(q, k, v, causal=True, **packed).shape
    (64, 8, 100)
    """
    if positional or v is ...:
        refuse_arguments(attention, positional, options)
    if type(q) not in OWN_TYPES or type(k) is Fp8Array or "layout" in options or "engine" in options:
        if isinstance(q, Fp8Array) or type(k) is Fp8Array:
            made = attend_in_fp8(q, k, v, options, return_stats=return_stats, out=out, stats=stats)
            return tuple(made) if len(made) > 1 else made[0]
        if needs_conversion(q, options):
            given = {"q": q, "k": k, "v": v, "out": out, "stats": stats}
            return convert(attention, given, options, OUTPUTS, return_stats=return_stats, deterministic=deterministic)
    dtype = read_compute_dtype(options.pop("compute_dtype"), q) if "compute_dtype" in options else None
    if dtype is not None or "block_mask" in options or "mask_mod" in options:
        mask, rest = blocks_of(q, k, options, automatic=return_stats != "max_sumexp")
        if dtype is not None or mask is not None:
            made = attend(
                q, k, v, rest, mask=mask, dtype=dtype, return_stats=return_stats, deterministic=deterministic, out=out,
                stats=stats,
            )  # fmt: skip
            return tuple(made) if len(made) > 1 else made[0]
    deterministic = deterministic is not False and read_flag("deterministic", deterministic)
    kind = ("forward", return_stats if type(return_stats) is bool else str(return_stats), deterministic)
    arrays = (q, k, v) if out is stats is None else (q, k, v, out, stats)
    results = run_cached(kind, arrays, options)
    if results is None:
        read = read_forward(q, k, v, options, return_stats=return_stats, deterministic=deterministic, out=out, stats=stats)
        call = compiled(read)
        results = call.run()
        cache_call(kind, ("q", "k", "v", "out", "stats")[: len(arrays)], arrays, options, call)
    if "layout" in options and (layout := other_layout(options)):
        results = results_in(layout, OUTPUTS, results, {"out": out, "stats": stats}, options)
    return tuple(results) if len(results) > 1 else results[0]


# fmt: off
@overload
def attention_backward(
    dout: Array, q: ArrayT, k: Array, v: Array, out: Array, stats: Array, *, deterministic: bool = False,
    return_dbias: Literal[False] = False, return_dsinks: Literal[False] = False, return_dtensors: Literal[False] = False,
    dq: Array | None = None, dk: Array | None = None, dv: Array | None = None, **options: Unpack[Options],
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, stats: Array, *, deterministic: bool = False,
    return_dbias: bool = False, return_dsinks: bool = False, return_dtensors: DTensors = False, dq: Array | None = None,
    dk: Array | None = None, dv: Array | None = None, **options: Unpack[Options],
) -> tuple[Any, ...]: ...
# fmt: on
@takes_options
def attention_backward(
    dout: Any = ...,
    q: Any = ...,
    k: Any = ...,
    v: Any = ...,
    out: Any = ...,
    stats: Any = ...,
    *positional: Any,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: DTensors = False,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    r"""The gradients of :func:`attention` with respect to q, k and v; on request also to the bias, the sinks and ``tensors``.

    .. math:: dV = P^\top dO, \qquad dS = P \circ (dO\, V^\top - \operatorname{rowsum}(dO \circ O)), \qquad
              dQ = \tau\, dS\, K, \qquad dK = \tau\, dS^\top Q

    P is recomputed from q, k and the log-sum-exp, so nothing of size Sq x Skv is stored between the passes. With a float32
    log-sum-exp, gradients of float64 arrays have a relative accuracy of about 1e-7; with a float64 one they are exact.

    Args:
        dout: the gradient of the output, ``(Dv, Hq, Sq, B)``, of q's dtype.
        q, k, v: the inputs of :func:`attention`.
        out: its output, ``(Dv, Hq, Sq, B)``.
        stats: its log-sum-exp, from ``return_stats=True``, ``(Sq, Hq, B)`` float32, in Fortran order. With float64 inputs it
            may be float64, from ``attention(..., stats=)``. On the CPU, out and stats of another call are refused, unless
            ``score_mod`` is passed; with ``block_mask`` only statistics that are too small are.
        deterministic: return the same bits in every run. By default dQ is accumulated in arbitrary order on the GPU (dK and dV
            are always deterministic). True needs a workspace of 2 x Hq x Sq x Skv x B bytes; if that exceeds ``max_workspace``,
            a slower engine with a small workspace is used, on Hopper with cuDNN 9.25.1 or newer. The choice does not depend on
            the free memory; :func:`cupy_sdpa.explain` shows the workspace. Default False.
        return_dbias: also return the gradient of the bias, in its shape and dtype, summed over the axes along which it is
            broadcast. On the GPU it is accumulated in 16 bits, even for a float32 bias. Default False.
        return_dsinks: also return the gradient of the sinks, ``(Hq,)`` float32. Default False.
        return_dtensors: also return the gradients of the floating-point arrays in ``tensors``: True for all, or some names. An
            array that is added to the scores, such as a bias, shares the launch; every other array, and every further way of
            indexing one, needs another launch of the same cost. On the GPU each gradient is accumulated in 16 bits, in memory
            of size Sq x Skv, times Hq and B if the array has these axes, and then in float32. Default False.
        dq, dk, dv: arrays to write the gradients into, of the shapes and dtypes of q, k and v.
        options: the options of the forward pass. Gradients of padding are 0.

    Returns:
        ``(dq, dk, dv)``, followed by dbias, dsinks, and a dict of the gradients of ``tensors``, of their shapes and dtypes, if
        requested. New arrays are in Fortran order. dk and dv are summed over the query heads of a group in float32.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`attention`.

    Source: Dao 2023, "FlashAttention-2", section 2.2 and algorithm 2.

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (np.asfortranarray(rng.standard_normal((16, 2, 10, 1))) for _ in range(4))
    >>> out, stats = cupy_sdpa.attention(q, k, v, return_stats=True)
    >>> dq, dk, dv = cupy_sdpa.attention_backward(dout, q, k, v, out, stats)
    >>> bool(np.allclose((dq * q).sum(), (dk * k).sum()))         # scaling q or k has the same effect on the scores
    True
    """
    if positional or stats is ...:
        refuse_arguments(attention_backward, positional, options)
    if not type(deterministic) is type(return_dbias) is type(return_dsinks) is bool:
        for name, value in (("deterministic", deterministic), ("return_dbias", return_dbias), ("return_dsinks", return_dsinks)):
            read_flag(name, value)
    if (type(q) not in OWN_TYPES or "layout" in options or "engine" in options) and needs_conversion(q, options):
        passed = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "stats": stats, "dq": dq, "dk": dk, "dv": dv}
        gradients: tuple[Any, ...] = convert(
            attention_backward, passed, options, gradient_names(return_dbias, return_dsinks), deterministic=deterministic,
            return_dbias=return_dbias, return_dsinks=return_dsinks, return_dtensors=return_dtensors,
        )  # fmt: skip
        return gradients
    dtype = read_compute_dtype(options.pop("compute_dtype"), q) if "compute_dtype" in options else None
    if dtype is not None or "block_mask" in options or "mask_mod" in options:
        requested = return_dbias or return_dsinks or (return_dtensors is not None and return_dtensors is not False)
        mask, rest = blocks_of(q, k, options, automatic=not requested)
        if dtype is not None or mask is not None:
            every = (dout, q, k, v, out, stats, dq, dk, dv)
            return tuple(
                attend_backward(
                    every, rest, mask=mask, dtype=dtype, deterministic=deterministic, return_dbias=return_dbias,
                    return_dsinks=return_dsinks, return_dtensors=return_dtensors,
                )
            )  # fmt: skip
    dtensors = return_dtensors if type(return_dtensors) is bool else repr(return_dtensors)
    kind = ("backward", deterministic, return_dbias, return_dsinks, dtensors)
    arrays = (dout, q, k, v, out, stats) if dq is dk is dv is None else (dout, q, k, v, out, stats, dq, dk, dv)
    results = run_cached(kind, arrays, options)
    if results is None:
        for name, array in (("dout", dout), ("out", out), ("stats", stats)):
            if array is None:
                raise TypeError(
                    f"{name} is None; the backward pass needs it: attention(..., return_stats=True) returns out and stats"
                )
        read = read_backward(
            q, k, v, options, dout=dout, out=out, stats=stats, dq=dq, dk=dk, dv=dv,
            return_dbias=return_dbias, return_dsinks=return_dsinks, return_dtensors=return_dtensors,
            deterministic=deterministic,
        )  # fmt: skip
        read.has_all_keys = True
        call = compiled(read)
        results = call.run()
        cache_call(kind, ("dout", "q", "k", "v", "out", "stats", "dq", "dk", "dv")[: len(arrays)], arrays, options, call)
    if "layout" in options and (layout := other_layout(options)):
        given = {"dq": dq, "dk": dk, "dv": dv}
        results = results_in(layout, gradient_names(return_dbias, return_dsinks), results, given, options)
    return tuple(results)
