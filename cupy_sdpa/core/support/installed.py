"""The cuDNN and the NVRTC that this process finds, and what is missing to run on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from ..cudnn.library import OVERRIDE, library
from ..cudnn.nvrtc import Nvrtc, nvrtc
from ..errors import CudnnError
from ..version import MINIMUM_CUDNN, version_text
from .rules import MINIMUM_CAPABILITY


class Installed(NamedTuple):
    """The cuDNN of this process.

    Attributes:
        version: its version as text.
        path: the path of the library.
        cuda: the CUDA version that it was built with; 12090 is 12.9.
        found_by: where it was found.
        nvrtc: the compiler that it uses.
    """

    version: str
    path: str
    cuda: int
    found_by: str
    nvrtc: Nvrtc


def installed() -> Installed:
    """Return the cuDNN of this process, loaded on first use.

    Raises:
        CudnnError: cuDNN is not found; the message lists every place searched.
    """
    cudnn = library()
    return Installed(version_text(cudnn.version), str(cudnn.path), cudnn.cudart_version, cudnn.found_via, nvrtc())


def cudnn_obstacles(capability: int | None, install: str) -> Iterator[str]:
    """Yield why cuDNN cannot run here, with the fix: it is missing or too old, or the GPU is too old.

    ``capability`` is the GPU's compute capability, None if it is unknown; ``install`` is the command that installs cuDNN.
    """
    try:
        version = library().version
    except CudnnError as error:
        yield f"cuDNN is not found: {error.summary if OVERRIDE in os.environ else install}"
    else:
        if version < MINIMUM_CUDNN:
            yield f"cuDNN is {version_text(version)}, {version_text(MINIMUM_CUDNN)} or newer is required: {install}"
    if capability is not None and capability < MINIMUM_CAPABILITY:
        yield f"the GPU has compute capability {capability / 10}, {MINIMUM_CAPABILITY / 10} or newer is required"
