"""The engines of the tests. A test with the fixture ``engine`` runs on numpy, on the fake CuPy and, with the marker gpu, on a GPU.

With the decorator :data:`every_engine` it also runs with ``engine="cupy"`` on the fake CuPy.
"""

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import pytest

from cupy_sdpa import get_plan_cache
from cupy_sdpa.check import Case
from cupy_sdpa.check.case import Outcome
from cupy_sdpa.check.combine import LEFT_OUT, ONLY_WITH
from cupy_sdpa.check.draw import OPTIONS, draw_options
from cupy_sdpa.check.execute import execute
from cupy_sdpa.check.sampler import LIMITS, Limits, Sampler
from cupy_sdpa.core.boundary import arguments, user_functions
from cupy_sdpa.core.cudnn.library import library
from cupy_sdpa.core.problem import slices
from cupy_sdpa.core.problem.problem import Problem
from cupy_sdpa.core.programs.executor import ReadCall

#: The largest sizes of a case of ``check`` on each engine. The fake CuPy computes with Python and compiled kernels on the host.
SIZES = {"numpy": LIMITS["cpu"], "fake": Limits(20_000, 60_000), "interpreted": Limits(20_000, 60_000), "cupy": LIMITS["gpu"]}
#: The names of the engines in cases of ``check``.
CASES = {"numpy": "cpu", "fake": "gpu", "interpreted": "cupy", "cupy": "gpu"}
#: Runs a test on every engine; ``engine="cupy"``, which compiles most, with one in two combinations.
every_engine = pytest.mark.parametrize(
    "engine",
    [
        "numpy", "fake", pytest.param("interpreted", marks=[pytest.mark.slow, pytest.mark.in_turn(2)]),
        pytest.param("cupy", marks=pytest.mark.gpu),
    ],
    indirect=True,
)  # fmt: skip
#: Runs a test on the engines whose calls run through cuDNN, or through what stands in for it.
on_cudnn = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


