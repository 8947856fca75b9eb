"""Rotary position embedding: the rotation, and the function that rotates queries and keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..extend import (
    FLOAT_DTYPES,
    Array,
    Axes,
    Expected,
    check_arrays,
    cupy_runtime,
    dtype_name,
    read_array,
    read_flag,
    read_number,
    takes_options,
)
from ..layout import Layout
from . import rope_kernel as kernels
from .cache_arguments import other_names

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


ArrayT = TypeVar("ArrayT", bound=Array)

#: The largest frequency of a rotation, in radians per position: turns are computed as float64 times 2^64.
_FASTEST = 1e150


@dataclasses.dataclass(frozen=True)
class Rope:
    r"""A rotary position embedding: it rotates pairs of channels of q and k by angles proportional to the position.

    .. math:: x_a \to f\,(x_a \cos p\,\theta_i - x_b \sin p\,\theta_i), \qquad
              x_b \to f\,(x_a \sin p\,\theta_i + x_b \cos p\,\theta_i)

    for the i-th pair of channels (a, b) of the token at position p. Angles are computed in integers modulo a whole turn, with
    an error of at most 2e-19 p radians: 2e-13 at a position of a million, far below the precision of float32. 16-bit numbers
    are rotated in float32.

    ===================================================  ========================================================
    model                                                rotation
    ===================================================  ========================================================
    LLaMA, Qwen, Mistral                                 ``Rope(128, base=500_000)``
    GPT-J                                                ``Rope(64, interleaved=True)``
    GPT-NeoX, Phi: part of the head dim                  ``Rope(32)``
    Llama 3.1, linear and other scaled frequencies       ``Rope(128, frequencies=inv_freq)``
    YaRN, LongRoPE: with an attention factor             ``Rope(128, frequencies=inv_freq, factor=attention_factor)``
    ===================================================  ========================================================

    Args:
        dim: R, the number of channels that are rotated, even and at most 256: the first R channels of the head dim. The other
            channels are unchanged.
        base: the base of the frequencies :math:`\theta_i = b^{-2i/R}`. Default None: 10000, unless ``frequencies`` are passed.
        frequencies: R/2 numbers in radians per position, instead of the base: a list or a numpy array.
        interleaved: True to pair neighbouring channels (2i, 2i+1), False to pair channels (i, i + R/2). Default False.
        factor: f, by which rotated channels are multiplied. Default 1.

    Attributes:
        dim, interleaved, factor: as above.
        frequencies: the R/2 frequencies, a tuple of numbers.

    Raises:
        TypeError, ValueError: an argument is invalid, or both ``base`` and ``frequencies`` are passed.

    Sources: Su et al. 2021, "RoFormer", section 3.2; Peng et al. 2023, "YaRN", section 3.

    >>> from cupy_sdpa import Rope
    >>> Rope(4, base=100)
    Rope(dim=4, interleaved=False, factor=1.0)
    >>> Rope(4, base=100).frequencies
    (1.0, 0.1)
    >>> Rope(4, base=100) == Rope(4, frequencies=[1, 0.1])
    True
    """

    dim: int
    base: dataclasses.InitVar[float | None] = None
    frequencies: Sequence[float] | NDArray[Any] | None = dataclasses.field(default=None, repr=False)
    interleaved: bool = False
    factor: float = 1.0

    def __post_init__(self, base: float | None) -> None:
        dim, given = read_number("dim", self.dim, 2), self.frequencies
        if dim % 2 or dim > 2 * kernels.MAX_PAIRS:
            raise ValueError(f"dim is {dim}; it must be even, and at most {2 * kernels.MAX_PAIRS}")
        if given is None:
            base = _number("base", 10_000.0 if base is None else base)
            if base < 1 / _FASTEST:
                raise ValueError(f"base is {base}; it must be above 0, at least {1 / _FASTEST}; usual is 10000 or more")
            found = [base ** (-2 * i / dim) for i in range(dim // 2)]
        elif base is not None:
            raise ValueError(f"base is {base} and frequencies are passed; pass one of them")
        elif cupy_runtime.is_array(given):
            raise TypeError("frequencies are a CuPy array; pass numbers on the host, for example frequencies.get()")
        else:
            if np.asarray(given).dtype.kind not in "iufV":  # V: bfloat16
                raise TypeError(f"frequencies are {given!r}; pass {dim // 2} numbers")
            array = np.asarray(given, np.float64)
            if array.shape != (dim // 2,):
                raise ValueError(f"frequencies have shape {array.shape}; dim is {dim}, so pass {dim // 2} numbers")
            found = array.tolist()
            if not all(abs(frequency) <= _FASTEST for frequency in found):  # also false for NaN
                raise ValueError(f"frequencies are {found}; they must be finite, and at most {_FASTEST} radians per position")
        factor = _number("factor", self.factor)
        if not 0 < factor <= float(np.finfo(np.float32).max):
            raise ValueError(f"factor is {factor}; it must be above 0, and a number of float32")
        values = {
            "dim": dim, "frequencies": tuple(found), "interleaved": read_flag("interleaved", self.interleaved),
            "factor": factor,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)
        record = kernels.rotation_record(tuple(found), self.factor, interleaved=self.interleaved)
        object.__setattr__(self, "_record", record)

    def transposed(self) -> Rope:
        """Return the rotation by the negative angles, which turns gradients of rotated arrays into gradients of the originals.

        >>> import numpy as np
        >>> from cupy_sdpa import Rope, apply_rope
        >>> rope, x = Rope(8), np.random.default_rng(0).standard_normal((8, 1, 5, 1)).astype(np.float32, order="F")
        >>> bool(np.allclose(apply_rope(apply_rope(x, rope), rope.transposed()), x, atol=1e-6))
        True
        """
        return dataclasses.replace(self, base=None, frequencies=[-float(x) for x in self.frequencies])  # type: ignore[union-attr]


Rope.__init__ = other_names(  # type: ignore[method-assign]
    {
        "pass base=": "rope_base rope_theta rotary_base theta",
        "pass frequencies=, dim/2 numbers in radians per position": "freqs inv_freq inv_freqs",
        "pass dim=, the number of channels that are rotated": "head_dim rotary_dim rotary_ndims",
        "pass interleaved=; True if the channels of a pair are neighbours": "interleave is_neox is_neox_style traditional",
        "pass factor=, by which rotated channels are multiplied": "attention_factor attention_scaling mscale",
    }
)(Rope.__init__)


def _number(name: str, value: Any) -> float:
    """Return a finite number."""
    if not math.isfinite(found := read_number(name, value)):
        raise ValueError(f"{name} is {found}; it must be finite")
    return found


def _most_channels(head_dim: int) -> int:
    """Return the largest number of channels of a head dim that can be rotated."""
    return min(head_dim // 2, kernels.MAX_PAIRS) * 2


def read_rope(rope: Any, head_dim: int) -> Any:
    """Return the record of a rotation of arrays with a head dim.

    Raises:
        TypeError, ValueError: it is not a :class:`Rope`, or it rotates more channels.
    """
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is {rope!r}; pass a cupy_sdpa.Rope, for example Rope({max(2, _most_channels(head_dim))})")
    if rope.dim > head_dim:
        most = _most_channels(head_dim)
        remedy = f"pass Rope({most}) or less" if most else "a rotation needs 2 channels or more"
        raise ValueError(f"rope.dim is {rope.dim}, but the head dim is {head_dim}; {remedy}")
    return rope._record  # type: ignore[attr-defined]


@other_names(
    {
        "pass start=, the position of the first token of each sequence, a number or int32 (B,); or seq_lens_kv=": (
            "offset offsets seqlen_offset seqlen_offsets"
        ),
        "pass positions=, the position of every token, int32 (S,), (S, B) or packed (T,)": (
            "input_positions pos position position_ids"
        ),
        "pass seq_lens_kv=, the length of each sequence, which is one more than the position of its last token": "end ends",
        "pass seq_lens_q=, the number of tokens of each sequence in x": "counts lengths seq_lens",
        "pass cu_seqlens_q=, where each sequence of x begins": "cu_seqlens",
        "pass it to Rope, as base=, frequencies= or interleaved=": "base frequencies inv_freq interleave interleaved theta",
        "pass rope=, a cupy_sdpa.Rope": "cos cos_sin_cache freqs freqs_cis rotary sin",
    }
)
@takes_options
def apply_rope(
    x: ArrayT,
    rope: Rope,
    *,
    start: int | Array | None = None,
    seq_lens_q: Array | None = None,
    seq_lens_kv: Array | None = None,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    positions: Array | None = None,
    layout: Layout | None = None,
    k: Any = None,
    v: Any = None,
    page_table: Any = None,
) -> ArrayT:
    """Rotate queries or keys by the positions of their tokens. On the GPU, one kernel runs on CuPy's current stream.

    A sequence's positions count from ``start``; or end with the last of ``seq_lens_kv`` keys, which is the alignment of
    ``attention(..., causal="bottom_right")``; or ``positions`` lists them, for example for a draft tree (:func:`tree_depths`).
    After an append to a :class:`KVCache`, ``apply_rope(q, rope, **cache.view())`` gives queries the positions of the appended
    tokens. The host reads nothing, so you can capture the call in a CUDA graph. The first call for a dtype compiles the kernel:
    make it before the capture.

    Args:
        x: ``(D, H, S, B)``, or packed ``(D, H, T)`` with ``cu_seqlens_q``; float16, bfloat16, float32 or float64, with unit
            stride along D.
        rope: the rotation, of at most D channels.
        start: the position of the first token of each sequence: a number, or int32 ``(B,)``. Default None: 0, unless
            ``seq_lens_kv`` is passed.
        seq_lens_q: int32 ``(B,)``, the number of tokens of each sequence in a dense x, as for :func:`attention`, whether x is
            queries or keys. Only with ``seq_lens_kv``. Default None: S.
        seq_lens_kv: int32 ``(B,)``, the length of each sequence including the tokens in x: one more than the position of the
            last token. Replaces ``start``.
        cu_seqlens_q: int32 or int64 ``(B+1,)``, where each packed sequence begins, as for :func:`attention`; for queries and
            keys.
        max_seqlen_q: the maximum of ``seq_lens_q``, which must be at most S.
        positions: int32 ``(S,)``, ``(S, B)``, or ``(T,)`` for packed arrays: the position of every token. Replaces ``start``,
            and the lengths and offsets that ``**cache.view()`` passes.
        layout: the order of x's axes, as for :func:`attention`; with a layout in C order ``positions`` may be ``(B, S)``.
            Default None: the shapes above.
        k, v, page_table: ignored; accepted so that you can pass ``**cache.view()``.

    Returns:
        A new array with the shape and dtype of x, dense in memory in the order (D, H, S, B). Tokens after the end of a sequence
        get the positions that follow.

    Raises:
        TypeError, ValueError: an array has the wrong type, dtype or shape, or on the CPU lengths or offsets that do not fit x;
            or ``start`` is passed together with ``seq_lens_kv`` or ``positions``.

    Source: Su et al. 2021, "RoFormer", section 3.2.

    >>> import numpy as np
    >>> from cupy_sdpa import KVCache, Rope, apply_rope, attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (np.asfortranarray(rng.standard_normal((8, heads, 3, 2)).astype(np.float32)) for heads in (4, 2, 2))
    >>> cache, rope = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True), Rope(8)
    >>> cache.append(k, v, rope=rope)
    >>> rotated = apply_rope(q, rope, **cache.view())
    >>> out = attention(rotated, **cache.view())
    >>> bool(np.allclose(out, attention(rotated, apply_rope(k, rope), v), atol=1e-6))
    True
    """
    axes = Axes(layout)
    if positions is not None:
        if start is not None:
            raise ValueError("positions and start are both passed; positions are of all tokens: omit start=")
        seq_lens_q = seq_lens_kv = cu_seqlens_q = max_seqlen_q = None
    given: dict[str, Any] = {"start": start, "seq_lens_kv": seq_lens_kv, "seq_lens_q": seq_lens_q, "cu_seqlens_q": cu_seqlens_q}
    if axes.layout:
        if positions is not None:
            given["positions"] = axes.array("positions", read_array("positions", positions, integers=True))
        own = apply_rope(axes.array("q", x), rope, **given, max_seqlen_q=max_seqlen_q)
        return axes.result("q", own)  # type: ignore[no-any-return]
    if start is not None and seq_lens_kv is not None:
        raise ValueError(
            "start and seq_lens_kv are both passed; positions count from start, or up to seq_lens_kv: pass one of them"
        )
    if seq_lens_q is not None and cu_seqlens_q is not None:
        raise ValueError("seq_lens_q and cu_seqlens_q are both passed; packed arrays have cu_seqlens_q, dense ones seq_lens_q")
    first = 0
    if isinstance(start, (bool, float)):
        raise TypeError(f"start is {start!r}; it must be a number of tokens, or int32 (B,)")
    if start is None or isinstance(start, (int, np.integer)):
        first, given["start"] = int(start or 0), None
        if abs(first) >= 2**62:
            raise ValueError(f"start is {first}; positions are integers of 64 bits: pass one below 2**62")
    dtype = dtype_name(read_array("x", x).dtype)
    given |= {"positions": positions}
    others = {name: read_array(name, y, integers=True) for name, y in given.items() if y is not None}
    check_arrays([], {"x": x} | others)
    _check_tokens(x, dtype, others)
    if max_seqlen_q is not None and seq_lens_q is not None and max_seqlen_q > x.shape[2]:
        raise ValueError(
            f"max_seqlen_q is {max_seqlen_q}, the maximum of seq_lens_q, but x has {x.shape[2]} tokens: pass all tokens of the "
            "last append, or only seq_lens_kv=cache.lengths for the newest tokens of every sequence"
        )
    if positions is None:
        _check_lengths(x.shape, others)
    record = read_rope(rope, x.shape[0])
    start, seq_lens_kv, seq_lens_q, cu_seqlens_q, positions = map(others.get, given)
    places: tuple[Any, ...] = (start, seq_lens_kv, seq_lens_q, cu_seqlens_q)
    with cupy_runtime.device_context(x):
        dense = [y if y is None or y.flags.c_contiguous else y.copy() for y in places]
        out = cupy_runtime.new_result(x, x.shape, x.dtype)
        kernels.apply(x, out, record, kernels.TokenPositions(first, *dense)._replace(listed=positions), dtype)
    return out  # type: ignore[no-any-return]


def _check_tokens(x: Any, dtype: str, others: dict[str, Any]) -> None:
    """Check the tokens of :func:`apply_rope`, and their positions."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"x is {dtype}; it must be {', '.join(FLOAT_DTYPES)}: convert with .astype()")
    packed, listed = "cu_seqlens_q" in others, others.get("positions")
    if x.ndim not in ((3, 4) if listed is not None else (3,) if packed else (4,)):
        raise ValueError(
            f"x has shape {x.shape}; it must be (D, H, S, B), or packed (D, H, T) with cu_seqlens_q= or positions=: "
            f"cu_seqlens_q is {'passed' if packed else 'None'}"
        )
    Axes.check_strides("x", x, required=True, remedy="")
    if listed is not None:
        _check_positions(listed, x.shape)


