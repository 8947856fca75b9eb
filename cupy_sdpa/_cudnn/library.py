"""Find and load libcudnn; give every function its signature; turn a failed status into an exception that says enough.

Nothing is loaded by importing this module: :func:`library` loads on first use, once for the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CudnnError, Unsupported
from ..version import version_text
from .constants import Status, name_of

SONAME = "libcudnn.so.9"
#: Set to the path of a libcudnn.so.9 to use exactly that one.
OVERRIDE = "CUPY_SDPA_CUDNN"

# name: (argument types, result type). The C prototypes are in cudnn_graph.h.
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "cudnnGetVersion": ([], c_size_t),
    "cudnnGetCudartVersion": ([], c_size_t),
    "cudnnGetErrorString": ([c_int], c_char_p),
    "cudnnGetLastErrorString": ([c_char_p, c_size_t], None),
    "cudnnCreate": ([POINTER(c_void_p)], c_int),
    "cudnnDestroy": ([c_void_p], c_int),
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


class Library:
    """A loaded cuDNN: its functions by their C names, its version, its path, and how it was found.

    Attributes:
        version: as cuDNN counts, 9.19.0 is 91900.
        cudart_version: the CUDA version that this cuDNN was built with, 12.9 is 12090.
        path: the file that the process really uses.
        found: the route that led to it, for people.
    """

    def __init__(self, cdll: ctypes.CDLL, found: str) -> None:
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(cdll, name)
            function.argtypes, function.restype = arguments, result
            setattr(self, name, function)
        self.found = found
        self.path = path_of(cdll.cudnnGetVersion)
        self.version = int(cdll.cudnnGetVersion())
        self.cudart_version = int(cdll.cudnnGetCudartVersion())

    @functools.cached_property
    def build(self) -> str:
        """What tells this very build from every other: its versions, and the build ids of the libraries that make plans."""
        paths = [Path(self.path).with_name(name) for name in _PLANNERS]
        ids = [build_id(path) if path.exists() else "-" for path in paths]
        return " ".join([str(self.version), f"cuda {self.cudart_version}", *ids])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no signature is declared for {name}: add it to _SIGNATURES")

    def __repr__(self) -> str:
        return f"<cuDNN {version_text(self.version)} at {self.path}>"

    def last_error(self) -> list[str]:
        """What cuDNN said of its newest failures in this thread, a cause each; asking for it clears it."""
        text = ctypes.create_string_buffer(1 << 17)
        self.cudnnGetLastErrorString(text, len(text))
        return causes(text.value.decode(errors="replace"))

    def check(self, status: int, doing: str) -> None:
        """Raise unless ``status`` is success.

        Args:
            status: what a cuDNN function returned.
            doing: what was being done, as the end of "cuDNN failed to ...".

        Raises:
            Unsupported: status 3000 to 3999, the only range that means that this cuDNN or GPU cannot run it.
            CudnnError: any other failure.
        """
        if status == 0:
            return
        name = name_of(Status, status) or self.cudnnGetErrorString(status).decode(errors="replace")
        message = f"cuDNN {version_text(self.version)} failed to {doing}: {status} {name}"
        if said := self.last_error():
            message += f": {'; '.join(said)}"
        if 3000 <= status < 4000:
            raise Unsupported(message)
        raise CudnnError(message, status)


_ENGINE = re.compile(r'(?=\{"engineId":\d+)')
_SAID = re.compile(r"\w+: CUDNN_STATUS_\w+; Reason: (.*?)\s*(?=\w+: CUDNN_STATUS_|$)", re.S)


def causes(text: str) -> list[str]:
    """The causes in cuDNN's error text, which holds a trail of inner calls for every engine that was tried.

    The first reason of a trail is the cause; the rest says through which of its functions it went.

    >>> causes('{"engineId":2,"knobChoices":{}} Warning: CUDNN_STATUS_NOT_SUPPORTED_SHAPE; Reason: d is 12 at: d % 8 != 0 '
    ...        'Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: finalize_internal()')
    ['engine 2: d is 12 at: d % 8 != 0']
    >>> causes("plain words")
    ['plain words']
    """
    found = []
    for trail in _ENGINE.split(text):
        reasons = _SAID.findall(trail)
        cause = " ".join((reasons[0] if reasons else trail).split())
        engine = re.match(r'\{"engineId":(\d+)', trail)
        if cause and not cause.startswith("{"):
            found.append(f"engine {engine[1]}: {cause}" if engine else cause)
    return list(dict.fromkeys(found))


def path_of(function: Any) -> str:
    """The file that a loaded function comes from, asked of the dynamic loader."""
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes, dladdr.restype = [c_void_p, POINTER(_DlInfo)], c_int
    info = _DlInfo()
    found = dladdr(ctypes.cast(function, c_void_p), ctypes.byref(info))
    return os.path.realpath(info.dli_fname.decode()) if found and info.dli_fname else "unknown"


#: The libraries that choose an engine and write its kernel; beside libcudnn wherever that comes from.
_PLANNERS = ("libcudnn_graph.so.9", "libcudnn_engines_runtime_compiled.so.9")


def build_id(path: Path) -> str:
    """A digest of an ELF file's headers and notes; among these is the id that the linker gives every build."""
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


