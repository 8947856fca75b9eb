"""The problems of a program in a file: what is written, and that planning, the self-test and timing make them again."""

import errno
import json
import os
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from command_line import complaint

import cupy_sdpa
from cupy_sdpa import attention, fp8, zoo
from cupy_sdpa.__main__ import main
from cupy_sdpa.check.cases.draw import draw
from cupy_sdpa.check.cases.functions import MASKS, SCORES, compiled
from cupy_sdpa.check.traced.calls import replayed, visible_pairs
from cupy_sdpa.check.traced.convert import case_of, layout_of, reduced
from cupy_sdpa.check.traced.entry import NotReplayableError, read_trace
from cupy_sdpa.check.verify.execute import CaseRunner, execute
from cupy_sdpa.check.verify.planning import problems


def arrays(*shape, count=3, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [np.asfortranarray(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(count)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "problems.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


#: The functions of the self-test, by option.
FUNCTIONS = {"score_mod": SCORES, "mask_mod": MASKS}

# What is written


def test_a_problem_is_written_once(path):
    """Equal calls, calls in other threads, and calls of a later trace of the same file add no line."""
    q, k, v = arrays(8, 2, 5, 1)
    for _ in range(2):
        with cupy_sdpa.trace(path) as trace:
            for _ in range(3):
                attention(q, k, v, causal=True)
                thread = threading.Thread(target=attention, args=(q, k, v))
                thread.start()
                thread.join()
        assert trace.problems == 2
        assert "2 problems" in repr(trace)
    assert [line["options"] for line in lines(path)] == [{"causal": True}, {}]


def test_calls_after_the_block_are_not_written(path):
    q, k, v = arrays(8, 2, 5, 1)
    with pytest.raises(KeyError), cupy_sdpa.trace(path):
        raise KeyError
    attention(q, k, v)
    assert lines(path) == []


def test_shapes_strides_and_dtypes(path):
    """Strides are written unless the array is dense in Fortran order; lengths of 1 may have any stride."""
    q, k, v = arrays(8, 2, 5, 1, dtype=ml_dtypes.bfloat16)
    with cupy_sdpa.trace(path):
        for change in (lambda x: x, np.asfortranarray):
            some = (change(x[:, :, ::2]) for x in (k, v))
            attention(np.ascontiguousarray(q.T).T, *some, bias=np.ones((1, 5, 1, 1), np.float32))
    line, other = lines(path)
    assert other["k"] == {"shape": [8, 2, 3, 1], "dtype": "bfloat16"}
    assert line["q"] == {"shape": [8, 2, 5, 1], "dtype": "bfloat16"}
    assert line["k"] == {"shape": [8, 2, 3, 1], "dtype": "bfloat16", "strides": [2, 16, 64, 160]}
    assert line["options"] == {"bias": {"shape": [1, 5, 1, 1], "dtype": "float32"}}


def test_seeds_are_no_part_of_a_problem(path):
    """Each step of a training has its own seed: the problem is written once."""
    q, k, v = arrays(8, 2, 5, 1)
    with cupy_sdpa.trace(path):
        for seed in range(3):
            attention(q, k, v, dropout_p=0.5, seed=seed)
            attention(q, k, v, dropout_p=0.5, seed=np.array([seed]), offset=seed)
    assert [line["options"] for line in lines(path)] == [
        {"dropout_p": 0.5, "seed": 0}, {"dropout_p": 0.5, "seed": 0, "offset": 0},
    ]  # fmt: skip


LAYOUT_CALLS = {
    "forward": ("attention", {"causal": True}),
    "mask and bias": ("attention", {"mask": np.ones((5, 5), bool), "bias": np.zeros((2, 1, 5, 1), np.float32)}),
    "gradients": ("attention_backward", {"causal": True}),
    "prepared": ("prepared", {"softcap": 2.0}),
    "jvp": ("attention_jvp", {}),
}


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "dhsb"])
@pytest.mark.parametrize("name", LAYOUT_CALLS)
def test_calls_with_a_layout_are_written_in_our_axes(name, layout, path, tmp_path):
    """The line is that of the call on permuted arrays, and can be verified and timed."""
    call, options = LAYOUT_CALLS[name]
    sizes = dict(zip("dhsb", (8, 3, 5, 2), strict=True))
    q, k, v, dout = (x.reshape([sizes[x] for x in layout]) for x in arrays(240, count=4))

    def run(q, k, v, dout, **options):
        if call == "prepared":
            return cupy_sdpa.prepare(q, k, v, **options)(q, k, v)
        if call == "attention_jvp":
            return cupy_sdpa.attention_jvp(q, k, v, dout, **options)
        out, pullback = cupy_sdpa.attention_vjp(q, k, v, **options)
        return pullback(dout) if call == "attention_backward" else out

    own = {name: x.T[(..., *[None] * (4 - x.ndim))] if hasattr(x, "T") else x for name, x in options.items()}
    with cupy_sdpa.trace(path):
        run(q, k, v, dout, layout=layout, **(own if layout == "dhsb" else options))
    with cupy_sdpa.trace(tmp_path / "own.jsonl"):
        run(*(x.transpose([layout.index(axis) for axis in "dhsb"]) for x in (q, k, v, dout)), layout="dhsb", **own)
    found, wanted = lines(path), lines(tmp_path / "own.jsonl")
    for line in (*found, *wanted):  # out and stats are dense in the caller's axes
        line.pop("out", None)
        line.pop("stats", None)
    assert found == wanted
    for entry in read_trace(path):
        assert execute(case_of(entry, "cpu")).kind == "passed"
        replayed(entry, "cpu").run()


def test_packed_calls_with_a_layout_are_written(path):
    """Packed sequences in C order, and queries of pages."""
    q, k, v = (x.reshape(12, 2, 8) for x in arrays(192))
    starts = np.array([0, 5, 12], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 7, "max_seqlen_kv": 7}
    with cupy_sdpa.trace(path):
        attention(q, k, v, layout="thd", **packed)
        attention(q.reshape(3, 4, 2, 8), *(x.reshape(3, 4, 2, 8) for x in (k, v)), layout="bshd",
                  page_table=np.array([[0, 1], [1, 2], [2, 0]], np.int32), seq_lens_kv=np.array([5, 8, 1], np.int32))  # fmt: skip
    one, other = read_trace(path)
    assert one.arrays["q"]["shape"] == [8, 2, 12]
    assert other.options["page_table"]["shape"] == [2, 3]
    for entry in (one, other):
        assert execute(case_of(entry, "cpu")).kind == "passed"


REFUSED = {
    "packed without a maximum": (ValueError, {"cu_seqlens_q": np.array([0, 5], np.int32), "cu_seqlens_kv": np.array([0, 5], np.int32)}),
    "an option that does not exist": (TypeError, {"causl": True}),
    "a mask of another shape": (ValueError, {"mask": np.ones((3, 5, 1, 1), bool)}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls_are_not_written(name, path):
    """A call that raises is not part of the program's problems; the next one is written."""
    kind, options = REFUSED[name]
    q, k, v = arrays(8, 2, 5, 1)
    out, stats = attention(q, k, v, return_stats=True)
    prepared = cupy_sdpa.prepare(q, k, v)
    with cupy_sdpa.trace(path):
        for call in (
            lambda: attention(q, k, v, **options),
            lambda: cupy_sdpa.attention_backward(q, q, k, v, out, stats, **options),
            lambda: cupy_sdpa.attention_jvp(q, k, v, q, **options),
            lambda: prepared(q, k, v, **options),
        ):
            with pytest.raises(kind):
                call()
        assert lines(path) == []
        attention(q, k, v)
    assert len(lines(path)) == 1


def test_every_call_is_written(path):
    """Both passes, derivatives and prepared calls."""
    q, k, v = arrays(8, 2, 5, 1)
    with cupy_sdpa.trace(path):
        _, pullback = cupy_sdpa.attention_vjp(q, k, v)
        pullback(q, dq=np.empty_like(q))
        cupy_sdpa.attention_jvp(q, k, v, None, k, None, return_stats=True)
        prepared = cupy_sdpa.prepare(q, k, v, softcap=2.0)
        assert len(lines(path)) == 3, "preparing is not a call"
        prepared(q, k, v)
    found = [(line["call"], [name for name in line if line[name] and name not in ("call", "options")]) for line in lines(path)]
    assert found == [
        ("attention", ["q", "k", "v"]), ("attention_backward", ["dout", "q", "k", "v", "out", "stats", "dq"]),
        ("attention_jvp", ["q", "k", "v", "dk"]), ("attention", ["q", "k", "v"]),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_environment_variable(tmp_path, path):
    """CUPY_SDPA_TRACE writes the problems of a process; a file that cannot be written is an error."""
    code = "import numpy as np, cupy_sdpa\nx = np.ones((8, 2, 5, 1), order='F')\ncupy_sdpa.attention(x, x, x)"

    def run(where):
        environment = {"CUPY_SDPA_TRACE": str(where), "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert run(path).returncode == run(path).returncode == 0
    assert len(lines(path)) == 1
    assert f"CUPY_SDPA_TRACE is '{tmp_path}', and problems cannot be written there" in run(tmp_path).stderr


def _pipe(path):
    os.mkfifo(path)


def _sparse(path):
    with open(path, "wb") as file:
        file.truncate(3 << 30)


#: What CUPY_SDPA_TRACE must not be: how it is made, and the reason.
NO_TRACES = {
    "a pipe": (_pipe, "it is not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/full"), "it is not a regular file"),
    "a large file": (_sparse, "it has 3072 MiB, and a trace has at most 64 MiB"),
    "a program": (lambda path: path.write_text("import cupy\n"), "it has other contents than a trace"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe"), "it has other contents than a trace"),
}


@pytest.mark.parametrize("name", NO_TRACES)
def test_files_that_problems_are_not_appended_to(name, path):
    """They are refused at once and unchanged; nothing waits for a pipe or reads a large file."""
    make, reason = NO_TRACES[name]
    make(path)
    before = os.lstat(path).st_size
    with pytest.raises(OSError, match=reason), cupy_sdpa.trace(path):
        pass
    assert os.lstat(path).st_size == before
    attention(*arrays(8, 2, 5, 1))  # no trace is open
    assert os.lstat(path).st_size == before


def test_a_file_without_a_final_newline(path):
    """The next problem begins a new line."""
    q, k, v = arrays(8, 2, 5, 1)
    with cupy_sdpa.trace(path):
        attention(q, k, v)
    path.write_bytes(path.read_bytes().rstrip())
    with cupy_sdpa.trace(path) as problems:
        attention(q, k, v)
        attention(q, k, v, causal=True)
    assert problems.problems == 2
    assert [line["options"] for line in lines(path)] == [{}, {"causal": True}]


@pytest.fixture
def system(monkeypatch):
    """A system whose ``os.write`` can be replaced: ``system.write``."""
    given = SimpleNamespace(real=os.write, write=os.write)
    monkeypatch.setattr(os, "write", lambda file, text: given.write(file, text))
    return given


def test_short_writes_are_completed(path, system):
    """Every line is whole if the system writes a few bytes at a time."""
    system.write = lambda file, text: system.real(file, text[:7])
    with cupy_sdpa.trace(path):
        attention(*arrays(8, 2, 5, 1))
    assert len(lines(path)) == 1


@pytest.mark.parametrize("as_error", [False, True], ids=["a warning", "warnings are errors"])
def test_a_failed_write_is_no_error_of_the_call(as_error, path, system, capsys):
    """The call returns its results, one warning names the reason, and the file has whole lines."""
    q, k, v = arrays(8, 2, 5, 1)
    wanted = [attention(q, k, v), attention(q, k, v, causal=True)]

    def full(file, text):
        if len(text) < 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return system.real(file, text[:-50])

    with cupy_sdpa.trace(path):
        attention(q, k, v, softcap=2.0)
        system.write = full
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("error" if as_error else "always")
            got = [attention(q, k, v), attention(q, k, v, causal=True)]
        system.write = system.real
    message = capsys.readouterr().err if as_error else "".join(str(warning.message) for warning in found)
    assert message.count(f"no more problems are written to {path}: No space left on device") == 1
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [line["options"] for line in lines(path)] == [{"softcap": 2.0}]


# Functions


@pytest.mark.parametrize(("option", "name"), [(x, name) for x, names in FUNCTIONS.items() for name in names])
def test_functions_as_source(option, name, path):
    """The recorded source computes the same as the function."""
    function, sizes = FUNCTIONS[option][name], dict(zip("bhqk", (3, 4, 5, 6), strict=True))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.random([int(axis) if axis.isdigit() else sizes[axis] for axis in axes])
        for name, axes in function.tensors.items()
    }
    if function.kind in ("int", "bool"):
        tensors = {name: (3 * x).astype(function.kind) for name, x in tensors.items()}
    q, k = (np.ones((2, 4, sizes[axis], 3), order="F") for axis in "qk")
    with cupy_sdpa.trace(path):
        attention(q, k, k, **{option: function.call}, **({"tensors": tensors} if tensors else {}))
    again, reads = compiled(option, lines(path)[0]["options"][option]["source"])
    assert reads.keys() == tensors.keys()
    score = [np.linspace(-3, 3, 7)[:, None, None, None]] if option == "score_mod" else []
    for indices in (np.array(x) for x in np.ndindex(*sizes.values())):
        given = {name: x if x.ndim else x[()] for name, x in tensors.items()}
        np.testing.assert_array_equal(again(*score, *indices, **tensors), function.call(*score, *indices, **given))


@pytest.mark.parametrize(
    "line",
    [
        "import os", "t0 = np.load(score)", "t0 = np.tanh(score, out=b)", "t0 = __import__(b)", "t0 = np.tanh('x')",
        "t0 = np.tanh(score); import os", "return score.__class__", "t0 = np.add.reduce(score)", "t0 = special.os(b)",
        "t0 = x[[]]", "t0 = np.lib(score)", "return (1)",
    ],
)  # fmt: skip
def test_other_code_is_not_executed(line):
    with pytest.raises(ValueError, match="is not a line of a recorded function"):
        compiled("score_mod", [line, "return score"])


# Reading


@pytest.mark.parametrize(
    "number", [*range(0, 300, 24), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 300, 16))]
)
def test_random_problems_are_made_again(number, path):
    """The problems of a trace are those of the calls, and its cases have the same sizes, layouts and options."""
    case = draw(11, number, "cpu")
    if {"block_mask", "fp8", "parallel", "shared_prefix", "merge", "cache"} & case.options.keys():  # not recorded as one call
        return
    with cupy_sdpa.trace(path):
        outcome = execute(case)
    assert outcome.kind == "passed"
    entries = read_trace(path)
    backward = [entry for entry in entries if entry.call == "attention_backward"]
    entry = (backward or entries)[0]
    runner = CaseRunner(case)
    memory = runner.allocate()
    runner.load(memory, 0)
    assert entry.problems() in [tuple(problems(case)), *((problem,) for problem in problems(case))]
    again = case_of(entry, "cpu")
    ignored = {"preallocated", "jvp", *({"stats"} if case.backward else {})}
    assert {*again.options} - ignored == {*case.options} - ignored
    for name in ("dtype", "d", "dv", "hq", "hkv", "sq", "skv", "b", "backward"):
        assert getattr(again, name) == getattr(case, name), name
    assert execute(reduced(again)).kind in ("passed", "refused")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no problem"),
        ("nonsense", "line 1 is not a problem"),
        ('{"call": "eval", "options": {}}', "call is 'eval'"),
        ('{"call": "attention", "q": {"shape": [1]}, "options": {}}', "line 1 is not a problem"),
        ("[" * 100_000, "line 1 is not a problem"),
    ],
)
def test_files_that_are_no_trace(path, text, message, capsys):
    """Every command refuses the file with one line, which names the line of the file."""
    path.write_text(text, encoding="utf-8")
    for words in (["bench"], ["check", "--engine", "cpu"], ["plan", "--gpu", "h200", "-o", "plans"]):
        assert main([*words, "--trace", str(path)]) == 2
        captured = capsys.readouterr()
        assert message in " ".join(captured.err.split())
    assert main(["bench", "--trace", str(path) + "x"]) == 2
    assert complaint(capsys).endswith("No such file or directory")


