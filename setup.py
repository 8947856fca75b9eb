"""The README on a package index: its relative links become links to the repository.

Everything else about the package is in pyproject.toml, the address of the repository, too.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def absolute(text: str, repository: str) -> str:
    """The README with absolute links: pictures as files, other links as pages of the repository."""

    def replaced(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if re.match(r"https?:|#", target):
            return match[0]
        kind = "raw" if picture else "tree" if target.endswith("/") else "blob"
        return f"{picture}[{label}]({repository}/{kind}/main/{target})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # every second one is a block of code
    parts[::2] = [re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replaced, part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(long_description=absolute(readme, project["urls"]["Repository"]), long_description_content_type="text/markdown")
