"""Finding cuDNN, its constants, classification of its failures, and the lifetime of descriptors."""

import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from planner import child_environment, descriptors_of

import cupy_sdpa
from cupy_sdpa import CudnnError, Unsupported
from cupy_sdpa.core.cudnn import constants
from cupy_sdpa.core.cudnn.descriptor import Descriptor
from cupy_sdpa.core.cudnn.deviceless import COMPILERS
from cupy_sdpa.core.cudnn.launch import Handle, Launcher
from cupy_sdpa.core.cudnn.library import _SIGNATURES, OVERRIDE, SONAME, library
from cupy_sdpa.core.cudnn_engine.lowering import DATA_TYPES
from cupy_sdpa.core.cudnn_engine.plan import Plan
from cupy_sdpa.core.cudnn_engine.plan_cache import PlanCache
from cupy_sdpa.core.cudnn_engine.sessions import Session
from tools import constants as generator


def python(code, *arguments, **environment):
    """Run code in a new process; returns its output."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(**environment), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


#: Tries to load cuDNN with several values of the environment variable, where cuda.pathfinder finds nothing, or a broken file.
SEARCH = """
import ctypes, json, os, sys, types
from cupy_sdpa import CudnnError
from cupy_sdpa.core.cudnn.library import OVERRIDE, library

def find(name):
    if found:
        ctypes.CDLL(found)
    raise RuntimeError("no wheel,\\n  no conda")

sys.modules["cuda.pathfinder"] = types.SimpleNamespace(load_nvidia_dynamic_lib=find)
messages = []
for override, found in json.loads(sys.argv[1]):
    os.environ.pop(OVERRIDE, None)
    if override:
        os.environ[OVERRIDE] = override
    try:
        library()
    except CudnnError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def test_a_failure_lists_every_place(tmp_path):
    """The places that were searched, the results, and the fix; a file that was named is the only place."""
    broken = tmp_path / SONAME
    broken.write_bytes(b"not a library")
    mine = str(tmp_path / "mine.so")
    attempts = [("", ""), ("", str(broken)), ("missing.so", ""), ("libc.so.6", ""), (mine, "")]
    nowhere, damaged, missing, another, override = json.loads(python(SEARCH, json.dumps(attempts)))
    for words in (
        "pip install -e '.[cuda12]'", OVERRIDE, "already loaded in this process: no",
        "CUDNN_PATH, CUDA_PATH): RuntimeError: no wheel, no conda",
    ):  # fmt: skip
        assert words in nowhere
    assert f"OSError: {broken}" in damaged.partition("cuda.pathfinder")[2]
    assert f"Searched:\n  {OVERRIDE}=missing.so: OSError" in missing
    assert f"Searched:\n  {OVERRIDE}=libc.so.6: AttributeError" in another
    assert mine in override
    assert not any("pathfinder" in text for text in (missing, another, override))


#: Finds cuDNN where cuda.pathfinder finds none.
LIGHT = """
import json, sys, types
from cupy_sdpa.core.cudnn.library import library

def find(name):
    raise RuntimeError("no wheel")

sys.modules["cuda.pathfinder"] = types.SimpleNamespace(load_nvidia_dynamic_lib=find)
sys.path.append(sys.argv[1])
print(json.dumps([library().found_via, library().version, library().is_light]))
"""


@pytest.mark.parametrize("light", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_light_wheels_are_found(light, tmp_path):
    """In the folder of NVIDIA's wheels, of which cuda.pathfinder knows nothing; the engines of the full cuDNN are a file next to it."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path / "nvidia" / "cudnn_jit" / "lib"
    folder.mkdir(parents=True)
    functions = "".join(f"long {name}(void) {{ return 92700; }}\n" for name in _SIGNATURES)
    (tmp_path / "cudnn.c").write_text(functions)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / SONAME, tmp_path / "cudnn.c"], check=True)
    if not light:
        (folder / "libcudnn_engines_precompiled.so.9").touch()
    assert json.loads(python(LIGHT, str(tmp_path))) == ["nvidia-cudnn-jit", 92700, light]


#: Plans a problem that no engine computes.
REFUSED = """
import cupy_sdpa
from cupy_sdpa.core.cudnn_engine.described import plan_described
from cupy_sdpa.core.cudnn_engine.plan import Target
from cupy_sdpa.offline.remote_planner import Planner

shape = (12, 8, 64, 2)
with Planner() as planner:
    print(planner.call(plan_described, cupy_sdpa.problem(shape, shape, shape, dtype="bfloat16"), Target.described("h200")))
"""


@pytest.mark.slow
@pytest.mark.cudnn
def test_a_refusal_of_the_light_configuration():
    """It names the extras that install all engines."""
    refusal = python(REFUSED, CUDNN_LIB_CONFIG="GRAPH_JIT_ONLY")
    assert "no engine for this graph in its light configuration; all engines: pip install -e '.[cuda12]'" in refusal


LOAD = """
import ctypes, json, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path)
from cupy_sdpa import CudnnError
from cupy_sdpa.core.cudnn.library import library
try:
    print(json.dumps([library().found_via, library().path, library().version]))
