"""The README on a package index: its relative links become links to the repository.

Everything else about the package is in pyproject.toml, also the address of the repository. This file runs on older versions of
Python than the package, so that pip can report which version is required.
"""

import re
from pathlib import Path

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
    from setuptools import setup

    # tomllib requires Python 3.11
    (repository,) = re.findall(r'^Repository = "(.*)"$', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(long_description=absolute(readme, repository), long_description_content_type="text/markdown")
