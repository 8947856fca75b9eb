"""Serialized plans, kept: in memory for the threads and GPUs of this process, in a folder for other processes.

An entry is bytes under a key; neither means anything here. What is kept is executed on the GPU, so a folder is used only
where nobody but its owner can write to it, and what is damaged, cut short or not what its name says is never handed out:
it costs a warning and a rebuild.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from .errors import ShelfWarning

#: Names the folder; ``0`` turns it off. Default: ``cupy_sdpa`` in the user's cache folder.
DIRECTORY = "CUPY_SDPA_CACHE_DIR"
#: Bytes that a folder may hold, and that are kept in memory. A plan takes 70 to 250 kB.
DISK_LIMIT, MEMORY_LIMIT = 512 << 20, 64 << 20
#: The first bytes of every entry: what it is, and the version of its form.
_MAGIC = b"cupy_sdpa plan 1\n"
_SUFFIX = ".plan"


class Shelf:
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
        if mistrust := _mistrust(self.folder):
            raise PermissionError(f"plans cannot be kept in {self.folder}: {mistrust}")
        with tempfile.TemporaryFile(dir=self.folder):
            pass

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
        """The files of the entries in the folder."""
        return sorted(self.folder.glob(f"*{_SUFFIX}")) if self.folder and self.folder.is_dir() else []

    @property
    def nbytes(self) -> int:
        """Bytes of the files in the folder."""
        return sum(info.st_size for _, info in _stats(self.paths()))

    def __str__(self) -> str:
        where = f"in {self.folder}" if self.folder else f"in memory only ({DIRECTORY}=0)"
        return (
            f"plans {where}: {len(self.paths())} files, {self.nbytes / 1e6:.1f} of at most {self.limit / 1e6:.0f} MB, "
            f"{self.hits} hits, {self.misses} misses"
        )

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
            with path.open("rb") as file:
                if mistrust := _mistrust(self.folder):
                    self._warn(f"plans in {self.folder} are not used: {mistrust}")
                    return None
                raw = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"plans in {self.folder} cannot be read: {error}")
            return None
        head = _head(key, raw[len(_head(key, b"")) :])
        if not raw.startswith(head):
            self._discard(key, "it is damaged, cut short, or not what its name says")
            return None
        with contextlib.suppress(OSError):  # a folder that is only read keeps no order of use
            os.utime(path)
        return raw[len(head) :]

    def _write(self, folder: Path, key: str, content: bytes) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mistrust := _mistrust(folder):
            self._warn(f"plans cannot be kept in {folder}: {mistrust}")
            return
        # Written beside and then renamed: a reader finds the old entry or the whole new one.
        handle, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")  # readable by its owner alone
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_head(key, content) + content)
            os.replace(name, folder / f"{key}{_SUFFIX}")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _prune(self, folder: Path) -> None:
        for path, info in _stats(list(folder.glob(".*.part"))):  # left by a process that was killed while it wrote
            if time.time() - info.st_mtime > 3600:
                path.unlink(missing_ok=True)
        found = _stats(self.paths())
        total = sum(info.st_size for _, info in found)
        for path, info in sorted(found, key=lambda entry: entry[1].st_mtime):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= info.st_size

    def _discard(self, key: str, why: str) -> None:
        place = "memory" if self.folder is None else str(self.folder)
        warnings.warn(f"the plan {key}{_SUFFIX} in {place} is built anew: {why}", ShelfWarning, stacklevel=2)
        if self.folder is not None:
            with contextlib.suppress(OSError):  # in a folder that is only read it stays
                (self.folder / f"{key}{_SUFFIX}").unlink(missing_ok=True)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{text}. Set {DIRECTORY} to another folder, or to 0 to keep none", ShelfWarning, stacklevel=2)


def _head(key: str, content: bytes) -> bytes:
    """What stands before the content: the form, the key, and a checksum of both."""
    return _MAGIC + key.encode() + b"\n" + hashlib.sha256(key.encode() + content).hexdigest().encode() + b"\n"


def _mistrust(folder: Path) -> str | None:
    """Why what lies in a folder could have been put there by somebody else; None where it could not."""
    info = folder.stat()
    if info.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {info.st_uid}, this process to user {os.getuid()}"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(info.st_mode):o}): chmod 700 makes it private"
    return None


def _stats(paths: list[Path]) -> list[tuple[Path, os.stat_result]]:
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
            found.append((path, path.stat()))
    return found


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


_current: Shelf | None = None
_lock = threading.Lock()


def current() -> Shelf:
    """The process's shelf; a new one where the environment names another folder than before."""
    global _current
    wanted = folder()
    with _lock:
        if _current is None or _current.folder != wanted:
            _current = Shelf(wanted)
        return _current


def _forget() -> None:
    """In a forked child: locks that other threads of the parent hold would never be released."""
    global _current, _lock
    _lock = threading.Lock()
    _current = None


os.register_at_fork(after_in_child=_forget)
