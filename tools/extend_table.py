"""Write the names of ``cupy_sdpa.extend`` in docs/api_extend.md: ``python tools/extend_table.py > docs/extend_table.md``.

A name is described by the first sentence of its docstring, or of the comment before it.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "cupy_sdpa" / "core"
EXTEND = ROOT / "cupy_sdpa" / "extend"
#: The modules in the order of the page.
MODULES = ("__init__", "cudnn")


def sources(module: str) -> dict[str, Path]:
    """The names of a module of ``extend``, and the file of the core that each comes from."""
    tree = ast.parse((EXTEND / f"{module}.py").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            path = CORE.joinpath(*(node.module or "").split(".")[1:])
            for alias in node.names:
                files = path / f"{alias.name}.py", path.with_suffix(".py"), path / "__init__.py"  # the first if it is a module
                found[alias.name] = next(file for file in files if file.exists())
    return found


@functools.cache
def described(path: Path) -> dict[str, str]:
    """The first sentence on each name that a module defines, and on the module itself by the name of its file."""
    text = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    found, comment = {path.stem: ast.get_docstring(tree) or ""}, ""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, "")
            found[node.name] = ast.get_docstring(node) or found[node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            first = node.lineno - 1
            while lines[first - 1].startswith("#:"):
                first -= 1
            if first < node.lineno - 1 or not lines[first - 1].strip():  # else the comment is also on the assignment before
                comment = " ".join(line.removeprefix("#:").strip() for line in lines[first : node.lineno - 1])
            for target in targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name):
                        found[name.id] = comment
    return {name: sentence(text) for name, text in found.items()}


def sentence(text: str) -> str:
    """The first sentence of a docstring, with the markup of Markdown and without links."""
    text = " ".join(text.partition("\n\n")[0].split())
    text = re.sub(r":\w+:`~?\.?([\w.]+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")
    return re.split(r"(?<=[a-z`)\]])\. |(?<=[a-z`)\]]): (?=[a-z]+ [a-z]+ [a-z]+ [a-z]+ [a-z]+ [a-z]+ )", text)[0].rstrip(".")


def page() -> str:
    """The tables as Markdown, one for each module."""
    parts = []
    for module in MODULES:
        tree = ast.parse((EXTEND / f"{module}.py").read_text(encoding="utf-8"))
        title = "cupy_sdpa.extend" if module == "__init__" else f"cupy_sdpa.extend.{module}"
        parts.append(f"### `{title}`\n\n{sentence(ast.get_docstring(tree) or '')}.\n\n| name | what it is |\n| --- | --- |\n")
        rows = {name: described(path)[name] for name, path in sources(module).items()}
        order = re.findall(r"\w+", (ast.get_docstring(tree) or "").partition("\n===")[2])
        for name in sorted(rows, key=order.index):
            parts.append(f"| `{name}` | {rows[name]} |\n")
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
