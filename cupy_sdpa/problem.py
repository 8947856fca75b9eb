"""What is asked: the shapes, layouts and options of one attention call, validated, frozen and hashable.

A problem knows no device and no pointer. It holds everything that is baked into a plan and nothing else, so it is the
key of the plan cache. Equal calls get the very same object (:func:`problem` is cached), so a look-up compares by identity.

The legend of every shape: D head dim of q and k, Dv head dim of v, Hq query heads, Hkv key/value heads (Hq a multiple of
Hkv), Sq, Skv lengths, B batch.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import NamedTuple

#: Bytes of an element, for every dtype that q, k and v may have.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

#: The same, and of the dtypes of other arrays.
SIZES = ITEMSIZE | {"int32": 4}

#: An array's (dtype name, shape, strides in bytes, alignment of its memory in bytes): all that a problem takes from it.
Signature = tuple[str, tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An array as the caller holds it.

    Attributes:
        name: the argument's name.
        dtype: numpy's name of it.
        shape: as the caller sees it, ``(head_dim, heads, seq, batch)`` or ``(seq, heads, batch)``.
        strides: in bytes. An axis of length 1 gets the stride that it would have in dense memory.
        alignment: of the first element, in bytes, at most 16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    def __str__(self) -> str:
        text = f"{self.name} {self.shape} {self.dtype}"
        dense = dense_strides(self.shape, SIZES[self.dtype])
        return text if self.strides == dense else f"{text} strides {self.strides} bytes"


#: What ``window=`` takes: keys before and behind the diagonal, None for no bound; and, if wanted, which diagonal.
Window = tuple[int | None, int | None] | tuple[int | None, int | None, str] | None

#: The arrays of lengths, by their names.
LENGTHS = ("seq_lens_q", "seq_lens_kv")


class Band(NamedTuple):
    """Which keys a query sees: those from ``left`` before the diagonal to ``right`` behind it, inclusive; None is unbounded.

    The diagonal goes through the first query and the first key, or (bottom right) through the last ones.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def within(self, queries: int, keys: int, *, lengths: bool) -> Band | None:
        """The same on so many queries and keys, in its simplest form; None where every query sees every key.

        >>> Band(right=0, bottom_right=True).within(1, 100, lengths=False)        # a single query that sees every key
        >>> Band(left=5, right=500, bottom_right=True).within(100, 100, lengths=False)
        Band(left=5, right=None, bottom_right=False)
        """
        left, right, bottom_right = self
        if right is not None and right >= (queries if bottom_right else keys) - 1:
            right = None
        if left is not None and left >= (keys if bottom_right else queries) - 1:
            left = None
        if left is None and right is None:
            return None
        return Band(left, right, bottom_right and (lengths or queries != keys))

    def __str__(self) -> str:
        corner = "bottom right" if self.bottom_right else "top left"
        if self.left is None and self.right == 0:
            return f"causal from the {corner}"
        sides = ("all" if side is None else side for side in (self.left, self.right))
        return "window of {} keys before and {} behind the diagonal from the {}".format(*sides, corner)