@dataclass(frozen=True)
class Engine:
    """Arrays and random problems of one engine.

    Attributes:
        name: "numpy", "fake", "cupy", or "interpreted": ``engine="cupy"`` on the fake CuPy.
        xp: the module that creates arrays.
    """

    name: str
    xp: Any

    @property
    def on_cudnn(self) -> bool:
        """Whether calls run through cuDNN, or through what stands in for it."""
        return self.name in ("fake", "cupy")

    def has_cudnn_since(self, version: int) -> bool:
        """Whether a real cuDNN computes, of this version or a newer one."""
        return self.name == "cupy" and library().version >= version

    @property
    def left_out(self) -> set[str]:
        """The options that a run of ``check`` leaves out on the engine."""
        return LEFT_OUT[CASES[self.name]]

    @property
    def options(self) -> dict[str, Any]:
        """The option of a call that selects the engine."""
        return {"engine": "cupy"} if self.name == "interpreted" else {}

    @property
    def dtype(self) -> np.dtype:
        """The most exact dtype of q, k and v that the engine runs."""
        return np.dtype(np.float16 if self.on_cudnn else np.float32)

    @property
    def tolerance(self) -> float:
        """The error of results of magnitude 1 in :attr:`dtype`."""
        return 6e-3 if self.on_cudnn else 2e-5

    def put(self, x: Any) -> Any:
        """Arrays of numpy as arrays of the engine; also those in a tuple, list or dictionary."""
        if isinstance(x, dict):
            return {name: self.put(value) for name, value in x.items()}
        if isinstance(x, (tuple, list)):
            return type(x)(map(self.put, x))
        return self.xp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x

    def get(self, x: Any) -> Any:
        """Arrays of the engine as arrays of numpy; also those in a tuple or list."""
        if isinstance(x, (tuple, list)):
            return tuple(map(self.get, x))
        if self.name == "numpy" or not hasattr(x, "get"):
            return np.asarray(x)
        return x.get(order="F" if x.flags.f_contiguous else "C")  # CuPy's default is C order

    def normal(self, seed: int | list[int], *shape: int, dtype: Any = None) -> Any:
        """A standard normal array in Fortran order, of :attr:`dtype` by default."""
        x = np.random.default_rng(seed).standard_normal(shape)
        return self.put(np.asfortranarray(x.astype(dtype or self.dtype)))

    def nan(self, *shape: int, dtype: Any = None) -> Any:
        """An array full of NaN in Fortran order, for results: an element that is not written shows."""
        return self.put(np.full(shape, np.nan, dtype or self.dtype, order="F"))

    def draw(self, names: Iterable[str], number: int, *, others: Iterable[str] | None = None, most: int = 3) -> Case:
        """A random problem of ``check`` with the options ``names`` and up to ``most`` others that they can be combined with.

        Args:
            names: options of :mod:`cupy_sdpa.check.case`, also those that a run of ``check`` leaves out on the engine.
            number: the problem; it depends only on this, the names and the engine.
            others: what the other options are drawn from; by default all that can be combined with the names.
            most: the largest number of other options.
        """
        names, engine = {*names}, CASES[self.name]
        left_out = LEFT_OUT[engine] - names
        if others is None:
            limited = [ONLY_WITH[name] for name in names if name in ONLY_WITH]
            others = set.intersection(*limited) if limited else OPTIONS.keys()
        sampler = Sampler(np.random.default_rng([number, *"".join(sorted(names)).encode()]), "gpu" if self.on_cudnn else "cpu")
        names = sampler.extended(names, sorted(others), sampler.integer(most)) - left_out
        return draw_options(names, number, engine, limits=SIZES[self.name])

    def case(self, **values: Any) -> Case:
        """A problem of ``check`` with values instead of the defaults; q, k and v have :attr:`dtype` by default."""
        return Case(**{"engine": CASES[self.name], "dtype": str(self.dtype), **values})

    def agrees(self, case: Case, *, refused: bool = False) -> Outcome:
        """Run a problem: several calls whose results are compared with the reference, with NaN in what must not be read.

        The programs of the calls are checked: :func:`checked_programs`.

        Args:
            case: the problem.
            refused: whether cuDNN or the GPU may lack support for it; on numpy only groups may lack support.
        """
        with checked_programs(memory=self.name == "numpy"):
            outcome = execute(case)
        allowed = ("passed", "refused") if refused and (self.on_cudnn or "parallel" in case.options) else ("passed",)
        assert outcome.kind in allowed, f"{outcome.kind}: {outcome.message}\n{case!r}"
        return outcome

    def captured(self, call: Any) -> tuple[np.ndarray, ...]:
        """The results of a call, a tuple of arrays, in a CUDA graph that is launched twice, with other work in between."""
        call()
        self.xp.cuda.Device().synchronize()
        with self.xp.cuda.Stream(non_blocking=True) as stream:
            call()
            stream.begin_capture()
            results = call()
            graph = stream.end_capture()
            graph.launch(stream)
            first = self.get(tuple(results))
            junk = [self.xp.full(size, np.nan, np.float32) for size in (32, 128, 256, 512, 1024) for _ in range(8)]
            for x in results:
                x[...] = 255 if x.dtype == np.uint8 else np.nan  # FP8 elements: also NaN
            graph.launch(stream)
            for one, again in zip(first, self.get(tuple(results)), strict=True):
                np.testing.assert_array_equal(one, again)
            assert all(np.isnan(x.get()).all() for x in junk), "a captured graph wrote to memory of others"
        return first

    def forget_plans(self, *, kept: bool = True) -> None:
        """Destroy the plans that captured graphs keep for the rest of the process; without effect on a GPU.

        Args:
            kept: whether there must be such plans. Default True.
        """
        if self.name == "fake":
            get_plan_cache().clear()
            assert library().forget_plans() >= kept, "the plans of a captured graph are kept"


