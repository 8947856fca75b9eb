"""How every public function turns its arguments into a program.

A call is a value: :meth:`Call.of` makes a :class:`Call` from the arguments of an :class:`Operation`, and :meth:`Call.read`
reads it. Reading validates the arguments and builds the program, but plans, allocates and launches nothing. ``explain``,
``prepare``, planning ahead of time and :meth:`Call.run` all begin with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..boundary.arguments import read_forward, views_of_shapes
from ..boundary.compute import read_compute_dtype
from ..boundary.conversion import Conversion
from ..boundary.options import check_names
from ..boundary.read_array import INT32, as_int32, read_array
from ..boundary.user_functions import kept_options
from ..hooks import split_options
from ..problem.view import View, device_of
from ..replay.bound_program import shares_memory
from ..replay.call_key import CallKey
from ..replay.replay_cache import cache_call, is_cacheable, run_cached
from ..runtime import cupy_runtime
from .executor import ReadCall, is_any_array

Arrays = Mapping[str, Any]
Options = Mapping[str, Any]
#: The arrays of a backward pass that the forward pass returned, and dout, which has the shape of out.
OF_FORWARD = ("dout", "out", "stats")


def same_options(arrays: Arrays, options: Options) -> Options:
    """Return the options unchanged: :attr:`Call.decide` for calls whose program is built with the caller's options."""
    return options


