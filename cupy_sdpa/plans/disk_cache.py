"""Serialized plans, kept: in memory for the threads and GPUs of this process, in a folder for other processes.

An entry is bytes under a key; neither means anything here. What is kept is executed on the GPU, so folder and file must
belong to this user or to root, and nobody else may write to them. A file that is damaged, truncated or renamed is never
returned: it costs a warning and a rebuild.

The folder may hold files of others. An entry is named by its key, 64 hexadecimal digits and ``.plan``, and begins with
``cupy_sdpa plan``; a file that is being written is named ``.cupy_sdpa-`` and 32 digits and ``.part``. No other file is read,
counted, replaced or deleted, and no symbolic link is followed. Where the system has no user ids (Windows), owner and mode are
not checked.
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

#: Names the folder; ``0`` turns it off. Default: ``cupy_sdpa`` in the user's cache folder.
DIRECTORY = "CUPY_SDPA_CACHE_DIR"
#: Bytes that a folder may hold, and that are kept in memory. A plan takes 70 to 250 kB.
DISK_LIMIT, MEMORY_LIMIT = 512 << 20, 64 << 20
#: Bytes that one entry may take: a larger file is not read.
ENTRY_LIMIT = 16 << 20
#: The first bytes of every entry; the version of its format follows.
_MAGIC = b"cupy_sdpa plan "
_FORMAT = _MAGIC + b"1\n"
_SUFFIX = ".plan"
_ENTRY, _PART = re.compile(r"[0-9a-f]{64}\.plan"), re.compile(r"\.cupy_sdpa-[0-9a-f]{32}\.part")
#: Seconds after which a file that is being written counts as abandoned.
_ABANDONED = 3600
#: How a file is opened: no link is followed, and a pipe does not block.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class DiskCache:
    """Entries in a folder, the least recently used deleted first; without a folder only in memory.

    Args:
        folder: where; made at the first entry, for its owner alone. None keeps nothing beyond the process.
        limit: bytes that the folder may hold.

    Attributes:
        hits: entries that were found.
        misses: entries that were not.
    """

    def __init__(self, folder: Path | None, limit: int = DISK_LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self.hits = self.misses = 0
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._building = [threading.Lock() for _ in range(32)]
        self._warned = False

    @contextlib.contextmanager
    def building(self, key: str) -> Iterator[None]:
        """Held while a plan is looked for and built, so that of many threads one builds it and the others find it."""
        with self._building[int(key[:8], 16) % len(self._building)]:
            yield

    def get(self, key: str) -> bytes | None:
        """The entry under a key; None where there is none that can be trusted."""
        with self._lock:
            content = self._memory.get(key)
            if content is not None:
                self._memory.move_to_end(key)
        if content is None:
            content = self._read(key)
            if content is not None:
                self._remember(key, content)
        with self._lock:
            self.hits += content is not None
            self.misses += content is None
        return content

    def check(self) -> None:
        """Make the folder, where there is to be one, and raise where no entry could be kept in it.

        Raises:
            OSError: it is no folder, cannot be made or written to, or others may write to it.
        """
        if self.folder is None:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mistrust := _mistrust(self.folder.stat()):
            raise PermissionError(f"plans cannot be kept in {self.folder}: {mistrust}")
        descriptor, path = _new_part(self.folder)
        os.close(descriptor)
        path.unlink()

    def put(self, key: str, content: bytes) -> None:
        """Keep an entry, in place of what was there."""
        self._remember(key, content)
        if self.folder is None:
            return
        try:
            self._write(self.folder, key, content)
            self._prune(self.folder)
        except OSError as error:
            self._warn(f"plans cannot be kept in {self.folder}: {error}")

    def reject(self, key: str, why: str) -> None:
        """Forget an entry that turned out to be of no use."""
        with self._lock:
            self._memory.pop(key, None)
        self._discard(key, why)

    def clear(self) -> None:
        """Forget and delete every entry."""
        with self._lock:
            self._memory.clear()
            self.hits = self.misses = 0
        for path in self.paths():
            path.unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """The files of the entries in the folder; no others."""
        return [path for path, _ in self._entries()]

    @property
    def nbytes(self) -> int:
        """Bytes of the files of the entries in the folder."""
        return sum(info.st_size for _, info in self._entries())

    def __str__(self) -> str:
        where = f"in {self.folder}" if self.folder else f"in memory only ({DIRECTORY}=0)"
        sizes = [info.st_size for _, info in self._entries()]
        return (
            f"plans {where}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} of at most {self.limit / 1e6:.0f} MB, "
            f"{self.hits} hits, {self.misses} misses"
        )

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        return [] if self.folder is None else [(path, info) for path, info in _named(self.folder, _ENTRY) if _is_entry(path)]

    def _remember(self, key: str, content: bytes) -> None:
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
            descriptor = os.open(path, os.O_RDONLY | _SAFE)
            try:
                raw = self._read_trusted(descriptor, path, self.folder)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"plans in {self.folder} cannot be read: {error}")
            return None
        if raw is None:
            return None
        head = _head(key, raw[len(_head(key, b"")) :])
        if not raw.startswith(head):
            self._discard(key, "it is damaged, truncated, renamed or too large")
            return None
        with contextlib.suppress(OSError):  # a folder that is only read keeps no order of use
            os.utime(path)
        return raw[len(head) :]

    def _read_trusted(self, descriptor: int, path: Path, folder: Path) -> bytes | None:
        """The bytes of an open file; None, and a warning, where it is not an entry or somebody else may have written it."""
        if mistrust := _mistrust(folder.stat()):
            self._warn(f"plans in {folder} are not used: {mistrust}")
            return None
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            self._warn(f"{path} is not used: it is not a regular file")
            return None
        if mistrust := _mistrust(info):
            self._warn(f"{path} is not used: {mistrust}")
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            start = file.read(len(_MAGIC))
            if not _MAGIC.startswith(start):
                self._warn(f"{path} is not used: this package did not write it. Move it to another folder")
                return None
            return start + file.read(ENTRY_LIMIT - len(start)) if info.st_size <= ENTRY_LIMIT else b""

    def _write(self, folder: Path, key: str, content: bytes) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mistrust := _mistrust(folder.stat()):
            self._warn(f"plans cannot be kept in {folder}: {mistrust}")
            return
        target, raw = folder / f"{key}{_SUFFIX}", _head(key, content) + content
        if len(raw) > ENTRY_LIMIT:
            self._warn(f"a plan of {len(raw)} bytes is not kept in {folder}: the limit is {ENTRY_LIMIT} bytes")
            return
        if os.path.lexists(target) and not _is_entry(target):
            self._warn(f"{target} is not replaced: this package did not write it. Move it to another folder")
            return
        # Written to another file, then renamed: a reader finds the old entry or the whole new one.
        descriptor, part = _new_part(folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _prune(self, folder: Path) -> None:
        for path, info in _named(folder, _PART):  # left by a process that was killed while it wrote
            if time.time() - info.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)
        if sum(info.st_size for _, info in _named(folder, _ENTRY)) <= self.limit:
            return  # no file is opened where the names alone show that there is room
        found = self._entries()
        total = sum(info.st_size for _, info in found)
        for path, info in sorted(found, key=lambda entry: entry[1].st_mtime):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= info.st_size

    def _discard(self, key: str, why: str) -> None:
        place = "memory" if self.folder is None else str(self.folder)
        warnings.warn(f"the plan {key}{_SUFFIX} in {place} is built anew: {why}", DiskCacheWarning, stacklevel=2)
        path = None if self.folder is None else self.folder / f"{key}{_SUFFIX}"
        if path is not None and _is_entry(path):
            with contextlib.suppress(OSError):  # in a folder that is only read it stays
                path.unlink(missing_ok=True)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{text}. Set {DIRECTORY} to another folder, or to 0 to keep none", DiskCacheWarning, stacklevel=2)


def _head(key: str, content: bytes) -> bytes:
    """What stands before the content: the form, the key, and a checksum of both."""
    return _FORMAT + key.encode() + b"\n" + hashlib.sha256(key.encode() + content).hexdigest().encode() + b"\n"


def _mistrust(info: os.stat_result) -> str | None:
    """Why somebody else may have written a file, or a file in a folder; None where nobody else can."""
    if not hasattr(os, "getuid"):
        return None
    if info.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {info.st_uid}, this process to user {os.getuid()}"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(info.st_mode):o}): chmod go-w forbids that"
    return None


def _named(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
    """The regular files of a folder whose names fit a pattern, sorted by name."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            if pattern.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
                    info = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append((folder / file.name, info))
    return sorted(found)


def _is_entry(path: Path) -> bool:
    """Whether a file is an entry by its name and its first bytes; one cut short within those, or empty, is one too."""
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
    """A new file for writing, for its owner alone: its descriptor and its path."""
    path = folder / f".cupy_sdpa-{os.urandom(16).hex()}.part"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600), path


def folder() -> Path | None:
    """The folder that the environment names, or the default one; None where it is turned off."""
    named = os.environ.get(DIRECTORY)
    if named == "0":
        return None
    try:
        if named:
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cupy_sdpa"
    except RuntimeError:  # a user without a home
        return None


_current: DiskCache | None = None
_lock = threading.Lock()


def current() -> DiskCache:
    """The process's shelf; a new one where the environment names another folder than before."""
    global _current
    wanted = folder()
    with _lock:
        if _current is None or _current.folder != wanted:
            _current = DiskCache(wanted)
        return _current


def _forget() -> None:
    """In a forked child: locks that other threads of the parent hold would never be released."""
    global _current, _lock
    _lock = threading.Lock()
    _current = None


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget)
