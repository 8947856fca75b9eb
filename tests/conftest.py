"""The test tiers: unmarked tests need numpy only, ``cudnn`` the library and a C compiler, ``gpu`` a GPU, ``multi_gpu`` two;
``large`` a GPU with much memory, and runs only with ``-m large``.

Tests with the fixture ``fake`` also need a C++ compiler. A test with the fixture ``engine`` runs on all engines, see :mod:`engines`.

One command runs the tiers that the machine supports and lists the others. ``CUPY_SDPA_REQUIRE=gpu`` (or ``cudnn``) turns skips
of that tier, and of the tiers that it needs, into failures.
"""

import contextlib
import functools
import gc
import os
import tempfile
import time
import zlib
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported; every worker process has a core
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes three quarters of a GPU's memory otherwise

import numpy as np
import pytest
from tiers import missing

#: The search for doctests must not import these: one replaces the public functions by faulty ones, the other one needs CuPy.
collect_ignore = ["planted_errors.py", "parallel_member.py"]
TIERS = ("cudnn", "gpu", "multi_gpu", "large")
REQUIRES = {
    "": (),
    "cudnn": ("cudnn",),
    "gpu": ("gpu",),
    "multi_gpu": ("gpu", "multi_gpu"),
    "all": ("cudnn", "gpu", "multi_gpu"),
}
#: Why a test fails: its tier is required but not available.
REQUIRED = pytest.StashKey[str]()
#: Whether this is the nightly run, which may take hours.
NIGHTLY = os.environ.get("CUPY_SDPA_NIGHTLY", "0") != "0"
#: Compiling a kernel takes a second. The sweep compiles the kernels of one test in this many; the nightly run compiles all.
SHARE = 9
#: The tests of each of these files share results that take long to compute, so they run in one process.
TOGETHER = ("test_examples", "test_layers")
#: The tests that take longest are started first, so that no worker process waits for another at the end.
LONG = ("test_planning", "test_support")


def pytest_report_header(config):
    """The versions of cuDNN and the GPU."""
    return [f"{tier} tier: {missing(tier) or 'runs'}" for tier in TIERS]


def pytest_configure(config):
    """Leave long sweeps out unless a marker expression asks for something; keep no plans in the user's cache folder.

    The C++ libraries that stand in for CUDA kernels are compiled once for all worker processes, and kept in pytest's cache.
    """
    os.environ["CUPY_SDPA_CACHE_DIR"] = "0"
    if not hasattr(config, "workerinput"):  # a worker process of pytest-xdist inherits it
        os.environ["FAKE_CUPY_FOLDER"] = str(folder_of_kernels(config))
    asked = config.option.markexpr or "not sweep"
    if "large" not in asked:  # also with -m gpu: other processes leave no memory for them
        asked = f"({asked}) and not large"
    config.option.markexpr = asked


def folder_of_kernels(config):
    """The folder of compiled kernels in pytest's cache, without those that no run used for a week; else a temporary one."""
    if not hasattr(config, "cache"):  # -p no:cacheprovider
        temporary = tempfile.TemporaryDirectory()
        config.add_cleanup(temporary.cleanup)
        return temporary.name
    folder = Path(config.cache.mkdir("fake_cupy"))
    for path in folder.iterdir():
        if path.stat().st_mtime < time.time() - 7 * 24 * 3600:
            path.unlink(missing_ok=True)
    return folder


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers():
    """``-n auto``: a process for every core, and not more than eight: the collection takes seconds in each."""
    return min(len(os.sched_getaffinity(0)), 8)


def pytest_itemcollected(item):
    """Put tests that must run in one process into one group of pytest-xdist, and combinations out of turn into the sweep."""
    if item.get_closest_marker("large"):
        item.add_marker(pytest.mark.slow)
    if any(item.get_closest_marker(tier) for tier in ("gpu", "multi_gpu", "large")):
        item.add_marker(pytest.mark.xdist_group("gpu"))
        return
    if item.path.stem in TOGETHER:
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if (turn := item.get_closest_marker("in_turn")) and sum(numbers_of_values(item)) % turn.args[0]:
        item.add_marker(pytest.mark.sweep)
    if item.get_closest_marker("sweep"):
        item.add_marker(pytest.mark.slow)


@functools.cache
def values_of(function, name):
    """The values of a parameter that were collected, in their order."""
    return []


def numbers_of_values(item):
    """The position of each parameter's value among its values; combinations with one sum have every pair of values in turn."""
    for name, value in item.callspec.params.items():
        values = values_of(item.function, name)
        if repr(value) not in values:
            values.append(repr(value))
        yield values.index(repr(value))


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    """Skip the tests of tiers that this machine lacks, or fail them where they are required."""
    left = [item for item in items if not NIGHTLY and is_compiled(item) and zlib.crc32(item.nodeid.encode()) % SHARE]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]
    wanted = os.environ.get("CUPY_SDPA_REQUIRE", "")
    if wanted not in REQUIRES:
        raise pytest.UsageError(f"CUPY_SDPA_REQUIRE is {wanted!r}; it must be one of {', '.join(filter(None, REQUIRES))}")
    for item in items:
        for tier in TIERS:
            if item.get_closest_marker(tier) and (reason := missing(tier)):
                if tier in REQUIRES[wanted]:
                    item.stash[REQUIRED] = f"CUPY_SDPA_REQUIRE asks for the {tier} tier, which cannot run: {reason}"
                else:
                    item.add_marker(pytest.mark.skip(reason=f"{tier} tier: {reason}"))
                break
    items.sort(key=order)


