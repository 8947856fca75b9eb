"""Formulas as MathML: browsers render them without JavaScript and without a network, in the color of the text."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator


def visit_math(self: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line."""
    self.body.append(f'<span class="math">{convert(node.astext())}</span>')
    raise nodes.SkipNode


def visit_math_block(self: HTML5Translator, node: nodes.math_block) -> None:
    r"""Displayed formulas. Lines that end with a backslash pair, and alignment at &, are rows of a table.

    Formulas with \qquad between them are separate, so that a narrow page has them below each other.
    """
    text = node.astext().strip()
    if "\\\\" in text and "\\begin" not in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    parts = [text] if "\\begin" in text else text.split(r"\qquad")
    formulas = " ".join(convert(part, display="block") for part in parts)
    number = f'<span class="eqno">({get_node_equation_number(self, node)})</span>' if node.get("number") else ""
    self.body.append(f'<div class="math">{number}{formulas}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True}
