"""npz files: headers are read before data, nothing is unpickled, damage is reported in one line, and writes are atomic."""

from __future__ import annotations

import contextlib
import io
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...problem.tensor_spec import numpy_dtype
from .console import CommandError, one_line

#: Exceptions of zipfile, the decompressors and numpy for a damaged or unusual zip or npy file.
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, RuntimeError),
    *(SyntaxError, tokenize.TokenError, ValueError, TypeError),
)
#: The largest header of an array in bytes, and the compressions that numpy writes; only their reads are bounded in memory.
_MAX_HEADER, _COMPRESSIONS = 1 << 16, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
#: Readers of the header, by version of the npy format. Version 3 is for structured dtypes, which are not supported.
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class Header:
    """The header of an array in an npz file.

    Attributes:
        dtype: the dtype; two-byte void, as numpy writes bfloat16, is read as bfloat16.
        shape: the shape.
        fortran: whether the first axis is contiguous.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool

    @property
    def size(self) -> int:
        """The bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def headers(path: Path, names: Sequence[str], refused: Collection[str] = ()) -> list[Header]:
    """Read the headers of arrays in an npz file, without their data.

    Args:
        path: the file.
        names: the arrays.
        refused: the names of arrays that must not be in the file.

    Raises:
        CommandError: the file or an array is missing or damaged, or an array contains Python objects.
    """
    result = []
    with _opened(path) as archive:
        members = [entry.removesuffix(".npy") for entry in archive.namelist()]
        if missing := [name for name in names if name not in members]:
            holds = f"it holds {', '.join(members)}" if members else "it is empty"
            raise CommandError(f"{path} has no array {' and no '.join(missing)}: {holds}")
        if unread := [name for name in members if name in refused]:
            raise CommandError(
                f"{path} has {' and '.join(unread)}, which run does not read: remove them from the file, or call "
                "cupy_sdpa.attention in Python"
            )
        for name in names:
            with _member(path, archive, name) as stream:
                result.append(_header(path, archive, name, stream))
    return result


def load(path: Path, name: str) -> np.ndarray[Any, Any]:
    """Read an array whose header has been checked.

    Raises:
        CommandError: the data are damaged.
    """
    with _opened(path) as archive, _member(path, archive, name) as stream:
        array: np.ndarray[Any, Any] = np.lib.format.read_array(stream, allow_pickle=False)
        stream.read(1)  # zipfile compares the checksum at the end of the data
    return array.view(numpy_dtype("bfloat16")) if array.dtype == "V2" else array


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` if the block succeeds, and is removed if it fails.

    Raises:
        CommandError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))  # preserves a symbolic link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.exists() and not target.is_file():
            raise CommandError(f"cannot write {path}: it is {'a folder' if target.is_dir() else 'not a file'}")
        if target.exists() and not os.access(target, os.W_OK):
            raise CommandError(f"cannot write {path}: it is write-protected")
        file = open(temporary, "xb")  # noqa: SIM115 - closed below, before the rename
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror} ({target.parent})") from error
    try:
        with file:
            yield file
        os.replace(temporary, target)
    except OSError as error:  # for example, the disk is full
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)  # the temporary file does not exist after a successful rename


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe or a device, whose end may never come
        raise CommandError(f"cannot read {path}: it is not a regular file")
    try:
        archive = zipfile.ZipFile(path)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise CommandError(f"{path} is not an npz file, or is damaged: {error}") from error
    with archive:
        yield archive


@contextlib.contextmanager
def _member(path: Path, archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    compression = archive.getinfo(_name_in(archive, name)).compress_type
    if compression not in _COMPRESSIONS:
        raise CommandError(
            f"the array {name} in {path} has the zip compression {compression}, which numpy does not write: use numpy.savez or "
            "numpy.savez_compressed"
        )
    try:
        with archive.open(_name_in(archive, name)) as stream:
            yield stream
    except _DAMAGE as error:
        reason = one_line(str(error)) or type(error).__name__
        raise CommandError(f"the array {name} in {path} cannot be read: {reason}") from error


def _name_in(archive: zipfile.ZipFile, name: str) -> str:
    """The name of an array's member: with ``.npy``, as numpy writes it, or without, which numpy also reads."""
    return f"{name}.npy" if f"{name}.npy" in archive.namelist() else name


def _header(path: Path, archive: zipfile.ZipFile, name: str, member: IO[bytes]) -> Header:
    stream = io.BytesIO(member.read(_MAX_HEADER))
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise CommandError(f"the array {name} in {path} has npy format {version}, which is not supported")
    shape, fortran, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise CommandError(
            f"the array {name} in {path} holds Python objects, which are not supported: save it with a numeric dtype"
        )
    header = Header(numpy_dtype("bfloat16") if dtype == "V2" else dtype, shape, fortran)
    if min(shape, default=0) < 0 or stream.tell() + header.size != archive.getinfo(_name_in(archive, name)).file_size:
        raise CommandError(f"the array {name} in {path} is damaged: its size does not match shape {shape} and dtype {dtype}")
    return header
