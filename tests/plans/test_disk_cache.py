"""Serialized plans in the disk cache: found by any process of the user, never returned if damaged."""

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import time
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from planner import child_environment

from cupy_sdpa import DiskCacheWarning, store
from cupy_sdpa.store import DiskCache

#: The largest entry that is read.
LIMIT = 16 << 20
KEY, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
CONTENT = b'{"engine": 2}\n' + bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path):
    """The folder that a disk cache would create."""
    return tmp_path / "kept"


def file_of(folder, key=KEY):
    return folder / f"{key}.plan"


def test_entries_are_found_by_other_caches(folder):
    """By the same cache and by another one of the same folder, as in another process; not under another key."""
    DiskCache(folder).put(KEY, CONTENT)
    other = DiskCache(folder)
    assert other.get(KEY) == CONTENT
    assert other.get(OTHER) is None
    assert (other.hits, other.misses) == (1, 1)
    assert other.nbytes == file_of(folder).stat().st_size > len(CONTENT)
    assert str(other).startswith(f"plans in {folder}: 1 files")


def test_without_a_folder_entries_are_in_memory():
    """One cache finds its entries, another does not."""
    first = DiskCache(None)
    first.put(KEY, CONTENT)
    assert first.get(KEY) == CONTENT
    assert DiskCache(None).get(KEY) is None
    with pytest.warns(DiskCacheWarning, match="of no use"):
        first.reject(KEY, "of no use")
    assert first.get(KEY) is None
    assert "in memory only" in str(first)


def test_folder_and_files_are_private(folder):
    """Only the owner has access, and no temporary file is left."""
    DiskCache(folder).put(KEY, CONTENT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder).stat().st_mode) == 0o600
    assert os.listdir(folder) == [f"{KEY}.plan"]


