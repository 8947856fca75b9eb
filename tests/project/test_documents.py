"""The README, the docs and the notebooks: their code runs, and their tables and pictures are up to date."""

import contextlib
import functools
import importlib
import json
import re
import runpy
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from command_line import ROOT
from command_line import run as run_command
from replayed_calls import REPLAY, functions_run
from tiers import missing
from validated_steps import validated_steps

import cupy_sdpa
from benchmarks.__main__ import main as benchmarks
from benchmarks.tables import TABLES
from cupy_sdpa.nnlib import dot_product_attention_scores

DOCS = sorted((ROOT / "docs").glob("*.md"))
NOTEBOOKS = ROOT / "notebooks"


def code_blocks(path, others=None):
    """The Python code blocks of a Markdown file: those that need a library, or those that need neither PyTorch nor JAX."""
    blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.S | re.M)
    found = {code: re.search(r"^import (torch|jax)$", code, re.M) for code in blocks}
    return [code for code, match in found.items() if (match and match[1]) == others]


def run_block(code):
    """Run code for CuPy; numpy replaces CuPy if there is no GPU."""
    if missing("gpu"):
        code = re.sub(r"^import cupy\b.*$", "import numpy as cupy", code, flags=re.M)
        code = code.replace('engine="cupy"', 'engine="numpy"')
    exec(compile(code, "a block", "exec"), {"__name__": "readme"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in (ROOT / "README.md", *DOCS) if code_blocks(path)], ids=lambda path: path.name
)
def test_the_code_runs(path, tmp_path):
    """Every Python block of the README and the docs runs."""
    with contextlib.chdir(tmp_path):  # some write files
        for code in code_blocks(path):
            run_block(code)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_code_for_other_libraries_runs(library, cupy):
    """Blocks that import PyTorch or JAX."""
    pytest.importorskip(library)
    blocks = [code for path in DOCS for code in code_blocks(path, library)]
    assert blocks
    for code in blocks:
        run_block(code)


def test_no_code_is_overlooked():
    """Every block that is marked as Python is run by a test."""
    for path in (ROOT / "README.md", *DOCS):
        marked = re.findall(r"^[ \t]*(?:```|~~~)[ \t]*\{?\.?py", path.read_text(encoding="utf-8"), re.M | re.I)
        assert len(marked) == sum(len(code_blocks(path, others)) for others in (None, "torch", "jax")), path


def test_named_files_exist():
    """Files that the documents and notebooks name in code type are there, from the root, the package, the tests or the pages."""
    folders = ROOT, ROOT / "cupy_sdpa", ROOT / "tests", ROOT / "docs"
    for path in (ROOT / "README.md", *DOCS, *NOTEBOOKS.glob("*.ipynb")):
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|md|json|csv|txt))`", path.read_text(encoding="utf-8")):
            assert any((folder / name).exists() for folder in folders), f"{path.name}: {name}"


#: Pages that GitHub shows, but that are not part of the docs.
PROJECT_PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / ".github").rglob("*.md"))]


@pytest.mark.parametrize("path", PROJECT_PAGES, ids=lambda path: path.name)
def test_links_of_the_project_pages(path):
    """Every relative link leads to a file and, in a page, to a heading."""
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not re.match(r"https?:|#", link):
            target, _, heading = link.partition("#")
            assert (path.parent / target).exists(), link
            headings = re.findall(r"^#+ (.*)$", (path.parent / target).read_text(encoding="utf-8"), re.M) if heading else []
            assert not heading or heading in [re.sub(r"[^\w\- ]", "", x).lower().replace(" ", "-") for x in headings], link


def test_nothing_is_installed_from_an_index_before_the_release():
    """The documents install a clone. Only the texts for the time after the release name the package of an index."""
    for path in (*PROJECT_PAGES, *DOCS):
        if path.name != "publishing.md":
            assert not re.search(r"(pip|conda|uv) (add|install)[^\n&]*cupy-sdpa", path.read_text(encoding="utf-8")), path.name


@pytest.mark.parametrize("name", TABLES)
def test_tables(name):
    """Each equals the output of its script for the result files."""
    path = ROOT / "docs" / f"{name}_table.md"
    with contextlib.chdir(ROOT):
        printed = run_command(f"tables {name}", main=benchmarks)
    assert path.read_text(encoding="utf-8") == printed.out, (
        f"write it again: python -m benchmarks tables {name} > docs/{path.name}"
    )


@pytest.mark.slow
def test_pictures():
    """Each picture of the options equals the output of its script."""
    found = runpy.run_path(str(ROOT / "tools" / "pictures.py"))
    drawn = found["drawn"]()
    for folder, pictures in ((found["FOLDER"], drawn), (found["BLOCKS_FOLDER"], found["drawn_masks"]())):
        assert {path.stem for path in folder.glob("*.svg")} == set(pictures)
        for name, text in pictures.items():
            assert (folder / f"{name}.svg").read_text(encoding="utf-8") == text, "draw it anew: python tools/pictures.py"
    for name, text in {"overview": found["overview"](drawn), "memory": found["memory"]()}.items():
        assert (found["FOLDER"].parent / f"{name}.svg").read_text(encoding="utf-8") == text, (
            "draw it anew: python tools/pictures.py"
        )


@pytest.mark.slow
def test_pictures_of_the_tour():
    """Each equals the output of its script, and the tour shows it."""
    found = runpy.run_path(str(ROOT / "tools" / "tour_pictures.py"))
    drawn, page = found["drawn"](), (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    assert {path.stem for path in found["FOLDER"].glob("*.svg")} == set(drawn)
    for name, text in drawn.items():
        assert (found["FOLDER"] / f"{name}.svg").read_text(encoding="utf-8") == text, "python tools/tour_pictures.py"
        assert f"_static/tour/{name}.svg" in page


# the API


def documented(page):
    """The objects that a page of the API has entries of, and the names in its summary tables, by their full names."""
    entries, summarized, module = [], [], ""
    for block in re.findall(r"^```\{eval-rst\}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M):
        for line in block.splitlines():
            if found := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = found[1]
            elif found := re.match(r"\.\. (?:auto(?:function|class|exception)|py:(data)):: (\S+)", line):
                entries.append((found[2] if found[2].startswith("cupy_sdpa.") else f"{module}.{found[2]}", not found[1]))
            elif found := re.match(r"   (\w[\w.]*)$", line):
                summarized.append(f"{module}.{found[1]}")
    return entries, summarized


