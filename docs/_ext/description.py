"""The description of a page for search engines: its first paragraph, which says what the reader can do with the page."""

import html
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

#: Search engines show about so many characters.
LENGTH = 200


def described(paragraph: str) -> str:
    """As many whole sentences of a paragraph as search engines show; the start of the first if it is longer."""
    text = " ".join(paragraph.split())
    if len(text) > LENGTH:
        sentences = re.match(rf".{{0,{LENGTH - 1}}}[.!?](?= [A-Z])", text)
        text = sentences[0] if sentences else text[:LENGTH].rpartition(" ")[0] + " ..."
    return re.sub(":$", ".", text)


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Add the description to the head of a page."""
    if doctree is not None:
        paragraphs = (x for x in doctree.findall(nodes.paragraph) if isinstance(x.parent, nodes.section | nodes.document))
        paragraph = next(paragraphs, None)
        if paragraph is None:
            logging.getLogger(__name__).warning("a page begins with a paragraph that describes it", location=page)
        else:
            text = html.escape(described(paragraph.astext()))
            context["metatags"] += f'<meta name="description" content="{text}" />\n'


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handler."""
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True}
