"""Finding cuDNN, classification of its failures, and the lifetime of descriptors."""

import ctypes
import gc
import os
import subprocess
import sys

import pytest
from cases import Case

from cupy_sdpa import CudnnError, Unsupported
from cupy_sdpa._cudnn import descriptor, library
from cupy_sdpa._cudnn.constants import AttributeType, DataType
from cupy_sdpa._cudnn.descriptor import Descriptor, live
from cupy_sdpa._cudnn.launch import Handle, Launcher
from cupy_sdpa._cudnn.library import OVERRIDE, SONAME, Library
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans.plan import Plan
from cupy_sdpa.plans.plan_cache import PlanCache
from cupy_sdpa.plans.sessions import Session


def python(code, **environment):
    """Run code in a new process; returns the last line of its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


LOAD = "from cupy_sdpa._cudnn.library import library; lib = library(); print(lib.found_via, '|', lib.path, '|', lib.version)"


@pytest.fixture
def not_installed(monkeypatch):
    """A process in which there is no cuDNN."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr(library, "_already_loaded", lambda: None)

    def not_found():
        raise RuntimeError("no wheel,\n  no conda")

    monkeypatch.setattr(library, "_from_pathfinder", not_found)


@pytest.mark.usefixtures("not_installed")
def test_a_failure_lists_every_place():
    """If no cuDNN is found, the message lists the places that were searched, the results, and how to install one."""
    with pytest.raises(CudnnError) as failure:
        library._load()
    text = str(failure.value)
    for words in (
        "pip install 'cupy-sdpa[cuda12]'", OVERRIDE, "already loaded in this process: no", "CUDNN_PATH, CUDA_PATH): RuntimeError: no wheel, no conda",
    ):  # fmt: skip
        assert words in text


@pytest.mark.usefixtures("not_installed")
def test_a_file_that_cannot_be_loaded_is_named(monkeypatch, tmp_path):
    """If pathfinder finds a broken file, the message contains its path and the loader's error."""
    path = tmp_path / SONAME
    path.write_bytes(b"not a library")
    monkeypatch.setattr(library, "_from_pathfinder", lambda: ctypes.CDLL(str(path)))
    with pytest.raises(CudnnError, match=rf"cuda.pathfinder.*: OSError: {path}"):
        library._load()


@pytest.mark.parametrize("path", ["missing.so", "libc.so.6"])
def test_an_override_that_is_not_cudnn_is_named(path, monkeypatch):
    """A file that does not exist, or is another library."""
    monkeypatch.setattr(library, "_already_loaded", lambda: None)
    monkeypatch.setenv(OVERRIDE, path)
    with pytest.raises(CudnnError, match=rf"Searched:\n  {OVERRIDE}={path}: (OSError|AttributeError)"):
        library._load()


@pytest.mark.usefixtures("not_installed")
def test_an_override_is_the_only_place(monkeypatch, tmp_path):
    """CUPY_SDPA_CUDNN names one file; if it cannot be loaded, no other is tried."""
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "mine.so"))
    with pytest.raises(CudnnError) as failure:
        library._load()
    assert str(tmp_path / "mine.so") in str(failure.value)
    assert "pathfinder" not in str(failure.value)


@pytest.mark.cudnn
def test_the_path_of_the_library_is_reported():
    """A new process finds cuDNN and reports how and in which file."""
    found, path, version = python(LOAD).split(" | ")
    assert found != "already loaded in this process"
    assert os.path.basename(path).startswith("libcudnn.so")
    assert int(version) >= 91900


@pytest.mark.cudnn
def test_a_loaded_library_is_used():
    """A cuDNN that was loaded before is used."""
    path = python(LOAD).split(" | ")[1]
    code = f"import ctypes; ctypes.CDLL({path!r}); import cupy_sdpa; {LOAD}"
    assert python(code).split(" | ")[:2] == ["already loaded in this process", path]


