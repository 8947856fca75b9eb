"""Sphinx's settings: ``sphinx-build -W docs docs/_build``."""

import cupy_sdpa

project = "cupy_sdpa"
author = "The cupy_sdpa developers"
release = cupy_sdpa.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_heading_anchors = 2
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
exclude_patterns = ["_build", "*_table.md"]  # pages include them
autodoc_typehints = "none"
autodoc_mock_imports = ["torch", "thinc"]  # of cupy_sdpa.integrations
