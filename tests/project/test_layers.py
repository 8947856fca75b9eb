"""The layers of the package: folders import only from lower layers, as parsed from the code."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cupy_sdpa"

#: The folders and root modules, from the highest layer to the lowest. A unit imports only from lower layers, or from itself.
LAYERS = (
    ("__main__",),
    ("_cli",),
    ("check",),
    ("__init__",),
    ("nnlib", "store", "inference", "parallel", "integrations"),
    ("vjp",),
    ("explain",),
    ("attention", "jvp", "prepare", "helpers"),
    ("fp8",),
    ("offline",),
    ("programs",),
    ("forward_mode",),
    ("sparse",),
    ("calls",),
    ("tracing",),
    ("arrays",),
    ("staging",),
    ("plans",),
    ("support",),
    ("graph",),
    ("device",),
    ("problem",),
    ("score_fn", "_cudnn", "layout"),
    ("version", "errors", "reference", "zoo", "_html", "_interrupt", "_typing"),
)  # fmt: skip
#: The most modules per folder, and the most lines per module.
MODULES_PER_FOLDER, LINES = 8, 600


def unit(path):
    """The folder or root module that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


MODULES = sorted(PACKAGE.rglob("*.py"))
#: The benchmarks are outside the package. They import from it, and have the same limits of size.
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
UNITS = sorted({unit(path) for path in MODULES})


def imported(text, package=()):
    """The modules that code imports from, as tuples of names below the package; imports within functions are included.

    Args:
        text: the code.
        package: the names of the folders that the code is in.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            wanted = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["cupy_sdpa", *package[: len(package) + 1 - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            wanted = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for root, *inner in wanted:
            if root == "cupy_sdpa":
                yield tuple(inner)


def imports_of(path):
    return set(imported(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).parts[:-1]))


@functools.cache
def dependencies():
    """The units that each unit imports from, except itself."""
    found = {name: set() for name in UNITS}
    for path in MODULES:
        for names in imports_of(path):
            found[unit(path)].add(names[0] if names and names[0] in UNITS and not is_function(names) else "__init__")
    return {name: others - {name} for name, others in found.items()}


def is_function(names):
    """Whether an import from the root is the public function, not the module or folder with the same name."""
    return len(names) == 1 and names[0] in ("attention", "explain", "prepare", "problem")


def test_the_layers_list_every_unit_once():
    assert sorted(name for layer in LAYERS for name in layer) == UNITS


@pytest.mark.parametrize("name", UNITS)
def test_imports_go_downwards(name):
    """A unit imports only from itself and from lower layers."""
    level = next(i for i, layer in enumerate(LAYERS) if name in layer)
    below = {other for layer in LAYERS[level + 1 :] for other in layer}
    assert dependencies()[name] <= below


def test_imports_have_no_cycle():
    """Neither between folders nor between modules; the graph is printed (pytest -s)."""
    for layer in LAYERS:
        for name in layer:
            print(f"{name:12} -> {' '.join(sorted(dependencies()[name])) or '-'}")
    list(graphlib.TopologicalSorter(dependencies()).static_order())
    names = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in MODULES}
    graph = {}
    for own, path in names.items():
        wanted = {found[:n] for found in imports_of(path) if not is_function(found) for n in range(1, len(found) + 1)}
        graph[own] = {other for other in wanted if other in names} - {own}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in [*MODULES, *BENCHMARKS]} - {PACKAGE}),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_folders_are_small(folder):
    modules = [path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len(modules) <= MODULES_PER_FOLDER


@pytest.mark.parametrize("path", [*MODULES, *BENCHMARKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_short(path):
    if path.name != "constants.py":
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES


@pytest.mark.parametrize(
    ("text", "package", "wanted"),
    [
        ("from . import zoo, layout", (), {("zoo",), ("layout",)}),
        ("from .plans.plan import Plan", (), {("plans", "plan", "Plan")}),
        ("from ..plans.plan import Plan", ("_cli",), {("plans", "plan", "Plan")}),
        ("from ..plans import plan", ("_cli",), {("plans", "plan")}),
        ("from .. import Unsupported", ("_cli",), {("Unsupported",)}),
        ("from .library import library", ("_cudnn",), {("_cudnn", "library", "library")}),
        ("from . import library", ("_cudnn",), {("_cudnn", "library")}),
        ("def f():\n    from ._cudnn.library import library", (), {("_cudnn", "library", "library")}),
        ("import cupy_sdpa.plans.plan, numpy", (), {("plans", "plan")}),
        ("from cupy_sdpa.plans.plan import Plan", (), {("plans", "plan", "Plan")}),
        ("import cupy_sdpa", (), {()}),
        ("from cuda.bindings import driver\nimport plan", (), set()),
    ],
)
def test_every_form_of_import_is_found(text, package, wanted):
    """Relative or absolute, of modules or of names, at the top or within functions."""
    assert set(imported(text, package)) == wanted
