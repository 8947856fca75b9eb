"""Mistakes of users: each gets an error that names the fix, or the right result; none gives a wrong number silently."""

import functools
import importlib
import inspect
from pathlib import Path

import mistakes
import numpy as np
import pytest
from mistakes import Arrays, facts, host
from tiers import missing

import cupy_sdpa
from cupy_sdpa import fp8, layout, nnlib, parallel, reference, store, zoo

#: The rows of every module ``mistakes_of_...`` in the folder of the tests.
TABLES = [importlib.import_module(path.stem) for path in sorted(Path(mistakes.__file__).parent.glob("mistakes_of_*.py"))]
ROWS = [row for table in TABLES for row in table.ROWS]
#: The least number of rows.
ROWS_AT_LEAST = 250


@functools.cache
def arrays_of_numpy():
    """The arrays of the rows on the CPU."""
    return Arrays(np, np.float32)


@pytest.fixture
def arrays(request):
    """The arrays of a row's engine."""
    if request.param == "no GPU" and not missing("gpu"):
        pytest.skip("the row is for machines without a GPU")
    if request.param != "fake":
        return arrays_of_numpy()
    return Arrays(request.getfixturevalue("fake"), np.float16)


def parameters():
    """The rows, with the fake CuPy's rows last."""
    for row in sorted(ROWS, key=lambda row: row.engine == "fake"):
        yield pytest.param(row.engine, row, id=str(row))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("arrays", "row"), [*parameters()], indirect=["arrays"])
def test_a_mistake(arrays, row):
    """A mistake raises an error that names the values and the fix, or the result is the right one."""
    if isinstance(row.outcome, type):
        with pytest.raises(row.outcome) as raised:
            row.make(arrays)
        assert type(raised.value) is row.outcome or not issubclass(row.outcome, (ValueError, TypeError))
        for fact in facts(row.words):
            assert fact in str(raised.value)
        return
    found, wanted = host(row.make(arrays)), host(row.outcome(arrays))
    tolerance = 5e-3 if row.engine == "fake" else 1e-5
    pairs = zip(found, wanted, strict=True) if isinstance(found, list) else [(found, wanted)]
    for x, y in pairs:
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_facts_of_messages():
    """Values, names and code are compared, other words are not."""
    assert facts(["out has shape (4, 2); it must be (8, 2)", "order='F'", "no more"]) == [
        "out",
        "(4, 2)",
        "(8, 2)",
        "order='F'",
    ]
    assert facts(["q is float16 and k of JAX", "stats is a list"]) == ["q", "float16", "JAX", "stats", "list"]
    assert facts(["no value at all"]) == ["no value at all"]


def methods(owner):
    """The public methods that a class defines, not its properties."""
    return [name for name, x in inspect.getmembers(owner) if name[0] != "_" and callable(x)]


def public_callables():
    """The names of the public functions, classes and methods; exceptions and protocols are raised or implemented."""
    modules = {"": cupy_sdpa, "nnlib.": nnlib, "parallel.": parallel, "fp8.": fp8}
    names = [(prefix, module, name) for prefix, module in modules.items() for name in module.__all__]
    for prefix, module in {"zoo.": zoo, "store.": store, "reference.": reference, "": layout}.items():
        defined = {module.__name__, f"cupy_sdpa.core.{module.__name__.rpartition('.')[2]}"}
        own = [name for name, x in vars(module).items() if name[0] != "_" and getattr(x, "__module__", "") in defined]
        names += [(prefix, module, name) for name in own if inspect.isfunction(getattr(module, name))]
    names += [("", cupy_sdpa, "Prepared"), ("", cupy_sdpa, "Pullback")]
    for prefix, module, name in names:
        value = getattr(module, name, None)
        if isinstance(value, type):
            if issubclass(value, (BaseException, tuple)) or getattr(value, "_is_protocol", False) or name in RESULTS:
                continue
            if name in WITH_METHODS:
                yield from (f"{prefix}{name}.{method}" for method in methods(value))
        if name not in NOT_CALLED:
            yield prefix + name


#: The classes whose methods need rows.
WITH_METHODS = ("KVCache", "BlockMask", "Fp8Array", "DelayedScaling", "ContextParallel")
#: Classes of results, and of groups that need NCCL or MPI.
RESULTS = ("ParallelReport", "MpiGroup", "NcclGroup")
#: Helpers of the reference and of layouts, which are not in the documentation, and the version.
NOT_CALLED = (
    "__version__", "scores", "visible", "diagonal", "modified", "output", "gradients", "directional_derivative", "order", "default_is",
)  # fmt: skip


def test_every_public_callable_has_rows():
    """Every public function, class and method has a mistake in the tables."""
    assert set(public_callables()) - {row.callable for row in ROWS} == set()


def test_the_rows():
    """There are enough rows; each is there once, names an outcome, and an error has words that its message must contain."""
    assert len(ROWS) >= ROWS_AT_LEAST
    assert len({(str(row), row.engine) for row in ROWS}) == len(ROWS)
    known = set(public_callables()) | {"Problem", "Report", "to_julia", "from_julia"}
    assert {row.callable for row in ROWS} <= known
    for row in ROWS:
        assert row.engine in ("numpy", "fake", "no GPU"), row
        assert (isinstance(row.outcome, type) and row.words) or (callable(row.outcome) and not row.words), row
