"""The tiers: unmarked tests need numpy only, ``cudnn`` the library and a C compiler, ``gpu`` a GPU, ``multi_gpu`` two.

Tests with the fixture ``fake`` also need a C++ compiler.

One command runs what the machine has and says what it left out. ``CUPY_SDPA_REQUIRE=gpu`` (or ``cudnn``) turns the skips
of that tier, and of those that it stands on, into failures.
"""

import gc
import os

import pytest
from tiers import missing

TIERS = ("cudnn", "gpu", "multi_gpu")
REQUIRES = {"": (), "cudnn": ("cudnn",), "gpu": ("gpu",), "multi_gpu": ("gpu", "multi_gpu"), "all": TIERS}
LEFT_OUT = pytest.StashKey[dict[str, str]]()


def pytest_report_header(config):
    """Which library and which GPU the run is about."""
    return [f"{tier} tier: {missing(tier) or 'runs'}" for tier in TIERS]


def pytest_configure(config):
    """Leave long sweeps out unless a marker expression asks for something; keep no plans in the user's cache folder."""
    os.environ["CUPY_SDPA_CACHE_DIR"] = "0"
    config.stash[LEFT_OUT] = {}
    if not config.option.markexpr:
        config.option.markexpr = "not sweep"


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    """Skip the tests of tiers that this machine lacks, or fail them where they are required."""
    wanted = os.environ.get("CUPY_SDPA_REQUIRE", "")
    if wanted not in REQUIRES:
        raise pytest.UsageError(f"CUPY_SDPA_REQUIRE is {wanted!r}; it must be one of {', '.join(filter(None, REQUIRES))}")
    for item in items:
        for tier in TIERS:
            if item.get_closest_marker(tier) and (reason := missing(tier)):
                config.stash[LEFT_OUT][tier] = reason
                if tier in REQUIRES[wanted]:
                    item.add_marker(pytest.mark.usefixtures("required_tier_is_missing"))
                else:
                    item.add_marker(pytest.mark.skip(reason=f"{tier} tier: {reason}"))
                break


def pytest_terminal_summary(terminalreporter, config):
    """Say what was left out, and what this machine would need to run it."""
    for tier, reason in config.stash[LEFT_OUT].items():
        terminalreporter.write_line(f"left out: the {tier} tier: {reason}", yellow=True)


@pytest.fixture
def required_tier_is_missing(request):
    """Fails a test whose tier was required but is not here."""
    tier = next(tier for tier in TIERS if request.node.get_closest_marker(tier) and missing(tier))
    pytest.fail(f"CUPY_SDPA_REQUIRE asks for the {tier} tier, which cannot run: {missing(tier)}", pytrace=False)


@pytest.fixture(scope="session")
def planner():
    """A child process that plans with the real cuDNN for GPUs that are not here."""
    from planner import Planner

    with Planner() as child:
        yield child


@pytest.fixture
def plans(cupy):
    """This thread's plan cache, empty; afterwards nothing is left of what the test has planned or tuned."""
    from cupy_sdpa import get_plan_cache, store

    cache = get_plan_cache()
    cache.clear()
    yield cache
    cache.set_limit(256)
    cache.clear()
    store.kept().clear()  # a tuned plan would be found there


@pytest.fixture
def cupy():
    """The cupy module; also gives the pools' memory back afterwards."""
    import cupy as module

    yield module
    module.get_default_memory_pool().free_all_blocks()


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
    """The stand-in for CuPy, in a CUDA context of its own; afterwards every plan, graph and descriptor must be gone."""
    import fake_cupy

    from cupy_sdpa import get_plan_cache, store
    from cupy_sdpa._cudnn.library import library

    device = fake_cupy.DEVICE
    device.reset()
    library().reset()
    fake_cupy.driver.new_context()
    yield stand_ins
    store.kept().clear()
    get_plan_cache().clear()
    device.wait_for_all()
    device.check_guards()
    if device.graphs or device.captures:
        gc.collect()  # those of the test itself
    assert not device.captures, "a capture was not ended"
    assert not device.graphs, "a CUDA graph was not destroyed"
    assert not library().live, "descriptors were not destroyed"
    stand_ins.get_default_memory_pool().free_all_blocks()
