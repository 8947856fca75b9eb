"""The types of public signatures, as a type checker sees them. mypy runs on a snippet; it is skipped where mypy is not installed."""

import re

import pytest
from command_line import ROOT

pytestmark = pytest.mark.slow

F16, F32, F64 = (rf"numpy\.ndarray\[[^\"]*\b{name}\b[^\"]*\]" for name in ("_16Bit", "_32Bit", "float64"))


def results(*types):
    """The pattern of a tuple of types."""
    return rf'"tuple\[{", ".join(types)}\]"'


#: Code, and the type that mypy reveals or the error that it reports on each line.
LINES = (
    ("reveal_type(cupy_sdpa.attention(q, k, v))", r'"numpy\.ndarray\[.*_32Bit.*\]"'),
    ("reveal_type(cupy_sdpa.attention(q, k, v, causal=True, out=out))", r'"numpy\.ndarray\[.*_32Bit.*\]"'),
    ("reveal_type(cupy_sdpa.attention(q, k, v, return_stats=True))", results(F32, "Any")),
    ("reveal_type(cupy_sdpa.attention(half, half, half, return_stats=True))", results(F16, "Any")),
    ("reveal_type(cupy_sdpa.attention(mapped, mapped, mapped, return_stats=True))", results(r"numpy\.memmap\[.*\]", "Any")),
    ("reveal_type(cupy_sdpa.attention(fp8, fp8, fp8, return_stats=True))", results(r"cupy_sdpa\.fp8\.array\.Fp8Array", "Any")),
    ("reveal_type(cupy_sdpa.attention(half, half, half, stats=double))", results(F16, F64)),
    ("reveal_type(cupy_sdpa.attention(q, k, v, return_stats='max_sumexp'))", results(F32, "Any", "Any", "Any")),
    ("reveal_type(cupy_sdpa.attention(q, k, v, return_stats=flag))", '"Any"'),
    ("reveal_type(cupy_sdpa.attention(untyped, untyped, untyped, return_stats=True))", r'"tuple\[Any, Any\]"'),
    ("reveal_type(cupy_sdpa.attention_backward(q, q, k, v, q, stats))", r'"tuple\[(numpy\.ndarray\[.*_32Bit.*\](, )?){3}\]"'),
    ("reveal_type(cupy_sdpa.attention_backward(q, q, k, v, q, stats, bias=q, return_dbias=True))", r'"tuple\[Any, \.\.\.\]"'),
    ("reveal_type(cupy_sdpa.attention_vjp(q, k, v)[0])", f'"{F32}"'),
    ("reveal_type(cupy_sdpa.attention_vjp(q, k, v, causal=True)[1](q))", results(F32, F32, F32)),
    ("reveal_type(cupy_sdpa.attention_vjp(untyped, untyped, untyped)[1](untyped))", results("Any", "Any", "Any")),
    ("reveal_type(cupy_sdpa.attention_vjp(q, k, v, bias=q, return_dbias=True)[1](q))", r'"tuple\[Any, \.\.\.\]"'),
    ("reveal_type(cupy_sdpa.attention_vjp(q, k, v, tensors={'x': q}, return_dtensors='x')[1](q))", r'"tuple\[Any, \.\.\.\]"'),
    ("reveal_type(cupy_sdpa.fp8.attention(fp8, fp8, fp8, causal=True))", '"cupy_sdpa.fp8.array.Fp8Array"'),
    ("reveal_type(cupy_sdpa.fp8.attention(fp8, fp8, fp8, return_stats=True))", '"Any"'),
    ("reveal_type(cupy_sdpa.prepare(q, k, v)(q, k, v))", r'"numpy\.ndarray\[.*_32Bit.*\]"'),
    ("reveal_type(cupy_sdpa.prepare(half, half, half, return_stats=True)(q, k, v))", results(F16, "Any")),
    (
        "reveal_type(cupy_sdpa.problem((64, 8, 10, 1), (64, 8, 10, 1), (64, 8, 10, 1), dtype='f2'))",
        '"cupy_sdpa.core.problem.problem.Problem"',
    ),
    ("reveal_type(cupy_sdpa.zoo)", "Module"),
    (
        "cupy_sdpa.attention(q, k, v, causal='bottom_right', window=(3, None), tensors={'x': q}, seed=1, bucket='power_of_two')",
        None,
    ),
    ("cupy_sdpa.explain(q, k, v, causal=True, gpu='H200')", None),
    ("reveal_type(cupy_sdpa.supported(q, k, v, causal=True, gpu='H200'))", "bool"),
    ("cupy_sdpa.attention(q, k, v, window=[3, 0], causal=None, compute_dtype='bfloat16')", None),
    ("cupy_sdpa.attention(q, k, v, window=(3, 0, 'bottom_right'))", None),
    ("cupy_sdpa.attention(q, k, v, compute_dtype='float15')", "call-overload"),
    ("cupy_sdpa.attention(q, k, v, q)", "call-overload"),
    ("cupy_sdpa.attention(query=q, key=k, value=v)", "call-overload"),
    ("cupy_sdpa.block_mask(cupy_sdpa.zoo.causal, None, None, 8, 8)", "call-arg|arg-type"),
    ("cupy_sdpa.attention(q, k, v, causal='botom_right')", "call-overload"),
    ("cupy_sdpa.attention(q, k, v, is_causal=True)", "call-overload"),
    ("cupy_sdpa.attention(q, k, v, return_stats='max')", "call-overload"),
    ("cupy_sdpa.attention(q, k, [1.0])", "call-overload"),
    ("cupy_sdpa.attention_vjp(q, k, v, causal='botom_right')", "call-overload"),
    ("cupy_sdpa.attention_vjp(q, k, v, q)", "call-overload"),
    ("cupy_sdpa.attention_backward(q, q, k, v)", "call-overload"),
    ("cupy_sdpa.fp8.attention(fp8, fp8)", "call-overload"),
    ("cupy_sdpa.explain(query=q, key=k, value=v)", "call-arg"),
    ("dq, dk = cupy_sdpa.attention_vjp(q, k, v)[1](q)", "misc"),
    ("cupy_sdpa.prepare(q, k, v, causal='botom_right')", "call-overload"),
    ("cupy_sdpa.explain(q, k, v, scale='1')", "arg-type"),
    ("cupy_sdpa.supported(q, k, v, scale='1')", "arg-type"),
    ("a, b, c = cupy_sdpa.attention(q, k, v, return_stats=True)", "misc"),
    ("cupy_sdpa.attention(q, k, v) + 'x'", "operator"),
)
HEAD = """\
from typing import Any

import numpy as np
import numpy.typing as npt

import cupy_sdpa
from cupy_sdpa.fp8 import Fp8Array

Array = npt.NDArray[np.float32]
Mapped = np.memmap[Any, np.dtype[np.float32]]


def snippet(
    q: Array, k: Array, v: Array, half: npt.NDArray[np.float16], double: npt.NDArray[np.float64], mapped: Mapped, fp8: Fp8Array,
    flag: bool, untyped: Any
) -> None:
    out, stats = cupy_sdpa.attention(q, k, v, return_stats=True)
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """What mypy reports on each line of the snippet."""
    api = pytest.importorskip("mypy.api")
    path = tmp_path_factory.mktemp("typing") / "snippet.py"
    path.write_text(HEAD + "".join(f"    {code}\n" for code, _ in LINES), encoding="utf-8")
    config = path.with_name("mypy.ini")
    config.write_text(f"[mypy]\nstrict = True\nmypy_path = {ROOT}\nignore_missing_imports = True\n")
    cache = ROOT / ".mypy_cache" / "snippets"
    reported, failure, _ = api.run(["--config-file", str(config), "--cache-dir", str(cache), str(path)])
    assert not failure
    lines = {}
    for number, message in re.findall(r"snippet\.py:(\d+): (.*)", reported):
        lines.setdefault(int(number) - HEAD.count("\n") - 1, []).append(message)
    assert min(lines) >= 0, reported
    return lines


@pytest.mark.parametrize("index", range(len(LINES)), ids=[code for code, _ in LINES])
def test_mypy_knows_the_types(index, messages):
    """Results have the types of the options, and invalid options and arrays are errors."""
    _, expected = LINES[index]
    got = "\n".join(messages.get(index, []))
    if expected is None:
        assert not got
    else:
        assert re.search(expected, got), got or "no message"
