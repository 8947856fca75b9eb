"""Runs of the self-test: shrinking, worker processes that crash, hang and are killed, and the command ``check``."""

import json

import numpy as np
import pytest
from tiers import missing

from cupy_sdpa.__main__ import main
from cupy_sdpa.check import Case, pool, run
from cupy_sdpa.check.case import REQUIRES, Outcome, Paged, parse
from cupy_sdpa.check.draw import OPTIONS, draw
from cupy_sdpa.check.pool import CasePool
from cupy_sdpa.check.shrink import candidates, shrink

#: A module with faults, see :mod:`planted_errors`.
PLANTED = ("planted_errors",)
WRONG = "Case(sq=5, options={'causal': 'top_left'})"


# Shrinking


def test_shrinking_removes_what_a_failure_does_not_need():
    """Options, sizes, layouts and gradients that the failure does not need are removed."""

    def ask(case):
        wrong = "alibi_slopes" in case.options and case.skv > 256 and case.sq == 1
        return Outcome("wrong", "", "out") if wrong else Outcome()

    case = Case(
        "gpu", "bfloat16", d=64, dv=128, hq=12, hkv=4, sq=1, skv=1500, b=3, backward=True, layouts={"q": "dshb"},
        options={"causal": "bottom_right", "alibi_slopes": "usual", "sinks": "high", "return_dsinks": True},
    )  # fmt: skip
    small, outcome = shrink(case, ask(case), ask)
    assert small == Case("gpu", "float16", sq=1, skv=257, options={"alibi_slopes": "usual"})
    assert outcome.kind == "wrong"


def test_shrinking_keeps_the_kind_of_failure():
    """A smaller case that fails in another way is not accepted."""

    def ask(case):
        return Outcome("crash") if case.skv == 100 else Outcome("wrong", "", "out")

    small, outcome = shrink(Case(skv=100, b=4), Outcome("crash"), ask)
    assert (small, outcome.kind) == (Case(skv=100, sq=1, d=1, dv=1), "crash")


def test_every_candidate_is_smaller():
    """Candidates differ from the case, and never have an option without the one that it requires."""
    for number in range(100):
        case = draw(2, number, "gpu")
        for smaller in candidates(case):
            assert smaller != case
            assert len(smaller.options) <= len(case.options)
            assert not smaller.paged or smaller.skv % smaller.paged.page == 0
            for name, needed in REQUIRES.items():
                assert name not in smaller.options or needed in smaller.options


def test_shrinking_keeps_whole_pages():
    """Skv stays a multiple of the page size; the page and every field of the option become simpler."""

    def ask(case):
        return Outcome("wrong", "", "out") if case.paged and case.paged.shared and case.skv > 20 else Outcome()

    options = {"sinks": "high", "paged": Paged(16, "pages", "random", 3, "mixed", True, True)}
    case = Case("gpu", "float16", sq=4, skv=96, b=3, options=options)
    small, _ = shrink(case, ask(case), ask)
    options = {"paged": Paged(1, "pages", "full", 0, "unowned", True, False)}
    assert small == Case("gpu", "float16", sq=1, skv=21, options=options)


# Processes


@pytest.mark.slow
def test_a_crash_is_a_finding_and_the_run_continues():
    """Crashes and wrong results are reported with a line that reproduces them; all other cases run."""
    cases = [
        Case(), Case(options={"softcap": 2.0, "scale": 1.0}), Case(seed=1), Case(sq=5, b=2, options={"causal": "top_left"}),
        Case(seed=2),
    ]  # fmt: skip
    summary = run.run(iter(cases), 2, modules=PLANTED)
    assert summary.problems == 5
    assert summary.count("passed") == 3
    found = {finding.outcome.kind: finding for finding in summary.findings}
    assert found.keys() == {"crash", "wrong"}
    assert "SIGKILL" in found["crash"].outcome.message
    assert found["crash"].case.options == {"softcap": 2.0}
    assert found["wrong"].case == Case(d=1, dv=1, sq=1, skv=1, options={"causal": "top_left"})
    assert found["wrong"].command.count("\n") == 0
    assert parse(found["wrong"].command.split("reproduce(")[1].removesuffix(')"')) == found["wrong"].case


@pytest.mark.slow
def test_a_process_that_hangs_is_a_finding():
    """A case that exceeds the time limit is a finding, and its process is replaced."""
    with CasePool(1, PLANTED) as workers:
        assert workers.run(Case()).kind == "passed"
        outcome = workers.run(Case(options={"window": (1, 1)}), limit=1.0)
        assert outcome.kind == "hang"
        assert workers.run(Case()).kind == "passed"


@pytest.mark.slow
def test_an_interrupted_run_reports_the_finished_cases():
    """Ctrl-C ends all processes at once, also those that are running a case; the report contains the finished cases."""

    def progress(summary, activity):
        if summary.problems == 2:
            raise KeyboardInterrupt

    cases = [Case(), Case(seed=1), Case(options={"window": (1, 1)})]  # the last one would hang
    summary = run.run(iter(cases), 2, progress=progress, modules=PLANTED)
    assert (summary.problems, summary.findings, summary.interrupted) == (2, [], True)
    assert summary.seconds < pool.TIME_LIMIT / 2