class Tried(NamedTuple):
    """One place that was searched for libcudnn, and what came of it."""

    place: str
    outcome: str


def _already_loaded() -> ctypes.CDLL | None:
    """The libcudnn that something else (PyTorch, JAX) has loaded: a second one beside it would share its soname."""
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # Windows has no RTLD_NOLOAD
        return None


def _from_pathfinder() -> ctypes.CDLL:
    from cuda.pathfinder import load_nvidia_dynamic_lib  # 50 ms to import: only when needed

    return ctypes.CDLL(load_nvidia_dynamic_lib("cudnn").abs_path)


def _wheel_paths() -> Iterator[Path]:
    """Where a cuDNN wheel (nvidia-cudnn-cu12, -cu13) puts the library: nvidia/cudnn/lib in a folder of sys.path."""
    for folder in dict.fromkeys(sys.path):
        path = Path(folder or ".", "nvidia", "cudnn", "lib", SONAME)
        if path.exists():
            yield path


def _search() -> Library:
    tried: list[Tried] = []

    def attempt(place: str, load: Callable[[], ctypes.CDLL]) -> Library | None:
        try:
            return Library(load(), place)
        except Exception as error:  # every failure is kept and shown: pathfinder has its own classes, dlopen raises OSError
            tried.append(Tried(place, f"{type(error).__name__}: {' '.join(str(error).split())}"))
            return None

    loaded = _already_loaded()
    if wanted := os.environ.get(OVERRIDE):
        present = Library(loaded, "already loaded").path if loaded else None
        if present and present != os.path.realpath(wanted):
            raise CudnnError(
                f"{OVERRIDE} asks for {wanted}, but this process has already loaded {present}: "
                f"unset {OVERRIDE}, or use cupy_sdpa before whatever loaded the other"
            )
        if found := attempt(f"{OVERRIDE}={wanted}", lambda: ctypes.CDLL(wanted)):
            return found
    else:
        if loaded is not None:
            return Library(loaded, "already loaded in this process")
        tried.append(Tried("already loaded in this process", "no"))
        if found := attempt("cuda.pathfinder", _from_pathfinder):
            return found
        wheels = list(_wheel_paths())
        if not wheels:
            tried.append(Tried("wheels (nvidia/cudnn/lib in the folders of sys.path)", "none there"))
        for path in wheels:
            if found := attempt(f"wheel {path}", lambda path=path: ctypes.CDLL(str(path))):  # type: ignore[misc]
                return found
        if found := attempt(f"the loader's path ({SONAME})", lambda: ctypes.CDLL(SONAME)):
            return found
    places = "\n".join(f"  {place}: {outcome}" for place, outcome in tried)
    raise CudnnError(
        f"{SONAME} was not found. Install it with pip install 'cupy-sdpa[cuda12]' (or [cuda13]), "
        f"or set {OVERRIDE} to its path. Searched:\n{places}"
    )


_library: Library | None = None
_loading = threading.Lock()


def library() -> Library:
    """The process's cuDNN, loaded on first use.

    The search: the file named by ``CUPY_SDPA_CUDNN``, and nothing else, where that is set; otherwise one already loaded
    in the process, then ``cuda.pathfinder``, the wheels' folders, and the loader's path.

    Raises:
        CudnnError: none was found; the message lists every place searched.
    """
    global _library
    if _library is None:
        with _loading:
            if _library is None:
                _library = _search()
    return _library