def numbers(count: int, quick: int = 0, sweep: int | None = None) -> list[Any]:
    """The numbers of random problems, for ``parametrize``: those from ``quick`` on are slow, and those from ``sweep`` on in the sweep."""
    sweep = count if sweep is None else sweep
    markers = [[pytest.mark.slow] * (number >= quick) + [pytest.mark.sweep] * (number >= sweep) for number in range(count)]
    return [pytest.param(number, marks=marks) for number, marks in enumerate(markers)]


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Values for ``parametrize``, of which one in ``count`` is in the short tier; the others have the marker slow."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (number % count > 0)) for number, value in enumerate(values)]


@contextlib.contextmanager
def not_parsed():
    """Assert that the calls are repeated ones: no function is traced, no option is read, and no problem is created."""

    def fail(*_, **__):
        pytest.fail("the call was parsed")

    parsing = (
        (user_functions, "trace"), (arguments, "read_options"), (arguments, "make_problem"), (arguments, "spec_of"),
        (Problem, "__post_init__"),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in parsing:
            patch.setattr(owner, name, fail)
        yield


@contextlib.contextmanager
def sliced(limit):
    """Compute gradients beyond this number of elements, instead of 2^31, in slices; yield a list of the slices."""
    made, of_ranges = [], slices.Slice
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LIMIT", limit), ("Slice", lambda *ranges: made.append(of_ranges(*ranges)) or made[-1])):
            patch.setattr(slices, name, value)
        yield made


@contextlib.contextmanager
def checked_programs(*, memory):
    """Check every program that runs in the block: temporaries are written before they are read, in memory of their own; views stay
    inside; inputs are not written.

    With ``memory``, on numpy, the bits of the results must not depend on what the memory of the temporaries contained before.
    """
    own, checked = ReadCall.run, {}

    def run(call, *arguments):
        key = threading.get_ident(), id(call.program)
        first = checked.setdefault(key, call) is call
        # the members of a group exchange arrays in equally many runs
        exchanges = any(isinstance(step.function, MethodType) for step in call.program.steps)
        if memory and call.program.memory_bytes and (first or exchanges):
            check_memory(call)
        results = own(call, *arguments)
        if first:
            check_views(call)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadCall, "run", run)
        yield


def check_memory(call):
    """Run a call of a program on numpy twice, with other memory for temporaries."""
    call.create_inputs()
    call.create_results()
    found = []
    for byte in (0xFF, 0x00):  # NaN, and 0
        for name in call.results:
            call.arrays[name].fill(np.nan)
        call.execute(None, np.full(call.program.memory_bytes, byte, np.uint8))
        found.append([call.arrays[name].tobytes() for name in call.results])
    assert found[0] == found[1]


def check_views(call):
    """The static checks of a call of a program."""
    program = call.program
    written, last = set(), {view.storage.name: n for n, step in enumerate(program.steps) for view in step.views()}
    results = {*call.results}
    for n, step in enumerate(program.steps):
        writes = {view.storage.name for view in step.writes}
        for view in step.views():
            name, (begin, end) = view.storage.name, view.bounds
            assert name in {*program.temporaries, *program.constants, *program.fills, *call.arrays, *results}
            if name in program.temporaries and view.size:
                assert name in written or name in writes, f"{step.name} reads {name} before it is written"
                assert 0 <= begin <= end <= program.temporaries[name].size
                for other in written - {name}:
                    if other in program.temporaries and last[other] >= n:
                        a, b = program.temporaries[name], program.temporaries[other]
                        assert a.begin + a.size <= b.begin or b.begin + b.size <= a.begin, f"{name} and {other}"
            elif name in call.arrays and view.size:
                first, after = type(view).of(name, call.arrays[name]).bounds
                assert first <= begin <= end <= after, f"{step.name} leaves {name}"
        assert writes <= program.temporaries.keys() | results, f"{step.name} writes {writes}"
        written |= writes
