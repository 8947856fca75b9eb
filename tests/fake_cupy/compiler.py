"""CUDA kernels compiled by the C++ compiler. The threads run one after another.

In kernels with ``__syncthreads`` or ``__syncwarp`` each thread of a block is a coroutine: it runs until the barrier, then the next thread runs.
As with CuPy, which passes ``-ftz=true``, subnormal floats are 0. Products and sums are fused where the processor can. An access at an address that is
not a multiple of the size of its type is an error. The 16-bit floats are in ``include/``. Of the warp shuffles there is one, in blocks along x; dynamic shared memory is not
supported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

COMPILERS = ("c++", "g++", "clang++")
#: The environment variable that names the folder of compiled libraries.
FOLDER = "FAKE_CUPY_FOLDER"
#: The headers of 16-bit floats.
_INCLUDE = Path(__file__).parent / "include"
#: The limits of grids and blocks along x, y and z.
_MOST = (2**31 - 1, 65535, 65535, 1024, 1024, 64)

#: The header of every kernel.
_HEADER = """
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define rsqrtf(x) (1 / std::sqrt(float(x)))  // a macro: newer C libraries declare the function
static inline void sincospi(double x, double* s, double* c) { *s = std::sin(x * M_PI); *c = std::cos(x * M_PI); }
static inline void sincospif(float x, float* s, float* c) { double y, z; sincospi(x, &y, &z); *s = y; *c = z; }
using std::isinf; using std::isnan; using std::isfinite;
struct dim3 { unsigned x, y, z; };
static thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }
template <class To, class Of> static inline To bits(Of x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
static inline float __int_as_float(int x) { return bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return bits<float>(x); }
static inline int __float_as_int(float x) { return bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
#include <csetjmp>
// the only function of the sanitizer that is called: it ends the launch before the access
static thread_local unsigned long long misaligned;
static thread_local bool launching;
static thread_local std::jmp_buf launched;
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void*, unsigned long long address) {
    misaligned = address;
    if (launching) std::longjmp(launched, 1);
}
// an empty assembler statement: the compiler does not fuse the operation with another one
#if defined(__x86_64__)
#define ROUNDED(operation) float y = operation; __asm__("" : "+x"(y)); return y;
#else
#define ROUNDED(operation) volatile float y = operation; return y;
#endif
static inline float __fadd_rn(float a, float b) { ROUNDED(a + b) }
static inline float __fsub_rn(float a, float b) { ROUNDED(a - b) }
static inline float __fmul_rn(float a, float b) { ROUNDED(a * b) }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
static inline void __threadfence() {}
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T atomicAdd(T* p, T x) { T before = *p; *p += x; return before; }
template <class T> static inline T atomicExch(T* p, T x) { T before = *p; *p = x; return before; }
template <class T> static inline T atomicMax(T* p, T x) { T before = *p; *p = x > before ? x : before; return before; }

// runs the threads of a block one after another
template <class F> static void in_turn(F thread) {
    for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z) for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) thread();
}

// runs the threads of a block as coroutines: each runs until the next barrier, then the next one runs
#include <ucontext.h>
struct Coroutine { ucontext_t context; dim3 index; bool done; char stack[1 << 16]; };
static thread_local Coroutine* coroutines;  // not a std::vector, which takes as long to compile as the rest
static thread_local unsigned allocated;
static thread_local Coroutine* running;
static thread_local ucontext_t block;
static thread_local void (*body)(void*);
static thread_local void* argument;
static void __syncthreads() { swapcontext(&running->context, &block); }
static void __syncwarp() { __syncthreads(); }  // the threads of a warp meet the same barriers
static thread_local float exchanged[1024];
static float __shfl_xor_sync(unsigned, float x, int mask) {  // every thread of the block calls it
    const unsigned own = threadIdx.x + blockDim.x * threadIdx.y;
    exchanged[own] = x;
    __syncthreads();
    const float other = exchanged[own ^ mask];
    __syncthreads();
    return other;
}
static void run_thread() { body(argument); running->done = true; }
template <class F> static void with_barriers(F thread) {
    body = [](void* of) { (*(F*)of)(); };
    argument = &thread;
    const unsigned count = blockDim.x * blockDim.y * blockDim.z;
    if (allocated < count) {
        std::free(coroutines);
        coroutines = (Coroutine*)std::malloc(count * sizeof(Coroutine));
        allocated = count;
    }
    for (unsigned n = 0; n < count; ++n) {
        Coroutine& c = coroutines[n];
        c.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
        c.done = false;
        getcontext(&c.context);
        c.context.uc_stack.ss_sp = c.stack;
        c.context.uc_stack.ss_size = sizeof c.stack;
        c.context.uc_link = &block;
        makecontext(&c.context, run_thread, 0);
    }
    for (bool waiting = true; waiting;) {
        waiting = false;
        for (unsigned n = 0; n < count; ++n) {
            if (coroutines[n].done) continue;
            running = &coroutines[n];
            threadIdx = running->index;
            swapcontext(&block, &running->context);
            waiting |= !running->done;
        }
    }
}

