"""Write every distinct problem of a program to a file, one JSON object per line.

The calls look at :data:`active`, an attribute of this module, and do nothing more if it is empty.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..arrays import layouts
from ..score_fn.identity import identity
from .source import PARAMETERS, NotRecordedError, name_of, source_of
from .trace_file import TraceFile

#: The environment variable with the file to which a process writes its problems.
VARIABLE = "CUPY_SDPA_TRACE"
#: The options whose values are not written: seed and offset of dropout.
_SEEDS = ("seed", "offset")
#: Stands for a function without an identity.
_UNKNOWN = "unknown"
#: The open traces.
active: tuple[Trace, ...] = ()
_lock = threading.Lock()
_thread = threading.local()

ResultT = TypeVar("ResultT")


class Trace:
    """A file of problems. Problems that it contains are not written again, also not in a later process.

    A problem that cannot be written is an error of the trace, not of the call: a warning names the reason, and no further
    problem is written.

    Args:
        path: the file; problems are appended, and the file is created if it does not exist.

    Attributes:
        problems: the number of problems in the file.

    Raises:
        OSError: the file cannot be written, is not a regular file, or is not a trace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = TraceFile(self.path)
        self._failed = False
        self._seen: set[tuple[Any, ...]] = set()
        self._lock = threading.Lock()

    @property
    def problems(self) -> int:
        """The number of problems in the file."""
        return len(self._file.lines)

    def add(self, call: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Write the problem of a call, unless the file contains it. It does nothing if the arguments are not valid.

        Args:
            call: the name of the function.
            arrays: its array arguments; entries that are None are left out.
            options: its other arguments. Arrays in another ``layout`` are written as their views in the layout of this package.
        """
        try:
            if layout := layouts.other_layout(options):
                arrays = {name: layouts.to_own(name, array, layout) for name, array in arrays.items()}
                options = layouts.options_in_own(options, layout)
            seen = call, *_items(arrays), *_items(options)
            if self._failed or (_UNKNOWN not in seen and seen in self._seen):
                return
            line = json.dumps(_entry(call, arrays, options), allow_nan=False).encode()
        except (TypeError, ValueError, AttributeError):
            return  # the call raises the error
        with self._lock:
            if _UNKNOWN not in seen:
                self._seen.add(seen)
            if line not in self._file.lines and not self._failed:
                try:
                    self._file.append(line)
                except OSError as error:
                    self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Write nothing more, and warn; the warning is printed if it is an error, because the call has its results."""
        self._failed = True
        text = f"no more problems are written to {self.path}: {error.strerror}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            print(f"cupy_sdpa: {text}", file=sys.stderr)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __repr__(self) -> str:
        return f"<Trace {self.path}: {self.problems} problem{'s' * (self.problems != 1)}>"


def _items(values: Mapping[str, Any]) -> Iterator[Any]:
    """What identifies the arguments of a call, hashable; :data:`_UNKNOWN` for a function that may change."""
    for name, value in values.items():
        if name in _SEEDS and value is not None:
            yield name
        elif hasattr(value, "strides"):
            yield name, value.dtype, value.shape, value.strides
        elif isinstance(value, Mapping):
            yield name, *_items(value)
        elif callable(value):
            known = identity(value)
            yield _UNKNOWN if known is None else (name, known)
        elif value is not None and value is not False:
            yield name, type(value), tuple(value) if isinstance(value, list) else value


def _entry(call: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of a call."""
    tensors = options.get("tensors") or {}
    written = {
        name: _value(name, value, tensors)
        for name, value in options.items()
        if name != "layout" and value is not None and value is not False
    }
    return {
        "call": call,
        **{name: _array(array) for name, array in arrays.items() if array is not None},
        "options": {name: value for name, value in written.items() if value != {}},
    }


def _value(name: str, value: Any, tensors: Mapping[str, Any]) -> Any:
    """An option as JSON."""
    if name in _SEEDS:  # a training step has its own seed, and the same problem
        return 0
    if hasattr(value, "strides") and getattr(value, "shape", None) != ():
        return _array(value)
    if name == "tensors":
        return {key: _array(array) for key, array in value.items()}
    if name in PARAMETERS:
        try:
            return {"name": name_of(value), "source": source_of(value, name, tensors)}
        except NotRecordedError as error:
            return {"name": name_of(value), "not_replayable": str(error)}
    if callable(value) or name == "block_mask":
        return {"name": name_of(value) if callable(value) else repr(value), "not_replayable": f"{name} is not recorded"}
    if isinstance(value, (tuple, list)):
        return [_value(name, part, tensors) if part is not None else None for part in value]
    return value.item() if hasattr(value, "item") else value


def _array(array: Any) -> dict[str, Any]:
    """Shape and dtype of an array, and its strides in bytes unless it is dense in Fortran order."""
    shape, dense, step = list(map(int, array.shape)), [], int(getattr(array.dtype, "itemsize", 1))  # the dtype of FP8 is a name
    for length in shape:
        dense.append(step)
        step *= length
    found: dict[str, Any] = {"shape": shape, "dtype": str(array.dtype)}
    strides = list(map(int, array.strides))
    is_dense = 0 in shape or all(a == b or n == 1 for a, b, n in zip(strides, dense, shape, strict=True))
    return found if is_dense else {**found, "strides": strides}


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Trace]:
    """A context manager that writes every distinct problem of the calls in its block to a file.

    Calls of all threads are recorded: :func:`cupy_sdpa.attention`, its gradients, :func:`cupy_sdpa.attention_jvp` and prepared
    calls. Array contents are not written. The environment variable ``CUPY_SDPA_TRACE`` does the same for a whole process.

    Args:
        path: the file, one JSON object per line. Problems that it contains already are not written again.

    Yields:
        The trace, with the attribute ``problems``, the number of problems in the file.

    Raises:
        OSError: the file cannot be written, is not a regular file, or has other contents than a trace. An error of a later
            write is a warning, and the call returns its results.

    >>> import json, pathlib, tempfile, numpy as np, cupy_sdpa
    >>> x = np.ones((8, 2, 16, 1), np.float32, order="F")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "problems.jsonl")
    ...     with cupy_sdpa.trace(path) as problems:
    ...         for _ in range(3):
    ...             out = cupy_sdpa.attention(x, x, x, causal=True)
    ...     line, = path.read_text().splitlines()
    >>> problems.problems, json.loads(line)["options"]
    (1, {'causal': True})
    """
    global active
    opened = Trace(path)
    with _lock:
        active = (*active, opened)
    try:
        yield opened
    finally:
        with _lock:
            active = tuple(other for other in active if other is not opened)
        opened.close()


def record(call: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Write the problem of a call that was not refused to the open traces."""
    for opened in active:
        opened.add(call, arrays, options)


def is_recording() -> bool:
    """Whether the current call of this thread is one of :func:`recorded`."""
    return getattr(_thread, "recording", False)


def recorded(function: Callable[..., ResultT], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> ResultT:
    """Call a function with these arguments, and write its problem unless it is refused; a failure of cuDNN is written."""
    _thread.recording, refused = True, False
    try:
        return function(**arrays, **options)
    except (TypeError, ValueError, NotImplementedError):
        refused = True
        raise
    finally:
        _thread.recording = False
        if not refused:
            record(function.__name__, arrays, options)


def trace_process() -> None:
    """Open the file of ``CUPY_SDPA_TRACE``, until the process ends.

    Raises:
        OSError: the file cannot be written.
    """
    global active
    if path := os.environ.get(VARIABLE):
        try:
            active = (*active, Trace(path))
        except OSError as error:
            raise OSError(f"{VARIABLE} is {path!r}, and problems cannot be written there: {error.strerror}") from error
