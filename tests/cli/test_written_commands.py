"""Every command line in the README, the docs, the results and the help texts is accepted by its parser."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS
from benchmarks.compare import command as compare
from cupy_sdpa._cli import main as cli

ROOT = Path(__file__).parents[2]
PATHS = [
    ROOT / "README.md", ROOT / "benchmarks" / "results" / "README.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "cupy_sdpa" / "_cli").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py")),
]  # fmt: skip
PACKAGE = r"python3? -m cupy_sdpa|(?<![\w-])cupy-sdpa"
BENCHMARKS = "python3? -m benchmarks"


def written_commands(program):
    """The command lines of a program: brackets of optional words removed, placeholders replaced by values."""
    found = {}
    for path in PATHS:
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "results":  # commands in sentences may continue on the next line
            text = re.sub(r"\n\s*", " ", text)
        for words in re.findall(rf"(?:{program}) ([a-z]+ ?[^`\n]*)", text):
            command = re.split(r"  |[`>#;:\"]| \.\.\.| && |, ", words.replace(" ...]", "]"))[0]
            command = re.sub(r"[\[\]]", "", command)
            command = re.sub(r"\bN\b", "3", re.sub(r"\bNAME\b", "vit", command)).strip(" .)(")
            found.setdefault(command, path.name)
    return found


def status_of(parser, words):
    """The exit status of a parser: 0 if it accepts the words."""
    try:
        parser.parse_args(words)
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.parametrize("command", written_commands(PACKAGE))
def test_commands_of_the_package(command):
    """The parser accepts the command; a command without options has a help."""
    words = command.split()
    assert status_of(cli._parser(), [*words, "--help"] if len(words) == 1 else words) == 0


@pytest.mark.parametrize("command", written_commands(BENCHMARKS))
def test_commands_of_the_benchmarks(command):
    """The command exists, and the parser of ``compare`` accepts its options."""
    name, *words = command.split()
    assert name in COMMANDS
    assert name != "compare" or status_of(compare.parser(), words) == 0


def test_the_commands_are_found():
    """The search finds all commands, with their options."""
    commands = written_commands(PACKAGE)
    assert {command.split()[0] for command in commands} == {
        "demo",
        "run",
        "info",
        "explain",
        "plan",
        "support",
        "check",
        "bench",
    }
    assert "plan --gpu h200 shapes.toml -o plans/" in commands
    assert "demo --causal --seq 3 --dtype bfloat16" in commands
    assert "compare --presets vit" in written_commands(BENCHMARKS)
    assert {command.split()[0] for command in written_commands(BENCHMARKS)} == set(COMMANDS)