def _check_lengths(shape: tuple[int, ...], others: dict[str, Any]) -> None:
    """Check the starts, lengths or offsets from which :func:`apply_rope` computes the positions of an array of ``shape``."""
    batch, expected = shape[-1], []
    if (offsets := others.get("cu_seqlens_q")) is not None:
        if offsets.dtype not in (np.int32, np.int64):
            raise TypeError(f"cu_seqlens_q is {offsets.dtype}; it must be int32 or int64: convert with .astype('int32')")
        if offsets.ndim != 1 or offsets.size < 2:
            raise ValueError(f"cu_seqlens_q has shape {offsets.shape}; it must be (B + 1,) for B sequences")
        batch = offsets.size - 1
        expected.append(Expected("cu_seqlens_q", (batch + 1,), dtype_name(offsets.dtype), "(B + 1,)", most=shape[2]))
    expected += [Expected(name, (batch,), "int32", "(B,)") for name in ("start", "seq_lens_kv")]
    check_arrays([*expected, Expected("seq_lens_q", (batch,), "int32", "(B,)", most=shape[2])], others)


def read_positions(positions: Any, x: Any, axes: Axes) -> Any:
    """Return the positions of all tokens of an array ``(D, H, S, B)`` or packed ``(D, H, T)``, in its memory; as int32."""
    found = axes.array("positions", read_array("positions", positions, integers=True))
    check_arrays([], {"k": x, "positions": found})
    _check_positions(found, x.shape)
    return found


def _check_positions(positions: Any, shape: tuple[int, ...]) -> None:
    """Check the positions of all tokens of an array ``(D, H, S, B)`` or packed ``(D, H, T)``."""
    wanted = shape[2:] if positions.ndim == 2 else shape[2:3]
    legend = "(T,), the position of every token" if len(shape) == 3 else "(S,) or (S, B), the position of every token"
    check_arrays([Expected("positions", wanted, "int32", legend)], {"positions": positions})