except CudnnError as error:
    print(json.dumps([str(error), "", 0]))
"""


@pytest.mark.slow
@pytest.mark.cudnn
def test_a_loaded_library_is_used(tmp_path):
    """A new process reports how and where it found cuDNN; one that is loaded is used; with an override two copies raise."""
    found, path, version = json.loads(python(LOAD))
    assert found != "already loaded in this process"
    assert os.path.basename(path).startswith("libcudnn.so")
    assert int(version) >= 91900
    assert json.loads(python(LOAD, path)) == ["already loaded in this process", path, version]
    other = str(tmp_path / "other.so")
    text, *_ = json.loads(python(LOAD, path, **{OVERRIDE: other}))
    assert path in text
    assert other in text
    assert json.loads(python(LOAD, **{OVERRIDE: path}))[:2] == [f"{OVERRIDE}={path}", path]


@pytest.mark.parametrize("status", [1001, 2000, 2999, 3000, 3014, 3999, 4001, 5000])
def test_only_3000_to_3999_means_unsupported(status, fake):
    """Every other status is a failure; each error has the status, its name, cuDNN's message, its version, and the operation."""
    library()._error = "because"
    with pytest.raises(Unsupported if 3000 <= status < 4000 else CudnnError) as failure:
        library().check(status, "do a thing")
    assert str(failure.value) == f"cuDNN 9.19.0 failed to do a thing: {status} AN_ERROR: because"
    assert getattr(failure.value, "status", status) == status
    library().check(0, "do a thing")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_destroys_nothing(fake):
    """The parent owns its descriptors."""
    made = Descriptor("MATMUL")
    child = os.fork()
    if child == 0:
        made.close()
        os._exit(len(library().live))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    made.close()
    assert not library().live


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_can_load_cudnn():
    """A thread of the parent loads cuDNN during the fork, and holds the lock: the child has its own."""
    module = sys.modules[library.__module__]
    with module._loading:
        child = os.fork()
        if child == 0:
            os._exit(0 if module._loading.acquire(timeout=20) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_garbage_collection_never_calls_cudnn(fake):
    """A descriptor, or an object that holds one, may be garbage collected at any time: only close() destroys."""
    held = [Descriptor("EXECUTION_PLAN")]
    held.append(held)  # a reference cycle
    del held
    gc.collect()
    assert library().live == {"EXECUTION_PLAN": 1}
    library().reset()
    assert not any(hasattr(kind, "__del__") for kind in (Descriptor, Plan, PlanCache, Session, Handle, Launcher))


@pytest.mark.cudnn
@pytest.mark.parametrize(("d", "alive"), [(64, 1), (12, 0)], ids=["planned", "refused"])
def test_no_descriptor_outlives_its_use(d, alive, planner):
    """While a plan exists only its descriptor exists; after it is closed or refused, none."""
    made, with_plan, after = planner.accept(descriptors_of, cupy_sdpa.problem(*[(d, 4, 128, 2)] * 3, dtype="float16"), "h200")
    assert made > 20
    assert (with_plan, after) == (alive, 0)


def test_names_are_cudnns():
    """No two dtypes have the same constant."""
    assert len(set(DATA_TYPES.values())) == len(DATA_TYPES)
    assert SONAME == "libcudnn.so.9"


@pytest.mark.cudnn
def test_the_table_agrees_with_the_installed_header():
    """Every constant that the package names is in the table, and the table has the values of the installed header."""
    spec = importlib.util.find_spec("nvidia.cudnn")
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    version = generator.header_version((include / "cudnn_version.h").read_text())
    enums = generator.parse((include / "cudnn_graph.h").read_text())
    used = generator.words()
    for c_enum, whole in generator.ENUMS.items():
        start, enum = generator.prefix([*enums[c_enum]]), generator.python_name(c_enum)
        theirs = {name.removeprefix(start): value for name, value in enums[c_enum].items()}
        ours = {name: int(member) for name, member in getattr(constants, enum).__members__.items()}
        assert {name: value for name, value in ours.items() if theirs.get(name, value) != value} == {}, c_enum
        if version <= constants.HEADER_VERSION:
            wanted = {name for name in theirs if whole or generator.is_named(enum, name, used)}
            assert wanted <= ours.keys(), f"{c_enum}: regenerate the table: python tools/constants.py path/to/cudnn_graph.h"
            assert version < constants.HEADER_VERSION or wanted == ours.keys(), f"{c_enum}: not named by the package"
        if version >= constants.HEADER_VERSION:
            assert ours.keys() <= theirs.keys(), f"{c_enum}: not in the header of {version}"