@pytest.mark.slow
def test_findings_of_one_kind_are_reported_once():
    """Cases that fail in the same way are listed with the shrunk one."""
    cases = [Case(b=b, seed=b, options={"causal": "top_left"} | more) for b in (1, 2) for more in ({}, {"sinks": "high"})]
    (finding,) = run.run(iter(cases), 1, modules=PLANTED).findings
    assert len(finding.duplicates) == 3
    assert "4 times" in finding.text()


@pytest.mark.slow
def test_the_first_finding_ends_a_run():
    """It is reported as drawn, without shrinking."""
    cases = [Case(), Case(sq=5, options={"causal": "top_left"}), Case(seed=1), Case(seed=2)]
    summary = run.run(iter(cases), 1, run.RunLimits(first=True), modules=PLANTED)
    assert (summary.problems, [finding.shrunk for finding in summary.findings]) == (2, [False])


# The command


@pytest.fixture
def planted(monkeypatch):
    """Lets the command run cases with faults; returns a list of functions that are called before each case."""
    before = []

    class Faulty(CasePool):
        def run(self, *given):
            for function in before:
                function()
            return super().run(*given)

    monkeypatch.setattr(run, "CasePool", lambda jobs, modules: Faulty(jobs, PLANTED))
    return before


def test_the_command_writes_a_report(tmp_path, capsys):
    """A run without findings exits with 0; the report contains versions, seed and counts."""
    file = tmp_path / "report.json"
    words = ["check", "--engine", "cpu", "--case", "Case(options={'causal': 'top_left', 'sinks': 'normal'})"]
    assert main([*words, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["problems"] == 1
    assert report["findings"] == []
    assert report["versions"]["numpy"] == np.__version__
    assert report["options"]["causal"] == {"run": 1, "refused": 0, "wrong": 0}
    assert report["shares"]["causal"] == 100
    assert report["pairs"]["causal + sinks"]["run"] == 1
    printed = capsys.readouterr()
    assert "1 problem, 3 calls, 0 findings" in printed.out
    assert all(len(line) <= 100 for line in printed.out.splitlines())


def test_findings_are_printed_and_reported_before_they_are_shrunk(planted, tmp_path, capsys):
    """A run that is killed while it shrinks has printed its findings and written its report; it is written again at the end, and
    the exit status is 1.
    """
    file, seen = tmp_path / "report.json", []
    planted.append(lambda: seen.append((file.read_text() if file.exists() else "", capsys.readouterr().err)))
    assert main(["check", "--case", WRONG, "--json", str(file)]) == 1
    report, printed = json.loads(seen[1][0]), seen[1][1]  # before the first case that is smaller
    assert (report["problems"], report["final"]) == (1, False)
    assert [(finding["shrunk"], finding["case"]) for finding in report["findings"]] == [(False, WRONG)]
    assert f'found: python -c "from cupy_sdpa.check import Case, reproduce; reproduce({WRONG})"' in printed
    report = json.loads(file.read_text())
    assert report["final"]
    assert [(finding["shrunk"], finding["kind"]) for finding in report["findings"]] == [(True, "wrong")]
    assert report["findings"][0]["reproduce"] in capsys.readouterr().out


@pytest.mark.slow
def test_a_report_that_cannot_be_written_loses_no_finding(planted, tmp_path, capsys):
    """The run continues, prints its findings, and fails at the end."""
    file = tmp_path / "report.json"

    def become_a_folder():
        file.unlink(missing_ok=True)
        file.mkdir()
        planted.clear()

    planted.append(become_a_folder)
    assert main(["check", "--case", WRONG, "--json", str(file)]) == 2
    printed = capsys.readouterr()
    assert "1 finding in" in printed.out
    assert f"--json {file}: Is a directory" in " ".join(printed.err.split())


@pytest.mark.slow
def test_the_command_runs_drawn_problems(capsys):
    """Worker processes run drawn problems; the table of options fits 80 columns."""
    assert main(["check", "--engine", "cpu", "--problems", "6", "--seed", "5", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "6 problems" in out
    table = out[out.index("option") :].split("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert all(any(name in line for line in table) for name in OPTIONS)
    assert all(line.count("%") in (1, 2) for line in table[1:])


@pytest.mark.slow
@pytest.mark.skipif(not missing("gpu"), reason="the command runs on this GPU")
def test_the_command_without_a_gpu(monkeypatch, capsys):
    """Without a GPU and a C compiler the output names both, and the CPU engine is tested."""
    monkeypatch.setenv("PATH", "")
    assert main(["check", "--problems", "2", "--seed", "5", "--jobs", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no kernel is run: no GPU: " in out
    assert "planning: " in out
    assert "compiler" in out
    assert main(["check", "--engine", "gpu"]) == 2


@pytest.mark.slow
@pytest.mark.cudnn
def test_planning_is_tested_for_described_gpus():
    """The real cuDNN plans a case; a case that the support table rules out counts as refused."""
    with CasePool(1) as workers:
        planned = workers.run(Case("plan", "float16", d=64, dv=64, sq=128, skv=128, gpu="h200", options={"causal": "top_left"}))
        refused = workers.run(Case("plan", "float16", d=12, dv=12, sq=128, skv=128, gpu="h200"))
    assert (planned.kind, planned.calls) == ("passed", 1)
    assert refused.kind == "refused"
    assert "head_dim" in refused.message


@pytest.mark.gpu
def test_a_minute_on_the_gpu_finds_nothing(capsys):
    """One minute of random problems on this GPU and cuDNN without a finding."""
    status = main(["check", "--minutes", "1", "--seed", "1", "--engine", "gpu"])
    assert status == 0, capsys.readouterr().out
