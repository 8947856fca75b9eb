"""Draw the core and its layers: ``python tools/layers_picture.py`` writes ``docs/_static/layers.svg``.

A box is a folder, with its modules and lines; modules in the root of the package are one box. The core is drawn below the
layers. A line leads from each unit down to a unit that it imports from, unless another import already leads there. Everything
follows from the imports in the code.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cupy_sdpa"
PICTURE = ROOT / "docs" / "_static" / "layers.svg"
WIDTH, BOX, HEIGHT, GAP, ROW = 940, 132, 40, 14, 74
#: Colours that are visible on light and dark pages.
STROKE, CORE, LAYER, LINE = "#888888", "#76b90033", "#4c8bf533", "#88888877"
#: The name of the box for the modules in the root.
ROOT_MODULES = "public functions"


def unit(parts: tuple[str, ...]) -> str:
    """Return the box of a module: a folder of the core, a layer, or the modules in the root."""
    if parts[:1] == ("core",):
        return f"core/{parts[1]}" if len(parts) > 2 or (PACKAGE / "core" / parts[1]).is_dir() else "core/base"
    return parts[0] if (PACKAGE / parts[0]).is_dir() else ROOT_MODULES


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules of the package that a module imports from."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) + 1 - node.level], *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield (*base, alias.name)


def graph() -> tuple[dict[str, set[str]], dict[str, tuple[int, int]]]:
    """Return the units that each unit imports from; and the modules and lines of each unit."""
    edges: dict[str, set[str]] = collections.defaultdict(set)
    sizes: dict[str, tuple[int, int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if path.name in ("__init__.py", "__main__.py") and len(parts) < 3:
            continue
        name = unit(parts)
        modules, lines = sizes.get(name, (0, 0))
        sizes[name] = modules + 1, lines + len(path.read_text(encoding="utf-8").splitlines())
        edges[name] |= {unit(names) for names in imports(path) if names} - {name}
    return {name: edges[name] & sizes.keys() for name in sizes}, sizes


def levels(edges: dict[str, set[str]]) -> dict[str, int]:
    """Return the height of each unit above those that it imports from."""
    made: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...] = ()) -> int:
        if name not in made:
            lower = [other for other in edges[name] if other not in above]
            made[name] = 1 + max((height(other, (*above, name)) for other in lower), default=-1)
        return made[name]

    for name in edges:
        height(name)
    return made


def reachable(edges: dict[str, set[str]], name: str, without: str) -> set[str]:
    """Return the units to which the other imports of a unit lead."""
    found: set[str] = set()
    waiting = [other for other in edges[name] if other != without]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += edges[one]
    return found


def picture() -> str:
    """Return the drawing."""
    edges, sizes = graph()
    edges = {name: {o for o in others if o.startswith("core/") == name.startswith("core/")} for name, others in edges.items()}
    if ROOT_MODULES in edges:  # public functions lie on top of the features that they use, and below those that use them
        edges[ROOT_MODULES] = set()
    core = {name: others for name, others in edges.items() if name.startswith("core/")}
    beside = {name: others for name, others in edges.items() if name not in core}
    rows: list[list[str]] = []
    for part in (beside, core):
        of = levels(part)
        rows += [sorted(name for name in part if of[name] == level) for level in range(max(of.values()), -1, -1)]
    places = {}
    for number, row in enumerate(rows):
        left = (WIDTH - len(row) * (BOX + GAP) + GAP) // 2
        for i, name in enumerate(row):
            places[name] = left + i * (BOX + GAP), 30 + number * ROW + (34 if name in core else 0)
    height = max(y for _, y in places.values()) + HEIGHT + 12
    lines, boxes = [], []
    for name, (x, y) in places.items():
        for other in sorted(edges[name]):
            if other not in reachable(edges, name, other):
                a, b = places[other]
                lines.append(f'<path d="M{x + BOX // 2} {y + HEIGHT} L{a + BOX // 2} {b}" stroke="{LINE}"/>')
        modules, count = sizes[name]
        boxes.append(
            f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="5" fill="{CORE if name in core else LAYER}" '
            f'stroke="{STROKE}"/>'
            f'<text x="{x + BOX // 2}" y="{y + 17}" font-size="13" text-anchor="middle">{name.removeprefix("core/")}</text>'
            f'<text x="{x + BOX // 2}" y="{y + 32}" font-size="10" text-anchor="middle" fill-opacity="0.7">{modules} modules, '
            f"{count} lines</text>"
        )
    top = min(places[name][1] for name in core) - 28
    total = [sum(sizes[name][i] for name in core) for i in (0, 1)]
    frame = (
        f'<rect x="4" y="{top}" width="{WIDTH - 8}" height="{height - top - 4}" rx="8" fill="none" stroke="{STROKE}" '
        f'stroke-dasharray="5 4"/><text x="14" y="{top + 17}" font-size="13">core: {total[0]} modules, {total[1]} lines</text>'
        '<text x="14" y="18" font-size="13">layers, and what users import</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" fill="#888888">'
        + frame + "".join(lines) + "".join(boxes) + "</svg>\n"
    )  # fmt: skip


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
