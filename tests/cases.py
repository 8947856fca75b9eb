"""The named problems of the test suite, one list for all three corners."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

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
    causal: bool = False
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

    def problem(self):
        """The problem of arrays in dense Fortran order."""
        q, k, v = ((self.dtype, shape, dense_strides(shape, ITEMSIZE[self.dtype]), 16) for shape in self.shapes)
        return problem(q, k, v, None, None, self.stats, self.causal, self.tau > 0)

    def gradient_problem(self, **options):
        """The problem of the gradients, of arrays in dense Fortran order."""
        q, k, v = ((self.dtype, shape, dense_strides(shape, ITEMSIZE[self.dtype]), 16) for shape in self.shapes)
        return gradient_problem(q, k, v, causal=self.causal, positive_scale=self.tau > 0, **options)

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
    Case("many_heads", d=64, hq=71, hkv=1, sq=33, b=1),
    Case("bshd_passed_transposed", layout="bshd", hq=4, hkv=2),
    Case("bhsd", layout="bhsd", hq=4, hkv=2, causal=True),
    Case("sliced_sequence", layout="sliced", causal=True),
    Case("packed_qkv", layout="packed", d=128),
]