class Call(NamedTuple):
    """What a caller asked for. Nothing is read, allocated or launched.

    Attributes:
        key: the caller's arrays and options; the call is cached with them.
        parse: checks a key's arrays, which have the package's axes, and its decided options, and builds the program. It
            allocates nothing.
        results: the names of the results, in order, which the caller gets in its own axes. Default: no names; the arrays and
            the results then have the package's axes.
        decide: returns the options that the program is built with, from arrays by name and the caller's options, as
            :meth:`decide_pass` does. Default: the caller's options.
        finish: returns what the caller gets, from the results of the program.
        check: checks the caller's arguments before axes are permuted. Default None: no check.
        dense: the names of arrays and results that have the package's axes whatever the layout; such results are the last.

    Example: :func:`operation`.
    """

    key: CallKey
    parse: Callable[[CallKey], ReadCall]
    results: Sequence[str] = ()
    decide: Callable[[Arrays, Options], Options] = same_options
    finish: Callable[[list[Any]], list[Any]] = list
    check: Callable[[], object] | None = None
    dense: Sequence[str] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Call:
        """Return the call of a public function with these arguments; it ignores :func:`cupy_sdpa.layout.default`.

        Raises:
            TypeError: the function is not an operation.

        >>> import numpy as np
        >>> from cupy_sdpa import attention
        >>> q = np.zeros((8, 1, 4, 1))
        >>> [name for name, x in Call.of(attention, q, q, q, causal=True).key.named().items() if x is not None]
        ['q', 'k', 'v']
        """
        while isinstance(function, functools.partial):
            arguments, options, function = (*function.args, *arguments), function.keywords | options, function.func
        if (of := _operations.get(function)) is None:
            name = getattr(function, "__name__", function)
            raise TypeError(f"{name} does not run a program that computes attention: explain_function takes functions that do")
        options = dict(zip(of.positional, arguments, strict=False)) | options
        flags = {name: options.pop(name, default) for name, default in of.flags.items()}
        arrays = tuple(options.pop(name, None) for name in of.arrays)
        return of.call(arrays, options, **flags)

    @classmethod
    def of_shapes(
        cls,
        function: Callable[..., Any],
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        dtype: Any = None,
        **flags: Any,
    ) -> Call:
        """Return the call of a public function as on a GPU, on views of arrays, or of dense arrays with these shapes.

        The views have no elements: :meth:`read` the call and look at its problems. To report on it, pass both arguments of
        :meth:`ReadCall.report`.

        Args:
            function: the public function.
            arrays: its arrays, or their shapes, by name; q is one of them.
            options: its options.
            dtype: the dtype of the arrays that are shapes.
            flags: its other arguments.

        >>> from cupy_sdpa import attention
        >>> call = Call.of_shapes(attention, dict.fromkeys("qkv", (64, 2, 100, 1)), {"causal": True}, dtype="float16")
        >>> [problem.q.shape for problem in call.read().problems]
        [(64, 2, 100, 1)]
        """
        check_names({**options, "block_mask": None})  # the function itself checks block_mask
        views, given = views_of_shapes(arrays, options, dtype=dtype)
        return cls.of(function, **views, **given, **flags)

    def snapshot(self) -> Call:
        """Return the call with a snapshot of its options, for later calls: functions and lists may change in the meantime."""
        return self._replace(key=self.key._replace(options=kept_options(self.key.array("q"), self.key.options)))

    def conversion(self) -> Conversion | None:
        """Check the caller's arrays, and return how they become views with the package's axes; None if they have these axes."""
        if self.check:
            self.check()
        _, names, arrays, options, _ = self.key
        return Conversion.of(arrays[names.index("q")], options) if self.results else None

    def decided(self, conversion: Conversion | None) -> CallKey:
        """Return the arrays with the package's axes and the decided options, with which the program is built."""
        arrays, options = self.key.named(), self.key.options
        if conversion is not None:
            options = conversion.options
            arrays |= conversion.converted({name: x for name, x in arrays.items() if name not in self.dense}, self.results)
        return self.key._replace(arrays=tuple(arrays.values()), options=self.decide(arrays, options))

    @staticmethod
    def decide_pass(
        arrays: Arrays, options: Options, *, return_stats: Any = False, outputs: Mapping[str, Any] | None = None
    ) -> Options:
        """Decide ``compute_dtype`` and a layer's option; return the options that the program is built and cached with.

        ``compute_dtype`` stays if it differs from q's dtype. A layer's option stays if its own steps compute the pass, and
        is otherwise replaced: a block mask that needs all blocks, for example, becomes the option ``mask``. If nothing changes,
        the result is the argument ``options`` itself.

        Args:
            arrays: q and k by name.
            options: the caller's options.
            return_stats: whether the call also returns the log-sum-exp.
            outputs: the requested gradients, by the names of the arguments that request them.
        """
        layer_option, dtype, decided = split_options(options)
        dtype = read_compute_dtype(dtype, arrays["q"])
        replaced = None
        if layer_option is not None:
            of_call: dict[str, Any] = {"return_stats": return_stats, "outputs": outputs}
            replaced = layer_option.module.decide(layer_option.value, arrays, decided, **of_call)
        if replaced is None and dtype is options.get("compute_dtype"):
            return options
        if replaced is not None:
            decided = {**replaced}
        elif layer_option is not None:
            decided[layer_option.name] = layer_option.value
        return decided if dtype is None else decided | {"compute_dtype": dtype}

    def read(self, *, for_gpu: bool = False, missing: Collection[str] = ()) -> ReadCall:
        """Check the arguments, and build the program. Nothing is planned, allocated or launched.

        Args:
            for_gpu: build a GPU's program, even for numpy arrays. Default False.
            missing: which of ``dout``, ``out``, ``stats``, ``dq``, ``dk`` and ``dv`` are assumed to be dense if they are not
                passed. Default: none.
        """
        conversion = self.conversion()
        with contextlib.nullcontext() if conversion is None else conversion.context():
            key = self.decided(conversion)
            on_host = {**key.named(), **key.options}
            if for_gpu:
                key = _on_gpu(key)
            if missing:
                key = key._replace(arrays=_with_missing(key.named(), missing))
            read_call = self._parse(key)
            if for_gpu:  # the views have no elements; views of numpy arrays are checked as on numpy
                elements = {name: as_int32(name, x) for name, x in on_host.items() if name in INT32}
                read_call.check_elements({name: x for name, x in elements.items() if isinstance(x, np.ndarray)})
            return read_call

    def _parse(self, key: CallKey) -> ReadCall:
        """Check the arguments that :meth:`decided` returned, and build the program."""
        with cupy_runtime.device_context(next((array for array in key.arrays if array is not None), None)):
            return self.parse(key)

    def run(
        self,
        looked_up: CallKey | None = None,
        *,
        tag: Hashable | None = None,
        check: Callable[[ReadCall], object] | None = None,
        back: Callable[[list[Any]], list[Any]] | None = None,
    ) -> list[Any]:
        """Run a call that is not cached, and cache it; return the results in the caller's axes.

        Args:
            looked_up: the key that was looked up; the call's arrays are views of this key's arrays. If one of them is a copy,
                the call is looked up and cached with its own key. Default None: the call's own key.
            tag: the tag with which the call's own key was looked up. Default None: the call's tag.
            check: raises an error if the call must not run; called before anything runs.
            back: returns views of the results, which are cached with ``looked_up``. Default None: the results themselves.

        The call is cached with ``looked_up`` unless its program has other arrays, such as a dense mask, or other options. If it
        does, the call is first looked up with the decided options, and then cached with them.
        """
        if looked_up is not None and not _has_views_of(looked_up, self.key):
            if check is not None:
                check(self.read())
            returned = results_of(self)
            return returned if back is None else back(returned)
        call = self if tag is None else self._replace(key=self.key._replace(tag=tag))
        conversion = call.conversion()
        context = contextlib.nullcontext if conversion is None else conversion.context
        options = call.key.options if conversion is None else conversion.options
        with context():
            decided = call.decided(conversion)
            is_bound = decided.options is options and (conversion is None or conversion.makes_views)
            is_bound = is_bound and (looked_up is None or is_cacheable(looked_up))
            read_call = None if check is None else call._parse(decided)
        if check is not None and read_call is not None:
            check(read_call)  # its errors name the package's axes
        with context():
            results = None if is_bound else run_cached(decided.tag, decided.arrays, decided.options, decided.programs)
            is_repeated = results is not None
            if results is None:
                read_call = read_call or call._parse(decided)
                results = read_call.run()
                if not is_bound:
                    cache_call(decided, read_call)
            own = [name for name in call.results if name not in call.dense]
            returned = results if conversion is None else conversion.back(own, results, call.key.named())
        if back is not None:
            returned = back(returned)
        if is_bound and read_call is not None and not is_repeated:
            cache_call(looked_up or call.key, read_call, None if returned is results else returned)
        return call.finish(returned)


