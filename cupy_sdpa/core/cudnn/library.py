"""Find and load libcudnn, declare its functions, and convert failures to exceptions.

:func:`library` loads libcudnn on first use, once in a process. Importing this module does not load it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from ..errors import INSTALL_FOR_GPU, CudnnError, Unsupported
from ..version import version_text
from . import log

SONAME = "libcudnn.so.9"
#: The environment variable with the path of the libcudnn.so.9 to load.
OVERRIDE = "CUPY_SDPA_CUDNN"

# name: (argument types, result type). The C prototypes are in cudnn_graph.h.
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "cudnnGetVersion": ([], c_size_t),
    "cudnnGetCudartVersion": ([], c_size_t),
    "cudnnGetErrorString": ([c_int], c_char_p),
    "cudnnGetLastErrorString": ([c_char_p, c_size_t], None),
    "cudnnCreate": ([POINTER(c_void_p)], c_int),
    "cudnnDestroy": ([c_void_p], c_int),
    "cudnnSetCallback": ([c_uint, c_void_p, log.Callback], c_int),
    "cudnnSetStream": ([c_void_p, c_void_p], c_int),
    "cudnnBackendCreateDescriptor": ([c_int, POINTER(c_void_p)], c_int),
    "cudnnBackendDestroyDescriptor": ([c_void_p], c_int),
    "cudnnBackendFinalize": ([c_void_p], c_int),
    "cudnnBackendSetAttribute": ([c_void_p, c_int, c_int, c_int64, c_void_p], c_int),
    "cudnnBackendGetAttribute": ([c_void_p, c_int, c_int, c_int64, POINTER(c_int64), c_void_p], c_int),
    "cudnnBackendExecute": ([c_void_p, c_void_p, c_void_p], c_int),
}


class _DlInfo(ctypes.Structure):
    _fields_ = (("dli_fname", c_char_p), ("dli_fbase", c_void_p), ("dli_sname", c_char_p), ("dli_saddr", c_void_p))


class CudnnLibrary:
    """A loaded cuDNN. Its attributes include the functions, by their C names.

    ``version`` 91900 is 9.19.0; ``cudart_version`` 12090 is CUDA 12.9, with which this cuDNN was built; ``found_via`` says how
    the file was found.
    """

    _log_mask = 0  # of the severities that are logged

    def __init__(self, cdll: ctypes.CDLL, found_via: str) -> None:
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(cdll, name)
            function.argtypes, function.restype = arguments, result
            setattr(self, name, function)
        self.found_via = found_via
        self.path = path_of(cdll.cudnnGetVersion)
        self.version = int(cdll.cudnnGetVersion())
        self.cudart_version = int(cdll.cudnnGetCudartVersion())

    @functools.cached_property
    def build(self) -> str:
        """An identifier of this build: its versions, and the build ids of the libraries that create plans."""
        paths = [Path(self.path).with_name(name) for name in _PLANNING_LIBRARIES]
        ids = [build_id(path) if path.exists() else "-" for path in paths]
        return " ".join([str(self.version), f"cuda {self.cudart_version}", *ids])

    @functools.cached_property
    def is_light(self) -> bool:
        """Whether this is cuDNN's configuration for kernels compiled at run time, which has no other engines.

        NVIDIA's wheels ``nvidia-cudnn-jit-cu12`` and ``-cu13`` are this configuration; ``CUDNN_LIB_CONFIG=GRAPH_JIT_ONLY``
        selects it in the full cuDNN.
        """
        selected = os.environ.get("CUDNN_LIB_CONFIG") == "GRAPH_JIT_ONLY"
        return selected or not Path(self.path).with_name(_PRECOMPILED_LIBRARY).exists()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"{name} has no declared signature: add it to _SIGNATURES")

    def __repr__(self) -> str:
        return f"<cuDNN {version_text(self.version)} at {self.path}>"

    def last_error(self) -> list[str]:
        """Return the causes of cuDNN's latest failures in this thread; the call clears cuDNN's error text."""
        text = ctypes.create_string_buffer(1 << 17)
        self.cudnnGetLastErrorString(text, len(text))
        return causes_in(text.value.decode(errors="replace"))

    def route_log(self) -> None:
        """Let cuDNN send its own messages to the logger ``cupy_sdpa.cudnn``, as its level asks now (:mod:`.log`)."""
        if (mask := log.mask_of_level()) != self._log_mask:
            self.check(self.cudnnSetCallback(mask, None, log.callback), "route its log")
            if mask:
                atexit.register(self.cudnnSetCallback, 0, None, log.callback)  # there is no logger after the interpreter's end
            self._log_mask = mask

    def check(self, status: int, doing: str) -> None:
        """Raise unless ``status`` is success; the message is "cuDNN failed to <doing>".

        Raises:
            Unsupported: a status from 3000 to 3999, the only range that means "not supported by this cuDNN or GPU".
            CudnnError: any other failure.
        """
        if status == 0:
            return
        name = self.cudnnGetErrorString(status).decode(errors="replace").removeprefix("CUDNN_STATUS_")
        message = f"cuDNN {version_text(self.version)} failed to {doing}: {status} {name}"
        if causes := self.last_error():
            message += f": {'; '.join(causes)}"
        if 3000 <= status < 4000:
            raise Unsupported(message)
        raise CudnnError(message, status)


_ENGINE = re.compile(r'(?=\{"engineId":\d+)')
_REASON = re.compile(r"\w+: CUDNN_STATUS_\w+; Reason: (.*?)\s*(?=\w+: CUDNN_STATUS_|$)", re.S)


def causes_in(text: str) -> list[str]:
    """Return the causes in cuDNN's error text, which contains a stack of inner calls for every engine tried.

    The first reason in a stack is the cause. The others name the functions that propagated it.

    >>> causes_in('{"engineId":2,"knobChoices":{}} Warning: CUDNN_STATUS_NOT_SUPPORTED_SHAPE; Reason: d is 12 at: d % 8 != 0 '
    ...        'Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: finalize_internal()')
    ['engine 2: d is 12 at: d % 8 != 0']
    >>> causes_in("plain words")
    ['plain words']
    """
    causes = []
    for stack in _ENGINE.split(text):
        reasons = _REASON.findall(stack)
        cause = " ".join((reasons[0] if reasons else stack).split())
        engine = re.match(r'\{"engineId":(\d+)', stack)
        if cause and not cause.startswith("{"):
            causes.append(f"engine {engine[1]}: {cause}" if engine else cause)
    return list(dict.fromkeys(causes))


def path_of(function: Any) -> str:
    """Return the path of the file that a function was loaded from."""
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes, dladdr.restype = [c_void_p, POINTER(_DlInfo)], c_int
    info = _DlInfo()
    succeeded = dladdr(ctypes.cast(function, c_void_p), ctypes.byref(info))
    return os.path.realpath(info.dli_fname.decode()) if succeeded and info.dli_fname else "unknown"


#: The libraries that choose an engine and generate its kernel, in the folder of libcudnn.
_PLANNING_LIBRARIES = ("libcudnn_graph.so.9", "libcudnn_engines_runtime_compiled.so.9")
#: The library of the engines that are not compiled at run time, which the light configuration lacks.
_PRECOMPILED_LIBRARY = "libcudnn_engines_precompiled.so.9"


def build_id(path: Path) -> str:
    """Return a digest of the headers and notes of an ELF file. The notes include the linker's build id."""
    with path.open("rb") as file:
        header = file.read(64)
        (table,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        file.seek(table)
        segments = file.read(size * count)
        digest = hashlib.sha256(header + segments)
        for start in range(0, size * count, size):
            if struct.unpack_from("<I", segments, start)[0] == 4:  # PT_NOTE
                offset, _, _, length = struct.unpack_from("<4Q", segments, start + 8)
                file.seek(offset)
                digest.update(file.read(length))
    return digest.hexdigest()[:16]


def _already_loaded() -> ctypes.CDLL | None:
    """Return the libcudnn that another package (PyTorch, JAX) has loaded. A second one would have the same soname."""
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # Windows has no RTLD_NOLOAD
        return None


def _from_pathfinder() -> ctypes.CDLL:
    from cuda.pathfinder import load_nvidia_dynamic_lib  # the import takes 50 ms

    return ctypes.CDLL(load_nvidia_dynamic_lib("cudnn").abs_path)


def _from_light_wheel() -> ctypes.CDLL:
    """Return the cuDNN of NVIDIA's wheels ``nvidia-cudnn-jit-cu12`` and ``-cu13``, which cuda.pathfinder does not know."""
    places = [Path(folder) / "nvidia" / "cudnn_jit" / "lib" / SONAME for folder in sys.path]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise FileNotFoundError("not installed")
    return ctypes.CDLL(str(found))


def _load() -> CudnnLibrary:
    loaded = _already_loaded()
    if path := os.environ.get(OVERRIDE):
        present = CudnnLibrary(loaded, "already loaded").path if loaded else None
        if present and present != os.path.realpath(path):
            raise CudnnError(
                f"{OVERRIDE} is {path}, but this process has already loaded {present}: "
                f"unset {OVERRIDE}, or use cupy_sdpa before the package that loaded the other one"
            )
        try:
            return CudnnLibrary(ctypes.CDLL(path), f"{OVERRIDE}={path}")
        except (OSError, AttributeError) as error:  # not a library, or not cuDNN
            raise _not_found({f"{OVERRIDE}={path}": error}) from error
    if loaded is not None:
        return CudnnLibrary(loaded, "already loaded in this process")
    outcomes: dict[str, str | Exception] = {"already loaded in this process": "no"}
    for name, place, find in _PLACES:
        try:
            return CudnnLibrary(find(), name)
        except Exception as error:  # pathfinder's own classes, OSError, AttributeError
            outcomes[f"{name} ({place})"] = error
    raise _not_found(outcomes)


#: Where cuDNN is searched, in this order: a name, the places, and the function that loads it.
_PLACES: tuple[tuple[str, str, Callable[[], ctypes.CDLL]], ...] = (
    ("cuda.pathfinder", "wheels, conda, the loader's path, CUDNN_PATH, CUDA_PATH", _from_pathfinder),
    ("nvidia-cudnn-jit", "wheels of the light configuration", _from_light_wheel),
)


def _not_found(outcomes: Mapping[str, str | Exception]) -> CudnnError:
    """Return the error that lists every place searched, with its outcome."""
    lines = []
    for place, outcome in outcomes.items():
        text = f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, Exception) else outcome
        lines.append(f"  {place}: {' '.join(text.split())}")
    places = "\n".join(lines)
    return CudnnError(
        f"{SONAME} was not found. Install it with {INSTALL_FOR_GPU}, or set {OVERRIDE} to its "
        f"path, or pass engine='cupy', which computes without cuDNN, but slower. Searched:\n{places}"
    )


_library: CudnnLibrary | None = None
_loading = threading.Lock()


def _reset_after_fork() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it, and never releases it here."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_reset_after_fork)


def library() -> CudnnLibrary:
    """Return the cuDNN of this process, loaded on first use.

    If ``CUPY_SDPA_CUDNN`` is set, this file is loaded and no other place is searched. Otherwise a libcudnn that the process has
    already loaded is used, or else the one that ``cuda.pathfinder`` finds: in NVIDIA's wheels, in a conda environment, on the
    loader's path, or in ``CUDNN_PATH`` or ``CUDA_PATH``; otherwise the library of the wheels ``nvidia-cudnn-jit-cu12`` and
    ``-cu13``.

    Raises:
        CudnnError: cuDNN is not found; the message lists every place searched.
    """
    global _library
    if _library is None:
        with _loading:
            if _library is None:
                _library = _load()
    return _library
