"""The README on a package index: every link is absolute, and the code is unchanged."""

import re
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def converted(text):
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup_file")["absolute"](text, PROJECT["urls"]["Repository"])


def test_every_link_is_absolute():
    """Pictures are files, other links pages; each file exists in the repository."""
    text, address = converted(README), PROJECT["urls"]["Repository"]
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S))
    assert len(links) > 20
    for link in links:
        assert link.startswith("https://")
        if link.startswith(address):
            kind, _, path = link.removeprefix(f"{address}/").split("/", 2)
            assert (ROOT / path.split("#")[0]).exists(), link
            assert (kind == "raw") == path.endswith(".svg")


def test_code_is_unchanged():
    """Blocks of code are the same, and text without links is, too."""
    blocks = re.findall(r"```.*?```", README, re.S)
    assert blocks == re.findall(r"```.*?```", converted(README), re.S)
    assert converted("```python\nx[i](y)\n```\n") == "```python\nx[i](y)\n```\n"


def test_the_classifiers_begin_with_the_required_version():
    versions = [name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert versions[0] == PROJECT["requires-python"].removeprefix(">=")