def public_names():
    """The full name of each public object, once: of the package, or of the first public module that has it."""
    names = {name: getattr(cupy_sdpa, name) for name in dir(cupy_sdpa)}
    modules = {name for name, value in names.items() if isinstance(value, ModuleType)} | {"check", "extend"}
    found = {id(value): f"cupy_sdpa.{name}" for name, value in names.items() if name not in modules}
    for name in sorted(modules):
        module = importlib.import_module(f"cupy_sdpa.{name}")
        for public in module.__all__:
            found.setdefault(id(getattr(module, public)), f"cupy_sdpa.{name}.{public}")
    return set(found.values())


def test_every_public_name_is_on_one_page_of_the_api():
    """Exactly one has its entry; the tables at the top have the same names, and the first page links to every page."""
    pages = sorted((ROOT / "docs").glob("api_*.md"))
    first = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = [name for name, _ in documented(ROOT / "docs" / "api.md")[0]]
    for page in pages:
        found, summarized = documented(page)
        assert summarized == [name for name, in_table in found if in_table], page.name
        assert first.count(f"<{page.stem}>") == 2, f"{page.name}: a row of the table, and the list of pages"
        entries += [name for name, _ in found]
    assert len(entries) == len(set(entries))
    assert not public_names() - set(entries), "add these names to a page, docs/api_*.md"


# the notebooks


def test_the_gallery():
    """It shows every notebook once, with its title and a picture; thumbnails are of the saved outputs."""
    page, found = (
        (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8"),
        runpy.run_path(str(ROOT / "tools" / "thumbnails.py")),
    )
    entries = re.findall(
        r":::\{figure\} (\S+)\n:alt: .+\n:target: notebooks/(\w+)\.html\n\n\*\*\[(.+)\]\(\.\./notebooks/\2\.ipynb\)", page
    )
    assert [name for _, name, _ in entries] == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    for picture, name, title in entries:
        book = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
        assert "".join(book["cells"][0]["source"]).startswith(f"# {title}\n")
        assert (ROOT / "docs" / picture).exists()
        assert (picture == f"_static/notebooks/{name}.png") == (name in found["SHOWN"])
    assert {path.stem for path in found["FOLDER"].glob("*")} == set(found["SHOWN"])
    for name in found["SHOWN"]:
        assert found["digest"](name).encode() in (found["FOLDER"] / f"{name}.png").read_bytes(), "python tools/thumbnails.py"


def cells(name):
    """The code cells of a notebook: the source and the tags."""
    for cell in json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), cell["metadata"].get("tags", [])


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_need_no_local_files(path):
    """Every notebook imports installed packages and public names only, begins with a title, and has saved outputs without errors."""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert "".join(book["cells"][0]["source"]).startswith("# ")
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    assert outputs
    assert not any(output["output_type"] == "error" for output in outputs)
    (install,) = [source for source, tags in cells(path.stem) if "install" in tags]
    assert "pip install" in install
    local = re.compile(r"^\s*(?:from|import) (?:benchmarks|examples|tests|tools|cupy_sdpa\.(?:_|core))|open\(|Path\(", re.M)
    assert not any(local.search(source) for source, _ in cells(path.stem))


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_install_the_clone(path, tmp_path):
    """In a clone, the first cell of a notebook installs the clone; elsewhere, the package of an index."""
    (install,) = [source for source, tags in cells(path.stem) if "install" in tags]
    *code, command = install.splitlines()
    for folder, package in ((NOTEBOOKS, "-e ../"), (tmp_path, "cupy-sdpa")):
        names = {}
        with contextlib.chdir(folder):
            exec("\n".join(code), names)
        assert command.format(**names).replace('"', "").partition("[")[0] == f"%pip install -q {package}"