class Operation(NamedTuple):
    """A public function whose calls are values.

    Attributes:
        call: makes a :class:`Call` of its arrays, its options, and its other arguments by name.
        arrays: the names of its arrays, in the order of the cache key.
        flags: its other arguments that are not options, with their defaults.
        positional: the names of the arguments that can be passed by position.
    """

    call: Callable[..., Call]
    arrays: Sequence[str]
    flags: Mapping[str, Any]
    positional: Sequence[str]


CallT = TypeVar("CallT", bound=Callable[..., Call])
#: The operations by public function.
_operations: dict[Callable[..., Any], Operation] = {}


def operation(
    function: Callable[..., Any], arrays: Sequence[str], flags: Mapping[str, Any], positional: Sequence[str] = ()
) -> Callable[[CallT], CallT]:
    """Declare that the decorated function makes the calls of a public function.

    Args:
        function: the public function.
        arrays: the names of its arrays, among them ``q``.
        flags: its other arguments that are not options, with their defaults. An argument that callers must pass also needs a
            value here, which only :meth:`Call.of` and ``explain_function`` use.
        positional: the names of the arguments that can be passed by position. Default: the arrays.

    >>> from cupy_sdpa.extend import (
    ...     Call, CallKey, Expected, View, check_arrays, composed, dtype_name, operation, read_operands, results_of)
    >>> def doubled(q, *, out=None):
    ...     return results_of(call_of_doubled((q, out), {}))[0]
    >>> @operation(doubled, ("q", "out"), {}, ("q",))
    ... def call_of_doubled(arrays, options):
    ...     return Call(CallKey("doubled", ("q", "out"), arrays, options), parse, ("out",))
    >>> def parse(key):
    ...     arrays, views, _ = read_operands(key.named(), key.options)
    ...     q = views["q"]
    ...     check_arrays([Expected("out", q.shape, dtype_name(q.dtype), "like q", writable=True)], views)
    ...     def build(builder):
    ...         builder.copy(views["out"], q)
    ...         builder.add(views["out"], q)
    ...     return composed(key, arrays, views, {"out": View.dense("out", q.shape, q.dtype, q.storage.device)}, build)
    >>> import numpy as np
    >>> doubled(np.ones((2, 1, 3, 1), order="F")).ravel()
    array([2., 2., 2., 2., 2., 2.])
    """

    def declare(call: CallT) -> CallT:
        _operations[function] = Operation(call, arrays, flags, positional or arrays)
        return call

    return declare


def _has_views_of(key: CallKey, of_call: CallKey) -> bool:
    """True if all arrays of a call are views, not copies, of another key's arrays with the same names."""
    named = {name: x for name, x in zip(key.names, key.arrays, strict=True) if x is not None}  # a name may occur twice
    passed = {**key.options, **named}
    arrays = {name: x for name, x in {**of_call.options, **of_call.named()}.items() if hasattr(x, "shape")}
    return all(x is passed.get(name) or shares_memory(x, passed.get(name)) for name, x in arrays.items())


def results_of(call: Call) -> list[Any]:
    """Look a call up, run it, and return its results.

    Raises:
        TypeError, ValueError, Unsupported: raised by the call's parser.

    Example: :func:`operation`.
    """
    tag, _, arrays, options, programs = call.key
    results = run_cached(tag, arrays, options, programs)
    return call.run() if results is None else call.finish(results)


def _on_gpu(key: CallKey) -> CallKey:
    """Return the arrays and options of a call as views of arrays on a GPU."""

    def on_gpu(name: str, value: Any) -> Any:
        value = as_int32(name, value) if name in INT32 else value
        if not is_any_array(value):
            return value
        view = View.of(name, value)
        return view if view.storage.device is not None else replace(view, storage=view.storage._replace(device=0))

    options = {name: on_gpu(name, value) for name, value in key.options.items()}
    if isinstance(tensors := key.options.get("tensors"), Mapping):
        options["tensors"] = {name: on_gpu(name, value) for name, value in tensors.items()}
    return key._replace(arrays=tuple(map(on_gpu, key.names, key.arrays)), options=options)


def _with_missing(arrays: dict[str, Any], names: Collection[str]) -> tuple[Any, ...]:
    """Return the arrays, with views of dense arrays for missing ones; a gradient has its array's shape and dtype."""
    missing = {name: name.removeprefix("d") for name in names if arrays[name] is None}
    if not missing:
        return tuple(arrays.values())
    q, k, v = (read_array(name, arrays[name]) for name in "qkv")
    if not all(x.ndim in (3, 4) for x in (q, k, v)):
        read_forward(q, k, v, {})  # raises
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape, "out": (v.shape[0], *q.shape[1:])}
    views = {
        name: View.row_stats(name, View.of("q", q)) if like == "stats"
        else View.dense(name, shapes[like], q.dtype, device_of(q)) for name, like in missing.items()
    }  # fmt: skip
    return tuple((arrays | views).values())