@dataclass(frozen=True)
class Problem:
    """One attention problem.

    Attributes:
        q: ``(D, Hq, Sq, B)``.
        k: ``(D, Hkv, Skv, B)``.
        v: ``(Dv, Hkv, Skv, B)``.
        out: ``(Dv, Hq, Sq, B)``.
        stats: ``(Sq, Hq, B)``, or None where nobody asked for the log-sum-exp.
        band: which keys a query sees, by their distance from the diagonal; None for all.
        positive_scale: whether the scale is a positive normal number; its value is no part of the problem.
        dout: ``(Dv, Hq, Sq, B)``, the gradient of out; None for the forward pass. Then out and stats are inputs.
        dq, dk, dv: the gradients of q, k and v, of their shapes.
        deterministic: whether the result is to be the same, bit for bit, in every run.
        max_workspace: bytes that cuDNN may use beside the arrays; None for no limit.
        seq_lens_q, seq_lens_kv: ``(B,)`` int32, how many queries and keys every batch entry has; None where it has all.
    """

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    out: TensorSpec
    stats: TensorSpec | None = None
    band: Band | None = None
    positive_scale: bool = True
    dout: TensorSpec | None = None
    dq: TensorSpec | None = None
    dk: TensorSpec | None = None
    dv: TensorSpec | None = None
    deterministic: bool = False
    max_workspace: int | None = None
    seq_lens_q: TensorSpec | None = None
    seq_lens_kv: TensorSpec | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        what = (*self.tensors, self.band, self.deterministic, self.max_workspace)
        object.__setattr__(self, "_hash", hash(what))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Problem], tuple[object, ...]]:
        # Made anew in another process: the kept hash is this one's.
        return Problem, tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.init)

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """``(D, Dv, Hq, Hkv, Sq, Skv, B)``."""
        (d, hq, sq, b), (dv, hkv, skv, _) = self.q.shape, self.v.shape
        return d, dv, hq, hkv, sq, skv, b

    @property
    def dtype(self) -> str:
        """The dtype of q, k, v and out."""
        return self.q.dtype

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every array that the call reads or writes."""
        arrays = (self.q, self.k, self.v, self.out, self.stats, self.dout, self.dq, self.dk, self.dv)
        every = (*arrays, self.seq_lens_q, self.seq_lens_kv)
        return tuple(spec for spec in every if spec is not None)

    @property
    def backward(self) -> bool:
        """Whether gradients are asked for."""
        return self.dout is not None

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """The arrays that the call writes."""
        every = (self.dq, self.dk, self.dv) if self.backward else (self.out, self.stats)
        return tuple(spec for spec in every if spec is not None)

    @functools.cached_property
    def extents(self) -> dict[str, tuple[int, int]]:
        """For every tensor, the bytes that it reaches from its first element: from (<= 0), to (> 0), which is beyond."""
        reaches = {}
        for t in self.tensors:
            steps = [step * (length - 1) for step, length in zip(t.strides, t.shape, strict=True)]
            reaches[t.name] = (sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + SIZES[t.dtype])
        return reaches

    @property
    def trivial(self) -> bool:
        """Whether there is nothing to compute: out has no element, or there is no key to see."""
        return 0 in self.out.shape or self.k.shape[2] == 0

    def __str__(self) -> str:
        d, dv, hq, hkv, sq, skv, b = self.sizes
        group = "" if hq == hkv else f" ({'MQA' if hkv == 1 else 'GQA'}, {hq // hkv} query heads a key head)"
        dims = f"head dim {d}" if d == dv else f"head dim {d} (values {dv})"
        mask = str(self.band or "no mask")
        most = "at most " if self.seq_lens_q else ""
        kind = f"{'deterministic ' * self.deterministic}backward" if self.backward else "forward"
        also = ", with log-sum-exp" if self.stats and not self.backward else ""
        return (
            f"{kind} attention, {self.dtype}: batch {b}, {hq} query and {hkv} key/value heads{group}, "
            f"{most}{sq} queries, {most}{skv} keys, {dims}, {mask}{also}"
        )


def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a dense array in Fortran order: the first axis is contiguous."""
    strides, step = [], itemsize
    for length in shape:
        strides.append(step)
        step *= max(length, 1)
    return tuple(strides)


def dense_spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """A dense array in Fortran order, as one that is made for a call."""
    return TensorSpec(name, dtype, shape, dense_strides(shape, SIZES[dtype]), 16)


def _spec(name: str, signature: Signature) -> TensorSpec:
    dtype, shape, strides, alignment = signature
    normal = list(strides)
    for axis, length in enumerate(shape):
        if length == 1:  # no step is ever taken along it: numpy, CuPy and DLPack put anything here, 0 too
            normal[axis] = normal[axis - 1] * max(shape[axis - 1], 1) if axis else SIZES.get(dtype, 1)
    return TensorSpec(name, dtype, shape, tuple(normal), alignment)


