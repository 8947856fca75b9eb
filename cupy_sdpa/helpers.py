"""Helpers of calls: the usual ALiBi slopes, the dropout mask of a call, and merged results over disjoint sets of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .core._typing import Array, ArrayT, Engine, Layout
from .core.boundary.arguments import read_forward
from .core.boundary.conversion import OUTPUTS, Conversion
from .core.boundary.layouts import check_layout, other_layout
from .core.boundary.options import takes_options
from .core.boundary.read_array import arrays_on_gpu, check_arrays, read_array
from .core.errors import in_words
from .core.kernels.merge import Parts, merge_parts
from .core.kernels.merge_gradients import PartGradient, merge_gradients
from .core.kernels.ragged import sum_over_scores
from .core.options.values import read_flag, read_number
from .core.problem.bucket import Bucket
from .core.problem.tensor_spec import Expected, numpy_dtype
from .core.programs.executor import call_of_problem
from .core.runtime import cupy_runtime

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


def alibi_slopes(heads: int) -> NDArray[np.float32]:
    r"""Return the usual ALiBi slopes, for ``alibi_slopes=``.

    .. math:: m_h = 2^{-8 h / H}, \quad h = 1 \dots H

    if H is a power of two; otherwise the slopes of the next lower power of two, then every second slope of the next higher one.

    Args:
        heads: H, the number of query heads.

    Returns:
        numpy array ``(H,)``, float32; ``cupy.asarray`` copies it to the GPU.

    Raises:
        TypeError, ValueError: heads is not a positive integer.

    Source: Press et al. 2022, "Train Short, Test Long", section 3, and its reference code for other numbers of heads.

    >>> alibi_slopes(8).tolist()
    [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    heads = read_number("heads", heads, 1)
    lower = 1 << int(math.log2(heads))
    lower_slopes, higher_slopes = (2.0 ** (-8 * np.arange(1, n + 1) / n) for n in (lower, 2 * lower))
    return np.concatenate([lower_slopes, higher_slopes[::2]])[:heads].astype(np.float32)


@takes_options
def dropout_mask(
    q: Array,
    k: Array,
    *,
    dropout_p: float,
    seed: int | Array,
    offset: int | Array = 0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    bucket: Bucket = None,
    layout: Literal["dhsb", "dht", "bshd", "bhsd", "sbhd", "thd"] | None = None,
    engine: Engine = None,
) -> Any:
    """Return which weights :func:`cupy_sdpa.attention` keeps with these arguments, on the engine of the arrays.

    It takes memory of size Hq x Sq x Skv x B: use it for tests and comparisons, not for training.

    Args:
        q, k: as for the call; the elements do not matter.
        dropout_p, seed, offset: as for the call.
        cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv: as for the call.
        bucket: as for the call: it changes which weights are dropped. For packed sequences pass the rounded ``max_seqlen_q``
            and ``max_seqlen_kv`` instead. Default None.
        layout: the axes of q and k, as for the call; in C order the result is ``(B, Hq, Sq, Skv)``. Default None: ``"dhsb"``.
        engine: as for the call; ``"cupy"`` draws the numbers of the CPU. Default None: the engine of the arrays.

    Returns:
        bool ``(Skv, Sq, Hq, B)``, True where a weight is kept; for packed sequences Sq and Skv are the maximum lengths. On the
        CPU, ``attention(..., dropout_p=..., dropout_mask=...)`` reproduces the dropout of the GPU with this mask.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.attention`.

    >>> x = np.ones((8, 2, 100, 1), np.float32, order="F")
    >>> mask = dropout_mask(x, x, dropout_p=0.25, seed=7)
    >>> mask.shape, round(float(mask.mean()), 1)
    ((100, 100, 2, 1), 0.8)
    """
    options = {
        "dropout_p": dropout_p, "seed": seed, "offset": offset, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv, "bucket": bucket, "layout": layout,
        **({} if engine is None else {"engine": engine}),
    }  # fmt: skip
    if bucket is not None and cu_seqlens_q is not None:
        raise ValueError(
            f"bucket is {bucket!r} and cu_seqlens_q is passed; round max_seqlen_q and max_seqlen_kv up, as the call does, and "
            "pass them without bucket="
        )
    if (conversion := Conversion.of(q, options)) is not None:
        return conversion.call(dropout_mask, {"q": q, "k": k}, ("mask",))
    call = read_forward(q, k, k, options, return_kept=True)
    if dropout_p:
        with cupy_runtime.device_context(q):
            for spec in call.problem.results:  # memory of the graph while the stream is captured
                dtype = numpy_dtype(spec.dtype, on_gpu=call.on_gpu)
                call.arrays[spec.name] = cupy_runtime.temporary(q, spec.shape, dtype)
        kept = call_of_problem(call).run()[-1] > 0
    else:  # the graph draws no random numbers
        kept = cupy_runtime.new_result(q, call.problem.results[-1].shape, np.dtype(bool))
        kept.fill(True)
    return kept


# fmt: off
@overload
def merge(
    outs: Sequence[ArrayT], stats: Sequence[Array], *, sinks: Array | None = None, out: Array | None = None,
    layout: Layout | None = None, return_stats: Literal[False] = False, engine: Engine = None,
) -> ArrayT: ...
@overload
def merge(
    outs: Sequence[ArrayT], stats: Sequence[Array], *, sinks: Array | None = None, out: Array | None = None,
    layout: Layout | None = None, return_stats: Literal[True], engine: Engine = None,
) -> tuple[ArrayT, Any]: ...
@overload
def merge(
    outs: Sequence[ArrayT], stats: Sequence[Array], *, sinks: Array | None = None, out: Array | None = None,
    layout: Layout | None = None, return_stats: bool, engine: Engine = None,
) -> Any: ...
# fmt: on
@takes_options
def merge(
    outs: Sequence[Array],
    stats: Sequence[Array],
    *,
    sinks: Array | None = None,
    out: Array | None = None,
    layout: Layout | None = None,
    return_stats: bool = False,
    engine: Engine = None,
) -> Any:
    r"""Merge the results of attention over disjoint sets of keys into the result over all keys.

    .. math:: O = \sum_i e^{L_i - L}\, O_i, \qquad L = \log \sum_i e^{L_i}

    Sums are computed in float32, or in float64 for float64 outputs on the CPU. On the GPU up to eight parts take one kernel
    launch on CuPy's current stream, without synchronization.

    Args:
        outs: n >= 1 outputs ``(Dv, Hq, Sq, B)`` of one dtype, or packed ``(Dv, Hq, Tq)``, with any strides: float16, bfloat16
            or float32; also float64 on the CPU.
        stats: their log-sum-exps to base e, n float32 arrays ``(Sq, Hq, B)``, or packed ``(Hq, Tq)``, also float64 for float64
            outputs: ``attention(..., return_stats=True)`` returns both. Where one is -inf, that part's output is not used.
            +inf, which flash-attention 2 returns for rows without keys, raises ValueError on the CPU; on a GPU, where elements
            are not checked, the row becomes NaN: replace +inf by -inf.
        sinks: float32 ``(Hq,)``, or float64 with float64 outputs: for each head the score of an additional key without a value.
            Pass sinks here, not to the calls for the parts, so that they count once. Default None.
        out: an array to write the result into, with the shape and dtype of one output; it must not overlap an input.
        layout: the axes of ``outs`` and ``out``, as for :func:`cupy_sdpa.attention`; statistics are then ``(B, Hq, Sq)``,
            packed ``(Tq, Hq)``. Default None: the shapes above.
        return_stats: also return L, with the dtype of ``stats``. Default False.
        engine: as for :func:`cupy_sdpa.attention`; ``"cupy"`` computes as the CPU does. Default None: the engine of the arrays.

    Returns:
        ``out`` or ``(out, stats)``. New arrays are in Fortran order. A row without keys in any part has output 0, and L is -inf
        or its sink.

    Raises:
        TypeError: numpy and CuPy arrays are mixed, or an array has a type or dtype that is not supported.
        ValueError: the numbers of arrays or their shapes do not match, ``out`` is read-only or overlaps an input, or a
            log-sum-exp in a numpy array is +inf.

    Sources: Dao et al. 2023, "Flash-Decoding for long-context inference"; Milakov and Gimelshein 2018, "Online normalizer
    calculation for softmax".

    >>> import cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (np.asfortranarray(rng.standard_normal((16, 2, n, 1))) for n in (3, 100, 100))
    >>> halves = [slice(60), slice(60, None)]
    >>> parts = [cupy_sdpa.attention(q, k[:, :, half], v[:, :, half], return_stats=True) for half in halves]
    >>> out, stats = merge(*zip(*parts), return_stats=True)
    >>> whole, whole_stats = cupy_sdpa.attention(q, k, v, return_stats=True)
    >>> bool(np.allclose(out, whole, atol=1e-6)), bool(np.allclose(stats, whole_stats, atol=1e-6))
    (True, True)
    """
    return_stats = read_flag("return_stats", return_stats)
    arrays = _named_parts(outs, stats, layout) | {"sinks": sinks, "out": out}
    if engine is not None or other_layout({"layout": layout}):

        def of_own(sinks: Any, out: Any, **parts: Any) -> Any:
            own = ([x for name, x in parts.items() if name.startswith(kind)] for kind in ("outs", "stats"))
            return merge(*own, sinks=sinks, out=out, return_stats=return_stats)

        # a layout is named, because an array of three axes has no missing batch axis
        return Conversion(outs[0], {"engine": engine, "layout": layout or "dht"}).run(of_own, arrays, OUTPUTS)
    _check_parts(arrays, outs[0], stats[0], len(outs))
    like, packed = outs[0], outs[0].ndim == 3
    groups = _groups(outs, stats)
    with cupy_runtime.device_context(like):
        out = cupy_runtime.new_result(like, like.shape, like.dtype) if out is None else out
        rows = cupy_runtime.new_result(like, stats[0].shape, stats[0].dtype) if return_stats else None
        if packed:
            merge_parts(groups, out[..., None], None if rows is None else rows.T[..., None], sinks)
        else:
            merge_parts(groups, out, rows, sinks)
    return (out, rows) if return_stats else out


# fmt: off
@overload
def merge_backward(
    outs: Sequence[ArrayT], stats: Sequence[Array], dout: Array | None, dstats: Array | None = None, *,
    sinks: Array | None = None, return_dsinks: Literal[False] = False, layout: Layout | None = None, engine: Engine = None,
) -> tuple[list[ArrayT], list[Any]]: ...
@overload
def merge_backward(
    outs: Sequence[ArrayT], stats: Sequence[Array], dout: Array | None, dstats: Array | None = None, *,
    sinks: Array | None = None, return_dsinks: bool, layout: Layout | None = None, engine: Engine = None,
) -> Any: ...
# fmt: on
@takes_options
def merge_backward(
    outs: Sequence[Array],
    stats: Sequence[Array],
    dout: Array | None,
    dstats: Array | None = None,
    *,
    sinks: Array | None = None,
    return_dsinks: bool = False,
    layout: Layout | None = None,
    engine: Engine = None,
) -> Any:
    r"""Compute the gradients of :func:`merge` with respect to the outputs and log-sum-exps of the parts.

    .. math:: dO_i = w_i\, dO, \qquad dL_i = w_i\, \bigl(\operatorname{rowsum}(dO \circ (O_i - O)) + dL\bigr), \qquad
              w_i = e^{L_i - L}

    Pass them to :func:`cupy_sdpa.attention_backward` of each part as dout and dstats. The merged O and L are computed again, in
    float32, or in float64 for float64 outputs on the CPU.

    Args:
        outs, stats, sinks, layout, engine: as for :func:`merge`.
        dout: the gradient of the merged output, with its shape and dtype; or None for 0, if dstats is passed.
        dstats: the gradient of the merged log-sum-exp, with the shape and dtype of one array of ``stats``. Default None: 0. It
            is ignored where the log-sum-exp is -inf.
        return_dsinks: also return the gradient of the sinks, ``(Hq,)``. Default False.

    Returns:
        ``(douts, dstats)``, two lists with the gradients of each part, or ``(douts, dstats, dsinks)``. They are 0 where the
        log-sum-exp of a part is -inf.

    Raises:
        TypeError, ValueError: as :func:`merge`; or dout and dstats are None, or ``return_dsinks`` is True without sinks.

    >>> import cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (np.asfortranarray(rng.standard_normal((16, 2, n, 1))) for n in (3, 100, 100, 3))
    >>> keys, values = (np.split(x, [60], axis=2) for x in (k, v))
    >>> parts = [cupy_sdpa.attention(q, *part, return_stats=True) for part in zip(keys, values)]
    >>> gradients = zip(keys, values, parts, *merge_backward(*zip(*parts), dout))
    >>> dq = sum(cupy_sdpa.attention_backward(do, q, k, v, *part, dstats=dl)[0] for k, v, part, do, dl in gradients)
    >>> out, stats = cupy_sdpa.attention(q, k, v, return_stats=True)
    >>> bool(np.allclose(dq, cupy_sdpa.attention_backward(dout, q, k, v, out, stats)[0]))
    True
    """
    return_dsinks = read_flag("return_dsinks", return_dsinks)
    arrays = _named_parts(outs, stats, layout) | {"sinks": sinks, "dout": dout, "dstats": dstats}
    if dout is dstats is None:
        raise TypeError("dout and dstats are None; pass the gradient of the merged output, of its log-sum-exp, or both")
    if return_dsinks and sinks is None:
        raise ValueError("return_dsinks is True and sinks is None: pass sinks=, or remove return_dsinks")
    count = len(outs)
    if engine is not None or other_layout({"layout": layout}):

        def of_own(sinks: Any, dout: Any, dstats: Any, **parts: Any) -> Any:
            outs, stats = ([x for name, x in parts.items() if name.startswith(kind)] for kind in ("outs", "stats"))
            douts, of_stats, *rest = merge_backward(outs, stats, dout, dstats, sinks=sinks, return_dsinks=return_dsinks)
            return (*douts, *of_stats, *rest)

        names = (*["out"] * count, *["stats"] * count, *["dsinks"] * return_dsinks)
        found = Conversion(outs[0], {"engine": engine, "layout": layout or "dht"}).run(of_own, arrays, names)
    else:
        _check_parts(arrays, outs[0], stats[0], count)
        found = _gradients_of_parts(outs, stats, dout, dstats, sinks, return_dsinks=return_dsinks)
    return ([*found[:count]], [*found[count : 2 * count]], *found[2 * count :])


def _gradients_of_parts(
    outs: Sequence[Any], stats: Sequence[Any], dout: Any, dstats: Any, sinks: Any, *, return_dsinks: bool
) -> list[Any]:
    """Return the gradients of the outputs, of the statistics, and of the sinks if requested, as one list."""
    like, packed = outs[0], outs[0].ndim == 3

    def of_rows(x: Any) -> Any:
        return x.T[..., None] if packed and x is not None else x

    def vectors(x: Any) -> Any:
        return x[..., None] if packed and x is not None else x

    with cupy_runtime.device_context(like):
        made = [cupy_runtime.new_result(like, x.shape, x.dtype) for x in (*outs, *stats)]
        rows = of_rows(stats[0])
        wide = np.dtype(np.float64 if like.dtype == np.float64 else np.float32)
        out = cupy_runtime.temporary(like, vectors(like).shape, wide)
        merged = cupy_runtime.temporary(like, rows.shape, rows.dtype)
        merge_parts(_groups(outs, stats), out, merged, sinks)
        douts, of_stats = made[: len(outs)], made[len(outs) :]
        parts = [
            PartGradient(vectors(x), of_rows(y), vectors(dx), of_rows(dy))
            for x, y, dx, dy in zip(outs, stats, douts, of_stats, strict=True)
        ]
        if return_dsinks:
            of_sinks = cupy_runtime.temporary(like, rows.shape, rows.dtype)
            scores = cupy_runtime.temporary(like, rows.shape, rows.dtype)
            scores[...] = sinks[None, :, None]
            parts.append(PartGradient(None, scores, None, of_sinks))
        merge_gradients(parts, out, merged, vectors(dout), of_rows(dstats))
        if return_dsinks:
            dsinks = cupy_runtime.new_result(like, sinks.shape, sinks.dtype)
            sum_over_scores(of_sinks.transpose(0, 2, 1)[..., None], dsinks[None, None, :, None])
            made.append(dsinks)
    return made


def _named_parts(outs: Any, stats: Any, layout: Any) -> dict[str, Any]:
    """Return the arrays of a merge's parts by name; check that there are some, and the layout."""
    check_layout(layout)
    for name, given in (("outs", outs), ("stats", stats)):
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{name} is {in_words(given)}; pass a list or a tuple of arrays")
    if len(outs) != len(stats) or not outs:
        raise ValueError(f"there are {len(outs)} outs and {len(stats)} stats; pass one or more parts, each with its stats")
    return {f"{name}[{i}]": x for name, given in (("outs", outs), ("stats", stats)) for i, x in enumerate(given)}


def _groups(outs: Sequence[Any], stats: Sequence[Any]) -> list[Parts]:
    """Return the parts of a merge, one in each group."""
    packed = outs[0].ndim == 3
    pairs = zip(outs, stats, strict=True)
    return [Parts(x[..., None, None], y.T[..., None, None]) if packed else Parts(x[..., None], y[..., None]) for x, y in pairs]


def _check_parts(arrays: Mapping[str, Any], like: Any, rows: Any, count: int) -> None:
    """Check the arrays of :func:`merge` and of its gradients, by name.

    ``like`` and ``rows`` belong to the first of ``count`` parts.
    """
    required = [name for name in arrays if "[" in name]
    on_gpu = arrays_on_gpu({name: read_array(name, x) for name, x in arrays.items() if x is not None or name in required})
    dtype, shape = like.dtype, like.shape
    allowed = ("float16", "bfloat16", "float32", *(() if on_gpu else ("float64",)))
    if dtype.name not in allowed:
        raise TypeError(f"outs[0] has dtype {dtype}; it must be {', '.join(allowed)}: convert with .astype(...)")
    if len(shape) not in (3, 4):
        raise ValueError(f"outs[0] has shape {shape}; it must be (Dv, Hq, Sq, B), or (Dv, Hq, Tq) of packed sequences")
    table = Expected.of_call(like, like, like, given={"stats": rows, "sinks": arrays["sinks"], "dstats": arrays.get("dstats")})
    legend = "the shape of outs[0]"
    wanted = [table["out"]._replace(name=f"outs[{i}]", legend=legend) for i in range(1, count)]
    wanted += [table["stats"]._replace(name=f"stats[{i}]") for i in range(count)]
    wanted += [table["dout"]._replace(legend=legend), table["sinks"], table["dstats"]]
    check_arrays([*wanted, table["out"]._replace(legend=legend, writable=True)], arrays)
    for i in range(count):
        rows = arrays[f"stats[{i}]"]
        if isinstance(rows, np.ndarray) and np.isposinf(rows).any():  # the elements of a GPU's arrays are not read
            places = np.isposinf(rows if len(shape) == 4 else rows.T)
            query, head, *entry = (int(n) for n in np.argwhere(places)[0])
            place = f"query {query}, head {head}{''.join(f' and batch item {b}' for b in entry)}"
            raise ValueError(
                f"stats[{i}] is inf in {int(places.sum())} of {places.size} rows, first at {place}: a row without keys has the "
                f"log-sum-exp -inf, but inf in flash-attention 2: pass np.where(stats[{i}] == np.inf, -np.inf, stats[{i}])"
            )
