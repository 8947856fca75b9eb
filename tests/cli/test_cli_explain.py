"""``python -m cupy_sdpa explain``: a report from shapes; and the JSON output of all commands."""

import json

import pytest

from cupy_sdpa._cli.main import main

SHAPES = ["64,8,1000,2", "--keys", "64,4,500,2"]


def said(capsys, *words):
    status = main(["explain", *words])
    return status, capsys.readouterr()


@pytest.mark.cudnn
def test_a_plan_for_a_described_gpu(capsys):
    """The report has the problem, the steps, the verdict and the plan."""
    status, out = said(capsys, *SHAPES, "--gpu", "h200", "--causal", "--dtype", "float16")
    assert status == 0
    assert out.out.startswith("forward attention, float16: batch 2, 8 query and 4 key/value heads")
    assert "runs on cuDNN (NVIDIA H200" in out.out
    assert "workspace" in out.out


def test_a_problem_that_cannot_run(capsys):
    """The reasons are on stdout, with status 1; --cudnn uses the support table."""
    status, out = said(capsys, "12,8,1000,2", "--gpu", "h200", "--cudnn", "9.19")
    assert status == 1
    assert "pad axis 0 with 4 zeros" in " ".join(out.out.split())


@pytest.mark.parametrize(("shape", "status"), [("64,8,1000,2", 0), ("12,8,1000,2", 1)], ids=["runs", "refused"])
def test_without_cudnn(shape, status, capsys, monkeypatch):
    """The support table for the newest supported version is used, and the report says so and why."""
    monkeypatch.setenv("CUPY_SDPA_CUDNN", "/missing/libcudnn.so.9")
    assert main(["explain", shape, "--gpu", "h200", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == (status == 0)
    assert found["plan"] is None
    for words in ("cuDNN 9.28.0; from the support table alone, not planned: libcudnn.so.9 was not found", "--cudnn VERSION"):
        assert words in found["note"]
    assert main(["explain", shape, "--gpu", "h200"]) == status
    assert "from the support table alone, not planned" in " ".join(capsys.readouterr().out.split())


def test_json(capsys):
    """All parts of the report as JSON."""
    options = ["--backward", "--window", "127,", "--causal", "bottom_right", "--softcap", "20", "--deterministic"]
    status, out = said(capsys, *SHAPES, *options, "--values", "32,4,500,2", "--gpu", "h200", "--cudnn", "9.19", "--json")
    found = json.loads(out.out)
    assert status == (0 if found["runs"] else 1)
    assert "deterministic backward attention" in found["problem"]
    assert "127" in found["problem"]
    assert "softcap" in found["problem"]
    assert any("dV = " in step["formula"] for step in found["steps"])
    stored = [step["outputs"] for step in found["steps"] if step["outputs"]]
    assert sorted(name for names in stored for name in names) == ["dk", "dq", "dv"]
    assert [tensor["shape"] for tensor in found["inputs"] if tensor["name"] == "q"] == [list(map(int, SHAPES[0].split(",")))]


BAD = {
    "gpu": ([*SHAPES, "--gpu", "abacus"], "abacus"),
    "dtype": ([*SHAPES, "--gpu", "h200", "--dtype", "int8"], "int8"),
    "rank": (["64,8,1000", "--gpu", "h200"], "it needs 4"),
    "heads": ([*SHAPES, "--values", "64,3,500,2", "--gpu", "h200"], "numbers of heads"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_problems(name, capsys):
    """The error is one line on stderr, with status 2."""
    words, text = BAD[name]
    status, out = said(capsys, *words)
    assert status == 2
    assert text in out.err
    assert out.err.count("\n") == 1


@pytest.mark.parametrize("words", [["64,8,x,2"], [*SHAPES, "--window", "1"]], ids=["shape", "window"])
def test_invalid_numbers(words, capsys):
    """The error of the parser has an example."""
    with pytest.raises(SystemExit) as stopped:
        main(["explain", *words])
    assert stopped.value.code == 2
    assert "such as 12" in capsys.readouterr().err


def test_without_a_gpu(capsys, monkeypatch):
    """The GPU must be named."""
    monkeypatch.setattr("cupy_sdpa.device.cupy_runtime.current_device", lambda: None)
    status, out = said(capsys, *SHAPES)
    assert status == 2
    assert "name one with --gpu" in out.err
