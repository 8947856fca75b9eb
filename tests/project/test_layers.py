"""The layers of the package and of its tests, as parsed from the code: folders import only from lower layers."""

import ast
import collections
import functools
import graphlib
import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

import cupy_sdpa

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cupy_sdpa"

#: The units of the package: the folders and modules of the core, and the folders and modules beside it. From the highest layer
#: to the lowest; a unit imports only from lower layers, or from itself.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("check",),
    ("__init__",),
    ("nnlib", "store"),
    ("vjp", "explanation"),
    ("kv_cache",),
    ("parallel", "derivatives", "fp8"),
    ("offline", "libraries", "block_masks"),
    ("preparation",),
    ("attention_functions", "helpers"),
    ("extend", "layout"),
    ("core/programs",),
    ("core/replay",),
    ("core/boundary",),
    ("core/cudnn_engine", "core/numpy_engine"),
    ("core/graph",),
    ("core/support",),
    ("core/kernels",),
    ("core/problem",),
    ("core/options",),
    ("core/runtime",),
    ("core/score_fn", "core/cudnn", "core/layout"),
    ("core/hooks", "core/errors", "core/version", "core/_data", "core/_html", "core/_interrupt", "core/_typing"),
    ("core/__init__",),
    ("reference", "zoo"),
)  # fmt: skip
#: The public face of the core: modules of the root with what users import. They may import the core, as the root itself does.
#: Those that need no layer are below the layers in :data:`LAYERS`, so that layers may call them.
FACE = {"__init__", "attention_functions", "explanation", "helpers", "layout", "preparation", "store", "vjp"}
#: The names of classes that are also names of types elsewhere, with the reasons.
SAME_NAMES = {
    "Array": "numpy's arrays, in modules that never see others",
    "Function": "any callable, where functions of callers are only called or decorated",
    "Options": "the options as any mapping, or as read",
}
#: The most lines per module.
LINES = 600

#: What tests may import without knowing the inside of the package; and ``check``, which they are written with.
PUBLIC = {
    *dir(cupy_sdpa), "__main__", "check", "extend",
}  # fmt: skip
#: Limits of the tests, to be lowered and never raised.
AT_MOST = {
    "modules that import the inside": 30,  # a change of the inside then costs them
    "calls of monkeypatch": 47,
    "modules that import a module of tests": 0,  # what two modules need is a helper in tests/
    "modules with more than 600 lines": 0,
}
PATCH = re.compile(r"\b(?:monkeypatch|patch)\.(?:setattr|setitem|delattr|delitem|setenv|delenv|chdir|syspath_prepend)\(")


def unit(path):
    """The unit that a file belongs to."""
    return unit_of(path.relative_to(PACKAGE).with_suffix("").parts)


def unit_of(names):
    """The unit of a module or of a name that is imported, as names below the package."""
    if not names:
        return "__init__"
    return names[0] if names[0] != "core" else f"core/{names[1] if len(names) > 1 else '__init__'}"


MODULES = sorted(PACKAGE.rglob("*.py"))
#: The benchmarks are outside the package. They import from it, and have the same limits of size.
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = ROOT / "tests"
UNITS = sorted({unit(path) for path in MODULES})


