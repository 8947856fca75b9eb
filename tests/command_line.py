"""Commands in tests: in this process, or in a new one."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from cupy_sdpa.__main__ import main as command_of_the_package

ROOT = Path(__file__).parents[1]


class Done(NamedTuple):
    """The outcome of a command: its exit status, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The printed lines; there is nothing on stderr."""
        assert self.err == ""
        return self.out.splitlines()

    @property
    def text(self) -> str:
        """The printed words with one space between them; there is nothing on stderr."""
        return " ".join(" ".join(self.lines).split())

    @property
    def json(self) -> Any:
        """The printed JSON object of a command that succeeded, or whose result is negative."""
        assert self.err == ""
        assert self.status in (0, 1)
        return json.loads(self.out)

    @property
    def complaint(self) -> str:
        """The error, one line without the program's name; nothing else is printed, and the status is 2."""
        assert (self.status, self.out, self.err.count("\n")) == (2, "", 1)
        program, error = self.err.removesuffix("\n").split(": ", 1)
        assert program in ("cupy_sdpa", "benchmarks")
        return error


def run(command: str, *words: str, main: Any = command_of_the_package, columns: int = 100, **environment: str) -> Done:
    """Run a command in this process.

    Args:
        command: words without spaces.
        words: further words, which may contain spaces.
        main: the program; by default ``python -m cupy_sdpa``.
        columns: the width of the terminal.
        environment: more variables of the environment.
    """
    out, err = io.StringIO(), io.StringIO()
    variables = mock.patch.dict(os.environ, {"COLUMNS": str(columns), **environment})
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), variables:
        try:
            status = main([*command.split(), *words])
        except SystemExit as ended:
            status = ended.code
    return Done(status, out.getvalue(), err.getvalue())


def python(*words, cwd, path=(), stdout=subprocess.PIPE, **environment):
    """Run a new Python process with warnings as errors.

    Args:
        words: the arguments of Python.
        cwd: the working directory.
        path: folders that are searched for modules before the repository.
        stdout: as in :func:`subprocess.run`.
        environment: more variables of the environment; None removes one.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-W", "error", *words], cwd=cwd, env=variables, stdout=stdout, stderr=subprocess.PIPE, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)
