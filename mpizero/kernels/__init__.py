"""Provide numerical kernels: formulas written once, compiled for CPU and GPU, checked against plain NumPy.

``backend(array)`` returns the package of kernels for this kind of array, :mod:`mpizero.kernels.cpu` or ``cuda``. Both
have the same modules (``optimizer``, ``fused``, ``reduction``, ``copy``, ``activation``, ``norm``, ``loss``,
``embedding``, ``attention``, ``compression``, ``random``). Modules are imported, and kernels compiled or loaded, on
first use. ``namespace(array)`` returns the array library, NumPy or CuPy.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from mpizero.kernels import cpu, cuda

__all__ = ["all_finite", "backend", "cpu", "cuda", "namespace", "to_host"]


def backend(array: Any) -> ModuleType:
    """Return the kernels for ``array``: :mod:`mpizero.kernels.cpu` for NumPy arrays, ``cuda`` for GPU arrays.

    Raises
    ------
    TypeError
        ``array`` is neither a NumPy nor a GPU array.
    """
    if isinstance(array, np.ndarray):
        return cpu
    if hasattr(array, "__cuda_array_interface__"):
        return cuda
    raise TypeError(f"kernels work on NumPy or CUDA arrays, got {type(array).__name__}")


def all_finite(array: Any) -> bool:
    """Tell whether no element of a contiguous 1-D array is infinite or NaN."""
    return bool(backend(array).reduction.all_finite(array))


def namespace(array: Any) -> Any:
    """Return the array library of ``array``: NumPy, or the package its type comes from (CuPy)."""
    if isinstance(array, np.ndarray):
        return np
    package = type(array).__module__.partition(".")[0]
    return array.__array_namespace__() if package == __package__.partition(".")[0] else sys.modules[package]


def to_host(array: Any) -> Any:
    """Copy a GPU array to the host; return any other object itself."""
    return array.get() if hasattr(array, "__cuda_array_interface__") else array
