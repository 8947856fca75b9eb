"""Write the table of options in docs/options.md: ``python tools/options_table.py > docs/options_table.md``."""

from cupy_sdpa.core.options.option import OF_FEW_OPTIONS
from cupy_sdpa.core.options.table import OPTIONS


def table() -> str:
    """Return the table as Markdown."""
    few = " and ".join(f"`{name}`" for name in OF_FEW_OPTIONS)
    header = ("option", "default", "a plan depends on", "functions that don't take it", f"taken by {few}")
    rows = [header, ("---",) * len(header)]
    for option in OPTIONS.values():
        taken = (name for name in OF_FEW_OPTIONS if option.refusal(name) is None)
        names = (", ".join(f"`{name}`" for name in some) or "–" for some in (option.refused, taken))
        rows.append((f"`{option.name}`", f"`{option.default}`", option.plan_depends_on or "–", *names))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(table(), end="")
