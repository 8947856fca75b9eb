"""Stand-ins of array libraries: modules with an array type, as far as sharing arrays with them needs.

They wrap a numpy array (CPU) or an array of :mod:`fake_cupy` (GPU). ``torch`` has streams and gradients, ``jax`` and ``another``
exchange arrays by DLPack alone, ``numba`` by ``__cuda_array_interface__``.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Wrapped:
    """An array of a library: ``inside`` is a numpy array or one of the fake CuPy."""

    def __init__(self, inside):
        self.inside = inside

    shape = property(lambda self: self.inside.shape)
    ndim = property(lambda self: self.inside.ndim)
    dtype = property(lambda self: self.inside.dtype)

    @property
    def on_gpu(self):
        """Whether the memory is that of the GPU."""
        return not isinstance(self.inside, np.ndarray)

    def __dlpack_device__(self):
        return (2 if self.on_gpu else 1), 0

    def __dlpack__(self, stream=None, **_):
        if not self.on_gpu:
            return self.inside.__dlpack__()
        self.streams.append(stream)
        return object()

    def exported(self):
        """What the fake CuPy shares."""
        return self.inside

    #: The streams that consumers named.
    streams: list = []  # noqa: RUF012


def module(name, **names):
    """A module; classes among its names get it as their module."""
    made = ModuleType(name)
    for key, value in names.items():
        if isinstance(value, type) and issubclass(value, Wrapped):
            value.__module__ = name
        setattr(made, key, value)
    return made


def make_torch():
    """``torch``: tensors refuse to be shared while they require a gradient; numpy has no bfloat16 of theirs."""
    state = SimpleNamespace(stream=0, grad=True)

    class Tensor(Wrapped):
        def __init__(self, inside, requires_grad=False):
            super().__init__(inside)
            self.requires_grad = requires_grad

        @property
        def dtype(self):
            return torch.bfloat16 if self.inside.dtype == BFLOAT16 else self.inside.dtype

        def data_ptr(self):
            return 1

        def detach(self):
            return Tensor(self.inside)

        def view(self, dtype):
            return Tensor(self.inside.view(BFLOAT16 if dtype is torch.bfloat16 else dtype))

        def numpy(self):
            if self.requires_grad or self.on_gpu or self.inside.dtype == BFLOAT16:
                raise TypeError("can't convert this tensor to numpy")
            return self.inside

        def __dlpack__(self, stream=None, **_):
            if self.requires_grad:
                raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
            return super().__dlpack__(stream)

    def from_numpy(array):
        if array.dtype == BFLOAT16:
            raise TypeError("can't convert np.ndarray of type bfloat16")
        return Tensor(array)

    torch = module(
        "torch", Tensor=Tensor, bfloat16="torch.bfloat16", int16=np.int16, from_dlpack=Tensor, from_numpy=from_numpy,
        is_grad_enabled=lambda: state.grad, state=state,
        cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=state.stream)),
    )  # fmt: skip
    return torch


def make_jax():
    """``jax``, whose arrays are of ``jaxlib`` and cannot be written to."""

    class ArrayImpl(Wrapped):
        def __array__(self, dtype=None, copy=None):
            return self.inside

    class DynamicJaxprTracer:
        __dlpack__ = property()

    DynamicJaxprTracer.__module__ = "jax._src.interpreters.partial_eval"
    return module(
        "jax", ArrayImpl=ArrayImpl, DynamicJaxprTracer=DynamicJaxprTracer, dlpack=SimpleNamespace(from_dlpack=ArrayImpl),
        numpy=SimpleNamespace(asarray=ArrayImpl),
    ), ArrayImpl  # fmt: skip


def make_numba():
    """``numba.cuda``."""

    class DeviceNDArray(Wrapped):
        __dlpack__ = __dlpack_device__ = property()
        __cuda_array_interface__ = property(lambda self: {"version": 3})

    cuda = module("numba.cuda", as_cuda_array=DeviceNDArray, DeviceNDArray=DeviceNDArray)
    return module("numba", cuda=cuda), cuda


def make_another():
    """A library that is not known, with the array API's ``from_dlpack``."""
    return module("another", Array=type("Array", (Wrapped,), {}), from_dlpack=lambda x: sys.modules["another"].Array(x))


@contextlib.contextmanager
def installed():
    """Install all of them; yields ``torch``, the array types by library, and what they wrap."""
    from cupy_sdpa.arrays import libraries

    torch, (jax, jax_array), (numba, cuda), another = make_torch(), make_jax(), make_numba(), make_another()
    jax_array.__module__ = "jaxlib._jax"
    modules = {"torch": torch, "jax": jax, "numba": numba, "numba.cuda": cuda, "another": another}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    Wrapped.streams.clear()
    try:
        yield SimpleNamespace(
            torch=torch.Tensor, jax=jax_array, numba=cuda.DeviceNDArray, another=another.Array, modules=modules
        )
    finally:
        libraries._libraries.clear()
        for name, found in before.items():
            if found is None:
                del sys.modules[name]
            else:
                sys.modules[name] = found
