"""Stand-ins of array libraries: modules with an array type, as far as sharing arrays with them needs.

They wrap a numpy array (CPU) or an array of :mod:`fake_cupy` (GPU). ``torch`` has streams and gradients, ``jax`` and ``another``
exchange arrays by DLPack alone, ``numba`` by ``__cuda_array_interface__``.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


#: Modules that import a library, and are imported anew with its stand-in.
_IMPORTING = ("examples.torch_attention", "examples.thinc_layer")


class Wrapped:
    """An array of a library: ``inside`` is a numpy array or one of the fake CuPy."""

    def __init__(self, inside):
        self.inside = inside

    shape = property(lambda self: self.inside.shape)
    ndim = property(lambda self: self.inside.ndim)
    dtype = property(lambda self: self.inside.dtype)

    @property
    def on_gpu(self):
        """Whether the memory is on the GPU."""
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
        if isinstance(value, type) and issubclass(value, Wrapped) and "jaxlib" not in value.__module__:
            value.__module__ = name
        setattr(made, key, value)
    return made


def make_torch():
    """``torch``: tensors cannot be shared while they require a gradient; numpy does not have their bfloat16."""
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

        def stride(self, axis=None):
            steps = tuple(step // self.inside.itemsize for step in self.inside.strides)
            return steps if axis is None else steps[axis]

        def contiguous(self):
            return Tensor(np.ascontiguousarray(self.inside))

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

    class Function:
        """Keeps the context of the last call in ``last``."""

        @classmethod
        def apply(cls, *given):
            context = SimpleNamespace(needs_input_grad=[getattr(x, "requires_grad", False) for x in given])
            context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
            state.grad, before = False, state.grad
            try:
                out = cls.forward(context, *given)
            finally:
                state.grad = before

            def backward(dout):
                state.grad = False
                try:
                    return cls.backward(context, dout)
                finally:
                    state.grad = True

            state.last = backward
            return out

    def empty(shape, dtype):
        return Tensor(np.full(shape, np.nan, dtype))

    def from_numpy(array):
        if array.dtype == BFLOAT16:
            raise TypeError("can't convert np.ndarray of type bfloat16")
        return Tensor(array)

    torch = module(
        "torch", Tensor=Tensor, bfloat16="torch.bfloat16", int16=np.int16, from_dlpack=Tensor, from_numpy=from_numpy,
        is_grad_enabled=lambda: state.grad, state=state, float64=np.dtype(np.float64), empty=empty,
        autograd=SimpleNamespace(Function=Function, function=SimpleNamespace(once_differentiable=lambda f: f)),
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

    ArrayImpl.__module__ = "jaxlib._jax"
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


def make_thinc():
    """``thinc``: a model calls its function, and a Ragged has data and lengths."""

    class Model:
        def __init__(self, name, forward, *, attrs):
            self.name, self._forward, self.attrs, self.ops = name, forward, attrs, SimpleNamespace(xp=np)

        def __call__(self, given, is_train):
            return self._forward(self, given, is_train)

    class Ragged(NamedTuple):
        data: Any
        lengths: Any
        dataXd = property(lambda self: self.data)  # noqa: N815

    layers = {}

    def register(name):
        return lambda function: layers.setdefault(name, function)

    api = module("thinc.api", Model=Model, registry=SimpleNamespace(layers=register, known=layers))
    types = module("thinc.types", Ragged=Ragged)
    return module("thinc", api=api, types=types), api, types


@contextlib.contextmanager
def installed():
    """Install all of them; yields ``torch``, the array types by library, and what they wrap."""
    from cupy_sdpa.core.boundary import libraries

    torch, (jax, jax_array), (numba, cuda), another = make_torch(), make_jax(), make_numba(), make_another()
    thinc, api, types = make_thinc()
    modules = {
        "torch": torch, "jax": jax, "numba": numba, "numba.cuda": cuda, "another": another, "thinc": thinc, "thinc.api": api,
        "thinc.types": types, **dict.fromkeys(_IMPORTING),
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update({name: made for name, made in modules.items() if made})
    for name in _IMPORTING:
        sys.modules.pop(name, None)
    Wrapped.streams.clear()
    try:
        yield SimpleNamespace(
            torch=torch.Tensor, jax=jax_array, numba=cuda.DeviceNDArray, another=another.Array, modules=modules
        )
    finally:
        libraries._libraries.clear()
        for name, found in before.items():
            if found is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = found
