"""The calls of a member: the real cuDNN plans them. The example, the pictures, the benchmark."""

import csv
import re
import runpy

import numpy as np
import pytest
from command_line import ROOT, python
from parallel_cases import METHODS
from planner import library_version, plan_problem

import cupy_sdpa
from benchmarks import parallel as parallel_benchmark
from benchmarks.__main__ import main as benchmarks
from cupy_sdpa.core.cudnn_engine.plan import PlanInfo
from cupy_sdpa.core.problem.tensor_spec import numpy_dtype
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.why_not import why_not
from cupy_sdpa.parallel import Loopback, context_parallel

EXAMPLE = str(ROOT / "examples" / "context_parallel.py")
SIZE = 4
CASES = {
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "window on both sides": {"window": (100, 50, "bottom_right")},
    "ALiBi": {"causal": True, "alibi_slopes": cupy_sdpa.alibi_slopes(8)},
    "softcap and ALiBi": {"causal": True, "softcap": 5.0, "alibi_slopes": cupy_sdpa.alibi_slopes(8)},
    "score function": {"score_mod": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * 0.01},
    "mask function": {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx // 64) == (kv_idx // 64)},
    "sinks": {"causal": True, "sinks": np.zeros(8, np.float32)},
    "bias": {"bias": np.zeros((512, 1, 8, 1), np.float32, order="F")},
    "lengths": {"causal": True, "seq_lens_kv": np.array([400, 512], np.int32)},
}
PACKED = {
    "packed": {},
    "packed, causal": {"causal": True},
    "packed, window": {"causal": True, "window": (40, 0)},
    "packed, ALiBi": {"causal": True, "alibi_slopes": cupy_sdpa.alibi_slopes(8)},
}


@pytest.mark.cudnn
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*CASES, *PACKED])
def test_the_calls_of_members_are_planned(name, method, planned, fake):
    """Every call of the members in the middle and at the end of a group is supported, and cuDNN plans it for the H200."""
    version = planned(library_version)
    found = set()
    for rank in (1, SIZE - 1):
        options = {key: fake.asarray(x) if hasattr(x, "shape") else x for key, x in (CASES | PACKED)[name].items()}
        batch, length = (2,), 512 // SIZE
        if name in PACKED:
            starts = np.cumsum([0, 256, 64, 0, 192], dtype=np.int32)
            options |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
            batch = ()
        shapes = {"q": (64, 8, length, *batch), "k": (64, 4, length, *batch), "v": (64, 4, length, *batch)}
        arrays = {key: fake.zeros(shape, numpy_dtype("bfloat16"), order="F") for key, shape in shapes.items()}
        cp = context_parallel(Loopback(SIZE).members[rank])
        for (report,) in cp.explain(*arrays.values(), method=method, **options).launches.values():
            found |= {launch.problem for launch in report.launches or (report,)}
    assert found
    for problem in found:
        assert not why_not(problem, version, gpus.capability_of("h200")), problem
        plan = planned(plan_problem, problem, "h200")
        assert isinstance(plan, PlanInfo), (problem, plan)


def test_the_example_runs(tmp_path):
    """The example runs with threads and numpy arrays, and its results equal one device's."""
    done = python(EXAMPLE, "--cpu", "3", "--length", "50", cwd=tmp_path)
    assert "method: " in done.text
    assert all(f"member {rank} of 3" in done.text for rank in range(3))
    assert float(re.search(r"error (\S+)", done.text)[1]) < 1e-4


def test_the_example_without_a_launcher(tmp_path):
    """Without CuPy, a GPU or a launcher one line names the fix."""
    done = python(EXAMPLE, cwd=tmp_path)
    assert done.status == 2
    assert "--cpu 4" in done.err.splitlines()[-1]


def test_the_pictures_of_groups_are_those_of_the_layouts():
    """Each equals the output of its script."""
    found = runpy.run_path(str(ROOT / "tools" / "parallel_pictures.py"))
    pictures = found["drawn"]()
    assert {path.stem for path in found["FOLDER"].glob("*.svg")} == set(pictures)
    for name, text in pictures.items():
        assert (found["FOLDER"] / f"{name}.svg").read_text(encoding="utf-8") == text, "python tools/parallel_pictures.py"


@pytest.mark.parametrize("runs", [True, False])
def test_the_benchmark_beside_pytorch(runs):
    """PyTorch's rows come first, our rows have the ratio of the times; without a time there is one row with the reason."""
    problem = parallel_benchmark.Problem("full", 4, 2, 2, 8, {}, "float32")
    seen = []

    def measure(engine, of, expected):
        seen.append((engine.members, of, expected.shape))
        return parallel_benchmark.Peer({"forward": 1.0, "backward": 4.0, "both": 5.0} if runs else {}, "a message", 1e-3)

    found = list(parallel_benchmark.measured_rows(parallel_benchmark.Engine(2, 0), problem, ["all_gather"], 0.0, measure))
    assert seen == [(2, problem, (8, 2, 8, 1))]
    passes = ["forward", "backward", "both"]
    theirs, ours = ([row for row in found if (row["method"] == "PyTorch") == is_peer] for is_peer in (True, False))
    assert [row["pass"] for row in found] == [*(passes if runs else [""]), *passes]
    assert all([*row] == [*parallel_benchmark.COLUMNS] for row in found)
    assert all((row["message"], row["of_pytorch"]) == ("a message", "") for row in theirs)
    assert [row["error"] for row in theirs] == (["1.00e-03", "", ""] if runs else [""])
    for row, ms in zip(ours, (1.0, 4.0, 5.0), strict=True):
        assert row["of_pytorch"] == (round(row["total_ms"] / ms, 3) if runs else "")


def test_the_benchmark_needs_torchrun_for_pytorch(capsys):
    """Otherwise the error has the command."""
    assert benchmarks(["parallel", "--cpu", "--pytorch"]) == 2
    assert "torchrun --nproc-per-node N -m benchmarks parallel --pytorch" in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_measures_a_small_group(monkeypatch, tmp_path):
    """The rows of the benchmark have the columns, and the group's results equal one device's."""
    monkeypatch.setattr(parallel_benchmark, "ROUNDS", 1)
    path = tmp_path / "x.csv"
    assert benchmarks(["parallel", str(path), "--cpu", "--members", "2", "--only", "causal"]) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["method"], row["pass"]) for row in rows] == [(m, p) for m in METHODS for p in ("forward", "backward", "both")]
    timed = [row for row in rows if row["pass"] != "both"]
    assert all(float(row["error"]) < 1e-5 and 0 <= float(row["hidden"]) <= 1 for row in timed)
