"""Compute on NumPy arrays by kernels that numba has compiled; the modules of this package are imported on first use.

The last parameter of some kernels (``scratch``, ``block`` or ``chunk``) is temporary memory, which callers do not pass.
"""

from __future__ import annotations

from types import ModuleType

TOPICS = (
    "activation",
    "attention",
    "compression",
    "copy",
    "element_loss",
    "embedding",
    "fused",
    "loss",
    "norm",
    "optimizer",
    "random",
    "reduction",
    "ring",
)


def __getattr__(name: str) -> ModuleType:
    if name not in TOPICS:
        raise AttributeError(f"module {__name__!r} has no kernels named {name!r}")
    from importlib import import_module

    return import_module(f"{__name__}.{name}")
