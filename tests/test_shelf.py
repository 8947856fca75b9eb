"""Serialized plans on disk: found again by whoever may, and never handed out damaged."""

import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from cupy_sdpa import ShelfWarning, shelf, store
from cupy_sdpa.shelf import Shelf

KEY, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
CONTENT = b'{"engine": 2}\n' + bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path):
    """Where a shelf would make its folder."""
    return tmp_path / "kept"


def file_of(folder, key=KEY):
    return folder / f"{key}.plan"


def test_what_is_put_is_found_by_another(folder):
    """By the same shelf, by another one of the same folder, as another process would; not under another key."""
    Shelf(folder).put(KEY, CONTENT)
    other = Shelf(folder)
    assert other.get(KEY) == CONTENT
    assert other.get(OTHER) is None
    assert (other.hits, other.misses) == (1, 1)
    assert other.nbytes == file_of(folder).stat().st_size > len(CONTENT)
    assert str(other).startswith(f"plans in {folder}: 1 files")


def test_without_a_folder_the_process_shares():
    """In memory only: one shelf finds what it kept, another does not."""
    first = Shelf(None)
    first.put(KEY, CONTENT)
    assert first.get(KEY) == CONTENT
    assert Shelf(None).get(KEY) is None
    with pytest.warns(ShelfWarning, match="of no use"):
        first.reject(KEY, "of no use")
    assert first.get(KEY) is None
    assert "in memory only" in str(first)


def test_what_is_kept_is_private(folder):
    """Folder and files are for their owner alone, and nothing half written is left lying about."""
    Shelf(folder).put(KEY, CONTENT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder).stat().st_mode) == 0o600
    assert os.listdir(folder) == [f"{KEY}.plan"]


def first_byte(raw):
    return bytes([raw[0] ^ 1]) + raw[1:]