@pytest.mark.cudnn
def test_an_override_with_another_loaded_copy_raises(tmp_path):
    """Two copies of cuDNN in one process would interfere; the message names both."""
    path = python(LOAD).split(" | ")[1]
    code = (
        f"import ctypes; ctypes.CDLL({path!r})\n"
        "from cupy_sdpa import CudnnError\n"
        "from cupy_sdpa._cudnn.library import library\n"
        "try: library()\n"
        "except CudnnError as error: print(str(error).replace(chr(10), ' '))"
    )
    text = python(code, **{OVERRIDE: str(tmp_path / "other.so")})
    assert path in text
    assert str(tmp_path / "other.so") in text
    assert python(LOAD, **{OVERRIDE: path}).split(" | ")[:2] == [f"{OVERRIDE}={path}", path]


class FakeLibrary(Library):
    """A cuDNN with configurable results, which stores the attributes that are set."""

    def __init__(self, said=""):
        self.version, self.said, self.sets, self.live = 91900, said, [], 0

    def cudnnGetLastErrorString(self, buffer, size):
        buffer.value = self.said.encode()

    def cudnnGetErrorString(self, status):
        return b"CUDNN_STATUS_NEWER_THAN_US"

    def cudnnBackendCreateDescriptor(self, kind, pointer):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = 0x1000
        self.live += 1
        return 0

    def cudnnBackendSetAttribute(self, pointer, name, kind, count, array):
        self.sets.append((name.name, kind, list(array)))
        return 0

    def cudnnBackendFinalize(self, pointer):
        return 2000

    def cudnnBackendDestroyDescriptor(self, pointer):
        self.live -= 1
        return 0


@pytest.mark.parametrize(
    ("status", "error", "name"),
    [
        (2000, CudnnError, "BAD_PARAM"), (3000, Unsupported, "NOT_SUPPORTED"), (3014, Unsupported, "INVALID_DYNAMIC_SHAPE"),
        (3999, Unsupported, "NEWER_THAN_US"), (4001, CudnnError, "COMPILATION_FAILED"), (5000, CudnnError, "EXECUTION_FAILED"),
        (1001, CudnnError, "NOT_INITIALIZED"), (2999, CudnnError, "NEWER_THAN_US"),
    ],
)  # fmt: skip
def test_only_3000_to_3999_means_unsupported(status, error, name):
    """Every other status is a failure; each error has the status name, cuDNN's message, its version, and the operation."""
    with pytest.raises(error) as failure:
        FakeLibrary("because").check(status, "do a thing")
    for words in (name, str(status), "because", "9.19.0", "do a thing"):
        assert words in str(failure.value)
    assert getattr(failure.value, "status", status) == status


def test_success_raises_nothing():
    """Status 0 raises nothing."""
    FakeLibrary().check(0, "do a thing")


@pytest.fixture
def fake(monkeypatch):
    """Descriptors of a fake cuDNN."""
    made = FakeLibrary("no")
    monkeypatch.setattr(descriptor, "library", lambda: made)
    return made


@pytest.mark.parametrize(
    ("kind", "name", "value", "sent"),
    [
        ("TENSOR", "DIMENSIONS", [2, 3], (AttributeType.INT64, [2, 3])),
        ("TENSOR", "IS_VIRTUAL", True, (AttributeType.BOOLEAN, [True])),
        ("TENSOR", "DATA_TYPE", DataType.HALF, (AttributeType.DATA_TYPE, [2])),
        ("MATMUL", "PADDING_VALUE", 0.5, (AttributeType.DOUBLE, [0.5])),
        ("DEVICEPROP", "JSON_REPRESENTATION", b"{}", (AttributeType.CHAR, [b"{", b"}"])),
    ],
    ids=lambda x: str(x)[:20],
)
def test_the_attribute_type_follows_from_the_value(fake, kind, name, value, sent):
    """For numbers, enums, descriptors and lists."""
    with Descriptor(kind) as made:
        made.set(name, value)
    ((attribute, *got),) = fake.sets
    assert attribute == f"{kind}_{name}"
    assert tuple(got) == sent