def test_a_notebook_writes_an_operation(engine):
    """Its code is short, and runs on every engine: repeated with other factors, in other layouts, and with other options."""
    ((source, _),) = [cell for cell in cells("02_inside_the_graph") if "operation" in cell[1]]
    assert len(source.splitlines()) <= 40
    names = {"np": np}
    exec(compile(source, "a cell", "exec"), names)
    function = names["differential_attention"]
    x = [engine.normal(n, 32, heads, 24, 2) for n, heads in enumerate((8, 4, 2))]
    q, k, v = (engine.get(one).astype(np.float64, order="F") for one in x)
    for options in {"causal": True}, {"window": (3, 3), "softcap": 2.0}:
        first, second = (cupy_sdpa.attention(q[:, n::2], k[:, n::2], v, **options) for n in (0, 1))
        lambdas = engine.put(np.empty(4, np.float32))
        for call in range(5):  # the third is captured
            values = np.array([0.1, 0.2, 0.3, 0.2 * call], np.float32)
            lambdas[...] = engine.put(values)
            want = first - values[:, None, None] * second
            np.testing.assert_allclose(engine.get(function(*x, lambdas, **options)), want, atol=2 * engine.tolerance)
        assert engine.name != "fake" or functions_run(functools.partial(function, *x, lambdas, **options)) <= REPLAY
        with validated_steps():
            function(*x, lambdas, **options)
        got = function(*(one.transpose(3, 1, 2, 0) for one in x), lambdas, layout="bhsd", **options)
        np.testing.assert_allclose(engine.get(got), want.transpose(3, 1, 2, 0), atol=2 * engine.tolerance)
        got = function(*(one[..., 0] for one in x), lambdas, **options)
        np.testing.assert_allclose(engine.get(got), want[..., 0], atol=2 * engine.tolerance)
    report = cupy_sdpa.explain_function(function, *x, lambdas)
    assert [line.split()[1] for line in report.steps] == ["even", "odd", "subtract"]
    with pytest.raises(ValueError, match=r"lambdas is float32 \(3,\); it must be float32 \(4,\)"):
        function(*x, lambdas[:3])
    with pytest.raises(ValueError, match="they must have 2 Hq, 2 Hkv and Hkv heads"):
        function(x[0], x[1], x[1], lambdas)


class LikeCupys(np.ndarray):
    """Integer indexing gives C order, as in CuPy; numpy puts the axis of the index first."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return np.ascontiguousarray(found).view(LikeCupys) if isinstance(found, np.ndarray) else found


def readable(*arrays):
    """Plain arrays of the same memory, in a layout that cuDNN can read."""
    plain = [x.view(np.ndarray) for x in arrays]
    report = cupy_sdpa.explain(*plain[:3], gpu="h200", cudnn="9.19")
    assert report, report.reasons
    assert all(x.strides[0] == x.itemsize for x in plain)
    return plain


@pytest.mark.slow
def test_cudnn_can_read_the_arrays_of_the_training_step():
    """q, k, v and the gradient of the output in the notebook's model, and the weights that are drawn, if the arrays are CuPy's."""
    names = {
        "np": np, "xp": np, "dtype": np.dtype(np.float16), "attention_vjp": cupy_sdpa.attention_vjp,
        "dot_product_attention_scores": lambda q, k: dot_product_attention_scores(*readable(q, k, k)[:2]),
    }  # fmt: skip
    for source, tags in cells("03_a_training_step"):
        if "model" in tags:
            exec(source, names)
    made = names["initial"]

    def vjp(*arrays):
        out, pullback = cupy_sdpa.attention_vjp(*readable(*arrays))

        def readable_pullback(dout):
            assert dout.flags.f_contiguous
            return pullback(dout.view(np.ndarray))

        return out, readable_pullback

    names["initial"] = lambda seed=0: {name: w.view(LikeCupys) for name, w in made(seed).items()}
    names["attention_vjp"] = vjp
    found = SimpleNamespace(**names)
    weights, _ = found.train(2)
    looked = found.attention_map(weights, *found.questions(np.random.default_rng(1)))
    assert looked.shape == (found.PAIRS, 1, found.HEADS, found.BATCH)