def test_a_problem_with_invalid_arguments_is_no_finding(path, capsys):
    """``check`` refuses a line whose arrays do not match, with its number, before anything runs."""
    with cupy_sdpa.trace(path):
        attention(*arrays(8, 2, 5, 1))
    (line,) = lines(path)
    line["k"]["shape"] = [16, 2, 5, 1]
    path.write_text(f"{path.read_text()}{json.dumps(line)}\n")
    assert main(["check", "--engine", "cpu", "--trace", str(path)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "line 2 is not a problem: " in message
    assert "head_dim" in message


def test_a_trace_that_is_a_pipe_is_refused(path, capsys):
    """A command does not wait for its writer."""
    os.mkfifo(path)
    assert main(["check", "--engine", "cpu", "--trace", str(path)]) == 2
    assert "it is not a regular file" in capsys.readouterr().err


def test_what_was_not_recorded_is_named(path):
    """A block mask and functions that cannot be written are marked; the commands name the reason."""
    q, k, v = arrays(8, 2, 5, 1)
    mask = cupy_sdpa.block_mask(zoo.causal, 5, 5)
    with cupy_sdpa.trace(path):
        attention(q, k, v, block_mask=mask)
        attention(q, k, v, bucket=lambda n: n + 3)
        cupy_sdpa.attention_jvp(q, k, v, widened=cupy_sdpa.widen(q, k, v, q, None, None))
        attention(q, k, v, score_mod=lambda score, b, h, i, j, np: score + np[j], tensors={"np": np.ones(5)})
    for entry, reason in zip(read_trace(path), ("block_mask", "bucket", "widened", "tensors has the name 'np'"), strict=True):
        for make in (entry.problems, lambda entry=entry: case_of(entry, "cpu")):
            with pytest.raises(NotReplayableError, match=reason):
                make()


@pytest.mark.parametrize("order", ["dhsb", "dshb", "dbsh", "shdb"])
@pytest.mark.parametrize("slices", [(), (1,), (2,), (1, 3)])
def test_layouts(order, slices, path):
    """The layout of an array is that from which it was made."""
    shape = {"d": 8, "h": 3, "s": 5, "b": 2}
    parent = np.zeros([shape[axis] + (2 if place in slices else 0) for place, axis in enumerate(order)], order="F")
    view = parent[tuple(slice(1, 1 + shape[axis]) if place in slices else slice(None) for place, axis in enumerate(order))]
    array = view.transpose([order.index(axis) for axis in "dhsb"])
    with cupy_sdpa.trace(path):
        attention(array, array, array, layout="dhsb")
    entry = lines(path)[0]["q"]
    visible = [place for place in slices if place != 3]  # a slice of the slowest axis has the strides of a dense array
    if order == "dhsb" and not visible:
        assert layout_of(entry) is None
    else:
        assert layout_of(entry) == order + "".join(f"+{order[place]}" for place in visible)


def test_large_problems_are_verified_at_smaller_sizes():
    """Heads and batch entries go first; lengths of a page stay multiples of it."""
    case = draw(1, 0, "cpu").with_(options={}, layouts={}, d=64, dv=64, hq=32, hkv=8, b=4, sq=4096, skv=4096)
    small = reduced(case)
    assert (small.b, small.hkv, small.hq, small.d) == (1, 1, 4, 64)
    assert small.b * small.hq * small.sq * small.skv <= 4_000_000
    assert reduced(small) == small


@pytest.mark.parametrize("options", [{}, {"causal": "top_left"}, {"causal": "bottom_right"}, {"window": (1, 2)},
                                     {"window": (None, 0, "bottom_right")}, {"window": (3, None), "causal": "top_left"}])  # fmt: skip
@pytest.mark.parametrize(("sq", "skv"), [(1, 5), (4, 4), (7, 3), (3, 9)])
def test_the_number_of_pairs(options, sq, skv):
    case = draw(1, 0, "cpu").with_(options=options, sq=sq, skv=skv)
    left, right, *corner = options.get("window", (None, None))
    shift = skv - sq if "bottom_right" in (options.get("causal"), *corner) else 0
    pairs = [
        (i, j) for i in range(sq) for j in range(skv)
        if (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)
        and ("causal" not in options or j <= i + shift)
    ]  # fmt: skip
    assert visible_pairs(case) == len(pairs)


# Commands


@pytest.fixture
def traced(path):
    """A trace of three problems, of which one is not replayable."""
    q, k, v = arrays(16, 2, 20, 1, dtype=np.float16)
    with cupy_sdpa.trace(path):
        attention(q, k, v, causal=True, score_mod=zoo.softcap(5.0))
        _, pullback = cupy_sdpa.attention_vjp(q, k, v, causal=True)
        pullback(q)
        attention(q, k, v, bucket=lambda n: n + 3)
    return path


def test_bench_times_every_problem(traced, capsys):
    """One row per problem; the exit status is 1 because one of them is not timed."""
    assert main(["bench", "--trace", str(traced), "--engine", "cpu", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["problems"]
    assert [row["time_ms"] is None for row in rows] == [False, False, False, True]
    assert all(row["time_ms"] > 0 and row["tflops"] > 0 for row in rows[:3])
    assert "bucket" in rows[3]["reason"]
    entry = read_trace(traced)[2]
    assert replayed(entry, "cpu").operations == 2.5 * 2 * 2 * 210 * 32


def test_check_verifies_every_problem(traced, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["check", "--trace", str(traced), "--engine", "cpu", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "skipped   line 4: bucket" in out
    assert json.loads(report.read_text(encoding="utf-8"))["problems"] == 3


@pytest.mark.slow
@pytest.mark.cudnn
def test_plan_plans_every_problem(traced, tmp_path, capsys):
    assert main(["plan", "--trace", str(traced), "--gpu", "h200", "-o", str(tmp_path / "plans"), "--json", "-j", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["planned"], facts["refused"], [skipped["line"] for skipped in facts["skipped"]]) == (3, 0, [4])


# FP8


@pytest.mark.parametrize("name", ["causal", "pages", "lengths", "converted queries"])
def test_fp8(name, path):
    """Problems of FP8 arrays are written, and planned, verified and timed like others."""
    q, k, v = (
        fp8.quantize(x, rotate=n < 2) for n, x in enumerate((*arrays(16, 4, 3, 2, count=1), *arrays(16, 2, 16, 2, count=2)))
    )
    options = {"causal": "bottom_right"}
    if name == "pages":
        options |= {"page_table": np.array([[0, 1]], np.int32), "seq_lens_kv": np.array([16, 5], np.int32)}
    if name == "lengths":
        options |= {"seq_lens_q": np.array([3, 1], np.int32), "seq_lens_kv": np.array([16, 5], np.int32)}
    if name == "converted queries":
        q = q.dequantize("bfloat16")
    with cupy_sdpa.trace(path) as trace:
        for _ in range(2):
            attention(q, k, v, return_stats=True, **options)
    assert trace.problems == 1
    (entry,) = read_trace(path)
    assert {array["dtype"] for array in (entry.arrays[x] for x in "qkv")} == {"float8_e4m3fn"}
    (problem,) = entry.problems()
    assert problem.fp8
    case = case_of(entry, "cpu")
    assert (case.options["fp8"], case.d, case.sq, case.skv, bool(case.paged)) == ("float8_e4m3fn", 16, 3, 16, name == "pages")
    assert execute(case).kind == "passed"
    out, *_ = replayed(entry, "cpu").run()
    assert isinstance(out, fp8.Fp8Array)
