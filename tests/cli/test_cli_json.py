"""``--json`` of every command: the output has the keys and types that docs/command_line.md lists."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa.__main__ import main

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "null": type(None),
    "any": object,
}


def schemas():
    """For every heading of the page its rows: the pattern of a path, and the type."""
    found = {}
    for heading, body in re.findall(r"^### `?([^`\n]+)`?\n(.*?)(?=^##|\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", body, re.M)
        found[heading] = {path: kind.strip() for path, kind in rows}
    return found


def paths(value, prefix=""):
    """Every leaf of a JSON value: its path, where ``[]`` stands for an element, and its value."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from paths(part, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and value:
        for part in value:
            yield from paths(part, f"{prefix}[]")
    else:
        yield prefix, value


def regex(path):
    return re.escape(path).replace(r"\*", r"[^\[\]]+?")


def expanded(schema):
    """The rows of a table, with those of a plan in place of each plan."""
    rows = {}
    for path, kind in schema.items():
        if kind.startswith("plan"):
            rows |= {
                f"{path}.{key}": other if "optional" in other else f"{other}, optional"
                for key, other in schemas()["plan"].items()
            }
            kind = "null, optional"
        rows[path] = kind
    return rows


def check(value, schema):
    """Raise if the value has a path that the table lacks, or the reverse, or another type."""
    rows, seen = expanded(schema), set()
    for path, leaf in paths(value):
        if isinstance(leaf, (dict, list)):  # empty
            continue
        matching = [row for row in rows if re.fullmatch(regex(row), path)]
        assert matching, f"{path} is not documented"
        seen.update(matching)
        names = {name.strip() for row in matching for name in rows[row].replace(", optional", "").split(" or ")}
        allowed = tuple(kind for name in names for kind in (TYPES[name] if isinstance(TYPES[name], tuple) else (TYPES[name],)))
        assert isinstance(leaf, allowed), f"{path} is {leaf!r}, documented as {names}"
        assert not isinstance(leaf, bool) or {"boolean", "any"} & names, path
    missing = {row for row, kind in rows.items() if row not in seen and "optional" not in kind and "null" not in kind}
    assert not missing, f"documented, but not in the output: {missing}"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


def output(capsys, *words, status=0):
    assert main([*words]) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


SHAPE = "64,8,256,2"
COMMANDS = {
    "demo --json": (("demo", "--seq", "40", "--engine", "numpy", "--json"), 0),
    "demo --generate --json": (
        ("demo", "--generate", "--steps", "2", "--tokens", "4", "--engine", "numpy", "--batch", "2", "--json"), 0,
    ),
    "info --json": (("info", "--json"), 0),
    "explain --json": (("explain", SHAPE, "--causal", "--gpu", "h200", "--cudnn", "9.19", "--json"), 0),
    "support --json": (("support", "--json"), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_output_is_as_documented(name, capsys):
    words, status = COMMANDS[name]
    check(output(capsys, *words, status=status), schemas()[name])


def test_run(capsys):
    x = np.ones((8, 2, 4, 1), np.float32)
    np.savez("in.npz", q=x, k=x, v=x)
    found = output(capsys, "run", "in.npz", "-o", "out.npz", "--stats", "--layout", "bhsd", "--json")
    check(found, schemas()["run --json"])
    assert found["wrote"]["arrays"] == {
        "out": {"shape": [8, 2, 4, 1], "dtype": "float32"}, "stats": {"shape": [8, 2, 4], "dtype": "float32"},
    }  # fmt: skip
    assert found["read"]["axes"] == ["batch", "heads", "seq", "head_dim"]


def test_a_problem_that_cannot_run(capsys):
    found = output(capsys, "explain", "12,8,1000,2", "--gpu", "h200", "--cudnn", "9.19", "--json", status=1)
    check(found, schemas()["explain --json"])
    assert not found["runs"]
    assert "pad axis 0 with 4 zeros" in found["reasons"][0]


def test_check(capsys):
    assert main(["check", "--engine", "cpu", "--problems", "3", "--seed", "1", "--json", "report.json"]) == 0
    check(json.loads(Path("report.json").read_text(encoding="utf-8")), schemas()["check --json FILE"])
    capsys.readouterr()


def test_bench(capsys):
    x = np.ones((8, 2, 4, 1), np.float32, order="F")
    with cupy_sdpa.trace("problems.jsonl"):
        cupy_sdpa.attention(x, x, x)
    check(output(capsys, "bench", "--trace", "problems.jsonl", "--engine", "cpu", "--json"), schemas()["bench --json"])


@pytest.mark.cudnn
def test_plan_and_explain_with_a_plan(capsys):
    Path("shapes.toml").write_text(
        '[[attention]]\nq = [64, 8, 256, 2]\nk = [64, 8, 256, 2]\nv = [64, 8, 256, 2]\ndtype = "bfloat16"\n', encoding="utf-8"
    )
    found = output(capsys, "plan", "shapes.toml", "--gpu", "h200", "-o", "plans", "-j", "1", "--json")
    check(found, schemas()["plan --json"])
    assert found["planned"] == 1
    found = output(capsys, "explain", SHAPE, "--gpu", "h200", "--json")
    check(found, schemas()["explain --json"])
    assert found["plan"]["engine"] > 0


def test_a_failure_prints_no_json(capsys):
    """One line on stderr, nothing on stdout."""
    assert main(["run", "none.npz", "-o", "out.npz", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "none.npz" in printed.err


def test_the_check_bites():
    """A missing key, an undocumented key and another type are found."""
    schema = {"a": "integer", "b[].c": "string", "d.*": "number or null"}
    good = {"a": 1, "b": [{"c": "x"}], "d": {"x": None, "y": 2.0}}
    check(good, schema)
    for bad in ({"b": [{"c": "x"}]}, {**good, "e": 1}, {**good, "a": "1"}, {**good, "a": True}, {**good, "b": [{"c": 1}]}):
        with pytest.raises(AssertionError):
            check(bad, schema)
