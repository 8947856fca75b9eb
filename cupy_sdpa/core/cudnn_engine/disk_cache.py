"""The disk cache of serialized plans: in memory for the threads and GPUs of this process, in a folder for other processes.

An entry is bytes stored under a key; this module interprets neither. Entries are executed on the GPU, so the folder and its
files must belong to this user or to root, and no other user may write to them. A damaged, truncated or renamed file is
never returned: a warning is issued, and the plan is built again.

The folder may contain other files. The name of an entry is its key, 64 hexadecimal digits, and ``.plan``; its first bytes are
``cupy_sdpa plan``. The name of a file that is being written is ``.cupy_sdpa-``, 32 digits and ``.part``. No other file is read,
counted, replaced or deleted, and symbolic links are not followed. On systems without user ids (Windows), owner and mode are not
checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from ..errors import DiskCacheWarning

#: The environment variable with the folder; ``0`` turns it off. Default: ``cupy_sdpa`` in the user's cache folder.
DIRECTORY = "CUPY_SDPA_CACHE_DIR"
#: The maximum number of bytes in a folder, and in memory. A plan takes 70 to 250 kB.
DISK_LIMIT, MEMORY_LIMIT = 512 << 20, 64 << 20
#: The maximum size of an entry in bytes; larger files are not read.
ENTRY_LIMIT = 16 << 20
#: The first bytes of every entry, followed by the version of the format.
_MAGIC = b"cupy_sdpa plan "
_FORMAT = _MAGIC + b"2\n"
_SUFFIX = ".plan"
_ENTRY, _PART = re.compile(r"[0-9a-f]{64}\.plan"), re.compile(r"\.cupy_sdpa-[0-9a-f]{32}\.part")
#: Seconds after which an unfinished file counts as abandoned.
_ABANDONED = 3600
#: Flags to open a file: follow no link, and do not block on a pipe.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class NotStored(OSError):
    """A plan cannot be stored in the folder."""


class DiskCache:
    """Keep serialized plans in a folder; the least recently used are deleted first. Without a folder, in memory only.

    :func:`cupy_sdpa.store.kept` returns the cache of this process.

    Args:
        folder: the folder; created with the first entry, accessible to its owner only. None stores nothing on disk.
        limit: the maximum number of bytes in the folder. Default 512 MiB.
        required: whether a plan that cannot be stored raises :class:`NotStored`. Default False: a warning is issued.

    Attributes:
        hits: number of look-ups that found an entry.
        misses: number of look-ups that did not.

    >>> import pathlib, tempfile
    >>> from cupy_sdpa.store import DiskCache
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = DiskCache(pathlib.Path(folder))
    ...     cache.nbytes, cache.paths(), cache.hits
    (0, [], 0)
    """

    def __init__(self, folder: Path | None, limit: int = DISK_LIMIT, *, required: bool = False) -> None:
        self.folder, self.limit, self._required = folder, limit, required
        self.hits = self.misses = 0
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._build_locks = [threading.Lock() for _ in range(32)]
        self._warned = False

    @contextlib.contextmanager
    def building(self, key: str) -> Iterator[None]:
        """Hold the lock of a key while its plan is looked up and built: one thread builds the plan, the others find it."""
        with self._build_locks[int(key[:8], 16) % len(self._build_locks)]:
            yield

    def get(self, key: str) -> bytes | None:
        """Return the entry of a key; None if there is no entry, or if it cannot be trusted."""
        with self._lock:
            content = self._memory.get(key)
            if content is not None:
                self._memory.move_to_end(key)
        if content is None:
            content = self._read(key)
            if content is not None:
                self._put_in_memory(key, content)
        with self._lock:
            self.hits += content is not None
            self.misses += content is None
        return content

    def put(self, key: str, content: bytes) -> None:
        """Store an entry, which replaces the previous one of the key."""
        self._put_in_memory(key, content)
        if self.folder is None:
            return
        try:
            self._write(self.folder, key, content)
            self._prune(self.folder)
        except OSError as error:
            text = f"plans cannot be stored in {self.folder}: {error}"
            if self._required:
                raise NotStored(text) from error
            self._warn(text)

    def reject(self, key: str, reason: str) -> None:
        """Delete an entry that cannot be used."""
        with self._lock:
            self._memory.pop(key, None)
        self._discard(key, reason)

    def check(self) -> None:
        """Create the folder if it does not exist, and check that entries can be stored in it.

        Raises:
            OSError: the folder cannot be created or written, or other users may write to it.
        """
        if self.folder is None:
            return
        try:
            _make_folder(self.folder)
            descriptor, path = _new_part(self.folder)
        except OSError as error:
            raise type(error)(f"plans cannot be stored in {self.folder}: {error.strerror or error}") from None
        os.close(descriptor)
        path.unlink()

    def clear(self) -> None:
        """Delete every entry, in memory and in the folder, and reset the counts.

        Raises:
            OSError: a file cannot be deleted.
        """
        with self._lock:
            self._memory.clear()
            self.hits = self.misses = 0
        for path in self.paths():
            path.unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """Return the files of the entries in the folder."""
        return [path for path, _ in self._entries()]

    @property
    def nbytes(self) -> int:
        """Bytes of the entries in the folder."""
        return sum(info.st_size for _, info in self._entries())

    def __repr__(self) -> str:
        return f"<DiskCache: {self}>"

    def __str__(self) -> str:
        place = f"in {self.folder}" if self.folder else f"in memory only ({DIRECTORY}=0)"
        sizes = [info.st_size for _, info in self._entries()]
        return (
            f"plans {place}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} of at most {self.limit / 1e6:.0f} MB, "
            f"{self.hits} hits, {self.misses} misses"
        )

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        return [] if self.folder is None else [(path, info) for path, info in _files(self.folder, _ENTRY) if _is_entry(path)]

    def _put_in_memory(self, key: str, content: bytes) -> None:
        with self._lock:
            self._memory[key] = content
            self._memory.move_to_end(key)
            while sum(map(len, self._memory.values())) > MEMORY_LIMIT and len(self._memory) > 1:
                self._memory.popitem(last=False)

    def _read(self, key: str) -> bytes | None:
        if self.folder is None:
            return None
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            raw = _read_trusted(self.folder, path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"plans in {self.folder} are not used: {error}")
            return None
        head_size = len(_head(key, b""))
        content = raw[head_size:]
        if raw[:head_size] != _head(key, content):
            self._discard(key, "it is damaged, truncated, renamed or too large")
            return None
        with contextlib.suppress(OSError):  # in a read-only folder the order of use cannot be updated
            os.utime(path)
        return content

    def _write(self, folder: Path, key: str, content: bytes) -> None:
        _make_folder(folder)
        target, raw = folder / f"{key}{_SUFFIX}", _head(key, content) + content
        if len(raw) > ENTRY_LIMIT:
            raise OSError(f"a plan has {len(raw)} bytes, the limit is {ENTRY_LIMIT} bytes")
        if os.path.lexists(target) and not _is_entry(target):
            raise OSError(f"{target} was not written by this package. Move it to another folder")
        # Write another file and rename it: readers find the old entry or the complete new one.
        descriptor, part = _new_part(folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _prune(self, folder: Path) -> None:
        for path, info in _files(folder, _PART):  # left by a process that was killed while it wrote
            if time.time() - info.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)
        if sum(info.st_size for _, info in _files(folder, _ENTRY)) <= self.limit:
            return  # without opening every file
        entries = self._entries()
        total = sum(info.st_size for _, info in entries)
        for path, info in sorted(entries, key=lambda entry: entry[1].st_mtime):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= info.st_size

    def _discard(self, key: str, reason: str) -> None:
        place = self.folder or "memory"
        warnings.warn(f"the plan {key}{_SUFFIX} in {place} is rebuilt: {reason}", DiskCacheWarning, stacklevel=2)
        if self.folder and _is_entry(path := self.folder / f"{key}{_SUFFIX}"):
            with contextlib.suppress(OSError):  # a read-only folder
                path.unlink(missing_ok=True)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            remedy = f"Set {DIRECTORY} to another folder, or to 0 to store no plans"
            warnings.warn(f"{text}. {remedy}", DiskCacheWarning, stacklevel=2)


def _head(key: str, content: bytes) -> bytes:
    """Return the bytes before the content: the format, the key, and a checksum of key and content. Their number is constant."""
    return _FORMAT + key.encode() + b"\n" + hashlib.sha256(key.encode() + content).hexdigest().encode() + b"\n"


def _check_trust(info: os.stat_result) -> None:
    """Raise PermissionError if another user may have written a file, or a file in a folder."""
    if not hasattr(os, "getuid"):
        return
    if info.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"it belongs to user {info.st_uid}, and this process to user {os.getuid()}")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to it (mode {stat.S_IMODE(info.st_mode):o}); chmod go-w forbids that")


def _make_folder(folder: Path) -> None:
    """Create a folder for its owner only. Raises OSError if this fails, or other users may write to the folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_trust(folder.stat())


