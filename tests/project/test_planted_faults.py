"""The faults of tools/planted_faults.py: they can be planted, and the program reports whether a command finds them."""

import importlib.util
import json
import shutil
import sys

import pytest
from command_line import ROOT


def program(root):
    """A repository's program, as a module."""
    spec = importlib.util.spec_from_file_location("planted_faults", root / "tools" / "planted_faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_faults"] = module
    spec.loader.exec_module(module)
    del sys.modules["planted_faults"]
    return module


def test_every_fault_can_be_planted():
    """The text of each fault occurs once in its file, and its name is unique; a fault has a command."""
    tool = program(ROOT)
    faults = tool.read_faults()
    assert tool.problems(faults) == []
    assert all(fault.old != fault.new for fault in faults)
    assert all(fault.command() for fault in faults)


def planted(root, **texts):
    """The program of a repository of one module, with faults in it: pairs of texts."""
    (root / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "planted_faults.py", root / "tools")
    (root / "module.py").write_text("first, second = 1, 2\n")
    faults = [{"name": name, "file": "module.py", "old": a, "new": b, "numeric": False} for name, (a, b) in texts.items()]
    (root / "tools" / "planted_faults.json").write_text(json.dumps(faults))
    return program(root)


def test_a_fault_whose_text_is_gone_is_an_error(tmp_path, capsys):
    """The message names the fault, the text and the file, and nothing runs."""
    tool = planted(tmp_path, gone=("no such text", ""))
    assert tool.main([]) == 2
    assert "gone: 'no such text' occurs 0 times in module.py, not once" in capsys.readouterr().err
    assert tool.problems(tool.read_faults() * 2)[0] == "gone: there are 2 faults of this name"
    assert tool.main(["--names", "absent"]) == 2
    assert "--names: there is no fault 'absent'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_catches_a_fault_or_not(tmp_path, capsys):
    """The command runs in copies, with one fault each; the files of the repository are unchanged."""
    tool = planted(tmp_path, found=("= 1", "= 3"), lost=("2", "4"), slow=("= 1", "= __import__('time').sleep(9)"))
    command = "python -S -c 'import module; assert module.first in (1, None)'"
    assert tool.main(["--command", command, "--jobs", "2", "--limit", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[:3]] == ["caught", "survived", "time limit"]
    assert lines[3] == "1 caught, 1 survived, 1 at the time limit, of 3"
    assert tool.main(["--command", "python -S -c 'raise SystemExit(1)'"]) == 2
    assert "fails without a fault" in capsys.readouterr().out
    assert (tmp_path / "module.py").read_text() == "first, second = 1, 2\n"
