"""Find this process's cuDNN and NVRTC, and say what is missing to run on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..cudnn.deviceless import read_description
from ..cudnn.library import OVERRIDE, library
from ..cudnn.nvrtc import nvrtc
from ..errors import CudnnError
from ..version import MINIMUM_CUDNN, version_text
from .rules import MINIMUM_CAPABILITY


class InstalledCudnn:
    """The cuDNN of this process, loaded on first use.

    Attributes:
        version: cuDNN's version as text.
        path: the path of cuDNN's library.
        cuda: the CUDA version that cuDNN was built with; 12090 is 12.9.
        found_by: how the library was found.
        nvrtc: the NVRTC that cuDNN uses.

    Raises:
        CudnnError: cuDNN is not found; the message lists every place searched.
    """

    def __init__(self) -> None:
        cudnn = library()
        self.version, self.path = version_text(cudnn.version), cudnn.path
        self.cuda, self.found_by, self.nvrtc = cudnn.cudart_version, cudnn.found_via, nvrtc()

    @staticmethod
    def obstacles(capability: int | None, install: str) -> Iterator[str]:
        """Yield the reasons why cuDNN cannot run here, with fixes: cuDNN is missing or too old, or the GPU is too old.

        ``capability`` is the GPU's compute capability, or None if unknown; ``install`` is the command that installs cuDNN.
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

    def describe_gpu(self) -> str:
        """Return cuDNN's description of the current GPU as JSON. Create a CUDA context if there is none.

        Raises:
            CudnnError: there is no GPU.
        """
        return read_description()
