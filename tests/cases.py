"""The named problems of the test suite, one list for all three corners."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from cupy_sdpa import arguments
from cupy_sdpa.problem import ITEMSIZE, dense_strides, gradient_problem, problem

DTYPES = {
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("float32"),
    "float64": np.dtype("float64"),
}


@dataclass(frozen=True)
class Case:
    """One forward problem; shapes in the legend's letters."""

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
    stats: bool = True
    scale: float | None = None
    layout: str = "fortran"

    def __str__(self):
        return self.name

    def with_dtype(self, dtype):
        """The same in another dtype."""
        return replace(self, dtype=dtype)

    @property
    def shapes(self):
        """Of q, k and v."""
        skv, dv = self.skv or self.sq, self.dv or self.d
        return (self.d, self.hq, self.sq, self.b), (self.d, self.hkv, skv, self.b), (dv, self.hkv, skv, self.b)

    @property
    def tau(self):
        """The scale as a number."""
        return 1 / np.sqrt(self.d) if self.scale is None else self.scale

    @property
    def band(self):
        """The band that the options ask for."""
        return arguments._band(self.causal, self.window)

    @property
    def lengths(self):
        """The signatures of the arrays of lengths, or None twice."""
        given = self.seq_lens_q or self.seq_lens_kv
        return (("int32", (self.b,), (4,), 16),) * 2 if given else (None, None)

    def mask(self, xp=np):
        """The options that say which keys a query sees, for numpy or CuPy."""
        options = {"causal": self.causal}
        for name in ("window", "seq_lens_q", "seq_lens_kv"):
            if (value := getattr(self, name)) is not None:
                options[name] = value if name == "window" else xp.asarray(np.array(value, np.int32))
        return options

    def length_arrays(self):
        """The arrays of lengths that the graph reads, by name; empty where none are given."""
        if self.lengths == (None, None):
            return {}
        full = {"seq_lens_q": self.sq, "seq_lens_kv": self.skv or self.sq}
        return {name: np.array(getattr(self, name) or (most,) * self.b, np.int32) for name, most in full.items()}

    def problem(self):
        """The problem of arrays in dense Fortran order."""
        q, k, v = ((self.dtype, shape, dense_strides(shape, ITEMSIZE[self.dtype]), 16) for shape in self.shapes)
        return problem(q, k, v, None, None, self.stats, self.band, self.tau > 0, None, *self.lengths)

    def gradient_problem(self, **options):
        """The problem of the gradients, of arrays in dense Fortran order."""
        q, k, v = ((self.dtype, shape, dense_strides(shape, ITEMSIZE[self.dtype]), 16) for shape in self.shapes)
        options["seq_lens_q"], options["seq_lens_kv"] = self.lengths
        return gradient_problem(q, k, v, band=self.band, positive_scale=self.tau > 0, **options)

    def dout(self):
        """A random gradient of the output, dense in Fortran order."""
        rng = np.random.default_rng([7, *self.name.encode()])
        shape = (self.dv or self.d, self.hq, self.sq, self.b)
        return np.asfortranarray(rng.standard_normal(shape).astype(DTYPES[self.dtype]))

    def arrays(self, seed=0):
        """Random q, k and v, dense in Fortran order."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        return tuple(np.asfortranarray(rng.standard_normal(shape).astype(DTYPES[self.dtype])) for shape in self.shapes)

    def laid_out(self, arrays):
        """The same values as the case's layout has them in memory; works on numpy and CuPy arrays."""
        return tuple(LAYOUTS[self.layout](array) for array in arrays)


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


def _packed(array):  # one of three interleaved in memory, as a fused projection gives q, k and v
    xp = _module(array)
    d, h, s, b = array.shape
    three = xp.zeros((d, h, 3, s, b), array.dtype, order="F")
    three[:, :, 1] = array
    return three[:, :, 1]


LAYOUTS = {"fortran": lambda array: array, "bshd": _bshd, "bhsd": _bhsd, "sliced": _sliced, "packed": _packed}

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
]