#if defined(__x86_64__)
#include <xmmintrin.h>
struct FlushToZero {  // of results and of operands
    const unsigned before = _mm_getcsr();
    FlushToZero() { _mm_setcsr(before | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before); }
};
#else
struct FlushToZero { FlushToZero() {} };
#endif
template <class... A, std::size_t... I> static void call(void (*f)(A...), void** a, std::index_sequence<I...>) {
    f(*(std::remove_cv_t<std::remove_reference_t<A>>*)a[I]...);
}
template <class... A> static long long sizes(void (*)(A...), long long* out) {
    const long long every[] = {(long long)sizeof(A)..., 0};
    for (std::size_t i = 0; i < sizeof...(A); ++i) out[i] = every[i];
    return sizeof...(A);
}
"""

#: What follows the source of a kernel.
_LAUNCH = """
template <class... A> static void launch(void (*f)(A...), const unsigned* n, void** arguments) {
    gridDim = {n[0], n[1], n[2]}; blockDim = {n[3], n[4], n[5]};
    for (blockIdx.z = 0; blockIdx.z < n[2]; ++blockIdx.z) for (blockIdx.y = 0; blockIdx.y < n[1]; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < n[0]; ++blockIdx.x)
        RUN_BLOCK([=] { call(f, arguments, std::index_sequence_for<A...>{}); });
}
extern "C" unsigned long long fake_launch(const unsigned* n, void** arguments) {
    const FlushToZero flush;
    misaligned = 0;
    launching = true;
    if (!setjmp(launched)) launch(KERNEL, n, arguments);
    launching = false;
    return misaligned;
}
extern "C" long long fake_sizes(long long* out) { return sizes(KERNEL, out); }
"""

#: The options of the compiler. NVRTC fuses products and sums, and a GPU faults on an address that is not aligned.
_OPTIONS = ("-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=fast", "-fsanitize=alignment", "-fPIC")


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


@functools.cache
def _fused() -> list[str]:
    """The option for instructions that fuse a product and a sum, if the processor has them."""
    known = Path("/proc/cpuinfo")
    return ["-mfma"] if known.exists() and " fma " in known.read_text() else []


def _run(folder: Path, source: str, suffix: str, *options: str | Path) -> Path:
    """Compile C++ source in a folder; the file appears when it is complete. Other processes may do the same."""
    code = folder / f"{os.getpid()}.{threading.get_ident()}.cpp"
    code.write_text(source)
    made = code.with_suffix(suffix)
    done = subprocess.run([str(compiler()), *_OPTIONS, *_fused(), f"-I{_INCLUDE}", f"-I{folder}", *options, "-o", made, code],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, f"{done.stderr}\n{source}"
    return made


@functools.cache
def _folder() -> tuple[Path, Any]:
    """The folder of compiled libraries, and what removes it at the end; it has the header, precompiled: most of it is the standard library's."""
    assert compiler(), "no C++ compiler: the fixture skips"
    temporary = None if os.environ.get(FOLDER) else tempfile.TemporaryDirectory()
    folder = Path(temporary.name if temporary else os.environ[FOLDER])
    header = folder / _header_name()
    if not header.exists():
        _run(folder, _HEADER, ".gch", "-x", "c++-header").replace(header.with_suffix(".h.gch"))
        written = folder / f"{os.getpid()}.h"
        written.write_text(_HEADER)
        written.replace(header)
    for path in (header, header.with_suffix(".h.gch")):
        os.utime(path)
    return folder, temporary


