"""The CUDA types of floating-point dtypes. FP8 is a type with conversions from and to float."""

from __future__ import annotations

from typing import NamedTuple


class CudaType(NamedTuple):
    """A dtype in CUDA: its name, its size in bytes, and the lines that declare it."""

    name: str
    itemsize: int
    header: str = ""


#: The conversions between float and FP8, and the type of an element.
_FP8 = """
// A float as FP8: rounded to nearest even, saturated. The macros are the bits of the mantissa, the bias of the exponent, the
// bits of the largest number, and whether there are infinities.
__device__ unsigned to_fp8(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.INSTRUCTION.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    return pair & 0xff;
#else
    const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7f;
    const int dropped = 23 - FP8_MANTISSA;
    unsigned found;
    if (magnitude < (127 - FP8_BIAS + 1) << 23) {  // a subnormal number: a multiple of 2^(1 - FP8_BIAS - FP8_MANTISSA)
        found = (unsigned)rintf(__uint_as_float(magnitude) * __uint_as_float((126 + FP8_BIAS + FP8_MANTISSA) << 23));
    } else {
        const unsigned up = magnitude + ((1u << (dropped - 1)) - 1) + (magnitude >> dropped & 1);
        found = (up >> dropped) - ((127 - FP8_BIAS) << FP8_MANTISSA);
    }
    return sign | (found < FP8_LARGEST ? found : FP8_LARGEST);
#endif
}
// FP8 as a float. No intermediate number is a subnormal float: CuPy compiles with -ftz=true, which replaces those by 0.
__device__ float from_fp8(unsigned x) {
    const unsigned magnitude = x & 0x7f;
    float value = __uint_as_float((magnitude << (23 - FP8_MANTISSA)) + ((127 - FP8_BIAS) << 23));
    if (magnitude < 1 << FP8_MANTISSA) value = (float)magnitude * __uint_as_float((128 - FP8_BIAS - FP8_MANTISSA) << 23);
    const bool infinite = FP8_INFINITE && magnitude == FP8_LARGEST + 1;
    if (magnitude > FP8_LARGEST) value = __uint_as_float(infinite ? 0x7f800000 : 0x7fc00000);
    return x & 0x80 ? -value : value;
}
struct Fp8 {
    unsigned char bits;
    Fp8() = default;
    __device__ explicit Fp8(float value) : bits(to_fp8(value)) {}
    __device__ operator float() const { return from_fp8(bits); }
};
"""


def _fp8(mantissa: int, bias: int, largest: int, infinite: int, instruction: str) -> CudaType:
    """Return an FP8 dtype; ``largest`` has the largest number's bits, ``instruction`` the format in the conversion's name."""
    names = {"MANTISSA": mantissa, "BIAS": bias, "LARGEST": f"{largest}u", "INFINITE": infinite}
    defined = "".join(f"#define FP8_{name} {value}\n" for name, value in names.items())
    return CudaType("Fp8", 1, defined + _FP8.replace("INSTRUCTION", instruction))


#: The C types in which kernels copy memory, by their size in bytes.
UNITS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short"}
#: The CUDA types.
TYPES = {
    "float16": CudaType("__half", 2, "#include <cuda_fp16.h>\n"),
    "bfloat16": CudaType("__nv_bfloat16", 2, "#include <cuda_bf16.h>\n"),
    "float32": CudaType("float", 4),
    "float64": CudaType("double", 8),
    "float8_e4m3fn": _fp8(3, 7, 0x7E, 0, "e4m3x2"),
    "float8_e5m2": _fp8(2, 15, 0x7B, 1, "e5m2x2"),
}