def pytest_collection_finish():
    """What the collection created stays: garbage collections of the tests, even explicit ones, do not visit it."""
    gc.collect()
    gc.freeze()


def order(item):
    """Tests on a GPU first, before a module installs the fake CuPy; then those that take longest."""
    stem = item.path.stem
    return item.get_closest_marker("gpu") is None, LONG.index(stem) if stem in LONG else len(LONG)


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item):
    """Fail a test whose tier is required but not available."""
    if REQUIRED in item.stash:
        pytest.fail(item.stash[REQUIRED], pytrace=False)


def is_compiled(item):
    """Whether a test has the kernels compiled that it asks cuDNN about."""
    return "callspec" in vars(item) and item.callspec.params.get("planned") == "compiled"


def pytest_terminal_summary(terminalreporter):
    """Report which tiers were skipped, and what this machine needs to run them."""
    reasons = {str(report.longrepr) for kind in ("skipped", "error") for report in terminalreporter.stats.get(kind, ())}
    for tier in TIERS:
        if any(f"Skipped: {tier} tier:" in reason or f"asks for the {tier} tier" in reason for reason in reasons):
            terminalreporter.write_line(f"left out: the {tier} tier: {missing(tier)}", yellow=True)


@pytest.fixture(scope="session")
def planner():
    """A child process that plans with the real cuDNN for described GPUs."""
    from planner import Planner

    with Planner() as child:
        yield child


@pytest.fixture(params=["accepted", pytest.param("compiled", marks=pytest.mark.sweep)])
def planned(request, planner):
    """Calls a function that plans in the planner's process; kernels are compiled in the sweep alone, see ``SHARE``."""
    from planner import compared

    return planner.accept if request.param == "accepted" else functools.partial(compared, planner)


@pytest.fixture
def cache(engine):
    """An empty plan cache with its default limits, which has not warned; afterwards no plan of the test is kept."""
    from cupy_sdpa import get_plan_cache

    cache = get_plan_cache()
    cache.clear()
    cache.recorded.warned, limit, recording_limit = False, cache.limit, cache.recording_limit
    yield cache
    engine.xp.cuda.Device().synchronize()
    cache.set_limit(limit)
    cache.set_recording_limit(recording_limit)
    engine.forget_plans(kept=False)
    cache.clear()


@pytest.fixture
def plans(cupy):
    """An empty plan cache of this thread, and no plan of the test afterwards."""
    from cupy_sdpa import get_plan_cache, store

    cache = get_plan_cache()
    cache.clear()
    yield cache
    cache.set_limit(256)
    cache.clear()
    store.kept().clear()


@pytest.fixture
def cupy():
    """The cupy module; the memory pools are emptied afterwards."""
    import cupy as module

    assert module.__name__ == "cupy", "the fake CuPy of an earlier test of this module is installed"
    yield module
    module.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def folder(tmp_path):
    """An empty folder, the working directory of the test."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.fixture
def libraries():
    """Stand-ins of other array libraries, see :mod:`fake_libraries`."""
    import fake_libraries

    with fake_libraries.installed() as made:
        yield made


@pytest.fixture(params=["numpy", "fake", pytest.param("cupy", marks=pytest.mark.gpu)])
def engine(request):
    """Each engine in turn, see :class:`engines.Engine`."""
    from engines import Engine

    module = np if request.param == "numpy" else request.getfixturevalue("cupy" if request.param == "cupy" else "fake")
    return Engine(request.param, module)


@pytest.fixture(scope="module")
def stand_ins():
    """CuPy, the CUDA driver and cuDNN on host memory for the tests of a module, see :mod:`fake_cupy`."""
    import fake_cupy

    if fake_cupy.compiler() is None:
        reason = f"no C++ compiler ({', '.join(fake_cupy.COMPILERS)}) to build the CUDA kernels with"
        pytest.fail(f"CUPY_SDPA_REQUIRE: {reason}") if os.environ.get("CUPY_SDPA_REQUIRE") else pytest.skip(reason)
    with fake_cupy.installed() as module:
        yield module


@pytest.fixture
def fake(stand_ins):
    """The fake CuPy in a new CUDA context; afterwards every plan, graph and descriptor must be destroyed."""
    import fake_cupy

    from cupy_sdpa import get_plan_cache, store

    device = fake_cupy.DEVICE
    device.reset()
    fake_cupy.memory.streams_of_thread().clear()  # of a test that failed
    fake_cupy.library().reset()
    fake_cupy.driver.new_context()
    yield stand_ins
    store.kept().clear()
    get_plan_cache().clear()
    device.wait_for_all()
    device.check_guards()
    if device.graphs or device.captures:
        gc.collect()  # the references of the test itself
    assert not device.captures, "a capture was not ended"
    assert not device.graphs, "a CUDA graph was not destroyed"
    assert not fake_cupy.library().live, "descriptors were not destroyed"
    stand_ins.get_default_memory_pool().free_all_blocks()