def imported(text, package=None):
    """The modules that code imports from, as tuples of names below the package; imports within functions are included.

    Args:
        text: the code.
        package: the names of the folders that the code is in; None if it is not in the package.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            wanted = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not (node.level and package is None):
            base = ["cupy_sdpa", *package[: len(package) + 1 - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            wanted = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for root, *inner in wanted:
            if root == "cupy_sdpa":
                yield tuple(inner)


@functools.cache
def imports_of(path):
    return set(imported(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).parts[:-1]))


#: The public names that the core defines, each with its unit: layers import them from the root.
OF_CORE = {
    name: unit_of(module.split(".")) for module, names in cupy_sdpa._NAMES.items() for name in names if module[:5] == "core."
}


@functools.cache
def dependencies():
    """The units that each unit imports from, except itself; a public name of the core counts as its unit."""
    found = {name: set() for name in UNITS}
    for path in MODULES:
        for names in imports_of(path):
            imported_unit = unit_of(names) if unit_of(names) in UNITS else "__init__"
            found[unit(path)].add(OF_CORE.get(names[0], imported_unit) if len(names) == 1 else imported_unit)
    return {name: others - {name} for name, others in found.items()}


def test_the_layers_list_every_unit_once():
    """Every folder and root module has a layer."""
    assert sorted(name for layer in LAYERS for name in layer) == UNITS


@pytest.mark.parametrize("name", UNITS)
def test_imports_go_downwards(name):
    """A unit imports only from itself and from lower layers."""
    level = next(i for i, layer in enumerate(LAYERS) if name in layer)
    below = {other for layer in LAYERS[level + 1 :] for other in layer}
    assert dependencies()[name] <= below


@pytest.mark.parametrize("name", [name for name in UNITS if name.startswith("core/")])
def test_the_core_imports_no_layer(name):
    """What a layer adds to a call of the core is registered: :mod:`cupy_sdpa.core.hooks`."""
    assert {other for other in dependencies()[name] if not other.startswith("core/")} == set()


def names_inside():
    """The names of the core that each layer imports directly, not from ``extend``."""
    found = collections.defaultdict(set)
    for path in MODULES:
        of = unit(path)
        if of not in FACE and of != "extend" and not of.startswith("core/"):
            found[of] |= {".".join(names[1:]) for names in imports_of(path) if names[:1] == ("core",)}
    return {name: names for name, names in found.items() if names}


def test_layers_import_the_interface_of_the_core():
    """No other name of the core."""
    assert names_inside() == {}


def test_the_interface_is_documented():
    """The docstring of each module of ``extend`` lists its names, and ``tools/extend_table.py`` writes them with a sentence on each."""
    tool = runpy.run_path(str(ROOT / "tools" / "extend_table.py"))
    assert {path.stem for path in (PACKAGE / "extend").glob("*.py")} == {*tool["MODULES"]}
    for name in tool["MODULES"]:
        module = importlib.import_module("cupy_sdpa.extend" if name == "__init__" else f"cupy_sdpa.extend.{name}")
        listed = re.findall(r"(\w+)(?:,|$)", module.__doc__.partition("\n===")[2], re.M)
        assert sorted(listed) == sorted(module.__all__) == sorted(tool["sources"](name)), name
    table = (ROOT / "docs" / "extend_table.md").read_text(encoding="utf-8")
    assert table == tool["page"]()
    assert "|  |" not in table


def test_the_names_of_the_interface():
    """At most 40 names, each with an example in its docstring or in the one that it refers to; types and tables need none."""
    interface, tools = (importlib.import_module(f"cupy_sdpa.{name}") for name in ("extend", "extend.cudnn"))
    assert len(interface.__all__) + len(tools.__all__) <= 40
    for name in {*interface.__all__} - {"Array", "FLOAT_DTYPES", "KEY_ARRAYS", "OPTIONS", "Options", "TYPES", "UNITS"}:
        doc = inspect.getdoc(getattr(interface, name))
        if example := re.search(r"^Example: :func:`\.?(\w+)`", doc, re.M):
            doc = inspect.getdoc(getattr(interface, example[1]))
        assert ">>>" in doc, name


def test_layers_use_every_name_of_the_interface():
    """Remove a name of the interface that no module of the package imports."""
    used = {names[-1] for path in MODULES for names in imports_of(path) if names[:1] == ("extend",)}
    interface, tools = (importlib.import_module(f"cupy_sdpa.{name}") for name in ("extend", "extend.cudnn"))
    assert {*interface.__all__, *tools.__all__} - used == set()


def test_every_layer_has_a_readme():
    """It names modules of the layer, and the core's names modules of the core; every module of a layer is named, or is a command."""
    for name in {path.parent for path in MODULES if path.parent.parent == PACKAGE}:
        text = (name / "README.md").read_text(encoding="utf-8")
        named = {word for word in re.findall(r"`([\w/]+\.py)`", text) if word != "attention_functions.py"}
        present = {path.relative_to(name).as_posix() for path in name.rglob("*.py")}
        known = present | {path.rpartition("/")[2] for path in present}
        assert {word for word in named if word not in known} == {"NAME_command.py"} & named, name
        if name.name != "core":
            missing = {path for path in present - named if not path.endswith(("__init__.py", "_command.py"))}
            assert missing == set(), name


def test_the_picture_of_the_layers():
    """``python tools/layers_picture.py`` draws it from the imports; the numbers of lines may be older."""
    tool = runpy.run_path(str(ROOT / "tools" / "layers_picture.py"))
    drawn, saved = (re.sub(r"\d+ modules, \d+ lines", "", text) for text in (tool["picture"](), tool["PICTURE"].read_text()))
    assert drawn == saved


