"""Sphinx's settings: ``sphinx-build -W docs docs/_build``."""

import shutil
import sys
from pathlib import Path

import cupy_sdpa

HERE = Path(__file__).parent
sys.path.append(str(HERE / "_ext"))

# Sphinx reads pages below this folder only: the notebooks are copied, and links between them and the pages are adapted.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
(HERE / "notebooks").mkdir()
for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
    text = notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")
    (HERE / "notebooks" / notebook.name).write_text(text, encoding="utf-8")


#: Classes that functions return and users do not create: the API shows no signature.
RESULTS = {
    "BlockMask", "Built", "DiskCache", "Environment", "Mask", "ParallelReport", "PlanCache", "Prepared", "Problem", "Pullback",
    "ReadCall", "ReadOptions", "Recorded", "Report",
}  # fmt: skip


def setup(app):
    """Adapt the links of pages to notebooks, and the signatures of classes."""

    def adapt(app, name, source):
        source[0] = source[0].replace("](../notebooks/", "](notebooks/")

    def shorten(app, what, name, value, options, signature, returned):
        return ("", None) if what == "class" and value.__name__ in RESULTS else None

    app.connect("source-read", adapt)
    app.connect("autodoc-process-signature", shorten)


project = "cupy_sdpa"
author = copyright = "The cupy_sdpa developers"
release = cupy_sdpa.__version__
extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_copybutton", "mathml",
    "description",
]  # fmt: skip
exclude_patterns = ["_build", "jupyter_execute", "*_table.md"]  # pages include them
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autosummary_generate = False  # tables only: a page of the API has the entries of its table
python_maximum_signature_line_length = 88  # a longer signature has one parameter per line
toc_object_entries_show_parents = "hide"
myst_heading_anchors = 3
napoleon_use_ivar = True  # fields are a list, as parameters are, without entries of "on this page"
napoleon_use_param = False  # one entry for several names, as in "dq, dk, dv: ..."
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
nb_execution_mode = "off"  # tools/notebooks.py executes them, and CI checks that every cell runs
nb_merge_streams = True
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "cupy_sdpa"
html_static_path = ["_static"]
html_css_files = ["style.css"]
templates_path = ["_templates"]
html_theme_options = {"top_of_page_buttons": []}
copybutton_exclude = ".linenos, .gp, .go"  # without the prompts and the outputs of a session
