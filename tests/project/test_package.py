"""The package as a whole: imports, loaded modules, and the code in the documentation."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cupy_sdpa"

MODULES = [(path, path.relative_to(PACKAGE).parts[0]) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.parametrize(("path", "name"), MODULES, ids=lambda x: x.stem if isinstance(x, Path) else "")
def test_only_cudnns_subpackage_imports_ctypes(path, name):
    """No other folder imports it."""
    names = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "ctypes" not in names or name == "_cudnn"


def test_the_reference_stands_alone():
    """The reference imports only numpy and the standard library."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / "reference.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module.split(".")[0])
    assert found == {"__future__", "math", "numpy", "typing"}


def loaded_by(code):
    """The modules that a new process has imported after running some code."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return set(done.stdout.split())


HEAVY = {
    "cupy",
    "ctypes.util",
    "cuda.pathfinder",
    "cuda.bindings",
    "ml_dtypes",
    "torch",
    "matplotlib",
    "cupy_sdpa._cudnn.library",
}


def test_import_loads_neither_cupy_nor_cudnn():
    """import cupy_sdpa loads no GPU library and no slow module; the same holds for a call on numpy arrays."""
    assert not HEAVY & loaded_by("import cupy_sdpa")
    assert not {"difflib", "hashlib", "html", "tempfile"} & (loaded_by("import cupy_sdpa") - loaded_by("import numpy"))
    call = "import cupy_sdpa, numpy; x = numpy.ones((8, 1, 4, 1), 'f4', order='F'); cupy_sdpa.attention(x, x, x); cupy_sdpa.explain(x, x, x)"
    assert not HEAVY & loaded_by(call)


#: Functions of os that are used here and do not exist on Windows.
NOT_ON_WINDOWS = ("register_at_fork", "fork", "getuid", "geteuid", "O_NOFOLLOW", "O_NONBLOCK")


@pytest.mark.parametrize(
    "code",
    [
        "import cupy_sdpa; str(cupy_sdpa.store.kept())",
        "from cupy_sdpa.store import DiskCache; from pathlib import Path\n"
        "shelf = DiskCache(Path('plans')); shelf.check(); shelf.put('0' * 64, b'x')\n"
        "assert DiskCache(Path('plans')).get('0' * 64) == b'x'",
        "import cupy_sdpa.plans.plan_cache",
        "from cupy_sdpa.__main__ import main; main(['info'])",
    ],
    ids=["store", "plans", "plan_cache", "info"],
)
def test_without_functions_that_windows_lacks(code, tmp_path):
    """The package, the disk cache, the plan cache and the commands work where os has no fork and no user ids."""
    without = f"import os\nfor name in {NOT_ON_WINDOWS}:\n    delattr(os, name)\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", without + code], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_loaded_libraries_without_rtld_noload(monkeypatch):
    """Windows has no RTLD_NOLOAD: the search for cuDNN continues."""
    from cupy_sdpa._cudnn import library

    monkeypatch.delattr(os, "RTLD_NOLOAD")
    assert library._already_loaded() is None


def test_the_plan_cache_without_a_gpu(monkeypatch):
    """A RuntimeError names what is missing: the GPU, or CuPy and how to install it."""
    import cupy_sdpa
    from cupy_sdpa.device import cupy_runtime

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        with pytest.raises(RuntimeError, match="pip install 'cupy-sdpa"):
            cupy_sdpa.get_plan_cache()
    pytest.importorskip("cupy")
    monkeypatch.setattr(cupy_runtime, "current_device", lambda: None)
    with pytest.raises(RuntimeError, match=r"no GPU here.*python -m cupy_sdpa info"):
        cupy_sdpa.get_plan_cache()


def test_the_check_of_imports_can_fail():
    """Tests of this file: a real import is detected."""
    assert "ml_dtypes" in loaded_by("import cupy_sdpa, ml_dtypes")


def code_blocks(path):
    """The Python code blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.S | re.M)


def needs(library, code):
    """Whether code needs PyTorch or JAX on a GPU."""
    return re.search(rf"^import {library}$", code, re.M) is not None