def test_a_handle_is_sent_as_a_handle(fake):
    """HANDLE is type number 0, which must not be treated as missing."""
    with Descriptor("OPERATIONGRAPH") as made:
        made.set_handle(0x1234)
    assert fake.sets == [("OPERATIONGRAPH_HANDLE", AttributeType.HANDLE, [0x1234])]


def test_an_unknown_attribute_lists_the_valid_ones(fake):
    """A misspelled name is distinguished from a limit of cuDNN."""
    with (
        Descriptor("MATMUL") as made,
        pytest.raises(AttributeError, match=r"MATMUL descriptor has no attribute COMPTYPE; .*COMP_TYPE"),
    ):
        made.set("COMPTYPE", 1)


def test_a_descriptor_is_destroyed_at_once_and_once(fake):
    """Leaving the block destroys it, also after an exception; a second close() does nothing."""
    with Descriptor("MATMUL") as made:
        assert fake.live == 1
    assert fake.live == 0
    made.close()
    assert fake.live == 0
    with pytest.raises(CudnnError, match="finalize a MATMUL"), Descriptor("MATMUL") as made:
        made.finalize()
    assert fake.live == 0


def test_a_forked_child_destroys_nothing(fake, monkeypatch):
    """The parent owns its descriptors."""
    made = Descriptor("MATMUL")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    made.close()
    assert fake.live == 1


def test_living_descriptors_are_counted(fake, monkeypatch):
    """In debug builds: one of each kind while it exists, none afterwards."""
    monkeypatch.setattr(descriptor, "DEBUG", True)
    before = live()
    with Descriptor("MATMUL"), Descriptor("POINTWISE"):
        assert live() == {**before, "MATMUL": 1, "POINTWISE": 1}
    assert live() == before


def test_garbage_collection_never_calls_cudnn(fake):
    """A descriptor, or an object that holds one, may be garbage collected at any time: only close() destroys."""
    held = [Descriptor("EXECUTION_PLAN")]
    held.append(held)  # a reference cycle
    del held
    gc.collect()
    assert fake.live == 1
    assert not any(hasattr(kind, "__del__") for kind in (Descriptor, Plan, PlanCache, Session, Handle, Launcher))


def balance(graph, gpu, path):
    """In a child: plan, and report how many descriptors were created and exist, while the plan exists and after."""
    from cupy_sdpa._cudnn.library import library
    from cupy_sdpa.offline.planner import load_target
    from cupy_sdpa.plans.disk_cache import DiskCache
    from cupy_sdpa.plans.planner import load_or_build

    lib, made, gone = library(), [], []
    create, destroy = lib.cudnnBackendCreateDescriptor, lib.cudnnBackendDestroyDescriptor
    lib.cudnnBackendCreateDescriptor = lambda *a: (made.append(1), create(*a))[1]
    lib.cudnnBackendDestroyDescriptor = lambda *a: (gone.append(1), destroy(*a))[1]
    alive = 0
    disk_cache = DiskCache(None)
    for _ in range(2):  # built first, then
        try:
            plan = load_or_build(graph, load_target(gpu), disk_cache=disk_cache)
            alive = max(alive, len(made) - len(gone))
            plan.close()
        except Unsupported:
            pass
    with open(path, "w") as file:
        file.write(f"{len(made)} {alive} {len(made) - len(gone)}")


@pytest.mark.cudnn
@pytest.mark.parametrize(
    ("case", "alive"), [(Case("planned", causal=True), 1), (Case("refused", d=12), 0)], ids=["planned", "refused"]
)
def test_no_descriptor_outlives_its_use(case, alive, planner, tmp_path):
    """While a plan exists only its descriptor exists; after it is closed or refused, none."""
    path = tmp_path / "balance"
    planner.call(balance, forward(case.problem()), "h200", str(path))
    made, with_plan, after = map(int, path.read_text().split())
    assert made > 20
    assert (with_plan, after) == (alive, 0)


def test_the_soname_is_cudnn_9():
    """The package uses the graph API of version 9."""
    assert SONAME == "libcudnn.so.9"