DAMAGE = {
    "empty": lambda raw: b"",
    "one_byte": lambda raw: raw[:1],
    "head_only": lambda raw: raw[: len(raw) - len(CONTENT)],
    "cut_short": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"\0",
    "first_bit": first_byte,
    "last_bit": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "in_the_checksum": lambda raw: raw.replace(raw[90:91], b"\n", 1),
    "in_the_middle": lambda raw: raw[:200] + bytes(100) + raw[300:],
    "zeros": lambda raw: bytes(len(raw)),
    "something_else": lambda raw: b"MZ" + os.urandom(1000),
    "older_form": lambda raw: raw.replace(b"plan 1", b"plan 0", 1),
    "twice": lambda raw: raw + raw,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_costs_one_warning(name, folder):
    """Whatever is wrong with a file: it is not handed out, it is deleted, and a new one takes its place."""
    Shelf(folder).put(KEY, CONTENT)
    path = file_of(folder)
    raw = path.read_bytes()
    path.write_bytes(DAMAGE[name](raw))
    assert path.read_bytes() != raw
    other = Shelf(folder)
    with pytest.warns(ShelfWarning, match="built anew") as said:
        assert other.get(KEY) is None
    assert len(said) == 1
    assert not path.exists()
    other.put(KEY, CONTENT)
    assert Shelf(folder).get(KEY) == CONTENT


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_no_bit_may_be_wrong(position, folder):
    """A wrong bit anywhere in head or content is noticed."""
    Shelf(folder).put(KEY, CONTENT)
    path = file_of(folder)
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
    with pytest.warns(ShelfWarning):
        assert Shelf(folder).get(KEY) is None


def test_a_file_under_another_name_is_noticed(folder):
    """A whole and right entry, copied to where another belongs, is not taken for that one."""
    Shelf(folder).put(OTHER, CONTENT)
    file_of(folder, OTHER).rename(file_of(folder, KEY))
    with pytest.warns(ShelfWarning, match="not what its name says"):
        assert Shelf(folder).get(KEY) is None


def read_only(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shelf.tempfile, "mkstemp", refuse)


def full(folder, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shelf.os, "replace", refuse)


def a_file(folder, monkeypatch):
    folder.write_text("not a folder")


def of_somebody_else(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr(shelf.os, "getuid", lambda: 12345)


def open_to_all(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o777)


OBSTACLES = [read_only, full, a_file, of_somebody_else, open_to_all]


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda f: f.__name__)
def test_a_folder_of_no_use_costs_one_warning(obstacle, folder, monkeypatch, recwarn):
    """Where nothing can be kept, or should not be, the process goes on with its memory; it is told once."""
    obstacle(folder, monkeypatch)
    kept = Shelf(folder)
    kept.put(KEY, CONTENT)
    kept.put(OTHER, CONTENT)
    assert [said.category for said in recwarn] == [ShelfWarning]
    assert "CUPY_SDPA_CACHE_DIR" in str(recwarn[0].message)
    assert kept.get(KEY) == CONTENT
    assert not folder.is_dir() or not any(folder.iterdir())


@pytest.mark.parametrize("obstacle", [of_somebody_else, open_to_all], ids=lambda f: f.__name__)
def test_what_others_may_have_written_is_not_read(obstacle, folder, monkeypatch, tmp_path):
    """A right entry in a folder that others may write to is not executed."""
    Shelf(tmp_path / "private").put(KEY, CONTENT)
    obstacle(folder, monkeypatch)
    file_of(folder).write_bytes(file_of(tmp_path / "private").read_bytes())
    with pytest.warns(ShelfWarning, match=r"are not used: (it belongs to|others may write)"):
        assert Shelf(folder).get(KEY) is None


def test_a_folder_in_the_place_of_an_entry(folder, recwarn):
    """It cannot be read, nor replaced: told once, and the memory serves."""
    file_of(folder).mkdir(parents=True)
    folder.chmod(0o700)
    kept = Shelf(folder)
    assert kept.get(KEY) is None
    kept.put(KEY, CONTENT)
    assert [said.category for said in recwarn] == [ShelfWarning]
    assert "cannot be read" in str(recwarn[0].message)
    assert kept.get(KEY) == CONTENT


def test_the_folder_is_bounded(folder):
    """Beyond the limit what was not used for the longest time goes."""
    kept = Shelf(folder, limit=3 * (len(CONTENT) + 300))
    keys = [f"{n:064x}" for n in range(4)]
    for n, key in enumerate(keys[:3]):
        kept.put(key, CONTENT)
        os.utime(file_of(folder, key), (n, n))
    assert Shelf(folder).get(keys[0]) == CONTENT  # used now
    kept.put(keys[3], CONTENT)
    assert [path.stem for path in kept.paths()] == [keys[0], keys[2], keys[3]]


def test_what_a_killed_process_left_is_removed(folder):
    """Half-written files go when they are old; those of a process that is writing now stay."""
    kept = Shelf(folder)
    kept.put(KEY, CONTENT)
    old, new = folder / ".old.part", folder / ".new.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    kept.put(OTHER, CONTENT)
    assert new.exists()
    assert not old.exists()


def test_clear_deletes_plans_and_nothing_else(folder):
    """Memory and files are empty; what is not ours stays."""
    kept = Shelf(folder)
    kept.put(KEY, CONTENT)
    (folder / "notes.txt").write_text("mine")
    kept.clear()
    assert kept.get(KEY) is None
    assert os.listdir(folder) == ["notes.txt"]


def test_processes_write_at_once(folder):
    """Four processes write and read the same entries over and over: whatever is found is whole."""
    code = f"""
import sys, warnings
warnings.simplefilter("error")
from cupy_sdpa.shelf import Shelf
from pathlib import Path
for n in range(100):
    key = f"{{n % 5:064x}}"
    kept = Shelf(Path({str(folder)!r}), limit=200_000)
    found = kept.get(key)
    assert found is None or found == key.encode() * 500
    kept.put(key, key.encode() * 500)
"""
    root = str(Path(__file__).parents[1])
    running = [subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4


def test_of_many_threads_one_builds():
    """Who waits for a plan that another thread is building finds it."""
    kept, built = Shelf(None), []

    def want():
        with kept.building(KEY):
            if kept.get(KEY) is None:
                time.sleep(0.01)
                built.append(1)
                kept.put(KEY, CONTENT)

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
def test_the_environment_says_where(environment, wanted, monkeypatch):
    """The variable, else the user's cache folder; a change is followed."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert store.kept().folder == wanted


def test_a_forked_child_has_locks_of_its_own(folder, monkeypatch):
    """A thread of the parent holds every lock while it forks: the child can still keep and find plans."""
    monkeypatch.setenv("CUPY_SDPA_CACHE_DIR", str(folder))
    parent = store.kept()
    with parent.building(KEY), parent._lock, shelf._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking while there are threads
        child = os.fork()
        if child == 0:
            mine = store.kept()
            with mine.building(KEY):
                mine.put(KEY, CONTENT)
                os._exit(0 if mine.get(KEY) == CONTENT else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_whether_a_folder_can_keep_entries(folder):
    """It is made where it is not there; what is no folder, or open to others, is refused."""
    folder.mkdir()
    Shelf(folder / "new").check()
    assert (folder / "new").stat().st_mode & 0o777 == 0o700
    (folder / "file").write_text("")
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    for name in ("file", "open", "file/below"):
        with pytest.raises(OSError, match=name.partition("/")[0]):
            Shelf(folder / name).check()
    Shelf(None).check()
