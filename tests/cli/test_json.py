"""``--json`` of every command: the output has the keys and types that docs/command_line.md lists."""

import json
import re
from pathlib import Path

import pytest
from command_line import ROOT, run

pytestmark = pytest.mark.usefixtures("folder")

TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "null": type(None), "any": object,
}  # fmt: skip


def schema_of(heading):
    """The rows of the page below a heading: the pattern of a path, and the type; with the rows of a plan for each plan."""
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^### `?{re.escape(heading)}`?\n(.*?)(?=^##|\Z)", page, re.M | re.S)
    rows = {}
    for path, kind in re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", body, re.M):
        if kind.startswith("plan"):
            rows |= {f"{path}.{key}": f"{other}, optional" for key, other in schema_of("plan").items()}
            kind = "null, optional"
        rows[path] = kind.strip()
    return rows


def paths(value, prefix=""):
    """Every leaf of a JSON value: its path, where ``[]`` stands for an element, and its value."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from paths(part, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list):
        for part in value:
            yield from paths(part, f"{prefix}[]")
    else:
        yield prefix, value


def check(value, rows):
    """Raise if the value has a path that the table lacks, or the reverse, or another type."""
    seen = set()
    for path, leaf in paths(value):
        matching = [row for row in rows if re.fullmatch(re.escape(row).replace(r"\*", r"[^\[\]]+?"), path)]
        assert matching, f"{path} is not documented"
        seen.update(matching)
        names = {name.strip() for row in matching for name in rows[row].replace(", optional", "").split(" or ")}
        assert any(isinstance(leaf, TYPES[name]) for name in names), f"{path} is {leaf!r}, documented as {names}"
        assert not isinstance(leaf, bool) or {"boolean", "any"} & names, path
    missing = {row for row, kind in rows.items() if row not in seen and "optional" not in kind and "null" not in kind}
    assert not missing, f"documented, but not in the output: {missing}"


COMMANDS = (
    "info --json", "explain 64,8,256,2 --causal --gpu h200 --json",
    "explain 12,8,1000,2 --gpu h200 --json", pytest.param("support --json", marks=pytest.mark.slow),
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_output_is_as_documented(command):
    """Every key is documented, every documented key is there, and the types match the page; a refusal has status 1."""
    done = run(command, CUPY_SDPA_CUDNN="/missing/libcudnn.so.9")
    check(done.json, schema_of(f"{command.split()[0]} --json"))
    assert done.status == (not done.json.get("runs", True))
    assert done.status == 0 or "pad axis 0 with 4 zeros" in done.json["reasons"][0]


@pytest.mark.slow
def test_the_report_of_check():
    """It is written to a file."""
    assert run("check --engine cpu --problems 3 --seed 1 --json report.json").status == 0
    check(json.loads(Path("report.json").read_text(encoding="utf-8")), schema_of("check --json FILE"))


@pytest.mark.slow
@pytest.mark.cudnn
def test_plans_ahead_of_time():
    """The plans for a GPU that is not here, and the plan in a report."""
    found = run("plan 64,8,256,2 --gpu h200 -o plans -j 1 --json").json
    check(found, schema_of("plan --json"))
    assert found["planned"] == 1
    found = run("explain 64,8,256,2 --gpu h200 --json").json
    check(found, schema_of("explain --json"))
    assert found["plan"]["engine"] > 0


def test_a_failure_prints_no_json():
    """One line on stderr, nothing on stdout."""
    assert "3 numbers" in run("explain 64,8,256 --gpu h200 --json").complaint


def test_the_check_bites():
    """A missing key, an undocumented key and another type are found."""
    schema = {"a": "integer", "b[].c": "string", "d.*": "number or null"}
    good = {"a": 1, "b": [{"c": "x"}], "d": {"x": None, "y": 2.0}}
    check(good, schema)
    for bad in ({"b": [{"c": "x"}]}, {**good, "e": 1}, {**good, "a": "1"}, {**good, "a": True}, {**good, "b": [{"c": 1}]}):
        with pytest.raises(AssertionError):
            check(bad, schema)
