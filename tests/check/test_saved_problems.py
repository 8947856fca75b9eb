"""The problems of a program in a file: what is written, that it is read back, and that the commands take it."""

import json
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from command_line import python, run

import cupy_sdpa
from benchmarks.__main__ import main as benchmarks
from cupy_sdpa import fp8, store, zoo
from cupy_sdpa.check import Case
from cupy_sdpa.check.calls import problems
from cupy_sdpa.check.draw import draw
from cupy_sdpa.check.execute import execute
from cupy_sdpa.check.functions import MASKS, SCORES, tensor_shape
from cupy_sdpa.check.saved import case_of, reduced
from cupy_sdpa.core.problem import trace
from cupy_sdpa.offline import problem_file

#: A program on numpy arrays: equal calls, both passes, a score function with a scalar and an array, and dropout.
PROGRAM = """
import numpy as np, cupy_sdpa
x = np.ones((8, 2, 5, 1), np.float16, order="F")
for seed in range(3):
    cupy_sdpa.attention(x, x, x, causal=True)
    cupy_sdpa.attention(x, x, x, dropout_p=0.5, seed=seed)
out, pullback = cupy_sdpa.attention_vjp(
    x, x, x, score_mod=lambda s, b, h, q, k, t: s * t[h] - 0.25 * abs(q - k), tensors={"t": np.ones(2, np.float16)}
)
pullback(x)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "problems.jsonl"


def asked(shape=(64, 8, 100, 2), dtype="float16", **options):
    return cupy_sdpa.problem(shape, shape, shape, dtype=dtype, **options)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# What is written


@pytest.mark.parametrize("number", range(40))
def test_problems_are_read_back(number, path):
    """Problems of the self-test: field by field, and equal."""
    found = [problem for problem in problems(draw(11, number, "plan")) if not problem.trivial]
    if found:
        assert problem_file.add(path, found) == len(set(found))
        assert store.read_problems(path) == list(dict.fromkeys(found))


@pytest.mark.parametrize("function", [np.log1p, np.expm1, np.arctan, lambda x: np.hypot(x, x + 1)])
def test_functions_that_are_composed_of_others_are_read_back(function, path):
    """cuDNN has no operation of that name."""
    wanted = asked(score_mod=lambda s, *_: function(s))
    problem_file.add(path, [wanted])
    assert store.read_problems(path) == [wanted]
    assert execute(reduced(case_of(wanted, "cpu"))).kind == "passed"


def test_only_what_is_not_the_default_is_written(path):
    """A score function is its expression, also with infinity; contents and names of the caller are not written."""
    problem_file.add(path, [asked(score_mod=lambda s, b, h, q, k: np.where(s > 2.5, -np.inf, 2 * s), max_workspace=4096)])
    (line,) = lines(path)
    assert list(line) == ["q", "k", "v", "out", "settings"]
    assert line["q"] == {
        "name": "q", "dtype": "float16", "shape": [64, 8, 100, 2], "strides": [2, 128, 1024, 102400], "alignment": 16,
    }  # fmt: skip
    settings = line["settings"]
    assert settings.pop("expression")["steps"]
    assert settings == {"max_workspace": 4096}


def test_the_problems_of_the_plan_caches(engine, path):
    """On cuDNN the problems of all threads; every problem once, even if they are saved again."""
    if not engine.on_cudnn:
        pytest.skip("numpy has no plan cache")
    cupy_sdpa.get_plan_cache().clear()
    x, y = (engine.put(np.ones((64, 2, n, 1), np.float16, order="F")) for n in (8, 24))
    for _ in range(2):
        cupy_sdpa.attention(x, x, x)
    called, saved = threading.Event(), threading.Event()

    def other():
        cupy_sdpa.attention(y, y, y, causal=True)
        called.set()
        saved.wait(60)
        cupy_sdpa.get_plan_cache().clear()

    thread = threading.Thread(target=other)
    thread.start()
    called.wait(60)
    store.save_problems(path)
    once = path.read_bytes()
    assert store.save_problems(path) == len(lines(path))
    assert path.read_bytes() == once
    saved.set()
    thread.join()
    sizes = [tuple(line["q"]["shape"]) for line in lines(path)]
    assert {(64, 2, 8, 1), (64, 2, 24, 1)} <= set(sizes)
    assert sizes.count((64, 2, 8, 1)) == 1


def test_the_variable(path, tmp_path):
    """A process on numpy writes what a GPU would plan when it ends; a second one adds nothing, and no call writes."""
    for _ in range(2):
        done = python("-c", PROGRAM, cwd=tmp_path, CUPY_SDPA_TRACE=str(path))
        assert (done.status, done.err) == (0, "")
    found = store.read_problems(path)
    assert len(found) == 4
    assert [problem.backward for problem in found].count(True) == 1
    assert {problem.settings.dropout for problem in found} == {0.0, 0.5}
    assert trace.problems is None  # in this process


def test_a_failure_at_the_end_is_one_line(tmp_path):
    """The program has its results and its exit status."""
    done = python("-c", PROGRAM, cwd=tmp_path, CUPY_SDPA_TRACE=str(tmp_path))
    assert done.status == 0
    assert done.err.count("\n") == 1
    assert "CUPY_SDPA_TRACE is" in done.err
    assert "Is a directory" in done.err


def test_programs_that_run_at_the_same_time(path):
    """Threads add to one file: every problem once, in whole lines."""
    every = [asked((64, 8, n, 1)) for n in range(1, 40)]
    threads = [threading.Thread(target=problem_file.add, args=(path, every[start:])) for start in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(path)) == len(every)
    assert set(store.read_problems(path)) == set(every)


# The file


def test_an_incomplete_line_is_completed(path):
    """The last line of a file that was copied without its end is not joined with the next one."""
    problem_file.add(path, [asked()])
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    problem_file.add(path, [asked(causal=True)])
    assert store.read_problems(path) == [asked(), asked(causal=True)]


#: What is at the path before, and the error.
OTHERS = {
    "pipe": (os.mkfifo, "regular file|No such device"),
    "device": (lambda path: path.symlink_to("/dev/full"), "regular file|No such device"),
    "folder": (Path.mkdir, "directory"),
    "text": (lambda path: path.write_text("notes"), "does not contain problems"),
    "large": (lambda path: path.write_bytes(bytes(problem_file.MAX_BYTES + 1)), "MiB"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_left_alone(kind, path):
    """A pipe is not waited for; a file with other contents, or a large one, is unchanged."""
    make, message = OTHERS[kind]
    make(path)
    before = path.lstat()
    with pytest.raises(OSError, match=message):
        problem_file.add(path, [asked()])
    after = path.lstat()
    assert (after.st_mode, after.st_size, after.st_mtime_ns) == (before.st_mode, before.st_size, before.st_mtime_ns)


def test_a_full_disk_leaves_the_file_as_it_was(path):
    """Whole lines only."""
    problem_file.add(path, [asked()])
    before = path.read_bytes()
    limits, previous = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
        with pytest.raises(OSError, match="large"):
            problem_file.add(path, [asked(causal=True)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert path.read_bytes() == before


CHANGES = {
    "shape": lambda line: line["q"].update(shape=[64, -8, 100, 2]),
    "dtype": lambda line: line["q"].update(dtype="int7"),
    "axes": lambda line: line["q"].update(shape=[64], strides=[2]),
    "name": lambda line: line.update(quality=line["q"]),
    "setting": lambda line: line["settings"].update(hardness=3),
    "step": lambda line: line["settings"]["expression"]["steps"].insert(0, {"mode": "add", "args": [5, 6]}),
    "operation": lambda line: line["settings"]["expression"]["steps"][-1].update(mode="of a later version"),
    "operands": lambda line: line["settings"]["expression"]["steps"][-1].update(args=[0]),
    "band": lambda line: line["settings"].update(band={"right": 1.5}),
    "name of an array": lambda line: line["q"].update(name="k"),
    "root": lambda line: line["settings"]["expression"].update(mask=99),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_are_checked(name, path):
    """Before anything is planned."""
    problem_file.add(path, [asked(mask_mod=lambda b, h, q, k: (q + k) % 3 > 0)])
    line = json.loads(path.read_text())
    CHANGES[name](line)
    path.write_text(json.dumps(line))
    with pytest.raises(ValueError, match="line 1 is not a problem"):
        store.read_problems(path)


# Verification


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n in (1, 13))) for n in range(24)])
def test_saved_problems_are_verified(number):
    """Problems of the self-test for a GPU, with random data on the CPU engine."""
    for problem in problems(draw(12, number, "plan")):
        if not problem.trivial:
            outcome = execute(reduced(case_of(problem, "cpu"), 100_000))
            assert outcome.kind == "passed", outcome


@pytest.mark.parametrize("option", ["score_mod", "mask_mod"])
def test_functions_are_verified(option):
    """Every function of the self-test, as its expression."""
    tables = {"float": "float32", "int": "int32", "bool": "bool", "number": "float32"}
    for name, function in {"score_mod": SCORES, "mask_mod": MASKS}[option].items():
        shapes = {tensor: tensor_shape(axes, 2, 2, 20, 24) for tensor, axes in function.tensors.items()}
        tensors = {tensor: np.ones(shape, tables[function.kind]) for tensor, shape in shapes.items()}
        options = {option: function.call} | ({"tensors": tensors} if tensors else {})
        shapes = (16, 2, 20, 2), (16, 2, 24, 2), (16, 2, 24, 2)
        problem = cupy_sdpa.problem(*shapes, dtype="float16", **options)
        outcome = execute(case_of(problem, "cpu"))
        assert outcome.kind == "passed", (name, outcome)


SAME = {
    "pages": ({"page_table": (8, 3), "causal": "bottom_right"}, ((64, 8, 4, 3), (64, 2, 32, 24))),
    "packed": ({"cu_seqlens_q": (4,), "cu_seqlens_kv": (4,), "max_seqlen_q": 50, "max_seqlen_kv": 50}, ((64, 8, 128),) * 2),
    "masks": (
        {"mask": (50, 1, 8, 1), "bias": (50, 40, 1, 2), "window": (5, 3), "seq_lens_kv": True},
        ((64, 8, 40, 2), (64, 8, 50, 2)),
    ),
    "scores": ({"softcap": 5.0, "sinks": True, "alibi_slopes": True, "scale": -1.0}, ((64, 8, 40, 2), (64, 8, 50, 2))),
}


@pytest.mark.parametrize("name", SAME)
def test_the_case_leads_to_the_same_problem(name):
    """So that check runs the plan of the program; the number of pages and of packed tokens is drawn."""
    options, (q, k) = SAME[name]
    problem = cupy_sdpa.problem(q, k, k, dtype="float16", **options)
    (found,) = problems(case_of(problem, "plan").with_(gpu="h200"))
    assert (found.settings, found.sizes) == (problem.settings, problem.sizes)
    assert name == "packed" or (found.q, found.out) == (problem.q, problem.out)
    for option in ("mask", "bias", "sinks", "alibi_slopes", "seq_lens_kv", "page_table"):
        assert getattr(found, option) == getattr(problem, option)


def test_the_chunks_of_split_keys_are_one_sequence():
    """A problem of split keys has a batch item for each chunk; the case has one for each sequence."""
    options = {"paged": (16, "pages", "random", 3, "mixed", False, False), "causal": "bottom_right"}
    case = Case("plan", "float16", b=2, hq=4, hkv=2, sq=1, skv=384, d=64, dv=64, options=options, gpu="h200")
    split = [problem for problem in problems(case) if problem.settings.split]
    assert split
    for problem in split:
        found = case_of(problem, "plan")
        assert (found.b, found.hq, found.hkv) == (2, 2, 2)


# The commands


@pytest.mark.slow
def test_check_verifies_a_file(path, folder):
    """Problems of numpy arrays, of a GPU, and one that is verified smaller."""
    done = python("-c", PROGRAM, cwd=folder, CUPY_SDPA_TRACE=str(path))
    assert done.status == 0
    x = fp8.quantize(np.ones((64, 2, 16, 1), np.float32, order="F"))  # saved as the problem of 8 bits
    problem_file.add(path, [asked((64, 4, 3000, 2), mask_mod=zoo.dilated(16, 3)), cupy_sdpa.explain(x, x, x).problem])
    assert store.read_problems(path)[-1].fp8
    done = run(f"check --saved {path} --engine cpu --jobs 1")
    assert done.status == 0
    assert f"6 problems of {path}, verified by 6 cases; 1 with smaller sizes" in " ".join(done.out.split())
    assert "0 findings" in done.out


def test_the_benchmark_times_a_file(path, folder):
    """Both passes, lengths and pages, on numpy."""
    pages = (64, 2, 16, 20)
    paged = cupy_sdpa.problem((64, 4, 3, 2), pages, pages, dtype="float16", page_table=(8, 2), causal="bottom_right")
    problem_file.add(path, [asked((64, 2, 40, 2), seq_lens_kv=True, backward=True), paged])
    done = run(f"saved rows.csv --problems {path} --cpu", main=benchmarks)
    assert done.status == 0
    assert [line.split(", problem ")[1] for line in done.lines] == [str(problem) for problem in store.read_problems(path)]
    assert all(", ms " in line for line in done.lines)
    assert len((folder / "rows.csv").read_text().splitlines()) == 3
    path.write_text("3")
    assert "line 1 is not a problem" in run(f"saved --problems {path} --cpu", main=benchmarks).complaint


def test_a_file_that_cannot_be_read(folder):
    """One line."""
    assert "none.jsonl: No such file" in run("check --saved none.jsonl --engine cpu").err


@pytest.mark.slow
@pytest.mark.cudnn
def test_plan_plans_a_file(path, folder):
    """The plans of the problems, and what cannot run with the reason."""
    problem_file.add(path, [asked(), asked(dtype="float32")])
    done = run(f"plan --saved {path} --gpu h200 -o plans -j 1")
    assert done.status == 1
    assert "1 plans, 1 refused" in done.text
    assert "q, k and v are float32" in done.text
