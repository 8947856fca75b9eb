"""explain() with shapes: answered by the table and by the real cuDNN for a described GPU, and printed."""

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from planner import child_environment

import cupy_sdpa
from cupy_sdpa import explain, store

Q, KV = (128, 32, 512, 1), (128, 8, 512, 1)
SINKS = np.zeros(2, np.float32)


def asked(q=Q, k=KV, v=KV, **options):
    """The problem of shapes."""
    return cupy_sdpa.problem(q, k, v, **{"dtype": "bfloat16", **options})


def on_cpu(problem):
    """The problem that the CPU engine runs: it has no padded form."""
    return replace(problem, settings=problem.settings._replace(padded=False))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"return_stats": True}, {"scale": -1.0}, {"max_workspace": 10}, {"bucket": 128}, {"backward": True},
     {"backward": True, "deterministic": True}, {"backward": True, "bucket": 128}],
    ids=str,
)  # fmt: skip
def test_shapes_pose_the_problem_of_arrays(options):
    """Shapes give the problem of arrays with these shapes, and so the key of the same plan."""
    q, k, v = (np.zeros(shape, np.float32, order="F") for shape in (Q, KV, KV))
    assert on_cpu(asked(dtype="float32", **options)) == explain(q, k, v, **options).problem
    assert on_cpu(asked(q, k, v, dtype=None, **options)) == explain(q, k, v, **options).problem


