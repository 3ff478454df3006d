"""Compute on GPU arrays by CUDA kernels; the modules of this package are imported on first use.

Arrays are CuPy's or numba-cuda's. Under ``NUMBA_ENABLE_CUDASIM=1`` they are NumPy's or simulated ones.
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