@functools.cache
def _header_name() -> str:
    """The name of the header; it tells the compiler and all that a kernel is compiled with, because libraries are kept."""
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    included = [path.read_text() for path in sorted(_INCLUDE.iterdir())]
    words = "\0".join([version, *_OPTIONS, *_fused(), _HEADER, *included])
    return f"fake_cuda_{hashlib.sha256(words.encode()).hexdigest()[:16]}.h"


@functools.cache
def compiled(source: str) -> ctypes.CDLL:
    """Compile C++ source to a shared library; warnings that a CUDA compiler gives as errors are errors."""
    folder, _ = _folder()
    source = f'#include "{_header_name()}"\n{source}'
    kept = folder / f"{hashlib.sha256(source.encode()).hexdigest()}.so"
    if not kept.exists():
        # two runs: with the sanitizer's option the linker needs its library, of which the header has the only function
        module = _run(folder, source, ".o", "-c")
        target = module.with_suffix(".so")
        done = subprocess.run([str(compiler()), "-shared", "-o", target, module], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        module.unlink()
        target.replace(kept)
    os.utime(kept)  # libraries that no run uses are removed
    return ctypes.CDLL(str(kept))


class Launch:
    """A compiled CUDA kernel; ``name`` may be an instance of a template.

    Raises:
        TypeError: at a launch, the size of an argument differs from that of its parameter.
        RuntimeError: at a launch, an address is not aligned.
        ValueError: at a launch, the grid or the block is outside of CUDA's limits.
    """

    def __init__(self, source: str, name: str) -> None:
        threads = "with_barriers" if "_sync" in source else "in_turn"  # also of __shfl_xor_sync
        self._name = name
        self._library = compiled(f"{source}\n#define KERNEL {name}\n#define RUN_BLOCK {threads}\n{_LAUNCH}")
        self._library.fake_launch.restype = ctypes.c_ulonglong
        sizes = (ctypes.c_longlong * 64)()
        self._sizes = list(sizes[: self._library.fake_sizes(sizes)])

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: list[Any]) -> None:
        """Run all threads; arguments are numpy scalars or 0-dimensional arrays, passed by value."""
        held = [np.ascontiguousarray(x).copy() for x in arguments]
        if [x.nbytes for x in held] != self._sizes:
            raise TypeError(f"arguments of {[x.nbytes for x in held]} bytes, the kernel takes {self._sizes}")
        numbers = (ctypes.c_uint * 6)(*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        if not all(1 <= n <= most for n, most in zip(numbers, _MOST, strict=True)) or math.prod(numbers[3:]) > 1024:
            raise ValueError(f"grid {grid} and block {block} are outside of CUDA's limits")
        if address := self._library.fake_launch(numbers, (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held))):
            raise RuntimeError(f"misaligned address {address:#x} in {self._name}")


_C_TYPES = {
    "float32": "float", "float64": "double", "int32": "int", "int64": "long long", "uint32": "unsigned", "uint8": "unsigned char",
    "uint16": "unsigned short", "uint64": "unsigned long long", "float16": "_Float16", "bool": "bool",
}  # fmt: skip


class Parameter:
    """A parameter of an element-wise kernel: ``[raw] dtype name``."""

    def __init__(self, text: str) -> None:
        *raw, dtype, self.name = text.split()
        self.raw, self.dtype = bool(raw), np.dtype(dtype)
        self.c_type = _C_TYPES[dtype]


@functools.cache
def elementwise(inputs: str, outputs: str, operation: str) -> Any:
    """The loop of an element-wise kernel; ``i`` counts the elements in C order."""
    every = [Parameter(text) for text in f"{inputs},{outputs}".split(",")]
    bound = []
    for number, p in enumerate(every):
        place = f"arguments[{number}]"
        if p.raw:
            bound.append(f"{p.c_type}* const {p.name} = ({p.c_type}*){place};")
        else:
            bound.append(f"{p.c_type}& {p.name} = *({p.c_type}*)((char*){place} + offsets[{number}]);")
    source = f"""
    extern "C" void run(long long count, int axes, const long long* shape, const long long* strides, void** arguments) {{
        for (std::ptrdiff_t i = 0; i < count; ++i) {{
            long long offsets[{len(every)}] = {{}}, rest = i;
            for (int axis = axes - 1; axis >= 0; --axis) {{
                for (int a = 0; a < {len(every)}; ++a) offsets[a] += rest % shape[axis] * strides[a * axes + axis];
                rest /= shape[axis];
            }}
            {" ".join(bound)}
            {operation};
        }}
    }}"""
    return compiled(source).run
