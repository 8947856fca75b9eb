// CUDA's bfloat16: the upper half of a float32, rounded to nearest even.
#pragma once
struct __nv_bfloat16 {
    unsigned short upper;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        const unsigned whole = __float_as_uint(x);
        upper = x != x ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    }
    operator float() const { return __uint_as_float(unsigned(upper) << 16); }
};