DAMAGE = {
    "empty": lambda raw: b"",
    "one_byte": lambda raw: raw[:1],
    "head_only": lambda raw: raw[: len(raw) - len(CONTENT)],
    "cut_short": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"\0",
    "last_bit": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "in_the_checksum": lambda raw: raw.replace(raw[90:91], b"\n", 1),
    "in_the_middle": lambda raw: raw[:200] + bytes(100) + raw[300:],
    "head_cut_short": lambda raw: raw[:7],
    "older_form": lambda raw: raw.replace(b"plan 2", b"plan 1", 1),
    "twice": lambda raw: raw + raw,
    "renamed": lambda raw: raw.replace(KEY.encode(), OTHER.encode()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_deleted_with_a_warning(name, folder):
    """After any damage: the entry is not returned, it is deleted, and can be stored again."""
    DiskCache(folder).put(KEY, CONTENT)
    path = file_of(folder)
    raw = path.read_bytes()
    path.write_bytes(DAMAGE[name](raw))
    assert path.read_bytes() != raw
    other = DiskCache(folder)
    with pytest.warns(DiskCacheWarning, match="is rebuilt") as said:
        assert other.get(KEY) is None
    assert len(said) == 1
    assert not path.exists()
    other.put(KEY, CONTENT)
    assert DiskCache(folder).get(KEY) == CONTENT


FOREIGN = {
    "first_bit": lambda raw: bytes([raw[0] ^ 1]) + raw[1:],
    "zeros": lambda raw: bytes(len(raw)),
    "something_else": lambda raw: b"MZ" + bytes(range(256)) * 4,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_with_the_name_of_an_entry_is_left_alone(name, folder, recwarn):
    """A file without the header of an entry is neither used, replaced, counted nor deleted; one warning names it."""
    DiskCache(folder).put(KEY, CONTENT)
    path = file_of(folder)
    path.write_bytes(FOREIGN[name](path.read_bytes()))
    before = path.read_bytes()
    kept = DiskCache(folder, limit=1)
    assert kept.get(KEY) is None
    kept.put(KEY, CONTENT)
    assert [(said.category, str(path) in str(said.message)) for said in recwarn] == [(DiskCacheWarning, True)]
    assert kept.get(KEY) == CONTENT
    with pytest.warns(DiskCacheWarning, match="of no use"):
        kept.reject(KEY, "of no use")
    kept.put(OTHER, CONTENT)
    kept.clear()
    assert (kept.paths(), kept.nbytes) == ([], 0)
    assert path.read_bytes() == before


@contextlib.contextmanager
def a_file(folder):
    folder.write_text("not a folder")
    yield folder


@contextlib.contextmanager
def read_only(folder):
    yield Path("/proc/self/task")  # of this user, and even root can create nothing in it


@contextlib.contextmanager
def full(folder):
    """No file can have more than 100 bytes, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def open_to_all(folder):
    folder.mkdir()
    folder.chmod(0o777)
    yield folder


@contextlib.contextmanager
def of_somebody_else(folder):
    if os.getuid():
        pytest.skip("only root can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    yield folder


OBSTACLES = [a_file, read_only, full, open_to_all, of_somebody_else]


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda f: f.__name__)
def test_an_unusable_folder_warns_once(obstacle, folder, recwarn):
    """If entries cannot or should not be stored, the process uses memory only."""
    with obstacle(folder) as folder:
        kept = DiskCache(folder)
        kept.put(KEY, CONTENT)
        kept.put(OTHER, CONTENT)
    assert [said.category for said in recwarn] == [DiskCacheWarning]
    assert "CUPY_SDPA_CACHE_DIR" in str(recwarn[0].message)
    assert kept.get(KEY) == CONTENT
    assert not folder.is_dir() or not any(path.suffix == ".plan" or path.name[0] == "." for path in folder.iterdir())


@pytest.mark.parametrize("obstacle", [of_somebody_else, open_to_all], ids=lambda f: f.__name__)
def test_a_folder_that_others_can_write_to_is_not_read(obstacle, folder, tmp_path):
    """A valid entry in it is not used."""
    DiskCache(tmp_path / "private").put(KEY, CONTENT)
    with obstacle(folder):
        file_of(folder).write_bytes(file_of(tmp_path / "private").read_bytes())
        with pytest.warns(DiskCacheWarning, match=r"are not used: (it belongs to|other users may write)"):
            assert DiskCache(folder).get(KEY) is None


def test_the_folder_is_bounded(folder):
    """Beyond the limit the least recently used entry is deleted."""
    kept = DiskCache(folder, limit=3 * (len(CONTENT) + 300))
    keys = [f"{n:064x}" for n in range(4)]
    for n, key in enumerate(keys[:3]):
        kept.put(key, CONTENT)
        os.utime(file_of(folder, key), (n, n))
    assert DiskCache(folder).get(keys[0]) == CONTENT  # most recently used
    kept.put(keys[3], CONTENT)
    assert [path.stem for path in kept.paths()] == [keys[0], keys[2], keys[3]]


def test_temporary_files_of_killed_processes_are_removed(folder):
    """Old temporary files are deleted, but not the files of a process that is writing."""
    kept = DiskCache(folder)
    kept.put(KEY, CONTENT)
    old, new = folder / f".cupy_sdpa-{1:032x}.part", folder / f".cupy_sdpa-{2:032x}.part"
    foreign = folder / ".movie.mkv.part"
    for path in (old, new, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    kept.put(OTHER, CONTENT)
    assert new.exists()
    assert foreign.exists()
    assert not old.exists()


def in_use(folder):
    """A folder with other files whose names resemble entries; returns the names."""
    folder.mkdir(mode=0o700)
    entry = b"cupy_sdpa plan 2\n" + b"x" * 1000
    others = {
        "notes.txt": b"mine", "house.plan": b"a plan of a house", f"{KEY}.plan": b"a plan of a house", "mine.plan": entry,
        f"{OTHER.upper()}.plan": entry, f"{OTHER}.plan.bak": entry, f".{OTHER}.plan": entry, ".download.part": b"half",
    }  # fmt: skip
    for name, content in others.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, (1, 1))
    (folder / "target").write_bytes(entry)
    (folder / f"{3:064x}.plan").symlink_to("target")
    (folder / f"{4:064x}.plan").mkdir()
    return set(os.listdir(folder))


def test_a_store_in_a_folder_in_use_touches_its_own_files_only(folder):
    """Files that this package did not write are kept and not counted."""
    others = in_use(folder)
    contents = {name: (folder / name).read_bytes() for name in others if (folder / name).is_file()}
    kept = DiskCache(folder, limit=1)
    assert (kept.paths(), kept.nbytes) == ([], 0)
    kept.check()
    for number in (5, 6):
        kept.put(f"{number:064x}", CONTENT)
    assert len(kept.paths()) <= 1
    roomy = DiskCache(folder)
    roomy.put(f"{7:064x}", CONTENT)
    assert f"{7:064x}.plan" in [path.name for path in roomy.paths()]
    roomy.clear()
    assert set(os.listdir(folder)) == others
    assert {name: (folder / name).read_bytes() for name in contents} == contents


def mode(bits):
    def change(path, entry):
        path.write_bytes(entry.read_bytes())
        path.chmod(bits)

    return change


def another_users(path, entry):
    if os.getuid():
        pytest.skip("only root can give a file away")
    path.write_bytes(entry.read_bytes())
    path.chmod(0o600)
    os.chown(path, 12345, -1)


UNSAFE = {
    "linked": lambda path, entry: path.symlink_to(entry), "a_pipe": lambda path, entry: os.mkfifo(path),
    "a_folder": lambda path, entry: path.mkdir(),
    "another_users": another_users, "writable_by_a_group": mode(0o620), "writable_by_all": mode(0o602),
}  # fmt: skip


@pytest.mark.parametrize("how", UNSAFE)
def test_a_file_that_others_may_have_written_is_not_read(how, folder, tmp_path):
    """Even in a private folder, an entry must be a regular file of this user or root that only its owner can write to."""
    DiskCache(tmp_path / "private").put(KEY, CONTENT)
    folder.mkdir(mode=0o700)
    UNSAFE[how](file_of(folder), file_of(tmp_path / "private"))
    kept = DiskCache(folder)
    with pytest.warns(DiskCacheWarning, match=f"{KEY}.plan"):
        assert kept.get(KEY) is None
    kept.put(KEY, CONTENT)
    assert kept.get(KEY) == CONTENT
    assert os.path.lexists(file_of(folder))


def test_a_file_beyond_the_size_limit_is_not_read(folder):
    """A sparse file of 3 GB with the header of an entry gives a warning, and is not read into memory."""
    folder.mkdir(mode=0o700)
    path = file_of(folder)
    with path.open("wb") as file:
        file.write(b"cupy_sdpa plan 2\n")
        file.truncate(3 << 30)
    path.chmod(0o600)
    tracemalloc.start()
    with pytest.warns(DiskCacheWarning, match="too large"):
        assert DiskCache(folder).get(KEY) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < LIMIT
    assert not path.exists()


def test_a_plan_beyond_the_size_limit_is_kept_in_memory(folder):
    """It could not be read, so it is not written; one warning."""
    kept, large = DiskCache(folder), bytes(LIMIT + 1)
    with pytest.warns(DiskCacheWarning, match=f"the limit is {LIMIT} bytes"):
        kept.put(KEY, large)
    assert kept.paths() == []
    assert kept.get(KEY) is large


@pytest.mark.slow
def test_processes_write_at_once(folder):
    """Three processes write and read the same entries repeatedly: every entry that is found is complete."""
    code = f"""
import sys, warnings
warnings.simplefilter("error")
from cupy_sdpa.store import DiskCache
from pathlib import Path
for n in range(40):
    key = f"{{n % 5:064x}}"
    kept = DiskCache(Path({str(folder)!r}), limit=200_000)
    found = kept.get(key)
    assert found is None or found == key.encode() * 500
    kept.put(key, key.encode() * 500)
"""
    running = [subprocess.Popen([sys.executable, "-c", code], env=child_environment()) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0] * 3


def test_of_many_threads_one_builds():
    """A thread that waits for a plan of another thread finds it."""
    kept, built = DiskCache(None), []

    def want():
        with kept.building(KEY):
            if kept.get(KEY) is None:
                time.sleep(0.01)
                built.append(1)
                kept.put(KEY, CONTENT)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(want)
    assert len(built) == 1


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"CUPY_SDPA_CACHE_DIR": "0"}, None),
        ({"CUPY_SDPA_CACHE_DIR": "/somewhere"}, Path("/somewhere")),
        ({"CUPY_SDPA_CACHE_DIR": "", "XDG_CACHE_HOME": "/cache"}, Path("/cache/cupy_sdpa")),
        ({"CUPY_SDPA_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, Path("/home/me/.cache/cupy_sdpa")),
        ({"CUPY_SDPA_CACHE_DIR": "~/plans", "HOME": "/home/me"}, Path("/home/me/plans")),
    ],
    ids=["off", "named", "xdg", "home", "tilde"],
)
def test_the_environment_sets_the_folder(environment, wanted, monkeypatch):
    """The variable, else the user's cache folder; a change takes effect."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert store.kept().folder == wanted


def test_a_plan_that_must_be_stored(folder):
    """A cache that is required raises where others warn, and changes nothing."""
    folder.mkdir()
    (folder / f"{KEY}.plan").write_text("of another program")
    with pytest.raises(OSError, match=r"plans cannot be stored in .*not written by this package"):
        DiskCache(folder, required=True).put(KEY, CONTENT)
    assert (folder / f"{KEY}.plan").read_text() == "of another program"


def test_a_forked_child_has_locks_of_its_own():
    """A thread of the parent holds every lock during the fork: the child can still store and find plans."""
    parent = store.kept()
    with parent.building(KEY), parent._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with several threads
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            mine = store.kept()
            with mine.building(KEY):
                mine.put(KEY, CONTENT)
                os._exit(0 if mine.get(KEY) == CONTENT else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_whether_a_folder_can_keep_entries(folder):
    """It is created if it does not exist; a file, or a folder that others can write to, raises."""
    folder.mkdir()
    DiskCache(folder / "new").check()
    assert (folder / "new").stat().st_mode & 0o777 == 0o700
    (folder / "file").write_text("")
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    for name in ("file", "open", "file/below"):
        with pytest.raises(OSError, match=name.partition("/")[0]):
            DiskCache(folder / name).check()
    DiskCache(None).check()
