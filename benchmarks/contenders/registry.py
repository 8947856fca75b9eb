"""All contenders by name, and whether each is available here."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Sequence

from cupy_sdpa.cli.console import CommandError

from .contender import Contender
from .cudnn_frontend import Frontend
from .jax_cudnn import Jax
from .ours import Ours
from .pytorch import Flex, TorchCudnn, TorchFlash, TorchMath

#: The contenders of other libraries.
PEERS: dict[str, type[Contender]] = {kind.name: kind for kind in (TorchCudnn, TorchFlash, Frontend, Flex, Jax, TorchMath)}
#: All contenders, this package first.
CONTENDERS: dict[str, type[Contender]] = {Ours.name: Ours, **PEERS}


def select(names: Sequence[str] | None) -> list[type[Contender]]:
    """Return the peers with the given names; None selects all.

    Raises:
        CommandError: no peer has such a name.
    """
    for name in names or ():
        if name not in PEERS:
            raise CommandError(f"there is no peer {name!r}: choose from {', '.join(PEERS)}")
    return [kind for name, kind in PEERS.items() if names is None or name in names]


def unavailable(kind: type[Contender]) -> str:
    """Return why a contender is not available here; empty if it is. Imports the modules that it requires."""
    Jax.limit_memory()
    return _import_error(kind.requires)


@functools.cache
def _import_error(modules: tuple[str, ...]) -> str:
    for name in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of other libraries
                importlib.import_module(name)
        except Exception as error:  # a broken installation may raise anything
            return f"{name} cannot be imported: {error}"
    return ""
