"""Kernels from CUDA code, and the structs that they take by value."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from . import cupy_runtime

P = ParamSpec("P")

#: The name of a kernel in its code.
_NAME = re.compile(r"__global__[^{;]*?\b(cupy_sdpa_\w+)\(")


def cuda_kernel(code: Callable[P, str]) -> Callable[P, Any]:
    """Return a decorator of a function that returns CUDA code: it then returns the kernel, made once for its arguments.

    The kernel has the prefix ``cupy_sdpa_``, and is called with its grid, its block and its arguments.

    >>> @cuda_kernel
    ... def doubled_kernel(type):
    ...     return '''extern "C" __global__ void cupy_sdpa_doubled(TYPE* x, long long size) {
    ...         const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    ...         if (i < size) x[i] *= 2;
    ...     }'''.replace("TYPE", type)
    >>> def doubled(x):  # of CuPy
    ...     doubled_kernel("float")((-(-x.size // 256),), (256,), (x, x.size))
    """

    def make(*args: P.args, **kwargs: P.kwargs) -> Any:
        text = code(*args, **kwargs)
        found = _NAME.search(text)
        assert found, text
        return cupy_runtime.cupy().RawKernel(text, found[1])

    kernel: Any = functools.cache(make)
    return kernel  # type: ignore[no-any-return]


class Struct:
    """A C struct that a kernel takes by value. Its fields are integers of 64 bits, other structs, and arrays of structs.

    ``str()`` is its declaration, after the declarations of the structs in it.

    Args:
        name: its name in C.
        numbers: the names of the fields that are integers, separated by spaces: addresses, lengths, strides and others.
        structs: the fields after these by name: a struct, or a struct and the length of an array.

    Attributes:
        fields: the names of the fields that are integers.
        size: the number of integers, including its structs' integers.
        dtype: of the record with its values, whose field ``numbers`` is an array of all of them.

    >>> row = Struct("Row", "begin end")
    >>> table = Struct("Table", "count", rows=(row, 3))
    """

    def __init__(self, name: str, numbers: str = "", **structs: Struct | tuple[Struct, int]) -> None:
        self.name, self.fields = name, tuple(numbers.split())
        self._names = tuple(structs)
        #: Each struct, and how many; 0 if it is no array.
        self._structs = [of if isinstance(of, tuple) else (of, 0) for of in structs.values()]
        self.size: int = len(self.fields) + sum(of.size * max(count, 1) for of, count in self._structs)
        self.dtype = np.dtype([("numbers", np.int64, (self.size,))])
        self._pack = struct.Struct(f"{self.size}q").pack

    def __str__(self) -> str:
        inner = dict.fromkeys(str(of) for of, _ in self._structs)
        numbers = f"long long {', '.join(self.fields)};" if self.fields else ""
        fields = zip(self._names, self._structs, strict=True)
        structs = (f"{of.name} {field}{f'[{count}]' if count else ''};" for field, (of, count) in fields)
        return " ".join([*inner, f"struct {self.name} {{ {' '.join([numbers, *structs])} }};"])

    def __call__(self, *values: Any) -> Any:
        """Return the struct as an argument of a kernel.

        Args:
            values: the values of the fields: a number, or an array of CuPy for its address; a sequence of the values of a
                struct; or a list of them for the first structs of an array. What is None or missing is 0.
        """
        found: list[int] = []
        waiting: list[tuple[Struct, Any]] = [(self, values)]  # a loop: functions take time in every launch
        while waiting:
            of, given = waiting.pop()
            if isinstance(given, int):  # how many are missing
                found += [0] * (of.size * given)
                continue
            count = len(of.fields)
            for x in given[:count]:
                found.append(x if isinstance(x, int) else 0 if x is None else x.data.ptr)
            parts: list[tuple[Struct, Any]] = []
            for value, (inner, length) in zip(given[count:], of._structs, strict=True):
                own = [] if value is None else value if length else [value]
                for part in own:
                    parts.append((inner, part))
                parts.append((inner, max(length, 1) - len(own)))
            waiting += parts[::-1]
        return np.frombuffer(bytearray(self._pack(*found)), self.dtype).reshape(())
