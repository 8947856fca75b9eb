"""The named problems of the test suite, shared by all three kinds of tests."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import cupy_sdpa
from cupy_sdpa.boundary import arguments

DTYPES = {
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("float32"),
    "float64": np.dtype("float64"),
}


@dataclass(frozen=True)
class Case:
    """One problem; the sizes have the names of the legend.

    ``mask`` and ``bias`` are the axes of ``kqhb`` that are not of length 1; "-" for none. ``packed`` concatenates the sequences
    of ``seq_lens_q`` and ``seq_lens_kv``; ``tail`` is the number of positions after the last sequence.
    """

    name: str
    d: int = 64
    dv: int | None = None
    hq: int = 4
    hkv: int = 4
    sq: int = 128
    skv: int | None = None
    b: int = 2
    dtype: str = "bfloat16"
    causal: bool | str = False
    window: tuple | None = None
    seq_lens_q: tuple | None = None
    seq_lens_kv: tuple | None = None
    packed: bool = False
    tail: int = 0
    mask: str = ""
    bias: str = ""
    bias_dtype: str | None = None
    alibi: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    stats: bool | str = True
    scale: float | None = None
    layout: str = "fortran"

    def __str__(self):
        return self.name

    def with_dtype(self, dtype):
        """A copy with another dtype."""
        return replace(self, dtype=dtype)

    @property
    def totals(self):
        """The total lengths of packed q and k."""
        if self.packed:
            return sum(self.seq_lens_q) + self.tail, sum(self.seq_lens_kv) + self.tail
        return self.sq, self.skv or self.sq

    @property
    def shapes(self):
        """The shapes of q, k and v."""
        (tq, tkv), dv = self.totals, self.dv or self.d
        batch = () if self.packed else (self.b,)
        return (self.d, self.hq, tq, *batch), (self.d, self.hkv, tkv, *batch), (dv, self.hkv, tkv, *batch)

    @property
    def tau(self):
        """The scale as a number."""
        return 1 / np.sqrt(self.d) if self.scale is None else self.scale

    @property
    def longest(self):
        """The lengths of the axes of the scores."""
        return (max(self.seq_lens_q), max(self.seq_lens_kv)) if self.packed else (self.sq, self.skv or self.sq)

    def rng(self, seed):
        """A random number generator that depends on the name of the case."""
        return np.random.default_rng([seed, *self.name.encode()])

    def axes(self, full):
        """The shape of an array that has full length along some of the axes ``kqhb``, and length 1 along the others."""
        sq, skv = self.longest
        sizes = {"k": skv, "q": sq, "h": self.hq, "b": self.b}
        return tuple(sizes[axis] if axis in full else 1 for axis in "kqhb")

    def options(self, xp=np, dropout_mask=None):
        """The options of a call with numpy or CuPy arrays; a dropout mask replaces the seed."""
        options = {"scale": self.scale, "causal": self.causal, "window": self.window, "softcap": self.softcap}
        arrays = {}
        lengths = {"q": self.seq_lens_q, "kv": self.seq_lens_kv}
        for side, of in lengths.items():
            if self.packed:
                arrays[f"cu_seqlens_{side}"] = np.cumsum([0, *of], dtype=np.int32)
                options[f"max_seqlen_{side}"] = max(of)
            elif of:
                arrays[f"seq_lens_{side}"] = np.array(of, np.int32)
        if self.mask:
            arrays["mask"] = np.asfortranarray(self.rng(2).random(self.axes(self.mask)) < 0.7)
        if self.bias:
            kind = DTYPES[self.bias_dtype or self.dtype]
            arrays["bias"] = np.asfortranarray(self.rng(3).standard_normal(self.axes(self.bias)).astype(kind))
        if self.alibi:
            arrays["alibi_slopes"] = cupy_sdpa.alibi_slopes(self.hq)
        if self.sinks:
            arrays["sinks"] = self.rng(4).standard_normal(self.hq).astype(np.float32)
        if self.dropout:
            options["dropout_p"] = self.dropout
            if dropout_mask is not None:
                options["dropout_mask"] = dropout_mask
            else:
                options |= {"seed": 1234, "offset": 5}
        return options | {name: xp.asarray(array) for name, array in arrays.items()}

    def added(self, options):
        """The largest magnitude of what is added to the scores."""
        bias, slopes = (np.abs(options[name]).max() if name in options else 0.0 for name in ("bias", "alibi_slopes"))
        # a tanh computed with hardware exponentials is a few units off
        return float(bias) + 32 * (self.softcap or 0.0) + slopes * max(self.longest)

    def kept(self):
        """A random dropout mask."""
        sq, skv = self.longest
        return np.asfortranarray(self.rng(5).random((skv, sq, self.hq, self.b)) >= self.dropout) if self.dropout else None

    @property
    def gradients(self):
        """The options that request every gradient."""
        return {"return_dbias": bool(self.bias), "return_dsinks": self.sinks}

    def problem(self, **options):
        """The problem of dense arrays in Fortran order."""
        options = self.options() | options
        return arguments.read_shapes(*self.shapes, options, dtype=self.dtype, return_stats=self.stats)

    def gradient_problem(self, deterministic=False, **options):
        """The problem of the gradients of dense arrays in Fortran order."""
        options = self.options() | options
        more = {"backward": True, "deterministic": deterministic, **self.gradients}
        return arguments.read_shapes(*self.shapes, options, dtype=self.dtype, **more)

    def dout(self):
        """A random gradient of the output, dense in Fortran order."""
        shape = (self.dv or self.d, *self.shapes[0][1:])
        return np.asfortranarray(self.rng(7).standard_normal(shape).astype(DTYPES[self.dtype]))

    def arrays(self, seed=0):
        """Random q, k and v, dense in Fortran order."""
        rng = self.rng(seed)
        return tuple(np.asfortranarray(rng.standard_normal(shape).astype(DTYPES[self.dtype])) for shape in self.shapes)

    def laid_out(self, arrays):
        """Copy numpy or CuPy arrays to the memory layout of the case."""
        return tuple(LAYOUTS[self.layout](array) for array in arrays)


class HiddenRows(Case):
    """A case whose bias is -inf for every third query."""

    def options(self, xp=np, dropout_mask=None):
        """The options of the case, with the bias."""
        options = super().options(dropout_mask=dropout_mask)
        options["bias"][:, ::3] = -np.inf
        return {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}

    def added(self, options):
        """As in the case, for the queries that are not masked."""
        return super().added(options | {"bias": np.nan_to_num(options["bias"].astype("f4"), neginf=0)})


def _module(array):
    import sys

    return sys.modules[type(array).__module__.split(".")[0]]


def _bshd(array):  # C order (batch, seq, heads, head_dim), passed as x.T
    return _module(array).ascontiguousarray(array.transpose(3, 2, 1, 0)).T


def _bhsd(array):  # C order (batch, heads, seq, head_dim)
    return _module(array).ascontiguousarray(array.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0)


def _sliced(array):  # every second position of a longer sequence
    xp = _module(array)
    d, h, s, b = array.shape
    longer = xp.zeros((d, h, 2 * s, b), array.dtype, order="F")
    longer[:, :, ::2] = array
    return longer[:, :, ::2]


def _packed(array):  # interleaved in memory, as a fused projection returns q, k and v
    xp = _module(array)
    d, h, s, b = array.shape
    three = xp.zeros((d, h, 3, s, b), array.dtype, order="F")
    three[:, :, 1] = array
    return three[:, :, 1]


LAYOUTS = {"fortran": lambda array: array, "bshd": _bshd, "bhsd": _bhsd, "sliced": _sliced, "packed": _packed}

PACKED: dict[str, Any] = {
    "packed": True,
    "seq_lens_q": (100, 0, 37, 128),
    "seq_lens_kv": (64, 20, 0, 150),
    "b": 4,
    "hq": 4,
    "hkv": 2,
}

#: A row that attends only to its sink has a finite log-sum-exp: its gradients are 0 because of the bias alone.
HIDDEN_ROWS = [
    HiddenRows(f"{kind}_{axes}_{skv}", d=16, sq=20, skv=skv, hkv=2, bias=axes, bias_dtype=kind, sinks=True)
    for kind, axes, skv in itertools.product(("float16", "bfloat16", "float32"), ("qhb", "q", "h", "kq"), (1, 24))
] + [HiddenRows("packed", d=16, bias="qb", sinks=True, **PACKED)]

#: Options that change the scores or the weights, alone and in combination.
VARIANTS = [
    Case("softcap", softcap=2.0),
    Case("softcap_causal_gqa_fp16", d=128, hkv=2, sq=150, skv=190, softcap=1.5, causal="bottom_right", dtype="float16"),
    Case("alibi", alibi=True, sq=100, skv=140),
    Case("alibi_causal_gqa", alibi=True, causal=True, hkv=2, sq=130),
    Case("alibi_bottom_right", alibi=True, causal="bottom_right", sq=100, skv=150),
    Case("alibi_window_bottom_right", alibi=True, window=(30, 20, "bottom_right"), sq=100, skv=150),
    Case("alibi_lengths_bottom_right", alibi=True, causal="bottom_right", skv=150, seq_lens_q=(128, 60), seq_lens_kv=(90, 150)),
    Case("bias", bias="kqhb", sq=100, skv=136),
    Case("bias_fp32_of_heads", bias="kqh", bias_dtype="float32", causal=True),
    Case("bias_fp16_of_all", bias="kq", bias_dtype="float16", hkv=2),
    Case("bias_odd", bias="kqb", sq=65, skv=67),
    Case("bias_of_keys", bias="kb", window=(40, 10), b=3),
    Case("bias_of_queries", bias="qh", sq=100),
    Case("bias_of_heads", bias="hb", bias_dtype="float32"),
    Case("bias_lengths", bias="kqh", hkv=2, seq_lens_q=(128, 70), seq_lens_kv=(50, 128)),
    Case("bias_softcap_alibi_causal", bias="kqhb", softcap=3.0, alibi=True, causal=True, d=128),
    Case("mask", mask="kqhb", sq=100, skv=136),
    Case("mask_of_all_fp16", mask="kq", dtype="float16", hkv=2),
    Case("mask_of_keys", mask="kb", sq=100, skv=77),
    Case("mask_of_queries", mask="qb"),
    Case("mask_causal_bias", mask="kb", bias="kqh", causal=True, sq=130),
    Case("mask_lengths_window", mask="kqb", window=(50, 30), seq_lens_q=(100, 128), seq_lens_kv=(128, 40)),
    Case("sinks", sinks=True),
    Case("sinks_causal_gqa_fp16", d=128, hq=8, hkv=2, sq=150, skv=100, sinks=True, causal=True, dtype="float16"),
    Case("sinks_bottom_right_tall", sinks=True, sq=150, skv=90, causal="bottom_right"),
    Case("sinks_window_bias", sinks=True, window=(30, 0), bias="kqh"),
    Case("sinks_lengths", sinks=True, seq_lens_q=(128, 70), seq_lens_kv=(50, 128)),
    Case("sinks_softcap_mask", sinks=True, softcap=2.0, mask="kb"),
    Case("max_sumexp", stats="max_sumexp", causal=True, hkv=2),
    Case("max_sumexp_lengths", stats="max_sumexp", seq_lens_q=(128, 70), seq_lens_kv=(0, 128)),
    Case("max_sumexp_sinks_fp16", stats="max_sumexp", sinks=True, dtype="float16", sq=100),
    Case("max_sumexp_softcap_bias_fp16", stats="max_sumexp", softcap=3.0, bias="kqh", dtype="float16", sq=100),
    Case("dropout", dropout=0.25),
    Case("dropout_causal_gqa", dropout=0.125, causal=True, d=128, hq=8, hkv=2, sq=150, skv=190),
    Case("dropout_lengths_fp16", dropout=0.5, seq_lens_q=(128, 70), seq_lens_kv=(50, 128), dtype="float16"),
    Case("dropout_bias_softcap_sinks", dropout=0.25, bias="kqhb", softcap=3.0, sinks=True),
    Case("packed", **PACKED),
    Case("packed_causal_fp16", **PACKED, causal=True, dtype="float16", d=128),
    Case("packed_bottom_right_mha", **{**PACKED, "hkv": 4}, causal="bottom_right"),
    Case("packed_window_tail", **PACKED, window=(30, 10, "bottom_right"), tail=29),
    Case("packed_192_128", **PACKED, d=192, dv=128, causal=True),
    Case("packed_max_sumexp", **PACKED, stats="max_sumexp", causal=True),
    Case("packed_one", packed=True, seq_lens_q=(77,), seq_lens_kv=(130,), b=1),
    Case("packed_alibi_softcap", **PACKED, alibi=True, softcap=2.0, causal="bottom_right"),
    Case("packed_bias", **PACKED, bias="kqh", causal=True),
    Case("packed_sinks", **PACKED, sinks=True, causal=True, tail=3),
    Case("packed_dropout", **PACKED, dropout=0.25),
]  # fmt: skip

FORWARD = [
    Case("square"),
    Case("causal", causal=True),
    Case("d128_gqa", d=128, hq=8, hkv=2),
    Case("d128_gqa_causal_fp16", d=128, hq=8, hkv=2, causal=True, dtype="float16"),
    Case("mqa_fp16", hq=8, hkv=1, dtype="float16"),
    Case("mla_192_128", d=192, dv=128, sq=130),
    Case("mla_192_128_causal", d=192, dv=128, sq=130, causal=True),
    Case("d256", d=256, sq=192, b=1),
    Case("d256_causal_gqa", d=256, hq=4, hkv=2, sq=192, b=1, causal=True),
    Case("narrow_values", d=128, dv=64, sq=96),
    Case("odd_head_dims_72_40", d=72, dv=40, hq=4, hkv=2, sq=65, skv=127, causal=True),
    Case("d8", d=8, sq=40),
    Case("short_queries", sq=64, skv=333),
    Case("long_queries_causal", sq=300, skv=100, causal=True),
    Case("odd_lengths", sq=127, skv=129),
    Case("odd_lengths_causal_fp16", sq=129, skv=127, causal=True, dtype="float16"),
    Case("decode", d=128, hq=8, hkv=2, sq=1, skv=500),
    Case("decode_causal_gqa", d=128, hq=8, hkv=2, sq=1, skv=500, causal=True),
    Case("one_key", sq=5, skv=1),
    Case("single_everything", hq=1, hkv=1, sq=1, skv=1, b=1),
    Case("given_scale", scale=0.5),
    Case("negative_scale", scale=-0.1),
    Case("negative_scale_causal_fp16", scale=-0.1, causal=True, dtype="float16"),
    Case("negative_scale_odd_lengths", d=128, hq=8, hkv=2, sq=300, scale=-0.1, b=1),
    Case("negative_scale_causal_odd_lengths", sq=100, skv=130, scale=-0.1, causal=True),
    Case("zero_scale_causal", scale=0.0, causal=True),
    Case("zero_scale_decode", d=128, sq=1, skv=300, scale=0.0),
    Case("no_stats", stats=False, causal=True),
    Case("bottom_right", sq=100, skv=150, causal="bottom_right"),
    Case("bottom_right_long_queries_fp16", sq=150, skv=100, causal="bottom_right", dtype="float16"),
    Case("bottom_right_d128_gqa", d=128, hq=8, hkv=2, sq=130, skv=257, causal="bottom_right"),
    Case("window_causal", d=128, sq=200, skv=200, causal=True, window=(17, None)),
    Case("window_both_sides", sq=140, skv=210, window=(30, 20)),
    Case("window_right", sq=90, skv=120, window=(None, 11)),
    Case("window_left_fp16", sq=120, skv=120, window=(9, None), dtype="float16"),
    Case("window_of_one", sq=70, skv=70, window=(0, 0)),
    Case("window_bottom_right", sq=100, skv=180, hq=4, hkv=2, window=(40, 10, "bottom_right")),
    Case("window_causal_bottom_right", sq=180, skv=100, causal="bottom_right", window=(25, None)),
    Case("window_beyond_the_keys", sq=200, skv=64, causal=True, window=(16, None)),
    Case("decode_bottom_right", d=128, hq=8, hkv=2, sq=1, skv=500, causal="bottom_right"),
    Case("lengths", sq=128, skv=192, seq_lens_q=(100, 128), seq_lens_kv=(33, 192)),
    Case(
        "lengths_gqa_d128_causal",
        d=128,
        hq=8,
        hkv=2,
        sq=150,
        skv=150,
        b=3,
        causal=True,
        seq_lens_q=(150, 1, 77),
        seq_lens_kv=(150, 60, 2),
    ),
    Case("lengths_of_nothing", sq=96, skv=96, b=3, seq_lens_q=(0, 50, 96), seq_lens_kv=(96, 0, 10)),
    Case(
        "lengths_bottom_right_fp16",
        sq=100,
        skv=140,
        causal="bottom_right",
        seq_lens_q=(100, 31),
        seq_lens_kv=(140, 90),
        dtype="float16",
    ),
    Case("lengths_window", sq=128, skv=128, window=(20, 5), seq_lens_q=(128, 64), seq_lens_kv=(128, 70)),
    Case(
        "lengths_window_bottom_right",
        sq=128,
        skv=160,
        window=(20, 5, "bottom_right"),
        seq_lens_q=(100, 64),
        seq_lens_kv=(160, 90),
    ),
    Case("lengths_batch_of_one", sq=100, skv=120, b=1, causal=True, seq_lens_q=(64,), seq_lens_kv=(99,)),
    Case("lengths_of_keys", sq=64, skv=300, seq_lens_kv=(300, 129)),
    Case("many_heads", d=64, hq=71, hkv=1, sq=33, b=1),
    Case("bshd_passed_transposed", layout="bshd", hq=4, hkv=2),
    Case("bhsd", layout="bhsd", hq=4, hkv=2, causal=True),
    Case("sliced_sequence", layout="sliced", causal=True),
    Case("packed_qkv", layout="packed", d=128),
    *VARIANTS,
]


def options_of_reference(options):
    """The options of a call without the maximum lengths, which the reference does not accept."""
    return {name: value for name, value in options.items() if name not in ("max_seqlen_q", "max_seqlen_kv")}


def inputs(xp, case):
    """q, k, v and dout of a case, as numpy or CuPy arrays."""
    case = case.with_dtype("float32") if xp is np else case
    return [xp.asarray(x) for x in (*case.arrays(), case.dout())]


def as_float(x):
    """A float32 copy on the host."""
    x = x if isinstance(x, np.ndarray) else x.get()
    return x.astype(np.float32)
