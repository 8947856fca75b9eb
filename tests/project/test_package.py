"""The package as a whole: what it imports, the descriptions of GPUs, and the metadata of its distribution."""

import ast
import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import ROOT, python
from tiers import missing

import cupy_sdpa

PACKAGE = ROOT / "cupy_sdpa"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def imports(path):
    """The modules that a file imports, except the package's."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module.split(".")[0]


@pytest.mark.slow
def test_who_imports_what():
    """Only the folder of cuDNN imports ctypes; the reference imports only numpy and the standard library."""
    folders = {path.relative_to(PACKAGE).parent.as_posix() for path in PACKAGE.rglob("*.py") if "ctypes" in imports(path)}
    assert folders == {"core/cudnn"}
    assert {*imports(PACKAGE / "reference.py")} <= {*sys.stdlib_module_names, "numpy"}


HEAVY = {
    "cupy", "ctypes.util", "cuda.pathfinder", "cuda.bindings", "ml_dtypes", "torch", "matplotlib", "cupy_sdpa.core.cudnn.library",
}  # fmt: skip
#: What the import loads: names are imported on first use.
LIGHT = {
    "cupy_sdpa", "cupy_sdpa.core", "cupy_sdpa.core._interrupt", "cupy_sdpa.core.hooks", "cupy_sdpa.core.version", "__future__",
    "signal",
}  # fmt: skip
#: What a plain call does not load.
OTHER_CALLS = {
    "cupy_sdpa.block_masks", "cupy_sdpa.derivatives", "cupy_sdpa.explanation", "cupy_sdpa.fp8", "cupy_sdpa.helpers",
    "cupy_sdpa.kv_cache", "cupy_sdpa.libraries", "cupy_sdpa.nnlib", "cupy_sdpa.offline", "cupy_sdpa.parallel",
    "cupy_sdpa.preparation", "cupy_sdpa.reference", "cupy_sdpa.store", "cupy_sdpa.vjp",
}  # fmt: skip
CALL = "import numpy; x = numpy.ones((8, 1, 4, 1), 'f4', order='F'); cupy_sdpa.attention(x, x, x)"


def test_import_loads_neither_cupy_nor_cudnn(tmp_path):
    """Nor does a call on numpy arrays. The import loads almost nothing, and a call no module of another function."""
    code = "import importlib, sys, numpy; before = {*sys.modules}; import cupy_sdpa; print(*{*sys.modules} - before)"
    code += f"; {CALL}; print(*{{*sys.modules}} - before); cupy_sdpa.explain(x, x, x); print(*sys.modules)"
    done = python("-c", f"{code}; import ml_dtypes; print(*sys.modules)", cwd=tmp_path)
    loaded, after_a_call, after_explain, after_another = (set(line.split()) for line in done.lines)
    assert loaded <= LIGHT
    assert not (HEAVY | OTHER_CALLS | {"difflib", "hashlib", "html", "tempfile"}) & after_a_call
    assert not HEAVY & after_explain
    assert {"cupy_sdpa.attention_functions", "ml_dtypes"} <= after_another  # the test can fail


def test_public_names():
    """Each name that is imported on first use is found, listed, and known to type checkers as the same."""
    found = ast.walk(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")))
    lines = [x for x in found if isinstance(x, ast.ImportFrom) and x.level and x.module != "core.hooks"]
    typed = {
        alias.name: line.module
        for line in lines
        for alias in line.names
        if alias.name[0] != "_" or line.module == "core.version"
    }
    for name in dir(cupy_sdpa):
        made = getattr(cupy_sdpa, name)
        assert typed[name] is None or made is getattr(sys.modules[f"cupy_sdpa.{typed[name]}"], name)
    assert {*dir(cupy_sdpa)} == {*typed}
    assert {*cupy_sdpa.__all__} <= {*dir(cupy_sdpa)}


@pytest.mark.parametrize("name", ["attention", "explain", "prepare", "problem"])
def test_a_module_does_not_hide_a_function(name, tmp_path):
    """For any order of imports, the name is the function, which can be pickled."""
    code = "import cupy_sdpa.core.problem.view, cupy_sdpa.vjp, cupy_sdpa.derivatives.jvp, cupy_sdpa.store, pickle"
    done = python("-c", f"{code}; x = cupy_sdpa.{name}; print(callable(x), pickle.loads(pickle.dumps(x)) is x)", cwd=tmp_path)
    assert done.lines == ["True True"]


def test_the_plan_cache_without_a_gpu(tmp_path):
    """Without a GPU, and without CuPy, it is an empty cache that prints and takes a limit."""
    if not missing("gpu"):
        pytest.skip("this machine has a GPU")
    code = (
        "import cupy_sdpa; c = cupy_sdpa.get_plan_cache(); c.set_limit(5); c.clear(); print(c, repr(c), c.size, c.recordings)"
    )
    for first in ("", "import sys; sys.modules['cupy'] = None; "):
        done = python("-c", first + code, cwd=tmp_path)
        assert "plan cache: 0 of at most 5" in done.out
        assert done.out.endswith(" 0 0\n")


def test_no_machine_paths():
    """No path of a machine is in the package or the docs."""
    home = os.path.expanduser("~")
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert f"{home}/" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["", "5", "[]", "{}", "[" * 100_000, '{"deviceName": 1e400}'], ids=lambda text: text[:20])
def test_a_bad_description_of_a_gpu(text, tmp_path):
    """For any contents of the file, a ValueError names it."""
    path, shape = tmp_path / "card.json", (64, 2, 32, 1)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"card\.json does not describe a GPU"):
        cupy_sdpa.explain(cupy_sdpa.problem(shape, shape, shape, dtype="float16"), gpu=str(path), cudnn="9.19")


@pytest.mark.parametrize("command", [["check", "."], ["format", "--check", "."]], ids=lambda command: command[0])
def test_lint(command):
    """The code has the rules and the format of ruff, whose version is fixed."""
    pytest.importorskip("ruff")
    extras = PROJECT["optional-dependencies"]
    assert {x for x in extras["test"] if x.startswith("ruff")} == {x for x in extras["lint"] if x.startswith("ruff")}
    done = python("-m", "ruff", *command, "--no-cache", cwd=ROOT)
    assert done.status == 0, done.out


# the distribution


def test_the_readme_on_a_package_index():
    """Every link is absolute, pictures are files and other links pages that exist; code and text without links are unchanged."""
    absolute = runpy.run_path(str(ROOT / "setup.py"), run_name="setup_file")["absolute"]
    text, address = (ROOT / "README.md").read_text(encoding="utf-8"), PROJECT["urls"]["Repository"]
    converted = absolute(text, address)
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", converted, flags=re.S))
    assert len(links) > 20
    for link in links:
        assert link.startswith("https://")
        if link.startswith(address):
            kind, _, path = link.removeprefix(f"{address}/").split("/", 2)
            assert (ROOT / path.split("#")[0]).exists(), link
            assert (kind == "raw") == path.endswith(".svg")
    assert re.findall(r"```.*?```", text, re.S) == re.findall(r"```.*?```", converted, re.S)
    assert absolute("```python\nx[i](y)\n```\n", address) == "```python\nx[i](y)\n```\n"


def test_old_versions_of_python_read_the_requirement():
    """setup.py runs on Python 3.10, so that pip reports the required version."""
    path = ROOT / "setup.py"
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    assert {*imports(path)} == {"re", "pathlib", "setuptools"}


def test_the_citation():
    """CITATION.cff names the version, the authors and the repository of the package."""
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    cited = dict(line.removeprefix("  - ").split(": ", 1) for line in lines if ": " in line)
    assert cited["version"] == cupy_sdpa.__version__
    assert cited["name"] == PROJECT["authors"][0]["name"]
    assert cited["repository-code"] == PROJECT["urls"]["Repository"]
    assert cited["license"] == PROJECT["license"]
    assert {line.removeprefix("  - ") for line in lines} >= {*PROJECT["keywords"]}


def test_the_workflow():
    """GitHub installs every version of Python that the classifiers name, the oldest as python3, and runs .ci/run."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    versions = re.findall(r"^ +(3\.\d+)$", workflow, re.M)
    assert [*versions[-1:], *versions[:-1]] == [name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if ":: 3." in name]
    assert "- run: .ci/run\n" in workflow
    later = re.search(r"^for version in (.*); do$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    assert later[1].split() == versions[:-1]


def test_the_metadata():
    """The classifiers begin with the required version; the README has the three commands that CI runs."""
    versions = [name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert versions[0] == PROJECT["requires-python"].removeprefix(">=")
    commands = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert len(commands) == 3
    assert Path(PACKAGE / "py.typed").exists()


# the recipe of conda-forge


def test_the_recipe_agrees_with_the_metadata():
    """Name, version, requirements, command, license and addresses; CuPy and cuDNN are constraints, so that numpy suffices."""
    text = (ROOT / ".ci" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    for name, value in re.findall(r'^  (\w+): "(.*)"$', text, re.M):
        text = text.replace(f"${{{{ {name} }}}}", value)
    required = {name: re.findall("- (.*)", body) for name, body in re.findall(r"^  (\w+):\n((?:    - .*\n)+)", text, re.M)}

    python = PROJECT["requires-python"]
    dependencies = [requirement.replace(">=", " >=") for requirement in PROJECT["dependencies"]]
    assert required["run"] == [f"python {python}", *dependencies]
    assert required["host"][0] == f"python {python.removeprefix('>=')}.*"  # the oldest, as conda-forge requires
    extras = PROJECT["optional-dependencies"]["cuda12"]
    (cupy,) = [x.removeprefix("cupy-cuda12x") for x in extras if x.startswith("cupy-")]
    (cudnn,) = [x.removeprefix("nvidia-cudnn-cu12") for x in extras if x.startswith("nvidia-cudnn-")]
    assert required["run_constraints"] == [f"cupy {cupy}", f"libcudnn {cudnn}"]
    lines = [line.strip() for line in text.splitlines()]
    for line in (
        f"name: {PROJECT['name']}", f"version: {cupy_sdpa.__version__}", "noarch: python", f"license: {PROJECT['license']}",
        f"summary: {PROJECT['description']}", f"repository: {PROJECT['urls']['Repository']}",
        *(f"- {name} = {target}" for name, target in PROJECT["scripts"].items()),
        "- python -m cupy_sdpa info", "- cupy-sdpa check --engine cpu --problems 20",
    ):  # fmt: skip
        assert line in lines


def test_the_address_is_in_one_place():
    """pyproject.toml has the address of the repository; every other file repeats it exactly or does not name one."""
    address = PROJECT["urls"]["Repository"]
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", address)
    assert PROJECT["urls"]["Changelog"] == f"{address}/blob/main/docs/changelog.md"
    own = re.compile(r"https?://github[^\s)\"'`>]*/cupy[_-]sdpa\b")
    for path in [*ROOT.glob("*.*"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".ci").rglob("*.*")]:
        if path.is_file() and not path.name.startswith(".coverage"):
            for found in own.findall(path.read_text(encoding="utf-8")):
                assert found == address, path.name