def _spec_or_dense(name: str, signature: Signature | None, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """The array that the caller gives, or the one that will be made where none is given."""
    if signature:
        return _spec(name, signature)
    return dense_spec(name, dtype, shape)


@functools.lru_cache(maxsize=4096)
def problem(
    q: Signature,
    k: Signature,
    v: Signature,
    out: Signature | None = None,
    stats: Signature | None = None,
    want_stats: bool = False,
    band: Band | None = None,
    positive_scale: bool = True,
    max_workspace: int | None = None,
    seq_lens_q: Signature | None = None,
    seq_lens_kv: Signature | None = None,
) -> Problem:
    """The problem that these arrays and options pose; an output that is not given is dense, in Fortran order.

    Args:
        q, k, v: what the inputs look like.
        out, stats: what the caller's own outputs look like, or None.
        want_stats: whether the log-sum-exp is asked for.
        band: which keys a query sees.
        positive_scale: whether the scale is a positive normal number.
        max_workspace: bytes that cuDNN may use beside the arrays.
        seq_lens_q, seq_lens_kv: what the arrays of lengths look like; both, or neither.

    Raises:
        TypeError: a dtype that attention does not take, or dtypes that differ.
        ValueError: shapes that do not fit.
    """
    specs = [_spec(name, signature) for name, signature in (("q", q), ("k", k), ("v", v))]
    for spec in specs:
        if len(spec.shape) != 4:
            raise ValueError(
                f"{spec.name} has {len(spec.shape)} dimensions {spec.shape}; it needs 4: (head_dim, heads, seq, batch). "
                f"For a single sequence add a batch axis: {spec.name}[..., None]"
            )
        if spec.dtype not in ITEMSIZE:
            raise TypeError(f"{spec.name} is {spec.dtype}; attention takes {', '.join(ITEMSIZE)}: convert with .astype(...)")
        if spec.dtype != specs[0].dtype:
            raise TypeError(f"{spec.name} is {spec.dtype} and q is {specs[0].dtype}: convert one, so that all have one dtype")
    sq_, sk_, sv_ = specs
    _equal("head dims (axis 0)", sq_, sk_, 0)
    _equal("batch sizes (axis 3)", sq_, sk_, 3)
    _equal("batch sizes (axis 3)", sq_, sv_, 3)
    _equal("numbers of heads (axis 1)", sk_, sv_, 1)
    _equal("lengths (axis 2)", sk_, sv_, 2)
    (d, hq, n, b), (dv, hkv, _, _) = sq_.shape, sv_.shape
    if d == 0:
        raise ValueError(f"q {sq_.shape} has head dim 0; the first axis is head_dim")
    if (hq % hkv) if hkv else hq:
        raise ValueError(
            f"q has {hq} heads and k, v have {hkv}: {hq} must be a multiple of {hkv} "
            f"(grouped queries: each key/value head serves {hq}/{hkv} query heads); shapes are (head_dim, heads, seq, batch)"
        )
    out_shape, stats_shape = (dv, hq, n, b), (n, hq, b)
    out_spec = _spec_or_dense("out", out, sq_.dtype, out_shape)
    _result(out_spec, out_shape, sq_.dtype, "(Dv, Hq, Sq, B), the dtype of q")
    stats_spec = None
    if want_stats or stats:
        stats_spec = _spec_or_dense("stats", stats, "float32", stats_shape)
        _result(stats_spec, stats_shape, "float32", "(Sq, Hq, B)")
    lengths = []
    for name, signature in (("seq_lens_q", seq_lens_q), ("seq_lens_kv", seq_lens_kv)):
        if signature is not None:
            lengths.append(_spec(name, signature))
            _belongs(lengths[-1], (b,), "int32", "(B,)")
    band = band and band.within(n, sk_.shape[2], lengths=bool(lengths))
    return Problem(
        sq_, sk_, sv_, out_spec, stats_spec, band, positive_scale, max_workspace=max_workspace,
        seq_lens_q=lengths[0] if lengths else None, seq_lens_kv=lengths[1] if lengths else None,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def gradient_problem(
    q: Signature,
    k: Signature,
    v: Signature,
    dout: Signature | None = None,
    out: Signature | None = None,
    stats: Signature | None = None,
    dq: Signature | None = None,
    dk: Signature | None = None,
    dv: Signature | None = None,
    band: Band | None = None,
    positive_scale: bool = True,
    deterministic: bool = False,
    max_workspace: int | None = None,
    seq_lens_q: Signature | None = None,
    seq_lens_kv: Signature | None = None,
) -> Problem:
    """The problem of the gradients of :func:`problem`; what is not given is dense, in Fortran order.

    Raises:
        TypeError, ValueError: as :func:`problem`, and for what does not belong to q, k and v.
    """
    asked = problem(q, k, v, None, None, True, band, positive_scale, max_workspace, seq_lens_q, seq_lens_kv)
    assert asked.stats
    inputs = []
    for name, signature, like, legend in (
        ("dout", dout, asked.out, "(Dv, Hq, Sq, B), the dtype of q"),
        ("out", out, asked.out, "(Dv, Hq, Sq, B), the dtype of q"),
        ("stats", stats, asked.stats, "(Sq, Hq, B)"),
    ):
        spec = _spec_or_dense(name, signature, like.dtype, like.shape)
        _belongs(spec, like.shape, like.dtype, legend)
        inputs.append(spec)
    gradients = []
    for name, signature, of in (("dq", dq, asked.q), ("dk", dk, asked.k), ("dv", dv, asked.v)):
        spec = _spec_or_dense(name, signature, of.dtype, of.shape)
        _result(spec, of.shape, of.dtype, f"that of {of.name}, and its dtype")
        gradients.append(spec)
    d_out, given_out, given_stats = inputs
    d_q, d_k, d_v = gradients
    return dataclasses.replace(
        asked, out=given_out, stats=given_stats, dout=d_out, dq=d_q, dk=d_k, dv=d_v, deterministic=deterministic
    )


def _equal(what: str, one: TensorSpec, other: TensorSpec, axis: int) -> None:
    if one.shape[axis] != other.shape[axis]:
        raise ValueError(
            f"the {what} of {one.name} and {other.name} differ, {one.shape[axis]} and {other.shape[axis]}: "
            f"{one.name} is {one.shape}, {other.name} is {other.shape}; shapes are (head_dim, heads, seq, batch). "
            "Arrays in C order (batch, seq, heads, head_dim) are passed as x.T"
        )


def _belongs(spec: TensorSpec, shape: tuple[int, ...], dtype: str, legend: str) -> None:
    if spec.dtype != dtype:
        raise TypeError(f"{spec.name} is {spec.dtype}; it must be {dtype}: convert with .astype, or make it anew")
    if spec.shape != shape:
        raise ValueError(f"{spec.name} has shape {spec.shape}; it must be {shape}, {legend}")


def _result(spec: TensorSpec, shape: tuple[int, ...], dtype: str, legend: str) -> None:
    _belongs(spec, shape, dtype, legend)
    reach = ITEMSIZE[dtype]  # bytes from the first element to the end of what the axes so far cover
    axes = zip(map(abs, spec.strides), spec.shape, strict=True)
    for step, length in sorted((step, length) for step, length in axes if length > 1):
        if step < reach and 0 not in spec.shape:
            raise ValueError(f"{spec.name} has strides {spec.strides} bytes: its elements share memory; pass a dense array")
        reach = step * (length - 1) + reach
