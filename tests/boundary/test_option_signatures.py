"""The options of public functions: signatures show those that a call takes, the page of options defines each one."""

import importlib
import inspect
import pydoc
import re
import runpy

import numpy as np
import pytest
from command_line import ROOT

import cupy_sdpa
from cupy_sdpa import zoo
from cupy_sdpa.extend import takes_options

#: The parameters of ``attention`` that are no options.
FLAGS = {"q", "k", "v", "return_stats", "deterministic", "out", "stats"}
OPTIONS = inspect.signature(cupy_sdpa.attention).parameters.keys() - FLAGS
#: The flags that request gradients.
GRADIENTS = [name for name in inspect.signature(cupy_sdpa.attention_backward).parameters if name.startswith("return_d")]


def test_the_help_of_attention_is_one_screen():
    """It names every option once and refers to the page that defines them."""
    text = pydoc.render_doc(cupy_sdpa.attention, renderer=pydoc.plaintext)
    doc = inspect.getdoc(cupy_sdpa.attention)
    assert len(doc.splitlines()) <= 50  # the length of the signature depends on Python: since 3.13 a line for each parameter
    assert "causal: bool | Literal['top_left', 'bottom_right'] | None = False" in text.replace('"', "'")
    assert ":doc:`/options`" in doc
    documented = re.findall(r"^    ([\w, ]+): ", doc, re.M)
    names = [name for line in documented for name in line.split(", ") if name in OPTIONS]
    assert sorted(names) == sorted(OPTIONS)


def test_signatures_of_your_own_functions():
    """Annotations are shown as they were written, also those that are not text, and parameters may have none."""

    @takes_options
    def function(q, k: np.ndarray, v: "np.ndarray", *, page=16, **options) -> tuple[int, ...]:
        return ()

    text = str(inspect.signature(function)).replace('"', "'")
    assert text.startswith("(q, k: numpy.ndarray, v: np.ndarray, *, page=16, scale: float | Array | None = None, causal:")
    assert text.endswith(" -> tuple[int, ...]")


def test_signatures_of_a_group():
    """They list the options that a group takes; a surplus array raises an error that names the option."""
    cp = cupy_sdpa.parallel.ContextParallel()
    for function in (cp.attention, cp.attention_backward, cp.attention_vjp, cp.explain):
        shown = inspect.signature(function).parameters.keys()
        assert OPTIONS - shown == {"page_table", "num_splits", "bucket", "batch_invariant"}
    x = np.ones((8, 1, 4, 1))
    with pytest.raises(TypeError, match=r"^4 arguments .* only q, k and v can be.* as mask="):
        cp.attention(x, x, x, x)


def test_the_page_defines_every_option():
    """Each has an anchor, a definition after it, and a place in the table of groups."""
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    flags = {"deterministic", "out", "stats", "return_stats", *GRADIENTS} - {"return_dscale"}
    groups = re.search(r"^\| group \|.*?\n\n", page, re.M | re.S)[0]
    for name in OPTIONS | flags:
        (place,) = [match.end() for match in re.finditer(rf"^\({name.replace('_', '-')}\)=$", page, re.M)]
        terms = re.match(r"(?:\n\([\w-]+\)=)*\n(.*)\n: ", page[place:])[1]
        assert f"`{name}`" in terms, name
        assert groups.count(f"`{name}`") == 1, name
    assert re.findall(r"^\| \[([\w ]+)\]", groups, re.M) == [title.lower() for title in re.findall(r"^## (.*)$", page, re.M)]


def test_the_table_of_options_is_current():
    """The page includes what the tool writes; ``python tools/options_table.py > docs/options_table.md``."""
    table = runpy.run_path(str(ROOT / "tools" / "options_table.py"))["table"]()
    assert (ROOT / "docs" / "options_table.md").read_text(encoding="utf-8") == table


MODULES = ("fp8", "layout", "nnlib", "parallel", "reference", "store", "zoo")


@pytest.mark.parametrize("name", MODULES)
def test_completion_offers_public_names(name):
    """In every public module."""
    module = importlib.import_module(f"cupy_sdpa.{name}")
    assert dir(module) == sorted(module.__all__)


def test_completion_of_block_masks_offers_public_names():
    """Of the class and of a mask: what the documentation lists."""
    page = (ROOT / "docs" / "api_masks.md").read_text(encoding="utf-8")
    listed = sorted(re.search(r"autoclass:: BlockMask\n   :members: (.*)", page)[1].split(", "))
    assert [name for name in dir(cupy_sdpa.BlockMask) if name[0] != "_"] == listed
    assert dir(cupy_sdpa.block_mask(zoo.causal, 4, 4)) == listed
