"""Both passes of problems of ``check``, to be called again and again, and how a call ran."""

import copy
import gc
import sys
from pathlib import Path

import numpy as np

import cupy_sdpa
from cupy_sdpa.check.calls import CaseRunner

PACKAGE = str(Path(cupy_sdpa.__file__).parent)
CHECK = str(Path(PACKAGE, "check"))
#: Calls with the same addresses until a CUDA graph is launched: at the third a call is captured, and a call that allocates
#: much memory is counted from the second on.
OFTEN = 5
#: The most functions of the package that a call runs if it launches a CUDA graph. Executing a plan runs about 30, parsing a
#: call hundreds.
REPLAY = 14

#: Sizes and options of problems: each has other copies, memory, and kernels before or after the plan.
CASES = {
    "plain": {"sq": 20, "skv": 24, "hq": 4, "hkv": 2, "options": {"causal": "top_left"}},
    "lengths": {"sq": 40, "skv": 48, "b": 2, "options": {"seq_lens_q": "random", "seq_lens_kv": "some_zero"}},
    "packed": {"sq": 19, "skv": 16, "hq": 4, "hkv": 2, "b": 3, "options": {"packed": ("some_zero", "random", 0, 3, 0, "int32")}},
    "mask": {"sq": 20, "skv": 20, "b": 2, "options": {"mask": ("k11b", "random")}},
    "bias": {"sq": 20, "skv": 20, "hq": 2, "options": {"bias": ("11hb", "float16", "normal"), "return_dbias": True}},
    "sinks": {"sq": 20, "skv": 20, "hq": 2, "options": {"sinks": "normal", "alibi_slopes": "usual", "return_dsinks": True}},
    "functions": {
        "sq": 20, "skv": 20, "hq": 2, "b": 2,
        "options": {"score_mod": ("bias_bk", "float32"), "mask_mod": ("chunks", "float32"), "return_dtensors": True},
    },
    "parts": {"sq": 20, "skv": 20, "backward": False, "options": {"stats": "max_sumexp"}},
    "large copies": {
        "d": 64, "sq": 40, "skv": 48, "hq": 4, "hkv": 4, "b": 2,
        "options": {"seq_lens_q": "random", "seq_lens_kv": "random", "dropout": (0.25, "array", 3, 1)},
    },
}  # fmt: skip


class Calls:
    """Both passes of a case, on memory of their own.

    Args:
        engine: the engine.
        name: one of :data:`CASES`.
        preallocated: whether the results are the caller's arrays. Default True.
        options: further options of the case.
    """

    def __init__(self, engine, name, *, preallocated=True, **options):
        values = {"d": 16, "dv": 16, "backward": True, **CASES[name]}
        values["dv"] = values["d"]
        options = {**values.pop("options"), **options} | ({"preallocated": True} if preallocated else {})
        self.engine, self.runner = engine, CaseRunner(engine.case(**values, options=options))
        self.memory = self.runner.allocate()
        self.load(0)

    def load(self, index):
        """Copy one of two sets of values into the inputs, and NaN into the results."""
        self.index = index
        self.runner.load(self.memory, index)

    def elsewhere(self):
        """The same calls on other memory, with the same values."""
        other = copy.copy(self)
        other.memory = self.runner.allocate()
        other.load(self.index)
        return other

    def launch(self):
        """The results by name, without synchronization."""
        results = self.runner.call(self.memory, self.index)
        return results | {name: self.memory.views[name] for name in results if name in self.memory.views}

    def run(self):
        """The contents of the results, after NaN was written to them."""
        self.load(self.index)
        return self.host(self.launch())

    def host(self, results):
        """Results as numpy arrays."""
        return {name: self.engine.get(x) for name, x in results.items()}


def equal(got, want):
    """Assert that results agree and contain no NaN. Their bits are equal, but for dq and sums, which are added in any order."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert not np.isnan(x).any(), f"{name} contains NaN"
        tolerance = 2e-2 if name in ("dq", "dbias", "dsinks") else 0
        np.testing.assert_allclose(x, want[name], atol=tolerance, rtol=tolerance, err_msg=name)


def functions_run(call, *arguments, **options):
    """The number of the package's Python functions that a call runs."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and name.startswith(PACKAGE) and not name.startswith(CHECK)

    before = sys.getprofile()
    gc.disable()  # the finalizers of other tests' objects would be counted
    sys.setprofile(note)
    try:
        call(*arguments, **options)
    finally:
        sys.setprofile(before)
        gc.enable()
    assert count, "the profiler saw no function, not even the public one"
    return count