def run_block(code):
    """Run code for CuPy; numpy replaces CuPy if there is no GPU."""
    from tiers import missing

    if missing("gpu"):
        code = re.sub(r"^import cupy\b.*$", "import numpy as cupy", code, flags=re.M)
    exec(compile(code, "README", "exec"), {"__name__": "readme"})


def test_the_readmes_code_runs():
    """Every Python block of the README runs."""
    blocks = code_blocks(ROOT / "README.md")
    assert blocks
    for code in blocks:
        run_block(code)


#: The pages with code that needs neither PyTorch nor JAX.
WITH_CODE = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "docs").glob("*.md"))
    if any(not needs("(torch|jax)", code) for code in code_blocks(path))
]


@pytest.mark.parametrize("path", WITH_CODE, ids=str)
def test_the_docs_code_runs(path, tmp_path, monkeypatch):
    """Every Python block of the docs runs."""
    monkeypatch.chdir(tmp_path)  # some write files
    for code in code_blocks(ROOT / path):
        if not needs("(torch|jax)", code):
            run_block(code)


def test_no_code_of_the_docs_is_overlooked():
    """Every block of the README and the docs that is marked as Python is run by a test."""
    paths = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert WITH_CODE
    for path in paths:
        marked = re.findall(r"^\s*(?:```|~~~)\s*\{?\.?py", path.read_text(encoding="utf-8"), re.M | re.I)
        assert len(marked) == len(code_blocks(path)), path


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_docs_code_for_other_libraries_runs(library, cupy, monkeypatch):
    """Blocks that import PyTorch or JAX."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    pytest.importorskip(library)
    blocks = [code for path in (ROOT / "docs").glob("*.md") for code in code_blocks(path) if needs(library, code)]
    assert blocks
    for code in blocks:
        run_block(code)


TABLES = ["plans", "functions", "speed", "host", "host_options", "graphs", "decode", "jvp", "sparse", "parallel"]


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_docs_are_made_of_the_results(name):
    """Each equals the output of its script for the result files."""
    command = [sys.executable, "-m", "benchmarks", "tables", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert (ROOT / "docs" / f"{name}_table.md").read_text(encoding="utf-8") == done.stdout, (
        f"write it again: python -m benchmarks tables {name} > docs/{name}_table.md"
    )


def test_the_pictures_of_the_options_are_the_engines():
    """Each equals the output of its script."""
    found = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for folder, pictures in ((found["FOLDER"], found["drawn"]()), (found["BLOCKS_FOLDER"], found["drawn_masks"]())):
        assert {path.stem for path in folder.glob("*.svg")} == set(pictures)
        for name, text in pictures.items():
            assert (folder / f"{name}.svg").read_text(encoding="utf-8") == text, "draw it anew: python3 docs/pictures.py"
    overview = found["FOLDER"].parent / "overview.svg"
    assert overview.read_text(encoding="utf-8") == found["overview"](found["drawn"]())


def test_no_machine_paths():
    """No path of a machine is in the package or the docs."""
    home = os.path.expanduser("~")
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert f"{home}/" not in path.read_text(encoding="utf-8")


def test_gpu_descriptions_have_names():
    """Every description of a GPU can be parsed, and an unknown name lists the valid ones."""
    from cupy_sdpa.support import gpus

    assert {p.stem for p in (PACKAGE / "support" / "gpus").glob("*.json")} == set(gpus.NAMES)
    assert np.all([gpus.capability(name) >= 80 for name in gpus.NAMES])
    with pytest.raises(ValueError, match="h200"):
        gpus.describe("h2000")


@pytest.mark.parametrize(
    "text", ["", "5", "[]", "{}", "[" * 100_000, '{"deviceName": 1e400}'], ids=lambda text: text[:20] or "empty"
)
def test_a_bad_gpu_description_raises(text, tmp_path):
    """Whatever the file contains, a ValueError names it."""
    from cupy_sdpa.support import gpus

    path = tmp_path / "card.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"card\.json does not describe a GPU"):
        gpus.describe(str(path))
