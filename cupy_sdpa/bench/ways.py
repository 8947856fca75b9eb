"""All ways by name, and which of them can be had here."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Sequence

from .way import Ours, Way
from .with_frontend import Frontend
from .with_jax import Jax
from .with_torch import Flex, TorchCudnn, TorchFlash

#: Everybody else's.
PEERS: dict[str, type[Way]] = {way.name: way for way in (TorchCudnn, TorchFlash, Frontend, Flex, Jax)}
#: Every way, ours first.
WAYS: dict[str, type[Way]] = {Ours.name: Ours, **PEERS}


def chosen(names: Sequence[str] | None) -> list[type[Way]]:
    """The peers of these names; all for None.

    Raises:
        ValueError: there is none of a name.
    """
    for name in names or ():
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}: choose from {', '.join(PEERS)}")
    return [way for name, way in PEERS.items() if names is None or name in names]


def why_not(way: type[Way]) -> str:
    """Why a way cannot be had here; empty where it can. What it needs is imported."""
    Jax.leave_memory()
    return _missing(way.needs)


@functools.cache
def _missing(modules: tuple[str, ...]) -> str:
    for name in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of others' code
                importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises
            return f"{name} cannot be imported: {error}"
    return ""
