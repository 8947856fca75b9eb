"""What this machine lacks for a tier of tests, determined once; only errors that mean "absent" count."""

import functools
import importlib.util


@functools.cache
def missing(tier: str) -> str | None:
    """The reason why a tier cannot run here, or None."""
    return {"cudnn": _cudnn, "gpu": _gpu, "multi_gpu": _multi_gpu, "large": _gpu}[tier]()


def _cudnn() -> str | None:
    from planner import probe

    return probe()


def _gpu() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install -e '.[cuda12]'"
    import cupy

    if not cupy.cuda.is_available():
        return "no GPU: CuPy finds no usable CUDA device"
    return None


def _multi_gpu() -> str | None:
    if reason := _gpu():
        return reason
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    return None if count > 1 else f"{count} GPU, two are needed"