def test_imports_have_no_cycle():
    """Not even between modules of one folder."""
    names = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in MODULES}
    graph = {}
    for own, path in names.items():
        wanted = {found[:n] for found in imports_of(path) for n in range(1, len(found) + 1)}
        graph[own] = {other for other in wanted if other in names} - {own}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_a_class_name_has_one_meaning():
    """The name belongs to no other class of the package, and to no assignment such as ``Name = tuple[...]``."""
    found = collections.defaultdict(set)
    classes = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
                found[node.name].add((path, node.lineno))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id].add((path, node.lineno))
    several = {name for name in classes if len(found[name]) > 1}
    assert several == SAME_NAMES.keys(), {name: sorted(map(str, found[name])) for name in several}


def test_modules_are_small():
    """So that each can be read at once; also the benchmarks."""
    assert [path for path in [*MODULES, *BENCHMARKS] if len(path.read_text(encoding="utf-8").splitlines()) > LINES] == []


# the tests


@functools.cache
def modules_of_tests():
    """The name and the text of every module, also of the helpers."""
    return [(path.stem, path.read_text(encoding="utf-8")) for path in sorted(TESTS.rglob("*.py"))]


@functools.cache
def counted():
    """The modules that each limit counts, as often as it counts them."""
    found = {limit: [] for limit in AT_MOST}
    for name, text in modules_of_tests():
        numbers = (
            any(names and names[0] not in PUBLIC for names in imported(text)),
            len(PATCH.findall(text)),
            re.search(r"^\s*(?:from|import) test_", text, re.M) is not None,
            text.count("\n") > LINES,
        )
        for limit, number in zip(AT_MOST, numbers, strict=True):
            found[limit] += [name] * number
    return found


@pytest.mark.slow
@pytest.mark.parametrize("limit", AT_MOST)
def test_limits_of_the_tests(limit):
    """Most modules of tests use only what is public; they are short, and independent of each other."""
    found = counted()[limit]
    assert len(found) <= AT_MOST[limit], collections.Counter(found)


def test_names_of_tests_are_unique():
    """In all folders: pytest imports them by their names."""
    names = [name for name, _ in modules_of_tests() if name.startswith("test_")]
    assert len(names) == len({*names})


def test_every_folder_of_the_package_has_tests():
    """tools/planted_faults.py names the folders of tests of each folder of the package, and docs/contributing.md lists them."""
    listed = runpy.run_path(str(ROOT / "tools" / "planted_faults.py"))["TESTS"]
    assert {f"cupy_sdpa/{name}" for name in UNITS if (PACKAGE / name).is_dir()} <= listed.keys()
    assert all((ROOT / name).exists() for name in listed)
    assert all((TESTS / name).is_dir() for names in listed.values() for name in names)
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `tests/(\w+)` \| (.*) \|$", page, re.M))
    assert rows.keys() == {path.name for path in TESTS.iterdir() if any(path.glob("test_*.py"))}
    for name, folders in listed.items():
        if name.removeprefix("cupy_sdpa/") in UNITS:
            for folder in folders:
                assert f"`{name.removeprefix('cupy_sdpa/')}`" in rows[folder], (name, folder)


@pytest.mark.parametrize(
    ("text", "package", "wanted"),
    [
        ("from . import zoo, layout", (), {("zoo",), ("layout",)}),
        ("from .cudnn_engine.plan import Plan", (), {("cudnn_engine", "plan", "Plan")}),
        ("from ..cudnn_engine.plan import Plan", ("cli",), {("cudnn_engine", "plan", "Plan")}),
        ("from ..cudnn_engine import plan", ("cli",), {("cudnn_engine", "plan")}),
        ("from .. import Unsupported", ("cli",), {("Unsupported",)}),
        ("from .library import library", ("cudnn",), {("cudnn", "library", "library")}),
        ("from . import library", ("cudnn",), {("cudnn", "library")}),
        ("def f():\n    from .cudnn.library import library", (), {("cudnn", "library", "library")}),
        ("import cupy_sdpa.core.cudnn_engine.plan, numpy", (), {("core", "cudnn_engine", "plan")}),
        ("from cupy_sdpa.core.cudnn_engine.plan import Plan", (), {("core", "cudnn_engine", "plan", "Plan")}),
        ("import cupy_sdpa", (), {()}),
        ("from cuda.bindings import driver\nimport plan", (), set()),
    ],
)
def test_every_form_of_import_is_found(text, package, wanted):
    """Relative or absolute, of modules or of names, at the top or within functions."""
    assert set(imported(text, package)) == wanted