REFUSED = {
    "decode_b200": (asked((128, 32, 1, 1)), "B200", "9.19", "decode-blackwell", "with cuDNN 9.24.1, or on Ampere, Ada, Hopper"),
    "head_dim_12": (asked((12, 8, 64, 1), (12, 8, 64, 1), (12, 8, 64, 1)), "H200", "9.28", "pad axis 0 with 4 zeros", ""),
    "float32": (asked(dtype="float32"), "H200", "9.28", "q.astype", ""),
    "gradients_256": (
        asked((256, 8, 64, 1), (256, 8, 64, 1), (256, 8, 64, 1), backward=True), "B200", "9.19", "head dims 256 and 256",
        "with cuDNN 9.23.0, or on Hopper",
    ),
    "old_cudnn": (asked(), "H200", "9.10", "cuDNN is 9.10.0; 9.19.0", "with cuDNN 9.19.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_where_the_rule_does_not_apply(name):
    """The rule with its values, and the versions of cuDNN and GPUs without it, which are correct."""
    problem, gpu, version, words, lift = REFUSED[name]
    report = explain(problem, gpu=gpu, cudnn=version)
    assert not report
    text = str(report)
    assert words in text or words in report.reasons[0] or words == "decode-blackwell"
    assert lift in text
    assert f"cannot run on cuDNN (NVIDIA {gpu}" in text
    if found := re.search(r"with cuDNN (\d+\.\d+\.\d+), or|with cuDNN (\d+\.\d+\.\d+)$", report.reasons[0]):
        lifted = explain(problem, gpu=gpu, cudnn=next(filter(None, found.groups())))
        assert not any(reason.startswith(report.reasons[0][:30]) for reason in lifted.reasons)


def test_another_version_is_answered_by_the_table():
    """The report states that the problem was not tried."""
    report = explain(asked(), gpu="H200", cudnn="9.20.5")
    assert report
    assert report.plan is None
    assert report.workspace is None
    assert "cuDNN 9.20.5; from the support table alone, not planned" in str(report)


def read(html):
    """The text of well-formed HTML."""
    return "".join(ElementTree.fromstring(html).itertext())


def test_reports_show_in_notebooks():
    """For accepted, refused and numpy problems the HTML is well-formed, escaped, and has the content of the text."""
    x = np.ones((8, 1, 4, 1), np.float32, order="F")
    assert "runs on the CPU" in read(explain(x, x, x)._repr_html_())
    refused = explain(*REFUSED["decode_b200"][:1], gpu="B200", cudnn="9.19")
    assert "It would run with cuDNN 9.24.1" in read(refused._repr_html_())
    odd = replace(refused, reasons=("<b>a & b</b>",))
    assert "<b>a & b</b>" in read(odd._repr_html_())


def test_reports_are_values():
    """A report can be pickled."""
    report = explain(asked(), gpu="H200", cudnn="9.20.5")
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A disk cache folder for explain()."""
    folder = tmp_path_factory.mktemp("kept") / "plans"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPY_SDPA_CACHE_DIR", str(folder))
        yield folder


@pytest.mark.cudnn
def test_a_problem_is_planned_for_a_described_gpu(kept):
    """The real cuDNN plans; the plan is stored, and loaded by the next call; the report is complete."""
    first = explain(asked(causal=True), gpu="H200")
    assert first
    assert not first.plan.loaded
    assert first.plan.engine == 2
    assert "KERNEL_CFG" in dict(first.plan.knobs)
    again = explain(asked(causal=True), gpu="h200")
    assert again.plan.loaded
    assert (again.plan.engine, again.plan.knobs, again.plan.workspace, again.plan.notes) == (
        first.plan.engine, first.plan.knobs, first.plan.workspace, first.plan.notes,
    )  # fmt: skip
    for words in (
        "NVIDIA H200, compute capability 9.0",
        "knobs",
        "KERNEL_CFG=",
        "tensor_core",
        "workspace",
        "built in",
        "S = Q Kᵀ",
    ):
        assert words in str(first)
        assert words in read(first._repr_html_())
    assert "loaded in" in str(again)


@pytest.mark.cudnn
@pytest.mark.slow
def test_arrays_are_explained_for_another_gpu_too(kept):
    """numpy arrays run on the CPU here; for a GPU their shapes and layouts are used."""
    q = k = v = np.ones((64, 2, 64, 1), np.float16, order="F")
    assert explain(q, k, v).engine == "numpy"
    assert explain(q, k, v, gpu="A100").plan.engine == 1
    assert not explain(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), gpu="A100")


@pytest.mark.cudnn
@pytest.mark.slow
def test_the_messages_of_cudnn_for_every_config():
    """If the table has no reason and cuDNN has no plan, each engine's reason is reported. (The rule for head dims is turned off.)"""
    text = explained((12, 4, 64, 2), CUPY_SDPA_GUARDS_OFF="head-dim")
    assert "cannot run on cuDNN" in text
    assert {"engine 1", "engine 2"} <= set(re.findall(r"engine \d", text))


@pytest.mark.cudnn
@pytest.mark.slow
def test_without_driver_and_compiler(tmp_path):
    """The message names what to install."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a driver here: no stub is needed")
    assert "requires a C compiler" in explained((64, 4, 64, 2), PATH=str(tmp_path))


def explained(shape, **environment):
    """The report on a shape for an H200 in a new process, or the error."""
    code = f"""
import cupy_sdpa
try:
    print(cupy_sdpa.explain(cupy_sdpa.problem({shape}, {shape}, {shape}, dtype="bfloat16"), gpu="H200"))
except cupy_sdpa.CudnnError as error:
    print(error)
"""
    environment = child_environment(**environment)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.cudnn
@pytest.mark.slow
def test_a_store_is_built_once(tmp_path):
    """One problem for two GPUs gives two plans; the second build finds them; refusals are reported; progress is counted."""
    small = {"q": (64, 2, 64, 1), "k": (64, 2, 64, 1), "v": (64, 2, 64, 1)}
    problems = [asked(**small, return_stats=True), asked(k=(128, 8, 0, 1), v=(128, 8, 0, 1))]
    steps = []
    built = store.build(problems, ["h200", "L40S"], tmp_path / "plans", progress=lambda *step: steps.append(step))
    assert [(entry.plan.engine, entry.plan.loaded) for entry in built] == [(2, False), (1, False)]
    assert steps[-1] == (2, 2)
    assert len(store.DiskCache(tmp_path / "plans").paths()) == 2
    again = store.build([*problems, asked(dtype="float32")], "h200", tmp_path / "plans", workers=1)
    assert [bool(entry.plan and entry.plan.loaded) for entry in again] == [True, False]
    assert "float32" in again[1].reason
    with pytest.raises(ValueError, match=r"cudnn is '9\.19\.9', but cuDNN"):
        store.build(problems, "h200", tmp_path, cudnn="9.19.9")


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": SINKS, "return_dsinks": True, "deterministic": True},
        {"sinks": SINKS, "return_stats": "max_sumexp", "backward": True},
        {"alibi_slopes": SINKS},
    ],
    ids=["gradients_of_forward", "rows_of_backward", "slopes"],
)
def test_options_of_the_other_pass_are_ignored(options):
    """In both passes."""
    x = np.zeros((64, 2, 128, 1), np.float16, order="F")
    asked = cupy_sdpa.problem(x, x, x, **options)
    assert asked == cupy_sdpa.explain(x, x, x, **options, gpu="H200", cudnn="9.19").problem


def test_constants_of_functions_are_shown_with_their_values():
    """In the operations of a report, not as n0."""
    x = np.ones((8, 1, 16, 1), np.float32, order="F")
    text = str(explain(x, x, x, score_mod=lambda s, b, h, i, j: s * 0.25 + 3.5 * i, softcap=4.0))
    assert "S₁ · 0.25" in text
    assert "· 3.5" in text
    assert "scalars: scale = 0.353553, softcap = 4\n" in text
    assert not re.search(r"\bn\d\b", text)


#: Calls of arrays (D, Hq, Sq, B) with D 16: the arguments of supported(), which explain() and the call take.
CALLS = {
    "plain": {}, "gradients": {"backward": True}, "derivative": {"jvp": True}, "deterministic gradients": {"backward": True, "deterministic": True},
    "float64": {"dtype": np.float64}, "a head dim of 12": {"d": 12}, "gradients of large heads": {"d": 512, "backward": True},
    "derivative of large heads": {"d": 136, "jvp": True}, "batch invariant": {"batch_invariant": True},
    "engine='cupy'": {"dtype": np.float64, "engine": "cupy"}, "sinks": {"sinks": SINKS, "backward": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_supported_answers_as_the_call(name, engine):
    """True if the call runs; False if it raises an exception, of any type."""
    options = {"d": 16, "dtype": engine.dtype, **CALLS[name]}
    shape, dtype = (options.pop("d"), 2, 24, 2), options.pop("dtype")
    options = {key: engine.put(value) for key, value in options.items() if key != "engine" or engine.on_cudnn}
    q, k, v = (engine.normal(seed, *shape, dtype=dtype) for seed in range(3))
    answer = cupy_sdpa.supported(q, k, v, **options)
    backward, jvp = options.pop("backward", False), options.pop("jvp", False)
    try:
        if jvp:
            cupy_sdpa.attention_jvp(q, k, v, q, k, v, **options)
        elif backward:
            pullback = cupy_sdpa.attention_vjp(q, k, v, **options)[1]
            pullback(q)
        else:
            cupy_sdpa.attention(q, k, v, **options)
        runs = True
    except (TypeError, ValueError, cupy_sdpa.Unsupported):
        runs = False
    assert answer is runs


def test_supported_is_false_where_explain_raises_unsupported(engine):
    """No program describes the derivative of a call with pages."""
    q, pages = engine.normal(0, 16, 2, 4, 1), engine.normal(1, 16, 2, 8, 3)
    options = {"page_table": engine.put(np.array([[0], [1]], np.int32)), "seq_lens_kv": engine.put(np.array([12], np.int32))}
    assert cupy_sdpa.supported(q, pages, pages, **options)
    with pytest.raises(cupy_sdpa.Unsupported, match="page_table"):
        explain(q, pages, pages, jvp=True, **options)
    assert not cupy_sdpa.supported(q, pages, pages, jvp=True, **options)


@pytest.mark.parametrize(("d", "answer"), [(64, "True"), (12, "False")])
def test_without_cudnn_the_support_table_answers(d, answer):
    """The table for the newest version decides for a described GPU, as on the command line."""
    shape = (d, 8, 1000, 2)
    code = f"import cupy_sdpa as c; print(c.supported(c.problem(*[{shape}] * 3, dtype='float16'), gpu='H200'))"
    environment = child_environment(CUPY_SDPA_CUDNN="/missing/libcudnn.so.9")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == answer