def _read_trusted(folder: Path, path: Path) -> bytes:
    """Return an entry's bytes, or b"" if it is too large; OSError unless only this user or root can write it."""
    descriptor = os.open(path, os.O_RDONLY | _SAFE)
    try:
        _check_trust(folder.stat())
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{path} is not a regular file")
        try:
            _check_trust(info)
        except PermissionError as error:
            raise PermissionError(f"{path}: {error}") from None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            start = file.read(len(_MAGIC))
            if not _MAGIC.startswith(start):
                raise OSError(f"{path} was not written by this package. Move it to another folder")
            return start + file.read(ENTRY_LIMIT - len(start)) if info.st_size <= ENTRY_LIMIT else b""
    finally:
        os.close(descriptor)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
    """Return the regular files of a folder whose names match a pattern, sorted by name."""
    files = []
    with contextlib.suppress(OSError):
        for name in filter(pattern.fullmatch, os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
                info = (folder / name).lstat()
                if stat.S_ISREG(info.st_mode):
                    files.append((folder / name, info))
    return sorted(files)


def _is_entry(path: Path) -> bool:
    """True if a file is an entry by its name and first bytes. A file truncated within these bytes also counts as an entry."""
    if not _ENTRY.fullmatch(path.name):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and _MAGIC.startswith(os.read(descriptor, len(_MAGIC)))
    finally:
        os.close(descriptor)


def _new_part(folder: Path) -> tuple[int, Path]:
    """Create a file for writing, accessible to its owner only; return its descriptor and its path."""
    path = folder / f".cupy_sdpa-{os.urandom(16).hex()}.part"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600), path


def folder() -> Path | None:
    """Return the folder set by the environment variable, or else the default one; None if the disk cache is turned off."""
    directory = os.environ.get(DIRECTORY)
    if directory == "0":
        return None
    try:
        if directory:
            return Path(directory).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cupy_sdpa"
    except RuntimeError:  # the user has no home folder
        return None


_current: DiskCache | None = None
_lock = threading.Lock()


def current() -> DiskCache:
    """Return the disk cache of this process; a new one if the environment variable names a different folder than before."""
    global _current
    directory = folder()
    with _lock:
        if _current is None or _current.folder != directory:
            _current = DiskCache(directory)
        return _current


def _reset_after_fork() -> None:
    """Replace the lock and the disk cache in a forked child: other threads of the parent may hold their locks forever."""
    global _current, _lock
    _lock = threading.Lock()
    _current = None


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_reset_after_fork)
