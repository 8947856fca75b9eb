"""The faults of tools/planted_faults.py: they can be planted, and the program reports whether a command finds them."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    """The module of the program."""
    spec = importlib.util.spec_from_file_location("planted_faults", ROOT / "tools" / "planted_faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_faults"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["planted_faults"]


def test_every_fault_can_be_planted(tool):
    """The text of each fault occurs once in its file, its name is unique, and its test files exist."""
    faults = tool.read_faults()
    assert tool.problems(faults) == []
    assert all(fault.old != fault.new for fault in faults)
    for names in tool.TESTS.values():
        assert [name for name in names if not (ROOT / "tests" / f"{name}.py").is_file()] == []


def test_a_fault_whose_text_is_gone_is_an_error(tool, monkeypatch, tmp_path, capsys):
    """The message names the fault, the text and the file, and nothing runs."""
    fault = {"name": "gone", "file": "cupy_sdpa/version.py", "old": "no such text", "new": "", "numeric": False}
    data = tmp_path / "faults.json"
    data.write_text(json.dumps([fault, fault]))
    monkeypatch.setattr(tool, "DATA", data)
    assert tool.main([]) == 2
    printed = capsys.readouterr().err
    assert "gone: 'no such text' occurs 0 times in cupy_sdpa/version.py, not once" in printed
    assert "gone: there are 2 faults of this name" in printed


def test_a_command_catches_a_fault_or_not(tool, monkeypatch, tmp_path, capsys):
    """The command runs in copies, with one fault each; the files of the repository are unchanged."""
    root = tmp_path / "repository"
    (root / "tools").mkdir(parents=True)
    (root / "module.py").write_text("first, second = 1, 2\n")
    faults = [
        {"name": name, "file": "module.py", "old": old, "new": new, "numeric": False}
        for name, old, new in (
            ("found", "= 1", "= 3"),
            ("not found", "2", "4"),
            ("slow", "= 1", "= __import__('time').sleep(9)"),
        )
    ]
    (root / "tools" / "faults.json").write_text(json.dumps(faults))
    monkeypatch.setattr(tool, "ROOT", root)
    monkeypatch.setattr(tool, "DATA", root / "tools" / "faults.json")
    monkeypatch.setattr(tool.Fault.problem, "__defaults__", (root,))
    command = "python -c 'import module; assert module.first in (1, None)'"
    assert tool.main(["--command", command, "--jobs", "2", "--limit", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[:3]] == ["caught", "survived", "time limit"]
    assert lines[3] == "1 caught, 1 survived, 1 at the time limit, of 3"
    assert (root / "module.py").read_text() == "first, second = 1, 2\n"
    assert tool.main(["--command", "python -c 'raise SystemExit(1)'"]) == 2
    assert "fails without a fault" in capsys.readouterr().out
    shutil.rmtree(root)
