"""npz files of any origin: headers before data, no pickles, every damage one clear sentence; written whole or not at all."""

from __future__ import annotations

import contextlib
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..problem.tensor_spec import numpy_dtype
from .console import CommandError, one_line

#: What a damaged or unusual zip, or npy inside it, makes zipfile, the decompressors and numpy raise.
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, RuntimeError),
    *(SyntaxError, tokenize.TokenError, ValueError, TypeError),
)
#: How the header of each version of the npy format is read. Version 3 is for dtypes with fields, which are no use here.
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class Header:
    """What an npz file says of one of its arrays.

    Attributes:
        dtype: the array's; two-byte void, as which numpy writes it, is taken as bfloat16.
        shape: the array's.
        fortran: whether the first axis is the contiguous one.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool

    @property
    def size(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def headers(path: Path, names: Sequence[str]) -> list[Header]:
    """The headers of arrays in an npz file; their data are not read.

    Raises:
        CommandError: the file, or one of the arrays, is not there, is damaged, or holds Python objects.
    """
    found = []
    with _opened(path) as archive:
        there = [entry.removesuffix(".npy") for entry in archive.namelist()]
        if missing := [name for name in names if name not in there]:
            holds = f"it holds {', '.join(there)}" if there else "it is empty"
            raise CommandError(f"{path} has no array {' and no '.join(missing)}: {holds}")
        for name in names:
            with _member(path, archive, name) as stream:
                found.append(_header(path, archive, name, stream))
    return found


def load(path: Path, name: str) -> np.ndarray[Any, Any]:
    """An array from an npz file whose header was found good.

    Raises:
        CommandError: its data are damaged.
    """
    with _opened(path) as archive, _member(path, archive, name) as stream:
        array: np.ndarray[Any, Any] = np.lib.format.read_array(stream, allow_pickle=False)
        stream.read(1)  # at the end of the data zipfile compares the checksum
    return array.view(numpy_dtype("bfloat16")) if array.dtype == "V2" else array


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` when the block ends well, and is gone when it does not.

    Raises:
        CommandError: it cannot be written there.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.exists() and not target.is_file():
            raise CommandError(f"cannot write {path}: it is {'a folder' if target.is_dir() else 'not a file'}")
        if target.exists() and not os.access(target, os.W_OK):
            raise CommandError(f"cannot write {path}: it is write-protected")
        file = open(temporary, "xb")  # noqa: SIM115 - closed below, before the file takes its place
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror} ({target.parent})") from error
    try:
        with file:
            yield file
        os.replace(temporary, target)
    except OSError as error:  # the disk is full, say
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)  # nothing is there any more where all went well


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
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
    try:
        with archive.open(_name_in(archive, name)) as stream:
            yield stream
    except _DAMAGE as error:
        said = one_line(str(error)) or type(error).__name__
        raise CommandError(f"the array {name} in {path} cannot be read: {said}") from error


def _name_in(archive: zipfile.ZipFile, name: str) -> str:
    """The name of an array's member: with ``.npy``, as numpy writes it, or without, which numpy reads too."""
    return f"{name}.npy" if f"{name}.npy" in archive.namelist() else name


def _header(path: Path, archive: zipfile.ZipFile, name: str, stream: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise CommandError(f"the array {name} in {path} is of npy format {version}, which attention has no use for")
    shape, fortran, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise CommandError(f"the array {name} in {path} holds Python objects, which are never read: save it as numbers")
    header = Header(numpy_dtype("bfloat16") if dtype == "V2" else dtype, shape, fortran)
    if min(shape, default=0) < 0 or stream.tell() + header.size != archive.getinfo(_name_in(archive, name)).file_size:
        raise CommandError(f"the array {name} in {path} is damaged: its size is not that of shape {shape} and dtype {dtype}")
    return header
